"""Estimates the duration of each task, and of the run, from former runs.

A training is estimated from the ledgers of former trainings: fixed seconds, and seconds per step. So a changed number
of epochs, steps, samples per step or workers changes the estimate.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from statistics import median
from typing import TYPE_CHECKING, Any

from rekindle.errors import RekindleError
from rekindle.keys import LEDGER, key
from rekindle.step import parse
from rekindle.training.ledger import accounting, events
from rekindle.training.spec import TrainingSpec
from rekindle.view.plan.history import FormerRun, Record
from rekindle.view.plan.tasks import CACHED_RESULT, CONDITIONAL, SKIPPED, Task, Tree

if TYPE_CHECKING:
    from rekindle.storage import Store

LAUNCHER = "rekindle.training.launch"


@dataclass(frozen=True)
class Estimate:
    """Seconds that a task takes: median, minimum and maximum over `runs` former runs; None if it is unknown."""

    seconds: float | None
    low: float = 0.0
    high: float = 0.0
    runs: int = 0
    note: str = ""


@dataclass(frozen=True)
class Span:
    """When a task would run, in seconds since the start of the run."""

    start: float
    end: float


MIN_POD_S = 0.001
ZERO = Estimate(0.0)


class Estimates:
    """Estimates tasks of `tree` from former runs. `store` has the ledgers; None if it cannot be read."""

    def __init__(self, tree: Tree, formers: Iterable[FormerRun], store: "Store | None", is_local: bool) -> None:
        self.tree, self.formers, self.store, self.is_local = tree, list(formers), store, is_local
        self.trees = {former.name: Tree(former.workflow) for former in self.formers if self._trains(former.workflow)}

    @staticmethod
    def _trains(workflow: Mapping[str, Any]) -> bool:
        templates = workflow["spec"].get("templates") or []
        return any(LAUNCHER in str((template.get("resource") or {}).get("manifest")) for template in templates)

    def of(self, task: Task) -> Estimate:
        """Estimate one task as if it runs."""
        if task.status in (CACHED_RESULT, SKIPPED):
            return ZERO
        records = [(former, record) for former in self.formers if (record := _find(former, task))]
        if not records:
            return Estimate(None)
        spec = training_spec(self.tree, task)
        samples = [self._training(task, spec, *pair) for pair in records] if spec else []
        notes = sorted({note for _, note in samples if note})
        seconds = [value for value, _ in samples] or [record.seconds for record in _best(task, records)]
        return Estimate(median(seconds), min(seconds), max(seconds), len(seconds), "; ".join(notes))

    def _training(self, task: Task, spec: TrainingSpec, former: FormerRun, record: Record) -> tuple[float, str]:
        """Return the seconds of a training with the settings `spec`, judged by a former training."""
        tree = self.trees.get(former.name)
        former_task = next((leaf for leaf in tree.leaves() if leaf.path == record.path), None) if tree else None
        former_spec = training_spec(tree, former_task) if tree and former_task else None
        if not former_spec:
            return record.seconds, ""
        if not (self.store and (split := _split(self.store, former.name, task.name))):
            ratio = _work(spec, self.is_local) / _work(former_spec, self.is_local)
            steps = (spec.steps / former_spec.steps) if spec.steps and former_spec.steps else 0
            ratio *= steps or (spec.epochs / former_spec.epochs) * _samples_per_step(former_spec) / _samples_per_step(
                spec
            )
            return record.seconds * ratio, "" if ratio == 1 else "scaled without a ledger"
        fixed, seconds_per_step, samples = record.seconds - split.seconds, split.seconds / split.steps, split.samples
        if not samples and not former_spec.steps:
            samples = round(split.total * _samples_per_step(former_spec) / former_spec.epochs)
        if not (samples or spec.steps):
            return record.seconds, "the number of samples is unknown, so its time is not scaled"
        steps = spec.total_steps(samples)
        if former_spec.total_steps(samples) == split.total > split.steps and spec.patience:
            steps = round(steps * split.steps / split.total)  # stopped early by train.patience
        ratio = _work(spec, self.is_local) / _work(former_spec, self.is_local)
        is_scaled = steps != split.steps or ratio != 1
        return max(fixed, 0.0) + steps * seconds_per_step * ratio, f"scaled to {steps} steps" if is_scaled else ""


@dataclass(frozen=True)
class Split:
    """The seconds of a training's steps, their number, the planned number and the training samples."""

    seconds: float
    steps: int
    total: int
    samples: int


