"""Run a rendered PyTorchJob on the local controller, and observe its processes.

    with WatchedTraining(cluster, folder, job) as training:
        # a hundred times a second, until the model is complete
        for _ in training.poll_until_done():
            print(training.step, training.members, training.state("worker-0"))

The groups of workers are read from the coordinator's log, the newest steps from shared memory and
the logs, and the processes from /proc.
"""

import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from argolocal.common.processes import read_start_ticks
from argolocal.controllers.controller import Controller
from argolocal.controllers.memory_volumes import shared_memory_path
from argolocal.controllers.pod_process import Pod
from rekindle.documents import ModelFile, read_object
from rekindle.errors import RekindleError
from rekindle.kubernetes_names import STORE_SECRET
from rekindle.local.cluster import LocalCluster
from rekindle.local.jobs.frameworks import get_port
from rekindle.local.jobs.training_job import TrainingJobs, find_condition, is_finished
from rekindle.training.checkpoint import snapshot_file
from rekindle.training.membership.protocol import DEFAULT_PORT
from rekindle.training.metrics import PROGRESS_LINE_PATTERN
from rekindle.training.spec import TrainingSpec

OBSERVE_INTERVAL_S = 0.01
POLL_INTERVAL_S = 0.05
# seconds that the processes have to end when the demo is stopped
GRACE_S = 0.3
# additional seconds for the children of these processes to end
CHILDREN_GRACE_S = 1.0
# a step counts as repeated if it is older than the newest step by more than this number of steps; a
# smaller lag is normal between workers
TOLERATED_LAG_STEPS = 5
COORDINATOR = "coordinator"
GENERATION_LINE = re.compile(r"generation \d+: (.*)")
RESUMED_LINE = re.compile(r"resuming from step (\d+)|step (\d+) was found in shared memory")


class DemoCluster(LocalCluster):
    """The local cluster without MLflow."""

    def configmap(self, name: str) -> dict[str, str]:
        return self.services.store_environment()

    def secret(self, name: str) -> dict[str, str]:
        if name == STORE_SECRET:
            return self.services.credentials()
        return super().secret(name)


