"""Estimates the duration of each task, and of the run, from former runs.

The duration of a training is estimated from the ledgers of former trainings, as fixed seconds plus
seconds per step. The estimate therefore depends on the numbers of epochs, steps, samples per step
and workers.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from statistics import median
from typing import TYPE_CHECKING, Any

from rekindle.cache.lookup import replace_unknown
from rekindle.errors import RekindleError
from rekindle.keys import LEDGER, key
from rekindle.kubernetes_names import WORKLOAD
from rekindle.operations.plan.history import FormerRun, Record
from rekindle.operations.plan.tasks import CACHED_RESULT, CONDITIONAL, SKIPPED, Task, Tree
from rekindle.step import parse
from rekindle.training.ledger import accounting, events
from rekindle.training.spec import TrainingSpec

if TYPE_CHECKING:
    from rekindle.storage import Store

MIN_POD_S = 0.001  # minimum duration of a pod in seconds, so that each pod counts towards the peak


@dataclass(frozen=True)
class Estimate:
    """Duration of a task in seconds: median, minimum and maximum over `runs` former runs; None if
    unknown.

    `free_seconds`: seconds that are not charged, as in the cost of a run, because the pods of a
    training are still starting.
    """

    seconds: float | None
    low: float = 0.0
    high: float = 0.0
    runs: int = 0
    note: str = ""
    free_seconds: float = 0.0


@dataclass(frozen=True)
class Span:
    """The start and end of a task, in seconds since the start of the run."""

    start: float
    end: float


NO_TIME = Estimate(0.0)


class Estimates:
    """Estimates tasks of `tree` from former runs. `store` has the ledgers; None if it cannot be
    read."""

    def __init__(
        self, tree: Tree, former_runs: Iterable[FormerRun], store: "Store | None", is_local: bool
    ) -> None:
        self.tree = tree
        self.former_runs = list(former_runs)
        self.store = store
        self.is_local = is_local

    def of(self, task: Task) -> Estimate:
        """Return the estimate of a task: 0 if it is cached or skipped; a conditional task is
        assumed to run."""
        if task.status in (CACHED_RESULT, SKIPPED):
            return NO_TIME

        pairs = [(run, _find_record(run, task)) for run in self.former_runs]
        records = [(run, record) for run, record in pairs if record]
        if not records:
            return Estimate(None)

        spec = training_spec(self.tree, task)
        if spec:
            trainings = [self._estimate_training(task, spec, *pair) for pair in records]
        else:
            trainings = []

        notes = sorted({note for _, note, _ in trainings if note})
        free_seconds = median([free for *_, free in trainings] or [0.0])
        seconds = [value for value, *_ in trainings] or [
            record.seconds for record in _most_similar(task, records)
        ]

        return Estimate(
            median(seconds),
            min(seconds),
            max(seconds),
            len(seconds),
            "; ".join(notes),
            free_seconds,
        )

    def _estimate_training(
        self, task: Task, spec: TrainingSpec, former: FormerRun, record: Record
    ) -> tuple[float, str, float]:
        """Estimate a training with the settings `spec` from a former training; return its seconds,
        a note, and the seconds that are not charged."""
        tree = former.tree
        if tree:
            former_task = next((leaf for leaf in tree.leaves() if leaf.path == record.path), None)
        else:
            former_task = None

        if tree and former_task:
            former_spec = training_spec(tree, former_task)
        else:
            former_spec = None

        if not former_spec:
            return record.seconds, "", 0.0

        if not (
            self.store and (step_times := _read_step_times(self.store, former.name, task.name))
        ):
            ratio = _sequential_samples(spec, self.is_local) / _sequential_samples(
                former_spec, self.is_local
            )
            if spec.steps and former_spec.steps:
                ratio *= spec.steps / former_spec.steps
            else:
                ratio *= spec.epochs / former_spec.epochs
                ratio *= _samples_per_step(former_spec) / _samples_per_step(spec)

            return record.seconds * ratio, "" if ratio == 1 else "scaled without a ledger", 0.0

        fixed_s = record.seconds - step_times.seconds
        samples = step_times.samples
        free_s = max(record.seconds - step_times.ledger_seconds, 0.0)
        seconds_per_step = step_times.seconds / step_times.steps

        if not samples and not former_spec.steps:
            samples = round(
                step_times.planned_steps * _samples_per_step(former_spec) / former_spec.epochs
            )

        if not (samples or spec.steps):
            return (
                record.seconds,
                "the number of samples is unknown, so its time is not scaled",
                free_s,
            )

        steps = spec.total_steps(samples)
        if (
            former_spec.total_steps(samples) == step_times.planned_steps > step_times.steps
            and spec.patience
        ):
            # train.patience stopped the former training early
            steps = round(steps * step_times.steps / step_times.planned_steps)

        ratio = _sequential_samples(spec, self.is_local) / _sequential_samples(
            former_spec, self.is_local
        )
        is_scaled = steps != step_times.steps or ratio != 1
        seconds = max(fixed_s, 0.0) + steps * seconds_per_step * ratio

        return seconds, f"scaled to {steps} steps" if is_scaled else "", free_s


@dataclass(frozen=True)
class StepTimes:
    """The seconds of a training's steps and of its whole ledger, and the numbers of executed steps,
    planned steps and samples."""

    seconds: float
    ledger_seconds: float
    steps: int
    planned_steps: int
    samples: int


def _read_step_times(store: "Store", run: str, task: str) -> StepTimes | None:
    try:
        summary = accounting.summarize(events.read_events(store, key(task, LEDGER, run)))
    except RekindleError:
        return None

    steps = summary.steps - summary.first_step
    if steps <= 0 or summary.training_seconds <= 0:
        return None

    return StepTimes(
        seconds=summary.training_seconds,
        ledger_seconds=summary.ended - summary.began,
        steps=steps,
        planned_steps=int(summary.run.get("steps") or steps),
        samples=int(summary.run.get("samples") or 0),
    )


def _samples_per_step(spec: TrainingSpec) -> int:
    return spec.batch_size * spec.virtual_workers


def _sequential_samples(spec: TrainingSpec, is_local: bool) -> float:
    """Return the number of samples that one worker processes one after the other in each step."""
    workers = min(spec.workers, spec.virtual_workers)
    if is_local:
        workers = min(workers, os.cpu_count() or 1)
    return spec.batch_size * -(-spec.virtual_workers // workers)


def training_spec(tree: Tree, task: Task) -> TrainingSpec | None:
    """Return the settings of a task that trains with Rekindle, else None."""
    manifest = str((task.template.get("resource") or {}).get("manifest"))
    call = tree.step_call(task) if WORKLOAD.launcher in manifest else None
    if not call:
        return None

    try:
        texts = {
            name: text for name, text in call.flags.items() if name in TrainingSpec.model_fields
        }
        spec = parse(TrainingSpec, replace_unknown(TrainingSpec, texts))
    except RekindleError:
        return None

    if isinstance(spec, TrainingSpec):
        return spec

    return None


def _find_record(former: FormerRun, task: Task) -> Record | None:
    """Return the record of the task with the same path, or else of a task with the same name at
    another path."""
    record = former.records.get(task.path)
    if record:
        return record
    if not task.name or task.repeats:
        return None
    return next(
        (r for path, r in former.records.items() if path.rpartition(".")[2] == task.name), None
    )


def _most_similar(task: Task, records: list[tuple[FormerRun, Record]]) -> list[Record]:
    """Return the records whose inputs agree most with the known inputs of the task."""
    arguments = (task.call.get("arguments") or {}).get("parameters") or []
    texts = {p["name"]: str(p.get("value")) for p in arguments if "{{" not in str(p.get("value"))}
    scores = [
        sum(record.inputs.get(name) == text for name, text in texts.items())
        for _, record in records
    ]
    return [
        record for score, (_, record) in zip(scores, records, strict=True) if score == max(scores)
    ]


def schedule(tree: Tree, seconds: Mapping[str, float]) -> tuple[float, dict[str, Span]]:
    """Return the duration of the run in seconds and the span of each task, if all pods start
    without delay. `seconds`: by path."""
    spans: dict[str, Span] = {}

    def schedule_task(task: Task, start: float) -> float:
        if not task.children:
            end = start + seconds.get(task.path, 0.0)
            spans[task.path] = Span(start, end)
            return end

        ends: dict[str, float] = {}
        for name in TopologicalSorter(task.needs).static_order():
            child_start = max((ends[needed] for needed in task.needs[name]), default=start)
            ends[name] = schedule_task(task.children[name], child_start)
        return max(ends.values(), default=start)

    end = schedule_task(tree.root, 0.0)
    if tree.exit:
        end = schedule_task(tree.exit, end)
    return end, spans


def pod_spans(tree: Tree, estimates: Mapping[str, Estimate]) -> dict[str, Span]:
    """Return the time span in which the pods of each task exist, if all tasks run. A task of
    unknown duration is assumed to take one second."""
    seconds = {
        path: 1.0 if e.seconds is None else max(e.seconds, MIN_POD_S)
        for path, e in estimates.items()
    }
    return schedule(tree, seconds)[1]


def critical_path(spans: Mapping[str, Span]) -> list[str]:
    """Return the paths of the tasks that determine the end of the run, in their order."""
    path: list[str] = []
    end = max((span.end for span in spans.values()), default=0.0)

    while end > 0:
        found = next((name for name, s in spans.items() if s.end == end and s.start < end), None)
        if found is None:
            break
        path.append(found)
        end = spans[found].start

    return path[::-1]


def overhead(tree: Tree, former_runs: Iterable[FormerRun]) -> float:
    """Return the median time that former runs spent between their tasks, such as for the start of
    services."""
    gaps = []
    for former in former_runs:
        if former.seconds:
            seconds = {path: record.seconds for path, record in former.records.items()}
            end, _ = schedule(tree, seconds)
            gaps.append(max(0.0, former.seconds - end))

    if gaps:
        return median(gaps)
    return 0.0


@dataclass(frozen=True)
class Total:
    """`seconds`, `low` and `high`: duration of the run in seconds if each task takes its median,
    minimum or maximum time. `critical_path` and `spans` belong to `seconds`."""

    seconds: float
    low: float
    high: float
    critical_path: list[str]
    spans: dict[str, Span]


def total(
    tree: Tree, estimates: Mapping[str, Estimate], overhead_s: float, with_conditional: bool
) -> Total:
    """Return the duration, the critical path and the spans of the run. Tasks of unknown duration
    count as 0; `overhead_s`: seconds between the tasks."""
    leaves = [leaf for leaf in tree.leaves() if with_conditional or leaf.status != CONDITIONAL]

    def schedule_with(value: Callable[[Estimate], Any]) -> tuple[float, dict[str, Span]]:
        return schedule(tree, {leaf.path: value(estimates[leaf.path]) or 0.0 for leaf in leaves})

    seconds, spans = schedule_with(lambda estimate: estimate.seconds)
    low, _ = schedule_with(lambda estimate: estimate.low)
    high, _ = schedule_with(lambda estimate: estimate.high)

    return Total(
        seconds + overhead_s, low + overhead_s, high + overhead_s, critical_path(spans), spans
    )
