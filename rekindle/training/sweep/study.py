"""A sweep in the object store: its decisions, and the results of its trials.

    ROOT/jobs/00007.json               decision 7: a trial, its rung and its pod; or the end of the
                                       sweep because of its budget
    ROOT/trials/7/rung-1/model.json    the model of trial 7 at rung 1 (after a failure: failed.json)
    ROOT/trials/7/checkpoints/         its checkpoints
    ROOT/seconds/PROCESS.json          the seconds that a process has used, by trial and rung

A decision depends only on previous decisions and their results. Before a pod acts on a decision, it
writes the decision to the object store, unless another pod has written it. So the result is the
same if any pod makes a decision again at any time.
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
from rekindle.training.sweep.halving import Job, Trial, is_finite
from rekindle.training.sweep.records import Decision, Failure, Seconds, TrialModel, Validation
from rekindle.training.sweep.sweep_config import LOSS, Settings, Sweep

if TYPE_CHECKING:
    from rekindle.storage import Store

FOLDER = "search"  # folder of the sweep, below the folder with the name of the workflow
POLL_INTERVAL_S = 0.5
CHECK_INTERVAL_S = 30.0
# time without progress after which another pod takes over a job; if its own pod restarts earlier,
# that pod continues it
TAKEOVER_TIMEOUT_S = 300.0
D = TypeVar("D", bound=BaseModel)


class StallDetector:
    """Finds jobs whose recorded seconds have not changed for TAKEOVER_TIMEOUT_S, by the clock of
    this process."""

    def __init__(self) -> None:
        self.next_check = time.monotonic() + CHECK_INTERVAL_S
        # the newest recorded seconds of each job, and when they changed
        self.changes: dict[Job, tuple[float, float]] = {}

    def find_stalled_job(
        self, running_jobs: Sequence[Job], read: Callable[[], Mapping[Job, float]]
    ) -> Job | None:
        """Return the first stalled job, or None. `read_seconds` returns the seconds that each job
        has used, as recorded in the store."""
        now = time.monotonic()
        if now < self.next_check:
            return None

        self.next_check = now + CHECK_INTERVAL_S
        seconds = read()
        for job in running_jobs:
            used = seconds.get(job, 0.0)
            if self.changes.setdefault(job, (used, now))[0] != used:
                self.changes[job] = (used, now)
        return next(
            (job for job in running_jobs if now - self.changes[job][1] > TAKEOVER_TIMEOUT_S), None
        )


class Study:
    """The decisions and results of one sweep. The methods raise StorageError."""

    def __init__(self, store: "Store", root: str, sweep: Sweep) -> None:
        self.store = store
        self.root = root.rstrip("/")
        self.sweep = sweep
        self.records: list[dict[str, Any]] = []  # decisions, in order
        self.results: dict[Job, dict[str, Any]] = {}  # results of the finished jobs

    @property
    def jobs(self) -> list[Job]:
        return [
            Job(record["trial"], record["rung"]) for record in self.records if "trial" in record
        ]

    @property
    def budget_stop(self) -> dict[str, Any] | None:
        """The used, expected and allowed hours, if the budget has ended the sweep; else None."""
        return next((record["stop"] for record in self.records if "stop" in record), None)

    def output_prefix(self, trial: int, rung: int) -> str:
        """Return the key prefix of a trial's output at a rung."""
        return f"{self.root}/trials/{trial}/rung-{rung}"

    def checkpoint_prefix(self, trial: int) -> str:
        return f"{self.root}/trials/{trial}/checkpoints"

    def read(self) -> list[Trial]:
        """Read the decisions and results since the last call. Return all trials with their results,
        by number."""
        keys = [entry.key for entry in self.store.list(f"{self.root}/jobs/")][len(self.records) :]

        with ThreadPoolExecutor(THREADS) as pool:
            for key, decision in zip(
                keys, pool.map(partial(read_object, Decision, self.store), keys), strict=True
            ):
                self._check(decision, key)
                self.records.append(decision.model_dump(exclude_unset=True))

            running = [job for job in self.jobs if job not in self.results]
            for job, result in zip(running, pool.map(self.read_result, running), strict=True):
                if result:
                    self.results[job] = result

        return self.trials()

    def _check(self, decision: Decision, key: str) -> None:
        """Raise InvalidDocument for a decision that does not belong to this sweep."""
        if decision.stop:
            return

        fault = self._find_fault(decision)
        if fault:
            raise InvalidDocument(
                f"{self.store.uri(key)} is malformed: {fault}. Restore it, or start the sweep"
                " again."
            )

    def _find_fault(self, decision: Decision) -> str:
        """Return the reason why a decision about a job is not part of this sweep; "" if it is part
        of it."""
        started = {job.trial for job in self.jobs}
        if (decision.rung or 0) >= self.sweep.rungs:
            return "the sweep does not have this rung"

        if decision.settings is None:
            return "" if decision.trial in started else "the sweep does not have this trial"

        # trials are numbered in the order of their starts
        if decision.trial != len(started) or len(started) >= self.sweep.trial_count:
            return "the sweep does not have this trial, or it has started before"

        # validate settings, because they may become part of a command and are compared with numbers
        choices = dict(self.sweep.choices())
        if decision.settings.keys() != choices.keys():
            return "its settings are not the settings in sweep.space"
        for path, choice in choices.items():
            if not choice.accepts_sample(decision.settings[path]):
                return f"its {path} is not a value in sweep.space"
        return ""

    def trials(self, jobs_with_results: int | None = None) -> list[Trial]:
        """Return all started trials, with the results of the first `result_count` jobs (default:
        all)."""
        new_trials = [record for record in self.records if "settings" in record]
        trials = {
            item["trial"]: Trial(item["trial"], item["settings"], item["attrs"])
            for item in new_trials
        }

        for job in self.jobs[:jobs_with_results]:
            result = self.results.get(job)
            if result:
                trial = trials[job.trial]
                trial.values[job.rung] = result.get("value")
                trial.failure = result.get("why", "")
                trial.steps = result.get("steps", trial.steps)
                trial.sha256 = result.get("sha256", "")

        return [trials[number] for number in sorted(trials)]

    def claim_trial(
        self, pod: int, default: Settings, integer_settings: Mapping[str, bool]
    ) -> tuple[Trial, int] | None:
        """Return the next trial that `pod` trains, and the rung to reach; None if no trial is left.

        If the pod has an unfinished job, its trial and rung are returned again. Waits while results
        are missing, and takes over the job of a stalled pod.
        """
        detector = StallDetector()

        while True:
            trials = self.read()
            for record in self.records:
                if (
                    record.get("pod") == pod
                    and (job := Job(record["trial"], record["rung"])) not in self.results
                ):
                    return trials[job.trial], job.rung

            job, result_count = self._decide()
            if job:
                self._append_record(
                    self._make_record(job, result_count, default, integer_settings) | {"pod": pod}
                )
            elif result_count < 0:
                time.sleep(POLL_INTERVAL_S)
                running = [job for job in self.jobs if job not in self.results]

                stalled = detector.find_stalled_job(running, self.read_seconds)
                if stalled:
                    return trials[stalled.trial], stalled.rung
            else:
                return None

    def _decide(self) -> tuple[Job | None, int]:
        """Return the next job, if any, and the number of jobs whose results this decision used; -1
        if results are missing."""
        sweep = self.sweep
        jobs = self.jobs
        values = {job: result.get("value") for job, result in self.results.items()}
        numbers = halving.usable_result_counts(sweep, jobs, values)

        if not self.budget_stop:
            for number in numbers:
                known_values = {job: values[job] for job in jobs[:number] if job in values}
                job = halving.choose_next_job(sweep, jobs, known_values)
                if job:
                    reason = budget.compute_excess(sweep, job, jobs, values, self._budget_seconds())
                    if not reason:
                        return job, number

                    self._append_record({"stop": reason})
                    return None, -1

            # this pod need not wait for a running job: its result leads to at most one further job,
            # which the pod of the running job can train. But this pod waits if decisions have not
            # used all finished results, because these may lead to more jobs
            unused = any(
                job in values and job.rung < sweep.rungs - 1 for job in jobs[numbers.stop - 1 :]
            )
            if unused or not numbers:
                return None, -1

        if all(job in values for job in jobs):
            return halving.choose_final_job(sweep, jobs, values), len(jobs)

        # another pod still trains, and the pod that finishes the last job decides whether the best
        # trial continues
        return None, len(jobs)

    def _make_record(
        self, job: Job, result_count: int, default: Settings, integer_settings: Mapping[str, bool]
    ) -> dict[str, Any]:
        record: dict[str, Any] = {"trial": job.trial, "rung": job.rung}
        if job.rung == 0:
            from rekindle.training.sweep.sampling import sample_settings  # imports Optuna

            settings, attrs = sample_settings(
                self.sweep, self.trials(result_count), default, integer_settings
            )
            record["settings"] = settings
            record["attrs"] = attrs
        return record

    def _append_record(self, record: Mapping[str, object]) -> None:
        """Write the next decision, unless another pod has written it."""
        try:
            key = f"{self.root}/jobs/{len(self.records):05d}.json"
            self.store.put(key, to_json(record).encode(), if_absent=True)
        except Conflict:
            return

    def find_winner(self) -> Trial:
        """Return the best trial that has reached the last rung. Raises ConfigError if all trials
        have failed."""
        trials = {trial.number: trial for trial in self.trials()}
        last = self.sweep.rungs - 1
        values = {
            trial.number: trial.values[last] for trial in trials.values() if last in trial.values
        }

        numbers = halving.rank_trials(values, 1, self.sweep.better)
        if numbers:
            return trials[numbers[0]]

        reason = next(
            (trial.failure for trial in trials.values() if trial.failure), "no trial is finished"
        )
        raise ConfigError(f"all {len(trials)} trials lack a {self.sweep.metric}: {reason}")

    def record_failure(self, trial: int, rung: int, reason: str) -> None:
        """Record that a trial has failed."""
        self.store.put(
            f"{self.output_prefix(trial, rung)}/failed.json",
            to_json({"value": None, "why": reason}).encode(),
        )

    def record_metric(self, trial: int, rung: int, value: float | None) -> None:
        """Record the metric of a trained program; None if it is not finite."""
        metrics = {self.sweep.metric: value}
        key = f"{self.output_prefix(trial, rung)}/validation.json"
        self.store.put(key, to_json(metrics).encode())

    def record_seconds(self, process: str, seconds: Mapping[Job, float]) -> None:
        """Record the seconds that a process has used for each job until now."""
        texts = {f"{job.trial}/{job.rung}": round(used, 3) for job, used in seconds.items()}
        self.store.put(f"{self.root}/seconds/{process}.json", to_json(texts).encode())

    def read_seconds(self) -> dict[Job, float]:
        """Return the seconds that all processes have used for each job."""
        total: dict[Job, float] = defaultdict(float)
        keys = [entry.key for entry in self.store.list(f"{self.root}/seconds/")]
        with ThreadPoolExecutor(THREADS) as pool:
            for seconds in pool.map(partial(read_object, Seconds, self.store), keys):
                for text, used in seconds.root.items():
                    trial, _, rung = text.partition("/")
                    total[Job(int(trial), int(rung))] += used
        return dict(total)

    def read_hours(self) -> float:
        """Return the worker-hours of all trials."""
        return sum(self.read_seconds().values()) / 3600

    def _budget_seconds(self) -> dict[Job, float]:
        if self.sweep.budget.hours:
            return self.read_seconds()
        return {}

    def read_result(self, job: Job) -> dict[str, Any] | None:
        """Read the result of a job: value, steps and sha256, or the reason (`why`) for its failure;
        None while no result exists."""
        output = self.output_prefix(job.trial, job.rung)
        metric = self.sweep.metric

        model = self._read(TrialModel, f"{output}/model.json")
        validation = self._read(Validation, f"{output}/validation.json") if model else None

        if model is None or (model.is_of_program and validation is None):
            failure = self._read(Failure, f"{output}/failed.json")
            return failure and failure.model_dump()

        metrics = validation.root if validation else {}
        best_validation = model.best

        if metric not in metrics:
            return {"why": f"its validation has only the metrics {', '.join(metrics) or '(none)'}"}

        values = [metrics[metric]]
        if metric == LOSS and best_validation and best_validation.released:
            values.append(best_validation.validation_loss)

        finite_values = [value for value in values if is_finite(value)]
        result = {
            "value": min(finite_values, default=None),
            "steps": model.step,
            "sha256": model.sha256,
        }
        if not finite_values:
            result["why"] = (
                f"its {metric} is not a number: lower the learning rate if the training diverged"
            )

        return result

    def _read(self, document: type[D], key: str) -> D | None:
        try:
            return read_object(document, self.store, key)
        except NotFound:
            return None
