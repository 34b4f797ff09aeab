"""Applies the Deployments and Services of models. The config can set the port of a Service.

If the user has not chosen a port, the Service gets a free port when it is applied: a training may
take hours, and other programs and runs may take a port during this time.
"""

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from argolocal.controllers.deployment import Deployments, Services, is_headless
from argolocal.manifest.types import Object
from argolocal.state.journal import RunFiles
from rekindle.errors import ConfigError, say
from rekindle.local.ports import PORTS_TO_TRY, move_server_port, move_service_port

# annotation that allows a workflow to serve its model at any free port
ANY_PORT = "rekindle.dev/any-port"


def allow_any_port(workflow: Mapping[str, Any]) -> dict[str, Any]:
    """Return the workflow with the permission to serve its model at any free port of this
    machine."""
    metadata = workflow["metadata"]
    annotations = (metadata.get("annotations") or {}) | {ANY_PORT: "true"}
    return {**workflow, "metadata": {**metadata, "annotations": annotations}}


def may_use_any_port(workflow: Mapping[str, Any]) -> bool:
    """Return True if the workflow has the permission of `allow_any_port`."""
    metadata = workflow.get("metadata")
    if isinstance(metadata, dict):
        annotations = metadata.get("annotations")
    else:
        annotations = None
    return isinstance(annotations, dict) and annotations.get(ANY_PORT) == "true"


class ModelDeployments(Deployments):
    """The Deployments of model servers."""

    def apply(self, obj: Object) -> Object:
        """Apply the Deployment; its pods use another port if a program of this machine listens on
        their port at all addresses."""
        self.check(obj)
        return super().apply(move_server_port(self.cluster, obj))


class ModelServices(Services):
    """Stores the Services of models. The port of a model's Service is the same for all releases."""

    hint = " (--set serve.port=...)"

    def apply(self, obj: Object) -> Object:
        """Apply the Service, at a free port if the run may use any port. Raises ConfigError."""
        spec = obj.get("spec") or {}
        if not spec.get("ports"):
            return super().apply(obj)  # raises ConfigError

        if is_headless(obj):
            self.check(obj)
            return super().apply(move_service_port(self.cluster, obj))

        if not self._may_use_any_port():
            return super().apply(obj)

        # until the Service is stored, another run of this home must not choose the same port
        with self._lock_ports():
            return super().apply(self._set_free_port(obj))

    def _may_use_any_port(self) -> bool:
        run = RunFiles(self.cluster.home, self.run.name)
        return run.is_own_folder() and may_use_any_port(run.workflow())

    @contextmanager
    def _lock_ports(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".ports.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _set_free_port(self, obj: Object) -> Object:
        """Return the Service with its current port or, if it does not have a port yet or the port
        is taken, with the next free port."""
        name = obj["metadata"]["name"]
        first_entry, *other_entries = obj["spec"]["ports"]
        default = first_entry["port"]

        current = self.read(name)
        if current:
            first_choice = current["spec"]["ports"][0]["port"]
        else:
            first_choice = default

        ports_of_others = self._ports_of_other_services(name)

        for port in (first_choice, *range(default, default + PORTS_TO_TRY)):
            if port in ports_of_others:
                continue

            moved = {
                **obj,
                "spec": {**obj["spec"], "ports": [{**first_entry, "port": port}, *other_entries]},
            }
            with suppress(ConfigError):
                self.check(moved)
                if port != default:
                    reason = f"because port {default} is taken (setting serve.port)"
                    say(f"note: the model is served at port {port}, {reason}.")

                return moved

        return obj

    def _ports_of_other_services(self, name: str) -> set[int]:
        """Return the ports of the other Services of this home, including Services that
        `rekindle down` has stopped."""
        services = [service for other, service in self.objects().items() if other != name]
        return {
            port["port"]
            for service in services
            if not is_headless(service)
            for port in service["spec"]["ports"]
        }
