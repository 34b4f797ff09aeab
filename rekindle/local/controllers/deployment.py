"""Deployments and their Services: pods that outlive the run that applied them.

`Deployments.apply` writes the object and ensures that its supervisor runs, a separate process (supervisor.py). The
supervisor is recorded in `deployments/<name>/supervisor.json`; the next command restarts one that died, but not one
that `down` stopped. Differences from Kubernetes: no autoscaler changes `replicas`, and a rollout fails before its
progressDeadlineSeconds if its pod exits four times in a row.
"""

import json
import os
import socket
import subprocess
import sys
import time
from shutil import rmtree
from typing import Any

from rekindle.common.files import write_atomically
from rekindle.errors import ConfigError, RekindleError
from rekindle.local.controllers.base import Controller, Object, sole_container
from rekindle.local.pods.interfaces import Cluster
from rekindle.local.processes import alive, confirm_recorded, end_group, started

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
OBSERVED = 10.0  # seconds until a supervisor must have observed a change


class Services(Controller):
    """Services: the supervisor of the Deployment whose pods they select listens on their ports."""

    kind = "Service"

    def check(self, obj: Object) -> None:
        """Raises ConfigError for a port that is in use or invalid."""
        super().check(obj)
        name, ports = obj["metadata"]["name"], (obj.get("spec") or {}).get("ports") or []
        if not ports or not (obj["spec"].get("selector")):
            raise ConfigError(f"Service {name} needs a selector and ports.")
        if wrong := [port for port in ports if not isinstance(port.get("port"), int)]:
            raise ConfigError(f"Service {name}: port is {wrong[0].get('port')!r}: it must be a number.")
        before = self.read(name)
        ours = [port["port"] for port in before["spec"]["ports"]] if before else []
        for port in [port["port"] for port in ports]:
            if port in ours and any(
                Deployments(self.cluster).running(deployment) for deployment in self._deployments(obj)
            ):
                continue  # its supervisor listens there
            _free(port, f"Service {name}")

    def _deployments(self, service: Object) -> list[str]:
        deployments = Deployments(self.cluster)
        objects = {name: deployments.read(name) for name in deployments.names()}
        return [name for name, obj in objects.items() if obj and selects(service, obj["spec"]["template"])]


class Deployments(Controller):
    """The controller in all processes but the supervisor."""

    kind = "Deployment"

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.home = cluster.home / "deployments"

    def check(self, obj: Object) -> None:
        """Raises ConfigError for an object that the API server would refuse or that is not supported here."""
        super().check(obj)
        where, spec = f"Deployment {obj['metadata']['name']}", obj.get("spec") or {}
        template = spec.get("template") or {}
        container = sole_container(template.get("spec") or {}, where)
        labels = (template.get("metadata") or {}).get("labels") or {}
        selector = (spec.get("selector") or {}).get("matchLabels") or {}
        if not selector or not selector.items() <= labels.items():
            raise ConfigError(f"{where}: spec.selector.matchLabels must be some of the labels of its template.")
        if (spec.get("strategy") or {}).get("type", "RollingUpdate") != "RollingUpdate":
            raise ConfigError(f"{where}: strategy.type must be RollingUpdate here.")
        for probe in PROBES:
            if probe in container and "httpGet" not in container[probe]:
                raise ConfigError(f"{where}: {probe} must be an httpGet here.")

    def apply(self, obj: Object) -> Object:
        """Returns once the supervisor has observed the change, so that the status belongs to the applied object."""
        stored = super().apply(obj)
        name, generation = stored["metadata"]["name"], stored["metadata"]["generation"]
        until = time.monotonic() + OBSERVED
        while (stored.get("status") or {}).get("observedGeneration") != generation or not self.running(name):
            self._supervise(name)
            if time.monotonic() > until:
                raise RekindleError(f"The supervisor of Deployment {name} does not answer: see {self.home}/{name}.")
            time.sleep(0.02)
            stored = self.read(name) or stored
        return stored

    def get(self, name: str) -> Object | None:
        self.revive(name)
        return self.read(name)

    def delete(self, name: str) -> bool:
        self._stop(name)
        rmtree(self.home / name / "pods", ignore_errors=True)  # the logs stay for diagnosis
        return super().delete(name)

    def running(self, name: str) -> bool:
        """Whether the supervisor is alive."""
        record = self._record(name)
        return bool(record and alive(record["pid"], record["since"]))

    def start(self, name: str) -> None:
        """Ensure that a Deployment runs, even a stopped one. Returns at once."""
        if self.read(name):
            self._supervise(name)

    def revive(self, *names: str) -> list[str]:
        """Restart supervisors that died without having been stopped (default: all). Returns their names."""
        dead = [name for name in names or self.names() if self._record(name) and not self.running(name)]
        for name in dead:
            self._supervise(name)
        return dead

    def down(self) -> list[str]:
        """Stop all supervisors and their pods, and wait. The objects stay."""
        return [name for name in self.names() if self._stop(name)]

    def overview(self) -> list[dict[str, Any]]:
        """One entry per Deployment: kind, name, address, whether it runs, how many pods are ready."""
        services = [json.loads(path.read_text()) for path in (self.cluster.home / "objects/Service").glob("*.json")]
        entries = []
        for name in self.names():
            obj = self.read(name)
            if obj is None:
                continue
            ports = [
                service["spec"]["ports"][0]["port"] for service in services if selects(service, obj["spec"]["template"])
            ]
            address, running = f"http://127.0.0.1:{ports[0]}" if ports else "", self.running(name)
            ready = (obj.get("status") or {}).get("readyReplicas", 0) if running else 0
            entry = {"kind": "deployment", "name": name, "address": address, "running": running, "ready": ready}
            entries.append(entry)
        return entries

    def _record(self, name: str) -> dict[str, int] | None:
        try:
            return json.loads((self.home / name / "supervisor.json").read_text())
        except FileNotFoundError:
            return None

    def _supervise(self, name: str) -> None:
        with self._locked():
            if self.running(name):
                return
            folder = self.home / name
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / "supervisor.log", "ab") as log:
                command = [sys.executable, "-m", "rekindle.local.supervise"]
                child = subprocess.Popen(
                    [*command, "--home", str(self.cluster.home), "--name", name],
                    stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, cwd=self.cluster.home,
                )  # fmt: skip
            CHILDREN.append(child)
            record = {"pid": child.pid, "since": started(child.pid) or 0}
            write_atomically(folder / "supervisor.json", json.dumps(record))
            confirm_recorded(child)

    def _stop(self, name: str) -> bool:
        record, obj = self._record(name), self.read(name)
        (self.home / name / "supervisor.json").unlink(missing_ok=True)
        if not record or not alive(record["pid"], record["since"]):
            return False
        spec = obj["spec"]["template"]["spec"] if obj else {}
        end_group(record["pid"], record["since"], spec.get("terminationGracePeriodSeconds", 30) + 5)
        for child in CHILDREN:
            child.poll()
        return True


CHILDREN: list[subprocess.Popen] = []  # supervisors started by this process, which they outlive


def selects(service: Object, template: Object) -> bool:
    """Whether a Service selects the pods of a template."""
    labels = (template.get("metadata") or {}).get("labels") or {}
    return service["spec"]["selector"].items() <= labels.items()


def _free(port: int, where: str) -> None:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except (OSError, OverflowError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise ConfigError(
            f"{where}: port {port} on 127.0.0.1 cannot be used ({why}): another program has it, or `rekindle` in "
            "another directory. Stop that one, or take another port: --set serve.port=..."
        ) from error