def _split(store: "Store", run: str, task: str) -> Split | None:
    try:
        summary = accounting.summarize(events.read(store, key(task, LEDGER, run)))
    except RekindleError:
        return None
    steps = summary.steps - summary.first_step
    if steps <= 0 or summary.training_seconds <= 0:
        return None
    total, samples = (int(summary.run.get(name) or 0) for name in ("steps", "samples"))
    return Split(summary.training_seconds, steps, total or steps, samples)


def _samples_per_step(spec: TrainingSpec) -> int:
    return spec.batch_size * spec.virtual_workers


def _work(spec: TrainingSpec, is_local: bool) -> float:
    """Return the samples of a step that one worker processes, one after the other."""
    workers = min(spec.workers, spec.virtual_workers, os.cpu_count() or 1 if is_local else spec.workers)
    return spec.batch_size * -(-spec.virtual_workers // workers)


def training_spec(tree: Tree, task: Task) -> TrainingSpec | None:
    """Return the settings of a task that trains with Rekindle, else None."""
    manifest = str((task.template.get("resource") or {}).get("manifest"))
    if LAUNCHER not in manifest or not (call := tree.step_call(task)):
        return None
    try:
        spec = parse(
            TrainingSpec, {name: text for name, text in call.flags.items() if name in TrainingSpec.model_fields}
        )
    except RekindleError:
        return None
    return spec if isinstance(spec, TrainingSpec) else None


def _find(former: FormerRun, task: Task) -> Record | None:
    """Return the record of the same task, or of a task with the same name in another group."""
    if record := former.records.get(task.path):
        return record
    if not task.name:
        return None
    return next((r for path, r in former.records.items() if path.rpartition(".")[2] == task.name), None)


def _best(task: Task, records: list[tuple[FormerRun, Record]]) -> list[Record]:
    """Return the records whose inputs agree most with the known inputs of the task."""
    arguments = (task.call.get("arguments") or {}).get("parameters") or []
    known = {p["name"]: str(p.get("value")) for p in arguments if "{{" not in str(p.get("value"))}
    scores = [sum(record.inputs.get(name) == text for name, text in known.items()) for _, record in records]
    return [record for score, (_, record) in zip(scores, records, strict=True) if score == max(scores)]


def schedule(tree: Tree, seconds: Mapping[str, float]) -> tuple[float, dict[str, Span]]:
    """Return the seconds of the run, and the span of each task with `seconds` (by path), without any limit."""
    spans: dict[str, Span] = {}

    def place(task: Task, start: float) -> float:
        if not task.children:
            end = start + seconds.get(task.path, 0.0)
            spans[task.path] = Span(start, end)
            return end
        ends: dict[str, float] = {}
        for name in TopologicalSorter(task.needs).static_order():
            begin = max((ends[needed] for needed in task.needs[name]), default=start)
            ends[name] = place(task.children[name], begin)
        return max(ends.values(), default=start)

    end = place(tree.root, 0.0)
    return place(tree.exit, end) if tree.exit else end, spans


def spans_of_pods(tree: Tree, estimates: Mapping[str, Estimate]) -> dict[str, Span]:
    """Return when the pods of each task exist, if all tasks run; tasks of unknown duration last a second."""
    seconds = {path: 1.0 if e.seconds is None else max(e.seconds, MIN_POD_S) for path, e in estimates.items()}
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


def overhead(tree: Tree, formers: Iterable[FormerRun]) -> float:
    """Return the median time that former runs spent between their tasks, such as for the start of services."""
    gaps = []
    for former in formers:
        if former.seconds:
            end, _ = schedule(tree, {path: record.seconds for path, record in former.records.items()})
            gaps.append(max(0.0, former.seconds - end))
    return median(gaps) if gaps else 0.0


@dataclass(frozen=True)
class Total:
    """Seconds of the run along its critical path, with the sums of the minima and maxima."""

    seconds: float
    low: float
    high: float
    critical: list[str]
    spans: dict[str, Span]


def total(tree: Tree, estimates: Mapping[str, Estimate], extra: float, with_conditional: bool) -> Total:
    """Add up the run. Unknown tasks count 0; `extra` seconds pass between the tasks."""
    leaves = [leaf for leaf in tree.leaves() if with_conditional or leaf.status != CONDITIONAL]

    def ends(value: Callable[[Estimate], Any]) -> tuple[float, dict[str, Span]]:
        return schedule(tree, {leaf.path: value(estimates[leaf.path]) or 0.0 for leaf in leaves})

    seconds, spans = ends(lambda estimate: estimate.seconds)
    (low, _), (high, _) = ends(lambda estimate: estimate.low), ends(lambda estimate: estimate.high)
    return Total(seconds + extra, low + extra, high + extra, critical_path(spans), spans)
