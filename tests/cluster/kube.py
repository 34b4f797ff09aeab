"""Access to a namespace of a cluster through kubectl.

kube = Kube("rekindle-test-1a2b"); kube("get", "pods"); kube.items("pods", "app=demo")
"""

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime

import yaml

from argolocal.manifest.types import Object


def seconds(timestamp: str) -> float:
    """Convert a Kubernetes timestamp to Unix seconds."""
    return datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()


@dataclass(frozen=True)
class Kube:
    """kubectl in one namespace."""

    namespace: str

    def __call__(
        self, *args: str, stdin: str | None = None, check: bool = True, timeout: float = 120
    ) -> str:
        """Run kubectl, and return its stdout. The test fails with the output of kubectl if kubectl
        fails, unless `check` is False."""
        command = ["kubectl", "--namespace", self.namespace, *args]
        completed = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=timeout
        )
        assert completed.returncode == 0 or not check, (
            f"{' '.join(command)}\n{completed.stdout}{completed.stderr}"
        )
        return completed.stdout

    def apply(self, *objects: Object) -> None:
        self(
            "apply",
            "--server-side",
            "--force-conflicts",
            "-f",
            "-",
            stdin=yaml.safe_dump_all(objects),
        )

    def get(self, kind: str, name: str) -> Object | None:
        output = self("get", kind, name, "--ignore-not-found", "-o", "json")
        if output.strip():
            return json.loads(output)
        return None

    def items(self, kind: str, selector: str = "") -> list[Object]:
        return json.loads(self("get", kind, "--selector", selector, "-o", "json"))["items"]

    def delete_pods(self, *names: str, force: bool = False) -> float:
        """Request the deletion of pods without waiting, and return the time of the request."""
        now = time.time()
        flags = ["--grace-period=0", "--force"] if force else []
        self("delete", "pod", *names, "--wait=false", *flags)
        return now

    def evict(self, pod: str, check: bool = True) -> bool:
        """Evict a pod by the Eviction API, as a drain or an autoscaler does; return False if the
        eviction is refused, or fail the test if `check` is True."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.namespace},
        }
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction"
        return bool(self("create", "--raw", path, "-f", "-", stdin=json.dumps(body), check=check))

    @contextmanager
    def forward(self, service: str, port: int) -> Iterator[str]:
        """Forward a port of this machine to a Service; yield the address of the port."""
        command = [
            "kubectl",
            "--namespace",
            self.namespace,
            "port-forward",
            f"service/{service}",
            f":{port}",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as forwarding_process:
            assert forwarding_process.stdout
            # example of the line: "Forwarding from 127.0.0.1:43210 -> 8080"
            try:
                yield "http://" + forwarding_process.stdout.readline().split()[2]
            finally:
                forwarding_process.terminate()

    def scale(self, deployment: str, replicas: int) -> None:
        self("scale", "deployment", deployment, f"--replicas={replicas}")
        if replicas:
            self("rollout", "status", f"deployment/{deployment}", "--timeout=120s", timeout=150)


@dataclass
class PodRecord:
    """The observed history of a pod, including its end."""

    name: str
    uid: str
    created: float
    ready: float | None = None
    # time when the deletion of the pod was requested
    deleting: float | None = None
    ended: float | None = None
    # last exit code of each container
    codes: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    phase: str = ""
    reason: str = ""


class Watch:
    """Records all pods of a namespace from the creation of the Watch on; unlike the API server, the
    Watch keeps deleted pods."""

    def __init__(self, kube: Kube) -> None:
        # uid → record
        self.pods: dict[str, PodRecord] = {}
        self._lock = threading.Lock()
        command = ["kubectl", "--namespace", kube.namespace, "get", "pods", "--watch"]
        command += ["--output-watch-events", "-o", "json"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join()

    def find(self, name_part: str) -> list[PodRecord]:
        """Return the pods with `name_part` in their name, in the order of their creation."""
        with self._lock:
            return sorted(
                (log for log in self.pods.values() if name_part in log.name),
                key=lambda log: log.created,
            )

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:  # kubectl prints one event per line
            event = json.loads(line)
            with self._lock:
                self._record(event["object"], gone=event["type"] == "DELETED")

    def _record(self, pod: Object, gone: bool) -> None:
        meta = pod["metadata"]
        status = pod["status"]
        seen = self.pods.setdefault(
            meta["uid"], PodRecord(meta["name"], meta["uid"], seconds(meta["creationTimestamp"]))
        )
        now = time.time()
        seen.phase, seen.reason = status.get("phase", ""), status.get("reason", "")
        ready = any(
            c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", [])
        )
        seen.ready = seen.ready or (now if ready else None)

        if gone or "deletionTimestamp" in meta:
            seen.deleting = seen.deleting or now

        for container in status.get("containerStatuses", []):
            seen.restarts = max(seen.restarts, container["restartCount"])
            for state in (container.get("lastState", {}), container.get("state", {})):
                end = state.get("terminated")
                if end:
                    seen.codes[container["name"]] = end["exitCode"]
                    seen.ended = seconds(end["finishedAt"]) if end.get("finishedAt") else now
