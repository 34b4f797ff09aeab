"""A sweep in the object store: its decisions, and the results of its trials.

    ROOT/jobs/00007.json               decision 7: a trial, its rung and its pod; or the end of the
                                       sweep because of its budget
    ROOT/trials/7/rung-1/model.json    the model of trial 7 at rung 1 (after a failure: failed.json)
    ROOT/trials/7/checkpoints/         its checkpoints
    ROOT/seconds/PROCESS.json          the seconds that a process has used, by trial and rung

A decision depends only on previous decisions and their results. Before a pod acts on a decision, it
writes the decision to the object store, unless another pod has written this decision. The result of
a sweep is therefore the same if any pod makes a decision again at any time.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from argolocal.common.json_text import to_json
from rekindle.documents import InvalidDocument, read_object
from rekindle.errors import ConfigError, Conflict
from rekindle.storage import THREADS, NotFound
from rekindle.training.sweep import budget, halving
from rekindle.training.sweep.halving import Trial, TrialJob, is_finite_metric
from rekindle.training.sweep.records import (
    SweepDecision,
    TrialFailure,
    TrialModel,
    TrialValidation,
    UsedSecondsRecord,
)
from rekindle.training.sweep.sweep_config import LOSS_METRIC, Settings, Sweep

if TYPE_CHECKING:
    from rekindle.storage import Store

# folder of the sweep, below the folder with the name of the workflow
SEARCH_FOLDER = "search"
POLL_INTERVAL_S = 0.5
CHECK_INTERVAL_S = 30.0
# seconds without progress after which another pod takes over a job; if the job's own pod restarts
# earlier, this pod continues the job
TAKEOVER_TIMEOUT_S = 300.0
DocumentT = TypeVar("DocumentT", bound=BaseModel)


class StallDetector:
    """Finds jobs whose recorded seconds have not changed for TAKEOVER_TIMEOUT_S, by the clock of
    this process."""

    def __init__(self) -> None:
        self.next_check = time.monotonic() + CHECK_INTERVAL_S
        # job → its newest recorded seconds, and the time when they changed
        self.changes: dict[TrialJob, tuple[float, float]] = {}

    def find_stalled_job(
        self,
        running_jobs: Sequence[TrialJob],
        read_job_seconds: Callable[[], Mapping[TrialJob, float]],
    ) -> TrialJob | None:
        """Return the first stalled job, or None. `read_job_seconds` returns the seconds that each
        job has used, as recorded in the object store."""
        now_s = time.monotonic()
        if now_s < self.next_check:
            return None

        self.next_check = now_s + CHECK_INTERVAL_S
        seconds_by_job = read_job_seconds()
        for running_job in running_jobs:
            used_seconds = seconds_by_job.get(running_job, 0.0)
            if self.changes.setdefault(running_job, (used_seconds, now_s))[0] != used_seconds:
                self.changes[running_job] = (used_seconds, now_s)
        return next(
            (
                running_job
                for running_job in running_jobs
                if now_s - self.changes[running_job][1] > TAKEOVER_TIMEOUT_S
            ),
            None,
        )


class SweepStudy:
    """The decisions and results of one sweep, as of the last call of `read`. The methods of
    SweepStudy raise StorageError."""

    def __init__(self, store: "Store", key_prefix: str, sweep: Sweep) -> None:
        self.store = store
        self.root = key_prefix.rstrip("/")
        self.sweep = sweep
        # decisions, in order
        self.records: list[dict[str, Any]] = []
        # results of the finished jobs
        self.results: dict[TrialJob, dict[str, Any]] = {}

    @property
    def jobs(self) -> list[TrialJob]:
        return [
            TrialJob(decision_record["trial"], decision_record["rung"])
            for decision_record in self.records
            if "trial" in decision_record
        ]

    @property
    def budget_stop(self) -> dict[str, Any] | None:
        """The used, expected and allowed hours, if the budget has ended the sweep; else None."""
        return next(
            (
                decision_record["stop"]
                for decision_record in self.records
                if "stop" in decision_record
            ),
            None,
        )

    def make_output_prefix(self, trial_number: int, rung_index: int) -> str:
        """Return the key prefix of a trial's output at a rung."""
        return f"{self.root}/trials/{trial_number}/rung-{rung_index}"

    def make_checkpoint_prefix(self, trial_number: int) -> str:
        return f"{self.root}/trials/{trial_number}/checkpoints"

    def read(self) -> list[Trial]:
        """Read the decisions and results since the last call. Return all trials with their results,
        by number."""
        decision_keys = [
            object_entry.key for object_entry in self.store.list(f"{self.root}/jobs/")
        ][len(self.records) :]

        with ThreadPoolExecutor(THREADS) as thread_pool:
            for decision_key, decision in zip(
                decision_keys,
                thread_pool.map(partial(read_object, SweepDecision, self.store), decision_keys),
                strict=True,
            ):
                self._check(decision, decision_key)
                self.records.append(decision.model_dump(exclude_unset=True))

            running_jobs = [
                started_job for started_job in self.jobs if started_job not in self.results
            ]
            for started_job, job_result in zip(
                running_jobs, thread_pool.map(self.read_result, running_jobs), strict=True
            ):
                if job_result:
                    self.results[started_job] = job_result

        return self.trials()

    def _check(self, sweep_decision: SweepDecision, decision_key: str) -> None:
        """Raise InvalidDocument for a decision that does not belong to this sweep."""
        if sweep_decision.stop:
            return

        decision_fault = self._find_decision_fault(sweep_decision)
        if decision_fault:
            raise InvalidDocument(
                f"{self.store.uri(decision_key)} is malformed: {decision_fault}. Restore it, or"
                " start the sweep again."
            )

    def _find_decision_fault(self, sweep_decision: SweepDecision) -> str:
        """Return the reason why a decision about a job is not part of this sweep; "" if the
        decision is part of the sweep."""
        started_trial_numbers = {started_job.trial for started_job in self.jobs}
        if (sweep_decision.rung or 0) >= self.sweep.rungs:
            return "the sweep does not have this rung"

        if sweep_decision.settings is None:
            return (
                ""
                if sweep_decision.trial in started_trial_numbers
                else "the sweep does not have this trial"
            )

        # trials are numbered in the order of their starts
        if (
            sweep_decision.trial != len(started_trial_numbers)
            or len(started_trial_numbers) >= self.sweep.trial_count
        ):
            return "the sweep does not have this trial, or it has started before"

        # validate settings, because they may become part of a command and are compared with numbers
        choice_by_path = dict(self.sweep.choices())
        if sweep_decision.settings.keys() != choice_by_path.keys():
            return "its settings are not the settings in sweep.space"
        for setting_path, setting_choice in choice_by_path.items():
            if not setting_choice.accepts_sample(sweep_decision.settings[setting_path]):
                return f"its {setting_path} is not a value in sweep.space"
        return ""

    def trials(self, jobs_with_results: int | None = None) -> list[Trial]:
        """Return all started trials by number, with the results of the first `jobs_with_results`
        jobs (default: all)."""
        new_trial_records = [
            decision_record for decision_record in self.records if "settings" in decision_record
        ]
        trial_by_number = {
            new_trial_record["trial"]: Trial(
                new_trial_record["trial"], new_trial_record["settings"], new_trial_record["attrs"]
            )
            for new_trial_record in new_trial_records
        }

        for started_job in self.jobs[:jobs_with_results]:
            job_result = self.results.get(started_job)
            if job_result:
                trial = trial_by_number[started_job.trial]
                trial.values[started_job.rung] = job_result.get("value")
                trial.failure = job_result.get("why", "")
                trial.steps = job_result.get("steps", trial.steps)
                trial.sha256 = job_result.get("sha256", "")

        return [trial_by_number[trial_number] for trial_number in sorted(trial_by_number)]

    def claim_trial(
        self, pod_index: int, default_settings: Settings, integer_settings: Mapping[str, bool]
    ) -> tuple[Trial, int] | None:
        """Return the next trial that `pod_index` trains, and the rung to reach; None if no trial is
        left.

        If the pod has an unfinished job, its trial and rung are returned again. The method waits
        while results are missing, and takes over the job of a stalled pod.
        """
        stall_detector = StallDetector()

        while True:
            all_trials = self.read()
            unfinished_job = self._find_unfinished_job(pod_index)
            if unfinished_job:
                return all_trials[unfinished_job.trial], unfinished_job.rung

            next_job, result_count = self._decide()
            if next_job:
                self._append_record(
                    self._make_record(next_job, result_count, default_settings, integer_settings)
                    | {"pod": pod_index}
                )
            elif result_count < 0:
                time.sleep(POLL_INTERVAL_S)
                running_jobs = [job for job in self.jobs if job not in self.results]

                stalled_job = stall_detector.find_stalled_job(running_jobs, self.read_seconds)
                if stalled_job:
                    return all_trials[stalled_job.trial], stalled_job.rung
            else:
                return None

    def _find_unfinished_job(self, pod_index: int) -> TrialJob | None:
        """Return the job of a pod that has no result yet, or None."""
        for decision_record in self.records:
            if decision_record.get("pod") == pod_index:
                job = TrialJob(decision_record["trial"], decision_record["rung"])
                if job not in self.results:
                    return job
        return None

    def _decide(self) -> tuple[TrialJob | None, int]:
        """Return the next job, or None, and the number of jobs whose results the decision used; -1
        if results are missing."""
        sweep = self.sweep
        started_jobs = self.jobs
        metric_by_job = {job: job_result.get("value") for job, job_result in self.results.items()}
        result_counts = halving.find_usable_result_counts(sweep, started_jobs, metric_by_job)

        if not self.budget_stop:
            for result_count in result_counts:
                known_metrics = {
                    job: metric_by_job[job]
                    for job in started_jobs[:result_count]
                    if job in metric_by_job
                }
                next_job = halving.choose_next_job(sweep, started_jobs, known_metrics)
                if next_job:
                    budget_excess = budget.compute_budget_excess(
                        sweep, next_job, started_jobs, metric_by_job, self._read_budget_seconds()
                    )
                    if not budget_excess:
                        return next_job, result_count

                    self._append_record({"stop": budget_excess})
                    return None, -1

            # the result of a running job leads to at most one further job, which the pod of the
            # running job can train, so this pod need not wait for it. However, results that no
            # decision has used yet may lead to more jobs, so this pod waits until these results are
            # used
            has_unused_results = any(
                job in metric_by_job and job.rung < sweep.rungs - 1
                for job in started_jobs[result_counts.stop - 1 :]
            )
            if has_unused_results or not result_counts:
                return None, -1

        if all(job in metric_by_job for job in started_jobs):
            return halving.choose_final_job(sweep, started_jobs, metric_by_job), len(started_jobs)

        # another pod still trains, and the pod that finishes the last job decides whether the best
        # trial continues
        return None, len(started_jobs)

    def _make_record(
        self,
        next_job: TrialJob,
        result_count: int,
        default_settings: Settings,
        integer_settings: Mapping[str, bool],
    ) -> dict[str, Any]:
        decision_record: dict[str, Any] = {"trial": next_job.trial, "rung": next_job.rung}
        if next_job.rung == 0:
            from rekindle.training.sweep.sampling import sample_settings  # imports Optuna

            trial_settings, trial_attributes = sample_settings(
                self.sweep, self.trials(result_count), default_settings, integer_settings
            )
            decision_record["settings"] = trial_settings
            decision_record["attrs"] = trial_attributes
        return decision_record

    def _append_record(self, decision_record: Mapping[str, object]) -> None:
        """Write the next decision, unless another pod has written it."""
        try:
            decision_key = f"{self.root}/jobs/{len(self.records):05d}.json"
            self.store.put(decision_key, to_json(decision_record).encode(), if_absent=True)
        except Conflict:
            return

    def find_winner(self) -> Trial:
        """Return the best trial that has reached the last rung. Raises ConfigError if all trials
        have failed."""
        trial_by_number = {trial.number: trial for trial in self.trials()}
        last_rung = self.sweep.rungs - 1
        metric_by_trial = {
            trial.number: trial.values[last_rung]
            for trial in trial_by_number.values()
            if last_rung in trial.values
        }

        ranked_trial_numbers = halving.rank_trials(metric_by_trial, 1, self.sweep.better)
        if ranked_trial_numbers:
            return trial_by_number[ranked_trial_numbers[0]]

        reason = next(
            (trial.failure for trial in trial_by_number.values() if trial.failure),
            "no trial is finished",
        )
        raise ConfigError(f"all {len(trial_by_number)} trials lack a {self.sweep.metric}: {reason}")

    def record_failure(self, trial_number: int, rung_index: int, reason: str) -> None:
        """Record that a trial has failed."""
        self.store.put(
            f"{self.make_output_prefix(trial_number, rung_index)}/failed.json",
            to_json({"value": None, "why": reason}).encode(),
        )

    def record_metric(self, trial_number: int, rung_index: int, metric_value: float | None) -> None:
        """Record the metric of a trial that a program has trained; the metric is None if it is not
        finite."""
        metric_values = {self.sweep.metric: metric_value}
        validation_key = f"{self.make_output_prefix(trial_number, rung_index)}/validation.json"
        self.store.put(validation_key, to_json(metric_values).encode())

    def record_seconds(self, process_name: str, seconds_by_job: Mapping[TrialJob, float]) -> None:
        """Record the seconds that a process has used for each job of the sweep until now."""
        seconds_by_job_name = {
            f"{trial_job.trial}/{trial_job.rung}": round(used_seconds, 3)
            for trial_job, used_seconds in seconds_by_job.items()
        }
        self.store.put(
            f"{self.root}/seconds/{process_name}.json", to_json(seconds_by_job_name).encode()
        )

    def read_seconds(self) -> dict[TrialJob, float]:
        """Return the seconds that all processes have used for each job."""
        total_seconds_by_job: dict[TrialJob, float] = defaultdict(float)
        record_keys = [
            object_entry.key for object_entry in self.store.list(f"{self.root}/seconds/")
        ]
        with ThreadPoolExecutor(THREADS) as thread_pool:
            for seconds_record in thread_pool.map(
                partial(read_object, UsedSecondsRecord, self.store), record_keys
            ):
                for job_name, used_seconds in seconds_record.root.items():
                    trial_text, _, rung_text = job_name.partition("/")
                    total_seconds_by_job[TrialJob(int(trial_text), int(rung_text))] += used_seconds
        return dict(total_seconds_by_job)

    def read_hours(self) -> float:
        """Return the worker-hours of all trials."""
        return sum(self.read_seconds().values()) / 3600

    def _read_budget_seconds(self) -> dict[TrialJob, float]:
        if self.sweep.budget.hours:
            return self.read_seconds()
        return {}

    def read_result(self, trial_job: TrialJob) -> dict[str, Any] | None:
        """Read the result of a job: value, steps and sha256, or the reason (`why`) for its failure;
        None while no result exists."""
        output_prefix = self.make_output_prefix(trial_job.trial, trial_job.rung)
        metric_name = self.sweep.metric

        trial_model = self._read(TrialModel, f"{output_prefix}/model.json")
        trial_validation = (
            self._read(TrialValidation, f"{output_prefix}/validation.json") if trial_model else None
        )

        if trial_model is None or (trial_model.is_of_program and trial_validation is None):
            trial_failure = self._read(TrialFailure, f"{output_prefix}/failed.json")
            return trial_failure and trial_failure.model_dump()

        metric_values = trial_validation.root if trial_validation else {}
        best_validation = trial_model.best

        if metric_name not in metric_values:
            return {
                "why": f"its validation has only the metrics {', '.join(metric_values) or '(none)'}"
            }

        loss_values = [metric_values[metric_name]]
        if metric_name == LOSS_METRIC and best_validation and best_validation.released:
            loss_values.append(best_validation.validation_loss)

        finite_values = [loss_value for loss_value in loss_values if is_finite_metric(loss_value)]
        job_result = {
            "value": min(finite_values, default=None),
            "steps": trial_model.step,
            "sha256": trial_model.sha256,
        }
        if not finite_values:
            job_result["why"] = (
                f"its {metric_name} is not a number: lower the learning rate if the training"
                " diverged"
            )

        return job_result

    def _read(self, document_class: type[DocumentT], document_key: str) -> DocumentT | None:
        try:
            return read_object(document_class, self.store, document_key)
        except NotFound:
            return None
