"""Executes schedules one after the other, with one bucket, one parent process and cached
undisturbed results.

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
from typing import Any

import psutil

from rekindle.storage import NotFound, Store
from rekindle.training.checkpoint import snapshot_file
from rekindle.training.spec import TrainingSpec as Inputs
from tests.chaos.execution import Execution, Shared
from tests.chaos.faults import Proxy
from tests.chaos.schedule import Schedule
from tests.chaos.watch import Watch
from tests.rekindle.training.crew import DATASET, Crew, make_flags, open_store, upload_dataset
from tests.waiting import until

# variable in the environment of every process of a stage
MARK = "REKINDLE_CHAOS"
# time limit for the exit of the last processes of a run
EXIT_TIMEOUT_S = 3.0


@dataclass
class Outcome:
    """The result of one schedule."""

    seed: int
    seconds: float
    problems: list[str]
    # kind of act or moment (see `required_coverage`) → count
    done: dict[str, int]
    # number of acts whose moment did not come, or for which no process was left
    missed: int
    signals: int
    generations: int
    # number of steps that were repeated after all workers had died
    repeated_steps: int
    story: str = field(default="", repr=False)


class Stage:
    """Starts runs in a folder, and kills all their processes at the end."""

    def __init__(
        self, environment: dict[str, str], folder: Path, *, with_story: bool = False
    ) -> None:
        self.with_story = with_story
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.environment = {"REKINDLE_SHM": str(Shared)} | environment
        # identity of a run → sha256 of model.safetensors
        self.undisturbed: dict[str, str] = {}
        self.store = open_store(environment)

    def __enter__(self) -> "Stage":
        self.original_environment = {
            name: os.environ.get(name) for name in (MARK, "OMP_NUM_THREADS")
        }
        # set the variables before the parent process starts
        os.environ.update({MARK: self.mark, "OMP_NUM_THREADS": "1"})
        if not any(True for _ in self.store.list(f"{DATASET}/")):
            # start the process from the crew's parent process, which has loaded torch
            crew = Crew(self.environment, self.folder)
            process = crew.context.Process(
                target=upload_dataset, args=(self.environment, self.folder)
            )
            process.start()
            process.join()
        return self

    def __exit__(self, *_: object) -> None:
        for name, value in self.original_environment.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

    def play(self, schedule: Schedule) -> Outcome:
        """Execute a schedule and check its result."""
        prefix = f"chaos/{schedule.seed}-{uuid.uuid4().hex[:6]}"
        argv = self._make_flags(prefix, schedule)
        inputs = Inputs.from_flags(argv)
        expected = self._train_undisturbed(inputs, schedule)
        folder = self.folder / prefix.replace("/", "-")
        folder.mkdir()
        crew = Crew(self.environment | _make_toy_config(schedule, inputs, folder), folder)
        existing = self._find_processes()
        run = snapshot_file.hash_run_name(inputs.identity_hash(), inputs.checkpoints)
        start = time.monotonic()

        with Proxy(self.environment["S3_ENDPOINT_URL"], schedule.seed) as proxy:
            execution = Execution(schedule, crew, proxy, self.store, argv, run)
            try:
                execution.execute()
                seconds = time.monotonic() - start
                problems = execution.problems + self._check_result(
                    prefix, expected, execution.watch
                )
                problems += self._find_leftovers(existing, run)
            finally:
                crew.close()
                execution.watch.close()

        missed_count = execution.missed + sum(len(acts) for acts in execution.waiting.values())
        outcome = Outcome(
            schedule.seed,
            seconds,
            problems,
            dict(execution.done),
            missed_count,
            execution.signals,
            len({number for _, number in execution.watch.generations}),
            execution.watch.repeated_steps(),
            execution.watch.story() if problems or self.with_story else "",
        )

        shutil.rmtree(folder)

        return outcome

    def _make_flags(self, prefix: str, schedule: Schedule) -> list[str]:
        settings = schedule.settings | {"model": json.dumps(schedule.settings["model"])}
        return make_flags(
            prefix, **{name: settings[name] for name in settings if name in Inputs.model_fields}
        )

    def _train_undisturbed(self, inputs: Inputs, schedule: Schedule) -> str:
        """Return the sha256 of the model that a single undisturbed process trains."""
        identity = inputs.identity_hash()
        if identity not in self.undisturbed:
            prefix = f"undisturbed/{identity}-{uuid.uuid4().hex[:6]}"
            folder = self.folder / identity
            folder.mkdir()
            crew = Crew(self.environment, folder)
            member = crew.start_lone_worker(self._make_flags(prefix, schedule))
            assert member.wait_for_exit_code(600) == 0, member.read_log()
            self.undisturbed[identity] = _read_model_sha256(self.store, prefix)
            shutil.rmtree(folder)
        return self.undisturbed[identity]

    def _check_result(self, prefix: str, expected: str, watch: Watch) -> list[str]:
        problems = [f"lost: {loss}" for loss in watch.losses()]
        try:
            actual = _read_model_sha256(self.store, prefix)
        except NotFound:
            return [*problems, "the model is missing"]
        if actual == expected:
            return problems
        return [*problems, f"the model is {actual}, undisturbed {expected}"]

    def _find_leftovers(self, existing: set[int], run: str) -> list[str]:
        """Return processes and shared memory that a finished run has left, which is an error."""
        with suppress(AssertionError):
            until(
                "all processes to end", lambda: self._find_processes() <= existing, EXIT_TIMEOUT_S
            )
        orphans = [
            f"orphan: {_describe_process(pid)}" for pid in sorted(self._find_processes() - existing)
        ]
        return orphans + [
            f"shared memory left: {path}" for path in sorted(Shared.glob(f"rekindle-{run}-*"))
        ]

    def _find_processes(self) -> set[int]:
        """Return the live processes of this stage."""
        mark = f"{MARK}={self.mark}".encode()
        pids = set[int]()
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    # a dead process has an empty environment
                    if mark in Path(f"/proc/{name}/environ").read_bytes():
                        pids.add(int(name))
                except OSError:
                    # the process has just ended, or belongs to another user
                    continue
        return pids - {os.getpid()}


def _make_toy_config(schedule: Schedule, inputs: Inputs, folder: Path) -> dict[str, Any]:
    return {
        "TOY_JOURNAL": str(folder / "journal"),
        "TOY_SAMPLER": f"{inputs.batch_size},{inputs.virtual_workers},{inputs.steps}",
        "TOY_PACE": str(schedule.pace),
    }


def _read_model_sha256(store: Store, prefix: str) -> str:
    return hashlib.sha256(store.get(f"{prefix}/model/model.safetensors")).hexdigest()


def _describe_process(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{pid} ({process.status()}) {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return f"{pid} (it has just ended)"


# the stages that this process has created
_stages: list[Stage] = []


def open_stage(environment: dict[str, str], folder: str, with_story: bool) -> None:
    """Prepare this process for the function `play`, with a separate bucket."""
    subfolder = Path(folder) / str(os.getpid())
    subfolder.mkdir()
    environment = environment | {"S3_BUCKET": f"chaos-{os.getpid()}"}
    stage = Stage(environment, subfolder, with_story=with_story)
    stage.store.client.create_bucket(Bucket=stage.store.bucket)
    _stages.append(stage.__enter__())


def play(schedule: Schedule) -> Outcome:
    """Execute one schedule, in a process prepared by `open_stage`."""
    return _stages[0].play(schedule)
