"""Run one pod of a controller: start its process, restart it as a kubelet does, and terminate it
with SIGTERM, then SIGKILL.

The delays before successive restarts are 0, 1, 2, 4 and 8 s (a kubelet's: 10 s, 20 s, ... 5 min).
After the container has run for a minute, the next restart has a delay of 0 s again.
"""

import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from signal import SIGKILL, SIGTERM
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.common.processes import read_start_ticks, signal_group
from argolocal.interfaces import Cluster
from argolocal.pods import filesystem, volumes
from argolocal.pods.filesystem import SHARED_MEMORY_PATH
from argolocal.pods.process import ContainerRun, Origin, Process, read_field, start_container
from argolocal.pods.volumes import VolumeDirectory
from argolocal.state.machine_resources import sum_requests

BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0)
# after a container has run for this many seconds, the restart delay is 0 again
RESET_BACKOFF_AFTER_S = 60.0


class Pod:
    """A pod with one container. `poll` starts, kills and reaps the pod's process; no method
    blocks."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        spec: Mapping[str, Any],
        log_folder: Path,
        environment: Mapping[str, str],
        directories: Mapping[str, Path] | None = None,
        origin: Origin | None = None,
        claim_names: Collection[str] = (),
        counts_resources: bool = True,
    ) -> None:
        """`directories`: name of a volume that the pod shares with others → its directory.
        `claim_names`: names of the PersistentVolumeClaims that the pod's workflow creates.
        `counts_resources`: make the pod wait while other runs use the GPUs or the memory that it
        requests. False lets the pod share them, as for the pods of a Deployment, which never
        end."""
        self.counts_resources = counts_resources
        self.is_waiting = False
        self.variables: Mapping[str, str] = {}
        self.cluster = cluster
        self.name = name
        self.spec = spec
        self.environment = environment
        self.origin = origin
        self.directories = directories or {}
        self.claim_names = claim_names
        self.root = log_folder / "pods" / name
        self.log = log_folder / "logs" / f"{name}.log"
        self.ip = cluster.address(name)
        # JSON file: pid and start time of the newest process
        self.pid_record = log_folder / "pids" / name
        self.process: Process | None = None
        self.restarts = 0
        self.recent_restarts = 0
        self.started_at = 0.0
        self.start_at = 0.0
        self.kill_at = float("inf")
        self.is_ending = False
        self.log_error: OSError | None = None
        self.volumes: dict[str, VolumeDirectory] = {}
        self.volumes_folder = log_folder / "volumes" / name
        # remove the files of an earlier pod with this name
        self.remove_files()

    @property
    def running(self) -> bool:
        """True if the pod's process is running or has not been reaped yet."""
        return self.process is not None

    def poll(self) -> int | None:
        """Start, kill or reap the process if it is time to do so. If the process has exited since
        the last call, return its exit code (128 + N after signal N), else None."""
        now = time.monotonic()
        if self.process is None:
            if not self.is_ending and now >= self.start_at and self._acquire_resources():
                self._start()

            return None

        process = self.process
        if process.poll() is None:
            if now >= self.kill_at:
                signal_group(process.pid, SIGKILL)

            return None

        # kill the other processes of the pod, which have outlived the first process
        signal_group(process.pid, SIGKILL)
        volumes.remove_contents(self.volumes, self.volumes_folder)
        self.log_error = process.log_pipe.error
        self.process = None
        if self.counts_resources:
            self.cluster.resources.release(self.name)

        return process.code

    def _acquire_resources(self) -> bool:
        """Reserve the GPUs and the memory that the pod requests. Return False if other runs use the
        GPUs or the memory."""
        if not self.counts_resources:
            return True

        request = sum_requests(self.spec["containers"])
        allocation = self.cluster.resources.acquire(self.name, request)
        if allocation is None:
            if not self.is_waiting:
                self.is_waiting = True
                self.log.parent.mkdir(parents=True, exist_ok=True)
                with self.log.open("a") as log:
                    log.write(f"[{self.name}] waits for {request}, which other runs use\n")
            return False

        self.is_waiting = False
        self.variables = allocation.variables
        return True

    def restart(self, exit_code: int, recreates_pod: bool = False) -> None:
        """Let `poll` restart the container after the restart delay. With `recreates_pod`, the pod's
        files are removed first, as if a new pod with the same name replaced this pod."""
        if time.monotonic() - self.started_at < RESET_BACKOFF_AFTER_S:
            self.recent_restarts += 1
        else:
            self.recent_restarts = 1

        self.restarts += 1

        if recreates_pod:
            self.restarts = 0
            self.remove_files()

        backoff_s = BACKOFF_S[min(self.recent_restarts, len(BACKOFF_S)) - 1]
        self.start_at = time.monotonic() + backoff_s
        self.kill_at = float("inf")
        delay_text = f" in {backoff_s:g} s" if backoff_s else ""

        with self.log.open("a") as log_file:
            log_file.write(
                f"[{self.name}] ended with code {exit_code} and is restarted{delay_text}\n"
            )

    def give_up(self, exit_code: int) -> None:
        """Never restart the container, because its exit code means that a restart cannot help."""
        self.start_at = float("inf")
        with self.log.open("a") as log_file:
            log_file.write(
                f"[{self.name}] ended with code {exit_code}, which a restart cannot fix\n"
            )

    def end(self, grace_seconds: float | None = None) -> None:
        """Terminate the pod (see `terminate`) and never restart it."""
        self.is_ending = True
        self.terminate(grace_seconds)

    def terminate(self, grace_seconds: float | None = None) -> None:
        """Send SIGTERM now, and SIGKILL after the smaller of `grace_seconds` and
        terminationGracePeriodSeconds."""
        pod_grace_seconds = float(self.spec.get("terminationGracePeriodSeconds", 30))
        kill_at = time.monotonic() + (
            pod_grace_seconds if grace_seconds is None else min(grace_seconds, pod_grace_seconds)
        )
        if self.process and kill_at < self.kill_at:
            if self.kill_at == float("inf"):
                signal_group(self.process.pid, SIGTERM)
            self.kill_at = kill_at

    def last_log_line(self) -> str:
        """Return the last line that the container has printed, for an error message; "" if it has
        printed nothing. If the log could not be written, return the reason."""
        if self.log_error:
            return f"its log cannot be written: {self.log_error}"
        if not self.log.exists():
            return ""
        with self.log.open("rb") as log_file:
            log_file.seek(max(0, log_file.seek(0, os.SEEK_END) - 8192))
            log_lines = [
                line.strip() for line in log_file.read().decode(errors="replace").splitlines()
            ]
        return next(
            (
                line
                for line in reversed(log_lines)
                if line and not line.startswith(f"[{self.name}]")
            ),
            "",
        )

    def _start(self) -> None:
        self.started_at = time.monotonic()
        container = self.spec["containers"][0]

        container_run = ContainerRun(
            name=self.name,
            container=container,
            root=self.root,
            log=self.log,
            ip=self.ip,
            extra_env={**self.environment, **self.variables},
            private_paths=() if filesystem.supports_namespaces() else None,
            origin=self.origin,
        )

        self._create_volumes(container_run)
        self.process = start_container(replace(container_run, volumes=self.volumes), self.cluster)

        # a full disk must not stop the pod; only the command `status` reads this record
        with suppress(OSError):
            self.pid_record.parent.mkdir(exist_ok=True)
            self.pid_record.write_text(
                to_json([self.process.pid, read_start_ticks(self.process.pid)])
            )

    def _create_volumes(self, container_run: ContainerRun) -> None:
        """Create the directories of the volumes in the same way as for a workflow's pod. The
        directories of emptyDir volumes outlive the pod's process."""
        volume_specs = self.spec.get("volumes") or []
        if not filesystem.supports_namespaces():
            volumes.check_without_mounts(volume_specs, self.name)
            return

        self.volumes = volumes.create(
            volume_specs,
            self.volumes_folder,
            self.cluster,
            lambda field_path, variable_name: read_field(container_run, field_path, variable_name),
            self.claim_names,
        )
        for volume_mount in container_run.container.get("volumeMounts") or []:
            # the pod uses the /dev/shm of this machine, whose files outlive the pod's processes
            if volume_mount["mountPath"] == SHARED_MEMORY_PATH:
                self.volumes[volume_mount["name"]] = VolumeDirectory(Path(SHARED_MEMORY_PATH))

        self.volumes.update(
            {
                volume_name: VolumeDirectory(directory)
                for volume_name, directory in self.directories.items()
            }
        )

    def remove_files(self) -> None:
        """Remove the root folder and the volumes of the pod."""
        for folder in (self.root, self.volumes_folder):
            rmtree(folder, ignore_errors=True)


def terminate_all(pods: list[Pod], grace_seconds: float) -> None:
    """Terminate pods and wait until their processes have exited."""
    for pod in pods:
        pod.end(grace_seconds)
    while any(pod.running for pod in pods):
        for pod in pods:
            pod.poll()
        time.sleep(0.01)
