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
from rekindle.keys import LEDGER_KEY, key
from rekindle.kubernetes_names import WORKLOAD_MODULES
from rekindle.operations.plan.history import FormerRun, TaskRecord
from rekindle.operations.plan.tasks import (
    CACHED_STATUS,
    CONDITIONAL_STATUS,
    SKIPPED_STATUS,
    Task,
    TaskTree,
)
from rekindle.step import parse_inputs
from rekindle.training.ledger import accounting, events
from rekindle.training.spec import TrainingSpec

if TYPE_CHECKING:
    from rekindle.storage import Store

# minimum duration of a pod in seconds, so that each pod counts towards the peak of the requests
MIN_POD_SECONDS = 0.001


@dataclass(frozen=True)
class Estimate:
    """Estimated duration of a task in seconds: median, minimum and maximum over `runs` former runs;
    None if unknown.

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
class TimeSpan:
    """The start and end of a task, in seconds since the start of the run."""

    start: float
    end: float


NO_TIME_ESTIMATE = Estimate(0.0)


class TaskEstimator:
    """Estimates the durations of the tasks of a task tree from former runs. `object_store`: the
    object store with the ledgers of former trainings; None if the object store cannot be read."""

    def __init__(
        self,
        task_tree: TaskTree,
        former_runs: Iterable[FormerRun],
        object_store: "Store | None",
        is_local: bool,
    ) -> None:
        self.tree = task_tree
        self.former_runs = list(former_runs)
        self.store = object_store
        self.is_local = is_local

    def estimate(self, task: Task) -> Estimate:
        """Return the estimated duration of a task: 0 if it is cached or skipped. A conditional task
        is assumed to run."""
        if task.status in (CACHED_STATUS, SKIPPED_STATUS):
            return NO_TIME_ESTIMATE

        run_record_pairs = [
            (former_run, _find_record(former_run, task)) for former_run in self.former_runs
        ]
        matching_records = [
            (former_run, task_record) for former_run, task_record in run_record_pairs if task_record
        ]
        if not matching_records:
            return Estimate(None)

        task_spec = read_training_spec(self.tree, task)
        if task_spec:
            training_estimates = [
                self._estimate_training(task, task_spec, *record_pair)
                for record_pair in matching_records
            ]
        else:
            training_estimates = []

        training_notes = sorted(
            {training_note for _, training_note, _ in training_estimates if training_note}
        )
        free_seconds = median(
            [uncharged_seconds for *_, uncharged_seconds in training_estimates] or [0.0]
        )
        estimated_seconds = [training_seconds for training_seconds, *_ in training_estimates] or [
            task_record.seconds for task_record in _select_most_similar(task, matching_records)
        ]

        return Estimate(
            median(estimated_seconds),
            min(estimated_seconds),
            max(estimated_seconds),
            len(estimated_seconds),
            "; ".join(training_notes),
            free_seconds,
        )

    def _estimate_training(
        self, task: Task, task_spec: TrainingSpec, former_run: FormerRun, task_record: TaskRecord
    ) -> tuple[float, str, float]:
        """Estimate a training with the settings `task_spec` from a former training; return its
        seconds, a note, and the seconds that are not charged."""
        former_spec = _read_former_spec(former_run, task_record)
        if not former_spec:
            return task_record.seconds, "", 0.0

        if self.store:
            step_times = _read_step_times(self.store, former_run.name, task.name)
        else:
            step_times = None

        if not step_times:
            samples_ratio = _count_sequential_samples(
                task_spec, self.is_local
            ) / _count_sequential_samples(former_spec, self.is_local)
            if task_spec.steps and former_spec.steps:
                samples_ratio *= task_spec.steps / former_spec.steps
            else:
                samples_ratio *= task_spec.epochs / former_spec.epochs
                samples_ratio *= _compute_samples_per_step(former_spec) / _compute_samples_per_step(
                    task_spec
                )

            return (
                task_record.seconds * samples_ratio,
                "" if samples_ratio == 1 else "scaled without a ledger",
                0.0,
            )

        fixed_seconds = task_record.seconds - step_times.seconds
        sample_count = step_times.samples
        free_seconds = max(task_record.seconds - step_times.ledger_seconds, 0.0)
        seconds_per_step = step_times.seconds / step_times.steps

        if not sample_count and not former_spec.steps:
            sample_count = round(
                step_times.planned_steps
                * _compute_samples_per_step(former_spec)
                / former_spec.epochs
            )

        if not (sample_count or task_spec.steps):
            return (
                task_record.seconds,
                "the number of samples is unknown, so its time is not scaled",
                free_seconds,
            )

        step_count = task_spec.total_steps(sample_count)
        if (
            former_spec.total_steps(sample_count) == step_times.planned_steps > step_times.steps
            and task_spec.patience
        ):
            # train.patience stopped the former training early
            step_count = round(step_count * step_times.steps / step_times.planned_steps)

        samples_ratio = _count_sequential_samples(
            task_spec, self.is_local
        ) / _count_sequential_samples(former_spec, self.is_local)
        is_scaled = step_count != step_times.steps or samples_ratio != 1
        total_seconds = max(fixed_seconds, 0.0) + step_count * seconds_per_step * samples_ratio

        return total_seconds, f"scaled to {step_count} steps" if is_scaled else "", free_seconds


@dataclass(frozen=True)
class StepTimes:
    """Values from the ledger of a former training: the seconds of its steps, the seconds of the
    whole training, and the numbers of executed steps, planned steps and samples."""

    seconds: float
    ledger_seconds: float
    steps: int
    planned_steps: int
    samples: int


def _read_step_times(object_store: "Store", run_name: str, task_name: str) -> StepTimes | None:
    try:
        ledger_summary = accounting.summarize_events(
            events.read_events(object_store, key(task_name, LEDGER_KEY, run_name))
        )
    except RekindleError:
        return None

    step_count = ledger_summary.steps - ledger_summary.first_step
    if step_count <= 0 or ledger_summary.training_seconds <= 0:
        return None

    return StepTimes(
        seconds=ledger_summary.training_seconds,
        ledger_seconds=ledger_summary.ended - ledger_summary.began,
        steps=step_count,
        planned_steps=int(ledger_summary.run.get("steps") or step_count),
        samples=int(ledger_summary.run.get("samples") or 0),
    )


def _compute_samples_per_step(task_spec: TrainingSpec) -> int:
    return task_spec.batch_size * task_spec.virtual_workers


def _count_sequential_samples(task_spec: TrainingSpec, is_local: bool) -> float:
    """Return the number of samples that one worker processes in each step, one after the other."""
    worker_count = min(task_spec.workers, task_spec.virtual_workers)
    if is_local:
        worker_count = min(worker_count, os.cpu_count() or 1)
    return task_spec.batch_size * -(-task_spec.virtual_workers // worker_count)


def read_training_spec(task_tree: TaskTree, task: Task) -> TrainingSpec | None:
    """Return the settings of a task that trains with Rekindle, else None."""
    manifest_text = str((task.template.get("resource") or {}).get("manifest"))
    step_call = (
        task_tree.parse_step_call(task) if WORKLOAD_MODULES.launcher in manifest_text else None
    )
    if not step_call:
        return None

    try:
        flag_texts = {
            flag_name: flag_text
            for flag_name, flag_text in step_call.flags.items()
            if flag_name in TrainingSpec.model_fields
        }
        parsed_spec = parse_inputs(TrainingSpec, replace_unknown(TrainingSpec, flag_texts))
    except RekindleError:
        return None

    if isinstance(parsed_spec, TrainingSpec):
        return parsed_spec

    return None


def _read_former_spec(former_run: FormerRun, task_record: TaskRecord) -> TrainingSpec | None:
    """Return the settings of a task of a former run; None if the task did not train."""
    if not former_run.tree:
        return None

    for leaf_task in former_run.tree.leaves():
        if leaf_task.path == task_record.path:
            return read_training_spec(former_run.tree, leaf_task)
    return None


def _find_record(former_run: FormerRun, task: Task) -> TaskRecord | None:
    """Return the record of the task with the same path in a former run, or else of a task with the
    same name at another path."""
    task_record = former_run.records.get(task.path)
    if task_record:
        return task_record
    if not task.name or task.repeats:
        return None
    return next(
        (
            other_record
            for record_path, other_record in former_run.records.items()
            if record_path.rpartition(".")[2] == task.name
        ),
        None,
    )


def _select_most_similar(
    task: Task, run_record_pairs: list[tuple[FormerRun, TaskRecord]]
) -> list[TaskRecord]:
    """Return the records of former runs whose inputs agree most with the known inputs of the
    task."""
    argument_parameters = (task.call.get("arguments") or {}).get("parameters") or []
    argument_texts = {
        parameter["name"]: str(parameter.get("value"))
        for parameter in argument_parameters
        if "{{" not in str(parameter.get("value"))
    }
    match_counts = [
        sum(task_record.inputs.get(name) == text for name, text in argument_texts.items())
        for _, task_record in run_record_pairs
    ]
    return [
        task_record
        for match_count, (_, task_record) in zip(match_counts, run_record_pairs, strict=True)
        if match_count == max(match_counts)
    ]


def compute_schedule(
    task_tree: TaskTree, seconds_by_path: Mapping[str, float]
) -> tuple[float, dict[str, TimeSpan]]:
    """Return the duration of the run in seconds, and the time span of each task by its path, if all
    pods start without delay. `seconds_by_path`: duration of each task; a missing duration counts as
    0."""
    spans_by_path: dict[str, TimeSpan] = {}

    def schedule_task(task: Task, start_seconds: float) -> float:
        if not task.children:
            end_seconds = start_seconds + seconds_by_path.get(task.path, 0.0)
            spans_by_path[task.path] = TimeSpan(start_seconds, end_seconds)
            return end_seconds

        end_by_name: dict[str, float] = {}
        for child_name in TopologicalSorter(task.needs).static_order():
            child_start_seconds = max(
                (end_by_name[dependency_name] for dependency_name in task.needs[child_name]),
                default=start_seconds,
            )
            end_by_name[child_name] = schedule_task(task.children[child_name], child_start_seconds)
        return max(end_by_name.values(), default=start_seconds)

    end_seconds = schedule_task(task_tree.root, 0.0)
    if task_tree.exit:
        end_seconds = schedule_task(task_tree.exit, end_seconds)
    return end_seconds, spans_by_path


def compute_pod_spans(
    task_tree: TaskTree, estimates: Mapping[str, Estimate]
) -> dict[str, TimeSpan]:
    """Return the time span in which the pods of each task exist, if all tasks run. A task of
    unknown duration is assumed to take one second."""
    seconds_by_path = {
        path: 1.0 if estimate.seconds is None else max(estimate.seconds, MIN_POD_SECONDS)
        for path, estimate in estimates.items()
    }
    return compute_schedule(task_tree, seconds_by_path)[1]


def find_critical_path(spans_by_path: Mapping[str, TimeSpan]) -> list[str]:
    """Return the paths of the tasks that determine the end of the run, in the order of their
    execution."""
    critical_tasks: list[str] = []
    end_seconds = max((span.end for span in spans_by_path.values()), default=0.0)

    while end_seconds > 0:
        critical_task = next(
            (
                task_path
                for task_path, other_span in spans_by_path.items()
                if other_span.end == end_seconds and other_span.start < end_seconds
            ),
            None,
        )
        if critical_task is None:
            break
        critical_tasks.append(critical_task)
        end_seconds = spans_by_path[critical_task].start

    return critical_tasks[::-1]


def compute_overhead(task_tree: TaskTree, former_runs: Iterable[FormerRun]) -> float:
    """Return the median time that former runs spent between their tasks, such as for the start of
    services."""
    gap_seconds = []
    for former_run in former_runs:
        if former_run.seconds:
            seconds_by_path = {
                path: task_record.seconds for path, task_record in former_run.records.items()
            }
            end_seconds, _ = compute_schedule(task_tree, seconds_by_path)
            gap_seconds.append(max(0.0, former_run.seconds - end_seconds))

    if gap_seconds:
        return median(gap_seconds)
    return 0.0


@dataclass(frozen=True)
class TotalEstimate:
    """The expected duration of a run. `seconds`, `low` and `high`: duration in seconds if each task
    takes its median, minimum or maximum time. `critical_path` and `spans` are computed from the
    median times."""

    seconds: float
    low: float
    high: float
    critical_path: list[str]
    spans: dict[str, TimeSpan]


def compute_total(
    task_tree: TaskTree,
    estimates_by_path: Mapping[str, Estimate],
    overhead_seconds: float,
    includes_conditional: bool,
) -> TotalEstimate:
    """Return the duration and the critical path of the run, and the time spans of its tasks. The
    duration of a task counts as 0 if it is unknown; `overhead_seconds`: seconds between the
    tasks."""
    leaf_tasks = [
        leaf_task
        for leaf_task in task_tree.leaves()
        if includes_conditional or leaf_task.status != CONDITIONAL_STATUS
    ]

    def compute_schedule_with(
        select_seconds: Callable[[Estimate], Any],
    ) -> tuple[float, dict[str, TimeSpan]]:
        return compute_schedule(
            task_tree,
            {
                leaf_task.path: select_seconds(estimates_by_path[leaf_task.path]) or 0.0
                for leaf_task in leaf_tasks
            },
        )

    seconds, spans = compute_schedule_with(lambda estimate: estimate.seconds)
    low, _ = compute_schedule_with(lambda estimate: estimate.low)
    high, _ = compute_schedule_with(lambda estimate: estimate.high)

    return TotalEstimate(
        seconds + overhead_seconds,
        low + overhead_seconds,
        high + overhead_seconds,
        find_critical_path(spans),
        spans,
    )
