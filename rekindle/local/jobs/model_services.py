"""Applies the Deployments and Services of models. The config can set the port of a Service.

If the user has not chosen a port, the Service gets a free port only when the Service is applied,
because other programs and runs may take a port during a training, which may last hours.
"""

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from argolocal.controllers.deployment import Deployments, Services, is_headless
from argolocal.manifest.types import Object
from argolocal.state.journal import RunFiles
from rekindle.errors import ConfigError, write_stderr
from rekindle.local.ports import PORTS_TO_TRY, move_server_port, move_service_port

# annotation that allows a workflow to serve its model at any free port
ANY_PORT = "rekindle.dev/any-port"


def allow_any_port(workflow: Mapping[str, Any]) -> dict[str, Any]:
    """Return the workflow with the permission to serve its model at any free port of this
    machine."""
    workflow_metadata = workflow["metadata"]
    new_annotations = (workflow_metadata.get("annotations") or {}) | {ANY_PORT: "true"}
    return {**workflow, "metadata": {**workflow_metadata, "annotations": new_annotations}}


def may_use_any_port(workflow: Mapping[str, Any]) -> bool:
    """Return True if the workflow has the permission of `allow_any_port`."""
    workflow_metadata = workflow.get("metadata")
    if isinstance(workflow_metadata, dict):
        annotations = workflow_metadata.get("annotations")
    else:
        annotations = None
    return isinstance(annotations, dict) and annotations.get(ANY_PORT) == "true"


class ModelDeployments(Deployments):
    """The Deployments of model servers."""

    def apply(self, kubernetes_object: Object) -> Object:
        """Apply a Deployment. If a program of this machine listens on the port of the Deployment's
        pods on all addresses, the pods use another port."""
        self.check(kubernetes_object)
        return super().apply(move_server_port(self.cluster, kubernetes_object))


class ModelServices(Services):
    """Stores the Services of models. The port of a model's Service is the same for all releases."""

    hint = " (--set serve.port=...)"

    def apply(self, kubernetes_object: Object) -> Object:
        """Apply a Service, at a free port if the run may use any port. Raises ConfigError."""
        service_spec = kubernetes_object.get("spec") or {}
        if not service_spec.get("ports"):
            return super().apply(kubernetes_object)  # raises ConfigError

        if is_headless(kubernetes_object):
            self.check(kubernetes_object)
            return super().apply(move_service_port(self.cluster, kubernetes_object))

        if not self._may_use_any_port():
            return super().apply(kubernetes_object)

        # until the Service is stored, another run on this machine must not choose the same port
        with self._hold_ports_lock():
            return super().apply(self._set_free_port(kubernetes_object))

    def _may_use_any_port(self) -> bool:
        run_files = RunFiles(self.cluster.home, self.run.name)
        return run_files.is_own_folder() and may_use_any_port(run_files.workflow())

    @contextmanager
    def _hold_ports_lock(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".ports.lock", "w") as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_EX)
            yield

    def _set_free_port(self, service: Object) -> Object:
        """Return the Service with its current port. If the Service does not have a port yet, or if
        the port is taken, return it with the next free port."""
        service_name = service["metadata"]["name"]
        first_port_entry, *other_port_entries = service["spec"]["ports"]
        default_port = first_port_entry["port"]

        current_service = self.read(service_name)
        if current_service:
            preferred_port = current_service["spec"]["ports"][0]["port"]
        else:
            preferred_port = default_port

        other_service_ports = self._list_other_service_ports(service_name)

        for port in (preferred_port, *range(default_port, default_port + PORTS_TO_TRY)):
            if port in other_service_ports:
                continue

            moved_service = {
                **service,
                "spec": {
                    **service["spec"],
                    "ports": [{**first_port_entry, "port": port}, *other_port_entries],
                },
            }
            with suppress(ConfigError):
                self.check(moved_service)
                if port != default_port:
                    move_reason = f"because port {default_port} is taken (setting serve.port)"
                    write_stderr(f"note: the model is served at port {port}, {move_reason}.")

                return moved_service

        return service

    def _list_other_service_ports(self, service_name: str) -> set[int]:
        """Return the ports of the other Services in REKINDLE_HOME, including Services that
        `rekindle down` has stopped."""
        other_services = [
            service for other_name, service in self.objects().items() if other_name != service_name
        ]
        return {
            port["port"]
            for service in other_services
            if not is_headless(service)
            for port in service["spec"]["ports"]
        }
