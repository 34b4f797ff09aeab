"""Deployments and their Services. The pods of a Deployment continue after the end of the run that
applied the Deployment.

Each change of a Deployment writes its object, and starts the supervisor if it is not running. The
supervisor is a separate process (deployment_supervisor.py) that runs the pods. The pid of the
supervisor is recorded in `deployments/supervisor.json`. If the supervisor dies, the next command
restarts it, unless the command `down` has stopped it.

Unlike in Kubernetes, no autoscaler changes `replicas`. A rollout also fails before its
progressDeadlineSeconds, if a new pod exits four times in a row, or once with a code in
`exit_codes.PERMANENT_ERRORS`, which a restart cannot fix. A Service listens on 127.0.0.1. Each
headless Service listens on a loopback address of its own.
"""

import os
import socket
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from shutil import rmtree

from argolocal.common import program
from argolocal.common.environment import remove_secrets
from argolocal.common.files import write_atomically
from argolocal.common.json_text import read_object, to_json
from argolocal.common.processes import (
    confirm_recorded,
    is_alive,
    make_python_command,
    read_start_ticks,
    terminate_group,
)
from argolocal.controllers.controller import Controller, require_single_container
from argolocal.errors import ArgolocalError, ConfigError, InvalidDocument
from argolocal.interfaces import Cluster
from argolocal.language.gofmt import format_timestamp
from argolocal.manifest.types import Object
from argolocal.pods.process import Origin

PROBE_FIELDS = ("startupProbe", "readinessProbe", "livenessProbe")
# files in `Deployments.home`
RECORD_FILE_NAME = "supervisor.json"
LOG_FILE_NAME = "supervisor.log"
# time limit for the supervisor to observe a change
OBSERVE_TIMEOUT_S = 10.0
# annotation of a Deployment; its value is JSON with the Origin of the pods and the process that
# applied the Deployment
ORIGIN_ANNOTATION = "argolocal/origin"


class Services(Controller):
    """Stores Services; the supervisor listens on their ports."""

    kind = "Service"
    # part of error messages that says how to choose another port
    hint = ""

    def check(self, kubernetes_object: Object) -> None:
        """Raise ConfigError for a Service without selector or ports, and for a port that is invalid
        or in use."""
        super().check(kubernetes_object)
        name = kubernetes_object["metadata"]["name"]

        service_ports = (kubernetes_object.get("spec") or {}).get("ports") or []
        if not service_ports or not (kubernetes_object["spec"].get("selector")):
            raise ConfigError(f"Service {name} needs a selector and ports: set both.")

        invalid_ports = [port for port in service_ports if not isinstance(port.get("port"), int)]
        if invalid_ports:
            raise ConfigError(
                f"Service {name}: port is {invalid_ports[0].get('port')!r}: it must be a number."
            )

        previous_service = self.read(name)
        if previous_service:
            own_ports = [port["port"] for port in previous_service["spec"]["ports"]]
        else:
            own_ports = []

        for port in [port["port"] for port in service_ports if not is_headless(kubernetes_object)]:
            supervisor_listens = port in own_ports and Deployments(self.cluster).running()
            if not supervisor_listens:
                self._check_port(port, name)

    def _check_port(self, port: int, name: str) -> None:
        """Raise ConfigError if another Service or another program uses the port."""
        for other_service in self.objects().values() if Deployments(self.cluster).running() else []:
            if is_headless(other_service):
                used_ports = []
            else:
                used_ports = [
                    service_port["port"] for service_port in other_service["spec"]["ports"]
                ]
            if port in used_ports and other_service["metadata"]["name"] != name:
                raise ConfigError(
                    f"Service {name}: port {port} is used by Service"
                    f" {other_service['metadata']['name']} of this home: choose another"
                    f" port{self.hint}, or stop all deployments with `{program.name} down`."
                )
        _check_port_is_free(port, f"Service {name}", self.hint)


