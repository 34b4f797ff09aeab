"""Deployments and their Services. The pods of a Deployment outlive the run that applied it.

A change of a Deployment writes the object, and starts the supervisor if it does not run. The
supervisor is a separate process (deployment_supervisor.py), recorded in
`deployments/supervisor.json`. If the supervisor dies, the next command restarts it, unless `down`
has stopped the supervisor.

Differences from Kubernetes: no autoscaler changes `replicas`. A rollout does not wait for its
progressDeadlineSeconds: it fails if its pod exits four times in a row, or once with a code in
`exit_codes.PERMANENT` (errors that a restart cannot fix). A Service listens on 127.0.0.1. Each
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
    end_group,
    is_alive,
    python_command,
    start_time,
)
from argolocal.controllers.controller import Controller, require_single_container
from argolocal.errors import ArgolocalError, ConfigError, InvalidDocument
from argolocal.interfaces import Cluster
from argolocal.language.gofmt import timestamp
from argolocal.manifest.types import Object
from argolocal.pods.process import Origin

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
# files in `Deployments.home`
RECORD_FILE = "supervisor.json"
LOG_FILE = "supervisor.log"
OBSERVE_TIMEOUT_S = 10.0  # time limit for the supervisor to observe a change
# annotation of a Deployment; its value is JSON with the Origin of the pods and the process that
# applied the Deployment
ORIGIN_ANNOTATION = "argolocal/origin"


class Services(Controller):
    """Stores Services; the supervisor listens on their ports."""

    kind = "Service"
    hint = ""  # the end of an error message; it says how to choose another port

    def check(self, obj: Object) -> None:
        """Raise ConfigError for a Service without selector or ports, and for a port that is invalid
        or in use."""
        super().check(obj)
        name = obj["metadata"]["name"]

        ports = (obj.get("spec") or {}).get("ports") or []
        if not ports or not (obj["spec"].get("selector")):
            raise ConfigError(f"Service {name} needs a selector and ports: set both.")

        invalid = [port for port in ports if not isinstance(port.get("port"), int)]
        if invalid:
            raise ConfigError(
                f"Service {name}: port is {invalid[0].get('port')!r}: it must be a number."
            )

        previous = self.read(name)
        if previous:
            own_ports = [port["port"] for port in previous["spec"]["ports"]]
        else:
            own_ports = []

        for port in [port["port"] for port in ports if not is_headless(obj)]:
            supervisor_listens = port in own_ports and Deployments(self.cluster).running()
            if not supervisor_listens:
                self._check_port(port, name)

    def _check_port(self, port: int, name: str) -> None:
        for service in self.objects().values() if Deployments(self.cluster).running() else []:
            if is_headless(service):
                ports = []
            else:
                ports = [service_port["port"] for service_port in service["spec"]["ports"]]
            if port in ports and service["metadata"]["name"] != name:
                raise ConfigError(
                    f"Service {name}: port {port} is used by Service {service['metadata']['name']}"
                    f" of this home: choose another port{self.hint}, or stop all deployments with"
                    f" `{program.name} down`."
                )
        _check_port_is_free(port, f"Service {name}", self.hint)


class Deployments(Controller):
    """Stores Deployments, and starts the supervisor, which runs their pods in its own process."""

    kind = "Deployment"

    def __init__(self, cluster: Cluster, kind: str = "", run: Path | None = None) -> None:
        super().__init__(cluster, kind, run)
        self.home = cluster.home / "deployments"

    def check(self, obj: Object) -> None:
        """Raise ConfigError for an object that the API server would reject or that is not supported
        here."""
        super().check(obj)
        where = f"Deployment {obj['metadata']['name']}"
        spec = obj.get("spec") or {}
        template = spec.get("template") or {}
        container = require_single_container(template.get("spec") or {}, where)
        labels = labels_of(template)

        selector = (spec.get("selector") or {}).get("matchLabels") or {}
        if not selector or not selector.items() <= labels.items():
            raise ConfigError(
                f"{where}: spec.selector.matchLabels must be a subset of the labels of its"
                " template."
            )

        if (spec.get("strategy") or {}).get("type", "RollingUpdate") != "RollingUpdate":
            raise ConfigError(f"{where}: strategy.type must be RollingUpdate here.")

        for probe in PROBES:
            if probe in container and "httpGet" not in container[probe]:
                raise ConfigError(f"{where}: {probe} must be an httpGet here.")

    def apply(self, obj: Object) -> Object:
        """Apply the object, and record the Origin of this process unless `obj` already has an
        Origin. The supervisor needs the Origin because it starts pods of several projects."""
        meta = obj.get("metadata") or {}
        process = f"{os.getpid()}/{start_time(os.getpid())}"
        origin = to_json(asdict(Origin(path=self.cluster.path)) | {"process": process})
        annotations = {ORIGIN_ANNOTATION: origin} | (meta.get("annotations") or {})
        return super().apply(obj | {"metadata": meta | {"annotations": annotations}})

    def on_write(self, stored: Object) -> Object:
        """Wait until the supervisor has observed the change, so that the object's status belongs to
        its new spec."""
        name = stored["metadata"]["name"]
        generation = stored["metadata"]["generation"]
        deadline = time.monotonic() + OBSERVE_TIMEOUT_S

        while (stored.get("status") or {}).get(
            "observedGeneration"
        ) != generation or not self.running():
            self.start()
            if time.monotonic() > deadline:
                raise ArgolocalError(
                    "The supervisor of the Deployments does not respond: see"
                    f" {self.home}/{LOG_FILE}."
                )

            time.sleep(0.02)
            stored = self.read(name) or stored

        return stored

    def get(self, name: str) -> Object | None:
        self.revive()
        return self.read(name)

    def delete(self, name: str) -> bool:
        """Delete the Deployment, and wait until its pods have ended."""
        if not self.running():
            return self.remove(name)
        stamp = {"deletionTimestamp": timestamp(time.time())}
        existing = self.change(
            name, lambda obj: obj and obj | {"metadata": obj["metadata"] | stamp}
        )
        while self.read(name) and self.running():
            time.sleep(0.02)
        self.remove(name)
        return bool(existing)

    def remove(self, name: str) -> bool:
        """Remove the files of a Deployment whose pods have ended, but keep its logs."""
        rmtree(self.home / name / "pods", ignore_errors=True)
        return super().delete(name)

    def running(self) -> bool:
        """Return True if the supervisor is alive."""
        record = self._record()
        return bool(record and is_alive(record["pid"], record["since"]))

    def revive(self) -> bool:
        """Restart the supervisor if it died, unless `down` had stopped it. Return True if the
        supervisor had died."""
        had_died = bool(self._record() and not self.running() and self.names())
        if had_died:
            self.start()
        return had_died

    def down(self) -> list[str]:
        """Stop the supervisor and all pods, and wait until they have ended.

        Return the names of the Deployments that ran. Their objects are not deleted.
        """
        record = self._record()
        (self.home / RECORD_FILE).unlink(missing_ok=True)

        if not record or not is_alive(record["pid"], record["since"]):
            return []

        objects = [obj for obj in self.objects().values() if obj["spec"].get("replicas", 1)]
        grace_periods = [
            obj["spec"]["template"]["spec"].get("terminationGracePeriodSeconds", 30)
            for obj in objects
        ]
        end_group(record["pid"], record["since"], max(grace_periods, default=0) + 5)

        for child in SUPERVISORS:
            child.poll()

        return [obj["metadata"]["name"] for obj in objects]

    def overview(self) -> list[Object]:
        """Return one dict per Deployment with its kind, name, address, `running` and number of
        ready pods."""
        services = [
            obj for obj in Services(self.cluster).objects().values() if not is_headless(obj)
        ]
        entries = []
        running = self.running()

        for name, obj in self.objects().items():
            template = obj["spec"]["template"]
            ports = [
                service["spec"]["ports"][0]["port"]
                for service in services
                if selects(service, template)
            ]

            address = f"http://127.0.0.1:{ports[0]}" if ports else ""

            if running:
                ready = (obj.get("status") or {}).get("readyReplicas", 0)
            else:
                ready = 0

            entry = {
                "kind": "deployment",
                "name": name,
                "address": address,
                "running": running,
                "ready": ready,
            }

            entries.append(entry)

        return entries

    def start(self) -> None:
        """Start the supervisor if it is not running, even if `down` has stopped it. This method
        does not wait until the supervisor is ready."""
        with self._locked():
            if self.running():
                return

            self.home.mkdir(parents=True, exist_ok=True)
            with open(self.home / LOG_FILE, "ab") as log:
                child = subprocess.Popen(
                    self._supervise(),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    cwd="/",
                    env=remove_secrets(os.environ),
                )

            SUPERVISORS.append(child)
            record = {"pid": child.pid, "since": start_time(child.pid) or 0}
            write_atomically(self.home / RECORD_FILE, to_json(record))
            confirm_recorded(child)

    def _supervise(self) -> list[str]:
        cluster = type(self.cluster)
        name = f"{cluster.__module__}:{cluster.__qualname__}"
        return python_command(
            "-m",
            "argolocal.runner.supervise_deployments",
            "--home",
            str(self.cluster.home),
            "--cluster",
            name,
        )

    def _record(self) -> dict[str, int] | None:
        try:
            record = read_object(self.home / RECORD_FILE)
        except FileNotFoundError:
            return None
        if not all(isinstance(record.get(name), int) for name in ("pid", "since")):
            raise InvalidDocument(
                f"{self.home / RECORD_FILE} is malformed (pid or since is not a number): restore"
                " the file, or remove it."
            )
        return record


# supervisors that this process has started; they continue to run when this process exits
SUPERVISORS: list[subprocess.Popen] = []


def selects(service: Object, template: Object) -> bool:
    """Return True if a Service selects the pods of a template."""
    return service["spec"]["selector"].items() <= labels_of(template).items()


def is_headless(service: Object) -> bool:
    """Return True if a Service is headless: its DNS name resolves to the addresses of the pods."""
    return service["spec"].get("clusterIP") == "None"


def labels_of(template: Object) -> dict[str, str]:
    """Return the labels of a template's pods."""
    return (template.get("metadata") or {}).get("labels") or {}


def _check_port_is_free(port: int, where: str, hint: str) -> None:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno:
            reason = os.strerror(error.errno)
        else:
            reason = str(error)
        raise ConfigError(
            f"{where}: port {port} on 127.0.0.1 cannot be used ({reason}): another program uses it,"
            f" or `{program.name}` in another directory. Stop that program, or choose another"
            f" port{hint}."
        ) from error
