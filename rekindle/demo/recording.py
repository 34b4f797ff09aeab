"""One training as real processes that can be watched and struck: a rendered PyTorchJob on the local controller.

    with Training(stage, folder, job) as training:
        for _ in training.going_on():        # a hundred times a second, until the model is there
            print(training.step, training.members, training.state("worker-0"))

What is seen, is seen from outside: the coordinator's log has the groups, shared memory the newest step of each worker,
/proc the processes.
"""

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from rekindle.errors import RekindleError
from rekindle.local.controllers.pod import Pod
from rekindle.local.controllers.pytorch_job import PyTorchJobs, condition, finished, shared_memory
from rekindle.local.emulator import LocalCluster
from rekindle.local.processes import started
from rekindle.local.services.services import BUCKET, REGION
from rekindle.training.checkpoint import snapshot_file
from rekindle.training.membership.protocol import PORT
from rekindle.training.spec import TrainingSpec as Inputs
from rekindle.view.summary import PROGRESS

LOOK = 0.01  # seconds between looks at the step
POLL = 0.05  # seconds between looks at the processes
GRACE = 0.3  # seconds that they have to end in when the show is over before the training is
LAST = 1.0  # seconds more until the kernel has ended what they started
SLACK = 5  # steps by which what is seen of one worker may be older than what is seen of another
COORDINATOR = "coordinator"
GENERATION = re.compile(r"generation \d+: (.*)")
RESUMED = re.compile(r"resuming from step (\d+)|step (\d+) was found in shared memory")


class Stage(LocalCluster):
    """This machine as a cluster without MLflow, which a demo has no use for."""

    def configmap(self, name: str) -> dict[str, str]:
        environ = self.services.environ
        return {
            "S3_ENDPOINT_URL": self.services.url("s3"),
            "S3_BUCKET": environ.get("S3_BUCKET", BUCKET),
            "AWS_REGION": environ.get("AWS_REGION", REGION),
        }


class Training:
    """A running job. Pods are called `coordinator` and `worker-N` here."""

    def __init__(self, stage: Stage, folder: Path, job: dict[str, Any]) -> None:
        self.stage, self.job, self.name = stage, job, str(job["metadata"]["name"])
        self.controller = PyTorchJobs(stage, folder)
        (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
        given = [each for each in container["args"] if each.startswith("--")]
        self.inputs = Inputs.from_flags(given)
        self.memory = shared_memory(folder, self.name)
        self.members: tuple[str, ...] = ()  # of the newest group
        self.groups = 0  # published so far
        self.resumed: list[int] = []  # the steps that restarted workers found in a checkpoint of either tier
        self.step = 0  # the newest that anybody has made
        self.repeated: list[int] = []  # steps that somebody made although it had been made before
        self._kept: dict[Path, int] = {}  # the newest step in each file of shared memory
        self._answered = 0  # pid of the coordinator that took a connection
        self._logs = [Tail(folder / "logs" / f"{self._pod(name)}.log") for name in self.names]

    @property
    def names(self) -> list[str]:
        replicas = self.job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]
        return [COORDINATOR, *(f"worker-{index}" for index in range(replicas))]

    def __enter__(self) -> Self:
        self.controller.apply(self.job)
        return self

    def __exit__(self, *_: object) -> None:
        pids = [pid for name in self.names for pid in self.processes(name)]
        self.controller.stop(GRACE)
        self.controller.delete(self.name)
        until = time.monotonic() + LAST
        while time.monotonic() < until and any(started(pid) for pid in pids):  # workers die with their launchers
            time.sleep(LOOK)

    def going_on(self, patience: float = 120) -> Iterator[None]:
        """Run until the model is there, and see what happens. Raises RekindleError if it cannot be made."""
        polled = moved = time.monotonic()
        while True:
            now, before = time.monotonic(), self.step
            if now - polled >= POLL or not self.pods:
                polled = now
                self.controller.poll()
                status = (self.controller.read(self.name) or {}).get("status") or {}
                if finished(status):
                    if failed := condition(status, "Failed"):
                        raise RekindleError(failed["message"])
                    return
            self._look()
            moved = now if self.step != before else moved
            if now - moved > patience:
                raise RekindleError(f"no step since {patience:.0f} s: the logs are in {self.controller.run / 'logs'}.")
            yield
            time.sleep(LOOK)

    def sha256(self) -> str:
        """The identity of the finished model."""
        return json.loads(self.stage.store().get(f"{self.inputs.out}/model.json"))["sha256"]

    @property
    def pods(self) -> dict[str, Pod]:
        job = self.controller.jobs.get(self.name)
        return {name: job.pods[self._pod(name)] for name in self.names if self._pod(name) in job.pods} if job else {}

    def launcher(self, name: str) -> int | None:
        """The pid of a pod's first process."""
        pod = self.pods.get(name)
        return pod.process.pid if pod and pod.process else None

    def trainer(self, name: str) -> int | None:
        """The pid of the process that trains in a worker's pod; the launcher's first child only loads torch."""
        launcher = self.launcher(name)
        return next(iter(children_of(launcher)[1:]), None) if launcher else None

    def processes(self, name: str) -> list[int]:
        """All pids of a pod."""
        launcher = self.launcher(name)
        return [launcher, *children_of(launcher)] if launcher else []

    def state(self, name: str) -> str:
        """What a pod does now, in one word (see show.LOOKS)."""
        if not self.launcher(name):
            return "dead"
        if name == COORDINATOR:
            return "serving" if self.answers() else "recovering" if self.groups else "starting"
        pid = self.trainer(name)
        if pid is None or not self.groups:
            return "dead" if self.groups else "starting"
        if stopped(pid):
            return "stopped"
        return "training" if name in self.members else "recovering"

    def answers(self) -> bool:
        """Whether the coordinator takes connections."""
        pid = self.launcher(COORDINATOR)
        if pid and pid != self._answered:
            with suppress(OSError):
                socket.create_connection((self.stage.address(self._pod(COORDINATOR)), PORT), 0.05).close()
                self._answered = pid
        return pid is not None and pid == self._answered

    def _pod(self, name: str) -> str:
        return f"{self.name}-{name.replace(COORDINATOR, 'master-0')}"

    def _look(self) -> None:
        made: list[int] = []
        for log in self._logs:
            for line in log.lines():
                if group := GENERATION.search(line):
                    self.groups += 1
                    self.members = tuple(each.removeprefix(f"{self.name}-") for each in group[1].split())
                elif resumed := RESUMED.search(line):
                    self.resumed.append(int(resumed[1] or resumed[2]))
                elif progress := PROGRESS.search(line):
                    made.append(int(progress[1]))
        for path in self.memory.glob("rekindle-*"):
            step = snapshot_file.newest_step(path)
            if step >= 0 and step != self._kept.get(path):
                self._kept[path] = step
                made.append(step)
        self.repeated += [step for step in made if step < self.step - SLACK]
        self.step = max([self.step, *made])


class Tail:
    """The new whole lines of a file that others append to."""

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, 0

    def lines(self) -> list[str]:
        try:
            with self.path.open("rb") as file:
                file.seek(self.place)
                whole, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self.place += len(whole) + len(end)
        return whole.decode(errors="replace").splitlines()


def children_of(pid: int) -> list[int]:
    """The processes that any of its threads started and that are still there."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def stopped(pid: int) -> bool:
    """Whether a SIGSTOP holds it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False