class Deployments(Controller):
    """Stores Deployments, and starts the supervisor, which runs their pods in its own process."""

    kind = "Deployment"

    def __init__(self, cluster: Cluster, kind: str = "", run: Path | None = None) -> None:
        super().__init__(cluster, kind, run)
        self.home = cluster.home / "deployments"

    def check(self, kubernetes_object: Object) -> None:
        """Raise ConfigError for an object that the API server would reject or that is not supported
        here."""
        super().check(kubernetes_object)
        field_path = f"Deployment {kubernetes_object['metadata']['name']}"
        spec = kubernetes_object.get("spec") or {}
        template = spec.get("template") or {}
        container = require_single_container(template.get("spec") or {}, field_path)
        labels = pod_labels(template)

        match_labels = (spec.get("selector") or {}).get("matchLabels") or {}
        if not match_labels or not match_labels.items() <= labels.items():
            raise ConfigError(
                f"{field_path}: spec.selector.matchLabels must be a subset of the labels of its"
                " template."
            )

        if (spec.get("strategy") or {}).get("type", "RollingUpdate") != "RollingUpdate":
            raise ConfigError(f"{field_path}: strategy.type must be RollingUpdate here.")

        for probe_field in PROBE_FIELDS:
            if probe_field in container and "httpGet" not in container[probe_field]:
                raise ConfigError(f"{field_path}: {probe_field} must be an httpGet here.")

    def apply(self, kubernetes_object: Object) -> Object:
        """Apply the object. Unless the object already has an Origin (the interpreter and import
        path of its pods), set it to the Origin of this process: the supervisor starts pods of
        several projects, and needs the Origin to find their code."""
        metadata = kubernetes_object.get("metadata") or {}
        process_identity = f"{os.getpid()}/{read_start_ticks(os.getpid())}"
        origin = to_json(asdict(Origin(path=self.cluster.path)) | {"process": process_identity})
        annotations = {ORIGIN_ANNOTATION: origin} | (metadata.get("annotations") or {})
        return super().apply(
            kubernetes_object | {"metadata": metadata | {"annotations": annotations}}
        )

    def on_write(self, stored_object: Object) -> Object:
        """Wait until the supervisor has observed the change, so that the object's status belongs to
        its new spec."""
        name = stored_object["metadata"]["name"]
        generation = stored_object["metadata"]["generation"]
        deadline = time.monotonic() + OBSERVE_TIMEOUT_S

        while (stored_object.get("status") or {}).get(
            "observedGeneration"
        ) != generation or not self.running():
            self.start()
            if time.monotonic() > deadline:
                raise ArgolocalError(
                    "The supervisor of the Deployments does not respond: see"
                    f" {self.home}/{LOG_FILE_NAME}."
                )

            time.sleep(0.02)
            stored_object = self.read(name) or stored_object

        return stored_object

    def get(self, name: str) -> Object | None:
        """Return the object with this name, or None. A dead supervisor is restarted first, so that
        it updates the status."""
        self.revive()
        return self.read(name)

    def delete(self, name: str) -> bool:
        """Delete the Deployment, and wait until its pods have ended."""
        if not self.running():
            return self.remove(name)
        deletion_metadata = {"deletionTimestamp": format_timestamp(time.time())}
        deleted_object = self.change(
            name,
            lambda kubernetes_object: (
                kubernetes_object
                and kubernetes_object
                | {"metadata": kubernetes_object["metadata"] | deletion_metadata}
            ),
        )
        while self.read(name) and self.running():
            time.sleep(0.02)
        self.remove(name)
        return bool(deleted_object)

    def remove(self, name: str) -> bool:
        """Remove the files of a Deployment whose pods have ended, but keep its logs."""
        rmtree(self.home / name / "pods", ignore_errors=True)
        return super().delete(name)

    def running(self) -> bool:
        """Return True if the supervisor is alive."""
        supervisor_record = self._record()
        return bool(
            supervisor_record and is_alive(supervisor_record["pid"], supervisor_record["since"])
        )

    def revive(self) -> bool:
        """Restart the supervisor if it died, unless `down` had stopped it. Return True if the
        supervisor had died."""
        had_died = bool(self._record() and not self.running() and self.names())
        if had_died:
            self.start()
        return had_died

    def down(self) -> list[str]:
        """Stop the supervisor and all pods, and wait until they have ended.

        Return the names of the Deployments that ran. The objects of the stopped Deployments are not
        deleted.
        """
        supervisor_record = self._record()
        (self.home / RECORD_FILE_NAME).unlink(missing_ok=True)

        if not supervisor_record or not is_alive(
            supervisor_record["pid"], supervisor_record["since"]
        ):
            return []

        stopped_objects = [
            kubernetes_object
            for kubernetes_object in self.objects().values()
            if kubernetes_object["spec"].get("replicas", 1)
        ]
        grace_periods = [
            kubernetes_object["spec"]["template"]["spec"].get("terminationGracePeriodSeconds", 30)
            for kubernetes_object in stopped_objects
        ]
        terminate_group(
            supervisor_record["pid"], supervisor_record["since"], max(grace_periods, default=0) + 5
        )

        for supervisor_process in supervisor_processes:
            supervisor_process.poll()

        return [kubernetes_object["metadata"]["name"] for kubernetes_object in stopped_objects]

    def overview(self) -> list[Object]:
        """Return a dict for each Deployment: its kind, name, address, whether the supervisor is
        running, and the number of ready pods."""
        services = [
            kubernetes_object
            for kubernetes_object in Services(self.cluster).objects().values()
            if not is_headless(kubernetes_object)
        ]
        overview_rows = []
        is_running = self.running()

        for name, kubernetes_object in self.objects().items():
            template = kubernetes_object["spec"]["template"]
            service_ports = [
                service["spec"]["ports"][0]["port"]
                for service in services
                if selects_pods(service, template)
            ]

            address = f"http://127.0.0.1:{service_ports[0]}" if service_ports else ""

            if is_running:
                ready_count = (kubernetes_object.get("status") or {}).get("readyReplicas", 0)
            else:
                ready_count = 0

            overview_row = {
                "kind": "deployment",
                "name": name,
                "address": address,
                "running": is_running,
                "ready": ready_count,
            }

            overview_rows.append(overview_row)

        return overview_rows

    def start(self) -> None:
        """Start the supervisor if it is not running, even if `down` has stopped it, and return
        before the supervisor is ready."""
        with self._locked():
            if self.running():
                return

            self.home.mkdir(parents=True, exist_ok=True)
            with open(self.home / LOG_FILE_NAME, "ab") as log_file:
                supervisor_process = subprocess.Popen(
                    self._supervisor_command(),
                    stdin=subprocess.PIPE,
                    stdout=log_file,
                    stderr=log_file,
                    start_new_session=True,
                    cwd="/",
                    env=remove_secrets(os.environ),
                )

            supervisor_processes.append(supervisor_process)
            supervisor_record = {
                "pid": supervisor_process.pid,
                "since": read_start_ticks(supervisor_process.pid) or 0,
            }
            write_atomically(self.home / RECORD_FILE_NAME, to_json(supervisor_record))
            confirm_recorded(supervisor_process)

    def _supervisor_command(self) -> list[str]:
        cluster_class = type(self.cluster)
        class_path = f"{cluster_class.__module__}:{cluster_class.__qualname__}"
        return make_python_command(
            "-m",
            "argolocal.runner.supervise_deployments",
            "--home",
            str(self.cluster.home),
            "--cluster",
            class_path,
        )

    def _record(self) -> dict[str, int] | None:
        """Return pid and start time (`since`, in clock ticks since boot) of the supervisor that was
        started last; None if `down` has stopped it. Raises InvalidDocument."""
        try:
            supervisor_record = read_object(self.home / RECORD_FILE_NAME)
        except FileNotFoundError:
            return None
        if not all(
            isinstance(supervisor_record.get(field_name), int) for field_name in ("pid", "since")
        ):
            raise InvalidDocument(
                f"{self.home / RECORD_FILE_NAME} is malformed (pid or since is not a number):"
                " restore the file, or remove it."
            )
        return supervisor_record


# supervisors that this process has started; they continue to run when this process exits
supervisor_processes: list[subprocess.Popen] = []


def selects_pods(service: Object, template: Object) -> bool:
    """Return True if a Service selects the pods of a template."""
    return service["spec"]["selector"].items() <= pod_labels(template).items()


def is_headless(service: Object) -> bool:
    """Return True if a Service is headless: its DNS name resolves to the addresses of the pods."""
    return service["spec"].get("clusterIP") == "None"


def pod_labels(template: Object) -> dict[str, str]:
    """Return the labels of a template's pods."""
    return (template.get("metadata") or {}).get("labels") or {}


def _check_port_is_free(port: int, field_path: str, hint: str) -> None:
    """Raise ConfigError if no program can listen on this port of 127.0.0.1."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno:
            reason = os.strerror(error.errno)
        else:
            reason = str(error)
        raise ConfigError(
            f"{field_path}: port {port} on 127.0.0.1 cannot be used ({reason}): another program"
            f" uses it, or `{program.name}` in another directory. Stop that program, or choose"
            f" another port{hint}."
        ) from error
