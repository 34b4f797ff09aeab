"""Run a rendered PyTorchJob on the local controller, and observe its processes.

    with Training(cluster, folder, job) as training:
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

from argolocal.common.processes import start_time
from argolocal.controllers.controller import Controller
from argolocal.controllers.memory_volumes import shared_memory
from argolocal.controllers.pod_process import Pod
from rekindle.documents import ModelFile, read_object
from rekindle.errors import RekindleError
from rekindle.kubernetes_names import STORE_SECRET
from rekindle.local.cluster import LocalCluster
from rekindle.local.jobs.frameworks import port_of
from rekindle.local.jobs.training_job import TrainingJobs, condition, is_finished
from rekindle.training.checkpoint import snapshot_file
from rekindle.training.membership.protocol import PORT
from rekindle.training.metrics import PROGRESS_LINE
from rekindle.training.spec import TrainingSpec

OBSERVE_INTERVAL_S = 0.01
POLL_INTERVAL_S = 0.05
GRACE_S = 0.3  # seconds that the processes have to end when the demo is stopped
CHILDREN_GRACE_S = 1.0  # additional seconds for the children of these processes to end
# a step counts as repeated if it is older than the newest step by more than this number of steps; a
# smaller lag is normal between workers
TOLERATED_LAG = 5
COORDINATOR = "coordinator"
GENERATION = re.compile(r"generation \d+: (.*)")
RESUMED = re.compile(r"resuming from step (\d+)|step (\d+) was found in shared memory")


class DemoCluster(LocalCluster):
    """The local cluster without MLflow."""

    def configmap(self, name: str) -> dict[str, str]:
        return self.services.store_environment()

    def secret(self, name: str) -> dict[str, str]:
        if name == STORE_SECRET:
            return self.services.credentials()
        return super().secret(name)


class Training:
    """A running job. The names of its pods are `coordinator` and `worker-N`."""

    def __init__(self, cluster: DemoCluster, folder: Path, job: dict[str, Any]) -> None:
        self.cluster = cluster
        self.job = job
        self.name = str(job["metadata"]["name"])
        self.controller = TrainingJobs(cluster, "PyTorchJob", folder)
        self.secret = Controller(cluster, "Secret")

        (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"][
            "containers"
        ]
        flags = [flag for flag in container["args"] if flag.startswith("--")]
        self.inputs = TrainingSpec.from_flags(flags)
        self.memory = shared_memory(folder, self.name)

        self.members: tuple[str, ...] = ()  # names of the workers in the newest group
        self.group_count = 0  # number of groups that the coordinator has published so far
        # steps of the snapshots (in shared memory) and checkpoints (in the object store) that
        # restarted workers have loaded
        self.resumed_steps: list[int] = []
        self.step = 0  # the newest step that any worker has trained
        self.repeated_steps: list[int] = []  # steps that were trained a second time

        self._snapshot_steps: dict[Path, int] = {}  # newest step in each snapshot file
        self._answering_pid = 0  # pid of the coordinator that last accepted a connection
        self._logs = [Tail(folder / "logs" / f"{self._pod(name)}.log") for name in self.names]

    @property
    def names(self) -> list[str]:
        replicas = self.job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]
        return [COORDINATOR, *(f"worker-{index}" for index in range(replicas))]

    def __enter__(self) -> Self:
        self.secret.apply(
            {"metadata": {"name": self.name}, "stringData": {"secret": secrets.token_hex(32)}}
        )
        self.controller.apply(self.job)
        return self

    def __exit__(self, *_: object) -> None:
        pids = [pid for name in self.names for pid in self.processes(name)]
        self.controller.stop(GRACE_S)
        self.controller.delete(self.name)
        self.secret.delete(self.name)

        # wait until the workers, which die with their launchers, have ended
        until = time.monotonic() + CHILDREN_GRACE_S
        while time.monotonic() < until and any(start_time(pid) for pid in pids):
            time.sleep(OBSERVE_INTERVAL_S)

    def poll_until_done(self, step_timeout_s: float = 120) -> Iterator[None]:
        """Observe the job until its model is complete. Raises RekindleError if the job fails or
        stalls."""
        last_step = time.monotonic()
        last_poll = last_step

        while True:
            now = time.monotonic()
            last_seen = self.step

            if now - last_poll >= POLL_INTERVAL_S or not self.pods:
                last_poll = now
                self.controller.poll()

                status = (self.controller.read(self.name) or {}).get("status") or {}
                if is_finished(status):
                    failure = condition(status, "Failed")
                    if failure:
                        raise RekindleError(failure["message"])
                    return

            self._observe()
            if self.step != last_seen:
                last_step = now
            if now - last_step > step_timeout_s:
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
        job = self.controller.jobs.get(self.name)
        pods = job.pods if job else {}
        return {name: pods[self._pod(name)] for name in self.names if self._pod(name) in pods}

    def launcher(self, name: str) -> int | None:
        """Return the pid of a pod's first process."""
        pod = self.pods.get(name)
        if pod and pod.process:
            return pod.process.pid
        return None

    def trainer(self, name: str) -> int | None:
        """Return the pid of the process that trains in a worker's pod. This process is not the
        launcher's first child, which only loads torch."""
        launcher = self.launcher(name)
        if launcher:
            return next(iter(children_of(launcher)[1:]), None)
        return None

    def processes(self, name: str) -> list[int]:
        launcher = self.launcher(name)
        if launcher:
            return [launcher, *children_of(launcher)]
        return []

    def state(self, name: str) -> str:
        """Return the state of a pod: a key of screen.STYLE_OF_STATE."""
        if not self.launcher(name):
            return "dead"

        if name == COORDINATOR:
            if self.accepts_connections():
                return "serving"
            if self.group_count:
                return "recovering"
            return "starting"

        pid = self.trainer(name)
        if not self.group_count:
            return "starting"
        if pid is None:
            return "dead"
        if is_stopped(pid):
            return "stopped"
        if name in self.members:
            return "training"
        return "recovering"

    def accepts_connections(self) -> bool:
        pid = self.launcher(COORDINATOR)
        if pid and pid != self._answering_pid:
            job = self.cluster.find("PyTorchJob", self.name)
            with suppress(OSError):
                port = port_of(job, "Master") if job else PORT
                address = (self.cluster.address(self._pod(COORDINATOR)), port)
                socket.create_connection(address, 0.05).close()
                self._answering_pid = pid

        return pid is not None and pid == self._answering_pid

    def _pod(self, name: str) -> str:
        return f"{self.name}-{name.replace(COORDINATOR, 'master-0')}"

    def _observe(self) -> None:
        steps: list[int] = []
        for log in self._logs:
            for line in log.read_lines():
                group = GENERATION.search(line)
                resumed = RESUMED.search(line)
                progress = PROGRESS_LINE.search(line)

                if group:
                    self.group_count += 1
                    names = group[1].split()
                    self.members = tuple(name.removeprefix(f"{self.name}-") for name in names)
                elif resumed:
                    self.resumed_steps.append(int(resumed[1] or resumed[2]))
                elif progress:
                    steps.append(int(progress[1]))

        for path in self.memory.glob("rekindle-*"):
            step = snapshot_file.newest_step(path)
            if step >= 0 and step != self._snapshot_steps.get(path):
                self._snapshot_steps[path] = step
                steps.append(step)

        self.repeated_steps += [step for step in steps if step < self.step - TOLERATED_LAG]
        self.step = max([self.step, *steps])


class Tail:
    """Reads the complete new lines of a file that other processes append to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def read_lines(self) -> list[str]:
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                lines, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []

        self.offset += len(lines) + len(end)
        return lines.decode(errors="replace").splitlines()


def children_of(pid: int) -> list[int]:
    """Return the pids of the living children of all threads of a process."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return [
            int(child) for thread in threads for child in (thread / "children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return []


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False