class WatchedTraining:
    """A running training job of the demo. The names of the job's pods are `coordinator` and
    `worker-N`."""

    def __init__(self, cluster: DemoCluster, folder: Path, job_manifest: dict[str, Any]) -> None:
        self.cluster = cluster
        self.job = job_manifest
        self.name = str(job_manifest["metadata"]["name"])
        self.controller = TrainingJobs(cluster, "PyTorchJob", folder)
        self.secret = Controller(cluster, "Secret")

        (worker_container,) = job_manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"][
            "spec"
        ]["containers"]
        worker_flags = [
            worker_flag for worker_flag in worker_container["args"] if worker_flag.startswith("--")
        ]
        self.inputs = TrainingSpec.from_flags(worker_flags)
        self.memory = shared_memory_path(folder, self.name)

        # names of the workers in the newest group
        self.members: tuple[str, ...] = ()
        # number of groups that the coordinator has published so far
        self.group_count = 0
        # steps of the snapshots (in shared memory) and checkpoints (in the object store) that
        # restarted workers have loaded
        self.resumed_steps: list[int] = []
        # the newest step that any worker has trained
        self.step = 0
        # steps that were trained a second time
        self.repeated_steps: list[int] = []

        # newest step in each snapshot file
        self._snapshot_steps: dict[Path, int] = {}
        # pid of the coordinator that last accepted a connection
        self._answering_pid = 0
        self._logs = [
            LogTail(folder / "logs" / f"{self._make_pod_name(name)}.log") for name in self.names
        ]

    @property
    def names(self) -> list[str]:
        worker_count = self.job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]
        return [COORDINATOR, *(f"worker-{index}" for index in range(worker_count))]

    def __enter__(self) -> Self:
        self.secret.apply(
            {"metadata": {"name": self.name}, "stringData": {"secret": secrets.token_hex(32)}}
        )
        self.controller.apply(self.job)
        return self

    def __exit__(self, *_: object) -> None:
        pids = [pid for name in self.names for pid in self.list_pids(name)]
        self.controller.stop(GRACE_S)
        self.controller.delete(self.name)
        self.secret.delete(self.name)

        # wait until the workers, which die with their launchers, have ended
        deadline_time = time.monotonic() + CHILDREN_GRACE_S
        while time.monotonic() < deadline_time and any(read_start_ticks(pid) for pid in pids):
            time.sleep(OBSERVE_INTERVAL_S)

    def poll_until_done(self, step_timeout_s: float = 120) -> Iterator[None]:
        """Observe the job until its model is complete. Raises RekindleError if the job fails or
        makes no progress."""
        last_step_time = time.monotonic()
        last_poll_time = last_step_time

        while True:
            current_time = time.monotonic()
            last_seen_step = self.step

            if current_time - last_poll_time >= POLL_INTERVAL_S or not self.pods:
                last_poll_time = current_time
                self.controller.poll()

                job_status = (self.controller.read(self.name) or {}).get("status") or {}
                if is_finished(job_status):
                    failed_condition = find_condition(job_status, "Failed")
                    if failed_condition:
                        raise RekindleError(failed_condition["message"])
                    return

            self._observe()
            if self.step != last_seen_step:
                last_step_time = current_time
            if current_time - last_step_time > step_timeout_s:
                raise RekindleError(
                    f"no step since {step_timeout_s:.0f} s: the logs are in"
                    f" {self.controller.run / 'logs'}."
                )

            yield
            time.sleep(OBSERVE_INTERVAL_S)

    def sha256(self) -> str:
        return read_object(ModelFile, self.cluster.store(), f"{self.inputs.out}/model.json").sha256

    @property
    def pods(self) -> dict[str, Pod]:
        running_job = self.controller.jobs.get(self.name)
        pods_by_name = running_job.pods if running_job else {}
        return {
            name: pods_by_name[self._make_pod_name(name)]
            for name in self.names
            if self._make_pod_name(name) in pods_by_name
        }

    def find_launcher_pid(self, worker_name: str) -> int | None:
        """Return the pid of a pod's first process."""
        pod = self.pods.get(worker_name)
        if pod and pod.process:
            return pod.process.pid
        return None

    def find_trainer_pid(self, worker_name: str) -> int | None:
        """Return the pid of the process that trains in a worker's pod. The training process is not
        the launcher's first child, which only loads torch."""
        launcher_pid = self.find_launcher_pid(worker_name)
        if launcher_pid:
            return next(iter(list_child_pids(launcher_pid)[1:]), None)
        return None

    def list_pids(self, worker_name: str) -> list[int]:
        """Return the pids of a pod's first process and of its children."""
        launcher_pid = self.find_launcher_pid(worker_name)
        if launcher_pid:
            return [launcher_pid, *list_child_pids(launcher_pid)]
        return []

    def state(self, worker_name: str) -> str:
        """Return the state of a pod: a key of screen.STYLE_OF_STATE."""
        if not self.find_launcher_pid(worker_name):
            return "dead"

        if worker_name == COORDINATOR:
            if self.accepts_connections():
                return "serving"
            if self.group_count:
                return "recovering"
            return "starting"

        trainer_pid = self.find_trainer_pid(worker_name)
        if not self.group_count:
            return "starting"
        if trainer_pid is None:
            return "dead"
        if is_stopped(trainer_pid):
            return "stopped"
        if worker_name in self.members:
            return "training"
        return "recovering"

    def accepts_connections(self) -> bool:
        """Return True if the coordinator's current process has accepted a connection."""
        coordinator_pid = self.find_launcher_pid(COORDINATOR)
        if coordinator_pid and coordinator_pid != self._answering_pid:
            job_object = self.cluster.find("PyTorchJob", self.name)
            with suppress(OSError):
                coordinator_port = get_port(job_object, "Master") if job_object else DEFAULT_PORT
                coordinator_address = (
                    self.cluster.address(self._make_pod_name(COORDINATOR)),
                    coordinator_port,
                )
                socket.create_connection(coordinator_address, 0.05).close()
                self._answering_pid = coordinator_pid

        return coordinator_pid is not None and coordinator_pid == self._answering_pid

    def _make_pod_name(self, worker_name: str) -> str:
        return f"{self.name}-{worker_name.replace(COORDINATOR, 'master-0')}"

    def _observe(self) -> None:
        """Read the new lines of all logs, and the newest step of each snapshot in shared
        memory."""
        snapshot_steps: list[int] = []
        for log_tail in self._logs:
            for line in log_tail.read_lines():
                generation_match = GENERATION_LINE.search(line)
                resumed_match = RESUMED_LINE.search(line)
                progress_match = PROGRESS_LINE_PATTERN.search(line)

                if generation_match:
                    self.group_count += 1
                    worker_names = generation_match[1].split()
                    self.members = tuple(
                        name.removeprefix(f"{self.name}-") for name in worker_names
                    )
                elif resumed_match:
                    self.resumed_steps.append(int(resumed_match[1] or resumed_match[2]))
                elif progress_match:
                    snapshot_steps.append(int(progress_match[1]))

        for path in self.memory.glob("rekindle-*"):
            snapshot_step = snapshot_file.read_newest_step(path)
            if snapshot_step >= 0 and snapshot_step != self._snapshot_steps.get(path):
                self._snapshot_steps[path] = snapshot_step
                snapshot_steps.append(snapshot_step)

        self.repeated_steps += [
            snapshot_step
            for snapshot_step in snapshot_steps
            if snapshot_step < self.step - TOLERATED_LAG_STEPS
        ]
        self.step = max([self.step, *snapshot_steps])


class LogTail:
    """Reads the complete new lines of a file that other processes append to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def read_lines(self) -> list[str]:
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                complete_lines, line_end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []

        self.offset += len(complete_lines) + len(line_end)
        return complete_lines.decode(errors="replace").splitlines()


def list_child_pids(pid: int) -> list[int]:
    """Return the pids of the living children of all threads of a process."""
    try:
        thread_folders = list(Path(f"/proc/{pid}/task").iterdir())
        return [
            int(child_pid)
            for thread_folder in thread_folders
            for child_pid in (thread_folder / "children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return []


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False
