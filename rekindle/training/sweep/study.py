"""A sweep in the object store: its decisions, and the results of its trials.

    ROOT/jobs/00007.json               decision 7: a trial, its rung and its pod; or that the budget
    ends the sweep
    ROOT/trials/7/rung-1/model.json    trial 7 was trained to rung 1 (`failed.json`: it failed)
    ROOT/trials/7/checkpoints/         its checkpoints
    ROOT/seconds/PROCESS.json          the seconds that a process has used, by trial and rung

A decision is written, if it does not exist yet, before a pod acts on it, and depends only on
previous decisions and their results. It may therefore be repeated at any time.
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

FOLDER = "search"  # folder below the name of the workflow
POLL_INTERVAL_S = 0.5
CHECK_INTERVAL_S = 30.0
TAKEOVER_TIMEOUT_S = 300.0  # a replaced pod continues its own trial within minutes
D = TypeVar("D", bound=BaseModel)


class StallDetector:
    """Finds jobs whose recorded seconds have not changed for TAKEOVER_TIMEOUT_S, by the clock of
    this process."""

    def __init__(self) -> None:
        self.next_check = time.monotonic() + CHECK_INTERVAL_S
        self.changes: dict[Job, tuple[float, float]] = {}  # recorded seconds, and when they changed

    def find_stalled_job(
        self, running: Sequence[Job], read: Callable[[], Mapping[Job, float]]
    ) -> Job | None:
        """Return the first stalled job; `read` returns the recorded seconds."""
        now = time.monotonic()
        if now < self.next_check:
            return None
        self.next_check, seconds = now + CHECK_INTERVAL_S, read()
        for job in running:
            used = seconds.get(job, 0.0)
            if self.changes.setdefault(job, (used, now))[0] != used:
                self.changes[job] = (used, now)
        return next(
            (job for job in running if now - self.changes[job][1] > TAKEOVER_TIMEOUT_S), None
        )


class Study:
    """The sweep below one prefix. Methods raise StorageError."""

    def __init__(self, store: "Store", root: str, sweep: Sweep) -> None:
        self.store, self.root, self.sweep = store, root.rstrip("/"), sweep
        self.records: list[dict[str, Any]] = []  # decisions, in order
        self.results: dict[Job, dict[str, Any]] = {}  # results of the finished jobs

    @property
    def jobs(self) -> list[Job]:
        return [
            Job(record["trial"], record["rung"]) for record in self.records if "trial" in record
        ]

    @property
    def budget_stop(self) -> dict[str, Any] | None:
        """The decision that ended the sweep because of its budget."""
        return next((record["stop"] for record in self.records if "stop" in record), None)

    def output(self, trial: int, rung: int) -> str:
        """Return the key prefix of a trial's output at a rung."""
        return f"{self.root}/trials/{trial}/rung-{rung}"

    def checkpoints(self, trial: int) -> str:
        return f"{self.root}/trials/{trial}/checkpoints"

    def read(self) -> list[Trial]:
        """Read new decisions and results. Returns all trials with their results, by number."""
        keys = [entry.key for entry in self.store.list(f"{self.root}/jobs/")][len(self.records) :]

        with ThreadPoolExecutor(THREADS) as pool:
            for key, decision in zip(
                keys, pool.map(partial(read_object, Decision, self.store), keys), strict=True
            ):
                self._check(decision, key)
                self.records.append(decision.model_dump(exclude_unset=True))

            running = [job for job in self.jobs if job not in self.results]
            for job, result in zip(running, pool.map(self.result, running), strict=True):
                if result:
                    self.results[job] = result

        return self.trials()

    def _check(self, decision: Decision, key: str) -> None:
        """Raise InvalidDocument for a decision that does not belong to this sweep."""
        if decision.stop:
            return
        started = {job.trial for job in self.jobs}
        has_settings = decision.trial in started or decision.settings is not None
        if (decision.rung or 0) >= self.sweep.rungs or not has_settings:
            raise InvalidDocument(
                f"{self.store.uri(key)} is malformed: the sweep does not have this trial, or not"
                " this rung. Restore it, or start the sweep again."
            )

    def trials(self, job_count: int | None = None) -> list[Trial]:
        """Return all started trials, with the results of the first `job_count` jobs (default:
        all)."""
        new_trials = [record for record in self.records if "settings" in record]
        trials = {
            item["trial"]: Trial(item["trial"], item["settings"], item["attrs"])
            for item in new_trials
        }

        for job in self.jobs[:job_count]:
            result = self.results.get(job)
            if result:
                trial = trials[job.trial]
                trial.values[job.rung], trial.failure = result.get("value"), result.get("why", "")
                trial.steps, trial.sha256 = (
                    result.get("steps", trial.steps),
                    result.get("sha256", ""),
                )

        return [trials[number] for number in sorted(trials)]

    def claim(
        self, pod: int, default: Settings, whole: Mapping[str, bool]
    ) -> tuple[Trial, int] | None:
        """Return the next trial that `pod` trains, and to which rung; None if no trial is left.

        A job that the pod has not finished is returned again. Waits while results are missing, or
        takes over the job of a stalled pod.
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
                self._append(self._make_record(job, result_count, default, whole) | {"pod": pod})
            elif result_count < 0:
                time.sleep(POLL_INTERVAL_S)
                running = [job for job in self.jobs if job not in self.results]

                stalled = detector.find_stalled_job(running, self.seconds)
                if stalled:
                    return trials[stalled.trial], stalled.rung
            else:
                return None

    def _decide(self) -> tuple[Job | None, int]:
        """Return the next job and the number of jobs whose results were used; -1: results are
        missing."""
        sweep = self.sweep
        jobs = self.jobs
        values = {job: result.get("value") for job, result in self.results.items()}
        numbers = halving.result_counts(sweep, jobs, values)

        if not self.budget_stop:
            for number in numbers:
                known_values = {job: values[job] for job in jobs[:number] if job in values}
                job = halving.next_job(sweep, jobs, known_values)
                if job:
                    reason = budget.compute_excess(sweep, job, jobs, values, self._budget_seconds())
                    if not reason:
                        return job, number

                    self._append({"stop": reason})
                    return None, -1

            # each running job leads to at most one other job, which its own pod can train; results
            # that are finished, but that no decision has used yet, may lead to more
            unused = any(
                job in values and job.rung < sweep.rungs - 1 for job in jobs[numbers.stop - 1 :]
            )
            if unused or not numbers:
                return None, -1

        if all(job in values for job in jobs):
            return halving.final_job(sweep, jobs, values), len(jobs)

        # the pod that finishes its job last decides whether the best trial continues
        return None, len(jobs)

    def _make_record(
        self, job: Job, result_count: int, default: Settings, whole: Mapping[str, bool]
    ) -> dict[str, Any]:
        record: dict[str, Any] = {"trial": job.trial, "rung": job.rung}
        if job.rung == 0:
            from rekindle.training.sweep.sampling import ask  # imports Optuna

            settings, attrs = ask(self.sweep, self.trials(result_count), default, whole)
            record["settings"] = settings
            record["attrs"] = attrs
        return record

    def _append(self, record: Mapping[str, Any]) -> None:
        """Write the next decision, unless another pod has written it."""
        try:
            key = f"{self.root}/jobs/{len(self.records):05d}.json"
            self.store.put(key, to_json(record).encode(), if_absent=True)
        except Conflict:
            return

    def winner(self) -> Trial:
        """Return the best trial that was trained to the end. Raises ConfigError if all trials have
        failed."""
        trials = {trial.number: trial for trial in self.trials()}
        last = self.sweep.rungs - 1
        values = {
            trial.number: trial.values[last] for trial in trials.values() if last in trial.values
        }

        numbers = halving.best_trials(values, 1, self.sweep.better)
        if numbers:
            return trials[numbers[0]]

        reason = next(
            (trial.failure for trial in trials.values() if trial.failure), "no trial is finished"
        )
        raise ConfigError(f"all {len(trials)} trials lack a {self.sweep.metric}: {reason}")

    def fail(self, trial: int, rung: int, reason: str) -> None:
        """Record that a trial has failed."""
        self.store.put(
            f"{self.output(trial, rung)}/failed.json",
            to_json({"value": None, "why": reason}).encode(),
        )

    def record_seconds(self, process: str, seconds: Mapping[Job, float]) -> None:
        """Record the total seconds that a process has trained each trial and rung until now."""
        texts = {f"{job.trial}/{job.rung}": round(used, 3) for job, used in seconds.items()}
        self.store.put(f"{self.root}/seconds/{process}.json", to_json(texts).encode())

    def seconds(self) -> dict[Job, float]:
        """Return the seconds that all processes have used for each job."""
        total: dict[Job, float] = defaultdict(float)
        keys = [entry.key for entry in self.store.list(f"{self.root}/seconds/")]
        with ThreadPoolExecutor(THREADS) as pool:
            for seconds in pool.map(partial(read_object, Seconds, self.store), keys):
                for text, used in seconds.root.items():
                    trial, _, rung = text.partition("/")
                    total[Job(int(trial), int(rung))] += used
        return dict(total)

    def hours(self) -> float:
        """Return the worker-hours of all trials."""
        return sum(self.seconds().values()) / 3600

    def _budget_seconds(self) -> dict[Job, float]:
        if self.sweep.budget.hours:
            return self.seconds()
        return {}

    def result(self, job: Job) -> dict[str, Any] | None:
        """Return a trial's value, steps and sha256 at a rung, or why the trial failed; None if both
        are missing."""
        output = self.output(job.trial, job.rung)
        metric = self.sweep.metric

        model = self._read(TrialModel, f"{output}/model.json")
        if model is None:
            failure = self._read(Failure, f"{output}/failed.json")
            return failure and failure.model_dump()

        validation = self._read(Validation, f"{output}/validation.json")
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
