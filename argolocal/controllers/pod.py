"""One pod of a controller: its process, restarted as by a kubelet, terminated by SIGTERM, then SIGKILL.

The back-off before a restart is shorter than a kubelet's (10 s, 20 s, ... 5 min): none for the first, then 1, 2, 4,
8 s, reset once the container has run for a minute.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree
from signal import SIGKILL, SIGTERM
from typing import Any

from argolocal.common.processes import signal_group
from argolocal.interfaces import Cluster
from argolocal.pods import filesystem
from argolocal.pods.filesystem import SHM
from argolocal.pods.process import ContainerRun, Origin, Process, start_container
from argolocal.pods.volumes import VolumeDirectory

BACKOFF = (0.0, 1.0, 2.0, 4.0, 8.0)
BACKOFF_RESET = 60.0  # seconds of running after which the back-off starts over


class Pod:
    """A pod with one container. `poll` reaps, starts and kills; no method blocks."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        spec: Mapping[str, Any],
        folder: Path,
        env: Mapping[str, str],
        directories: Mapping[str, Path] | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.cluster, self.name, self.spec, self.env, self.origin = cluster, name, spec, env, origin
        self.directories = directories or {}  # volumes that are not the pod's own
        self.root, self.log = folder / "pods" / name, folder / "logs" / f"{name}.log"
        self.ip = cluster.address(name)
        self.process: Process | None = None
        self.restarts = self.recent_restarts = 0
        self.started = 0.0
        self.start_at, self.kill_at = 0.0, float("inf")
        self.ending = False
        self.log_error: OSError | None = None
        rmtree(self.root, ignore_errors=True)  # of an earlier pod of this name

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return self.process is not None

    def poll(self) -> int | None:
        """The exit code if the process has just exited (128 + N for signal N); starts it when its back-off is over."""
        now = time.monotonic()
        if self.process is None:
            if not self.ending and now >= self.start_at:
                self._start()
            return None
        process = self.process
        if process.poll() is None:
            if now >= self.kill_at:
                signal_group(process.pid, SIGKILL)
            return None
        signal_group(process.pid, SIGKILL)  # processes left in its group
        self.log_error, self.process = process.log_pipe.error, None
        return process.code

    def restart(self, code: int, recreate: bool = False) -> None:
        """Start the container again, after the back-off; `recreate`: as a new pod of the same name."""
        self.recent_restarts = self.recent_restarts + 1 if time.monotonic() - self.started < BACKOFF_RESET else 1
        self.restarts += 1
        if recreate:
            self.restarts = 0
            rmtree(self.root, ignore_errors=True)
        wait = BACKOFF[min(self.recent_restarts, len(BACKOFF)) - 1]
        self.start_at, self.kill_at = time.monotonic() + wait, float("inf")
        when = f" in {wait:g} s" if wait else ""
        with self.log.open("a") as log:
            log.write(f"[{self.name}] ended with code {code}, is started again{when}\n")

    def give_up(self, code: int) -> None:
        """Leave the container ended: no restart can change what its exit code stands for."""
        self.start_at = float("inf")
        with self.log.open("a") as log:
            log.write(f"[{self.name}] ended with code {code}, which a restart cannot change\n")

    def end(self, grace: float | None = None) -> None:
        """SIGTERM now, SIGKILL after `grace` seconds (default: the pod's own), no restart."""
        self.ending = True
        self.terminate(grace)

    def terminate(self, grace: float | None = None) -> None:
        """SIGTERM now, SIGKILL after `grace` seconds (default: the pod's own)."""
        own = float(self.spec.get("terminationGracePeriodSeconds", 30))
        until = time.monotonic() + (own if grace is None else min(grace, own))
        if self.process and until < self.kill_at:
            if self.kill_at == float("inf"):
                signal_group(self.process.pid, SIGTERM)
            self.kill_at = until

    def last_log_line(self) -> str:
        """The last line of its log, for a message."""
        if self.log_error:
            return f"its log cannot be written: {self.log_error}"
        if not self.log.exists():
            return ""
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 8192))
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line and not line.startswith(f"[{self.name}]")), "")

    def _start(self) -> None:
        self.started = time.monotonic()
        container = self.spec["containers"][0]
        places = {mount["name"]: mount["mountPath"] for mount in container.get("volumeMounts") or []}
        volumes = {  # memory outlives the pod's processes
            name: VolumeDirectory(
                self.directories.get(name) or (Path(SHM) if path == SHM else self.root / path.lstrip("/"))
            )
            for name, path in places.items()
        }
        private = () if filesystem.available() else None
        self.process = start_container(
            ContainerRun(
                name=self.name, container=container, root=self.root, log=self.log, ip=self.ip,
                extra_env=self.env, private=private, volumes=volumes, origin=self.origin,
            ),
            self.cluster,
        )  # fmt: skip


def end_all(pods: list[Pod], grace: float) -> None:
    """Terminate pods and wait until their processes have exited."""
    for pod in pods:
        pod.end(grace)
    while any(pod.running for pod in pods):
        for pod in pods:
            pod.poll()
        time.sleep(0.01)
