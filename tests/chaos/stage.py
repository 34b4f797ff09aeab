"""Where schedules are executed, one after the other: a bucket, the processes' parent, what undisturbed runs give.

with Stage(s3_environment, folder) as stage:
    outcome = stage.play(Schedule.of(17))
"""

import hashlib
import json
import os
import shutil
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from rekindle.storage import NotFound, Store
from rekindle.training.checkpoint import snapshot_file
from rekindle.training.spec import TrainingSpec as Inputs
from tests.chaos.execution import Execution, Shared
from tests.chaos.faults import Proxy
from tests.chaos.schedule import Schedule
from tests.chaos.watch import Watch
from tests.rekindle.training.crew import DATASET, Crew, flags, provide, store
from tests.waiting import until

MARK = "REKINDLE_CHAOS"  # in the environment of every process of a stage
PATIENCE = 3.0  # seconds in which the last processes of a run may end


@dataclass
class Outcome:
    """What became of one schedule."""

    seed: int
    seconds: float
    problems: list[str]
    done: dict[str, int]  # what → how often, in the words of `everything`
    missed: int  # acts whose moment did not come, or that found no victim
    signals: int
    generations: int
    redone: int  # steps made again after all had died
    story: str = field(default="", repr=False)


class Stage:
    """Starts runs below its folder; nothing outlives it."""

    def __init__(self, environment: dict[str, str], folder: Path, *, tell: bool = False) -> None:
        self.tell = tell
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.environment = {"REKINDLE_SHM": str(Shared)} | environment
        self.undisturbed: dict[str, str] = {}  # identity → sha256 of model.safetensors
        self.store = store(environment)

    def __enter__(self) -> "Stage":
        self.before = {name: os.environ.get(name) for name in (MARK, "OMP_NUM_THREADS")}
        os.environ.update({MARK: self.mark, "OMP_NUM_THREADS": "1"})  # before the processes' parent starts
        if not any(True for _ in self.store.list(f"{DATASET}/")):
            crew = Crew(self.environment, self.folder)  # which has torch loaded
            process = crew.context.Process(target=provide, args=(self.environment, self.folder))
            process.start()
            process.join()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name, value in self.before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

    def play(self, schedule: Schedule) -> Outcome:
        """Execute a schedule and judge it."""
        prefix = f"chaos/{schedule.seed}-{uuid.uuid4().hex[:6]}"
        argv = self._flags(prefix, schedule)
        inputs = Inputs.from_flags(argv)
        expected = self._expected(inputs, schedule)
        folder = self.folder / prefix.replace("/", "-")
        folder.mkdir()
        crew = Crew(self.environment | _toy(schedule, inputs, folder), folder)
        before = self._marked()
        run = snapshot_file.run_name(inputs.identity_hash(), inputs.checkpoints)
        began = time.monotonic()
        with Proxy(self.environment["S3_ENDPOINT_URL"], schedule.seed) as proxy:
            execution = Execution(schedule, crew, proxy, self.store, argv, run)
            try:
                execution.execute()
                seconds = time.monotonic() - began
                problems = execution.problems + self._judge(prefix, expected, execution.watch)
                problems += self._left_behind(before, run)
            finally:
                crew.close()
                execution.watch.close()
        missed = execution.missed + sum(len(acts) for acts in execution.waiting.values())
        outcome = Outcome(
            schedule.seed, seconds, problems, dict(execution.done), missed, execution.signals,
            len({number for _, number in execution.watch.generations}), execution.watch.redone(),
            execution.watch.story() if problems or self.tell else "",
        )  # fmt: skip
        shutil.rmtree(folder)
        return outcome

    def _flags(self, prefix: str, schedule: Schedule) -> list[str]:
        settings = schedule.settings | {"model": json.dumps(schedule.settings["model"])}
        return flags(prefix, **{name: settings[name] for name in settings if name in Inputs.model_fields})

    def _expected(self, inputs: Inputs, schedule: Schedule) -> str:
        """What one process makes of it that nobody disturbs."""
        identity = inputs.identity_hash()
        if identity not in self.undisturbed:
            prefix = f"undisturbed/{identity}-{uuid.uuid4().hex[:6]}"
            folder = self.folder / identity
            folder.mkdir()
            crew = Crew(self.environment, folder)
            member = crew.alone(self._flags(prefix, schedule))
            assert member.code(600) == 0, member.said()
            self.undisturbed[identity] = _sha256(self.store, prefix)
            shutil.rmtree(folder)
        return self.undisturbed[identity]

    def _judge(self, prefix: str, expected: str, watch: Watch) -> list[str]:
        problems = [f"lost: {loss}" for loss in watch.losses()]
        try:
            found = _sha256(self.store, prefix)
        except NotFound:
            return [*problems, "there is no model"]
        return problems if found == expected else [*problems, f"the model is {found}, undisturbed {expected}"]

    def _left_behind(self, before: set[int], run: str) -> list[str]:
        """Processes and shared memory that a finished run must not leave."""
        with suppress(AssertionError):
            until("all processes to end", lambda: self._marked() <= before, PATIENCE)
        found = [f"orphan: {_words(pid)}" for pid in sorted(self._marked() - before)]
        return found + [f"shared memory left: {path}" for path in sorted(Shared.glob(f"rekindle-{run}-*"))]

    def _marked(self) -> set[int]:
        """The live processes of this stage."""
        mark, found = f"{MARK}={self.mark}".encode(), set[int]()
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    if mark in Path(f"/proc/{name}/environ").read_bytes():  # empty once it is dead
                        found.add(int(name))
                except OSError:
                    continue  # it ended meanwhile, or is not ours
        return found - {os.getpid()}


def _toy(schedule: Schedule, inputs: Inputs, folder: Path) -> dict[str, Any]:
    return {
        "TOY_JOURNAL": str(folder / "journal"),
        "TOY_SAMPLER": f"{inputs.batch_size},{inputs.virtual_workers},{inputs.steps}",
        "TOY_PACE": str(schedule.pace),
    }


def _sha256(store: Store, prefix: str) -> str:
    return hashlib.sha256(store.get(f"{prefix}/model/model.safetensors")).hexdigest()


def _words(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{pid} ({process.status()}) {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return f"{pid} (it has ended now)"


_stages: list[Stage] = []  # of this process


def begin(environment: dict[str, str], folder: str, tell: bool) -> None:
    """Make this process one that can `play`, with a bucket of its own."""
    place = Path(folder) / str(os.getpid())
    place.mkdir()
    environment = environment | {"S3_BUCKET": f"chaos-{os.getpid()}"}
    stage = Stage(environment, place, tell=tell)
    stage.store.client.create_bucket(Bucket=stage.store.bucket)
    _stages.append(stage.__enter__())


def play(schedule: Schedule) -> Outcome:
    """One schedule, in a process that has begun."""
    return _stages[0].play(schedule)
