"""Trains the trials of one pod, one after the other. Each trial runs in a process that is forked
after the slow imports.

After a restart of the pod, the interrupted trial continues from its checkpoint.
"""

import os
import select
import signal
import sys
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from argolocal.common import exit_codes
from argolocal.common.linux import die_with_parent
from rekindle import Store, tracking
from rekindle.errors import (
    ConfigError,
    DataError,
    RekindleError,
    StorageError,
    TrackingError,
    write_stderr,
)
from rekindle.training.launch import notice
from rekindle.training.spec import SINGLE_WORKER_SETTINGS, TrainingSpec
from rekindle.training.sweep.halving import Trial, TrialJob
from rekindle.training.sweep.study import SweepStudy
from rekindle.training.sweep.sweep_config import Settings

# name of the metric in a trial's MLflow run
OBJECTIVE_METRIC = "objective"
# seconds between two records of the time that a trial has used
RECORD_INTERVAL_S = 10.0
# number of crashes in this pod after which a trial counts as failed
MAX_CRASHES = 3
ResultT = TypeVar("ResultT")


class Trainer(Protocol):
    """Trains one trial: the workload's model, or a training program.

    `needs_mlflow` is True if the trial cannot be compared without its MLflow run.
    """

    needs_mlflow: bool

    def import_modules(self) -> None:
        """Import the modules that a training needs, before its process is forked."""
        ...

    def train(self, study: SweepStudy, trial: Trial, rung_index: int, run_id: str) -> None:
        """Train a trial in the current process, which has blocked SIGTERM, and record its result or
        failure. Raises SystemExit(143) after SIGTERM.

        `run_id`: id of the trial's MLflow run, or "".
        """
        ...


def train_trials(
    study: SweepStudy,
    pod_index: int,
    default_settings: Settings,
    integer_settings: Mapping[str, bool],
    trainer: Trainer,
    experiment: str,
    run_name: str,
    record_run: Callable[[Store, str], None],
) -> None:
    """Train the trials that the study assigns to `pod_index`, until no trial is left.

    `record_run`: records the id of a trial's MLflow run in the object store, since MLflow alone
    does not prove that a run belongs to the sweep. Raises RekindleError if a service is
    unavailable, SystemExit(143) after SIGTERM.
    """
    # install a handler, because without one, PID 1 ignores SIGTERM
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    notice.start_polling_process()
    process_name = f"{pod_index}-{uuid.uuid4().hex[:8]}"
    seconds_by_job = dict[TrialJob, float]()
    crash_counts = Counter[TrialJob]()

    while claimed_trial := study.claim_trial(pod_index, default_settings, integer_settings):
        trainer.import_modules()
        trial, rung_index = claimed_trial
        trial_job = TrialJob(trial.number, rung_index)
        start_s = time.monotonic()
        previous_seconds = seconds_by_job.get(trial_job, 0.0)

        def record(
            job: TrialJob = trial_job, start: float = start_s, previous: float = previous_seconds
        ) -> None:
            seconds_by_job[job] = previous + time.monotonic() - start
            study.record_seconds(process_name, seconds_by_job)

        write_stderr(
            f"trial {trial.number} to rung {rung_index + 1} of {study.sweep.rungs}:"
            f" {trial.settings}"
        )
        exit_code = run_in_child(
            lambda trial=trial, rung_index=rung_index: _train_trial(
                study, trial, rung_index, trainer, experiment, run_name, record_run
            ),
            record,
        )
        record()

        if exit_code == exit_codes.TERMINATED:
            raise SystemExit(exit_code)

        if exit_code == exit_codes.UNAVAILABLE:
            raise RekindleError(
                f"trial {trial.number} lacks a service. A restarted pod continues from the trial's"
                " checkpoint."
            )

        if exit_code:
            crash_counts[trial_job] += 1
        if crash_counts[trial_job] == MAX_CRASHES:
            study.record_failure(
                trial.number,
                rung_index,
                f"its process has crashed {MAX_CRASHES} times, at last with code {exit_code}",
            )

    used_seconds = sum(seconds_by_job.values())
    write_stderr(
        f"no trial is left: this process has trained {len(seconds_by_job)} times, for"
        f" {used_seconds:.0f} s"
    )


def _exit_on_sigterm(*_: object) -> None:
    raise SystemExit(exit_codes.TERMINATED)


def make_training_spec(
    study: SweepStudy,
    trial: Trial,
    rung_index: int,
    shared_inputs: Mapping[str, Any],
    run_id: str = "",
) -> TrainingSpec:
    """Return the inputs of a trial's training up to a rung. Raises ConfigError."""
    section_by_name: dict[str, dict[str, Any]] = {
        input_name: dict(shared_inputs[input_name]) for input_name in ("train", "model")
    }
    for setting_path, setting_value in trial.settings.items():
        section_name, _, setting_name = setting_path.partition(".")
        section_by_name[section_name][setting_name] = setting_value

    training_inputs = {
        **{
            input_name: shared_inputs[input_name]
            for input_name in ("workload", "family", "dataset", "digest")
        },
        **section_by_name["train"],
        **SINGLE_WORKER_SETTINGS,
        "out": study.make_output_prefix(trial.number, rung_index),
        "checkpoints": study.make_checkpoint_prefix(trial.number),
        "model": section_by_name["model"],
        "until": study.sweep.compute_step_share(rung_index),
        "run_id": run_id,
    }

    try:
        return TrainingSpec.model_validate(training_inputs)
    except ValueError as error:
        raise ConfigError(f"{trial.settings}: {error}") from error


class WorkloadTrainer:
    """Trains the model of the workload. `shared_inputs`: the inputs that are equal for all
    trials."""

    needs_mlflow = False

    def __init__(self, shared_inputs: Mapping[str, Any]) -> None:
        self.shared_inputs = shared_inputs

    def import_modules(self) -> None:
        import rekindle.training.loop  # noqa: F401  # imports torch

    def train(self, study: SweepStudy, trial: Trial, rung_index: int, run_id: str) -> None:
        import torch

        from rekindle.training.worker import run_worker

        try:
            run_worker(make_training_spec(study, trial, rung_index, self.shared_inputs, run_id))
        except (ConfigError, DataError, torch.OutOfMemoryError) as error:
            # record the failure, because errors of these classes are caused by the settings of the
            # trial
            record_failure(study, trial, rung_index, str(error))


def record_failure(study: SweepStudy, trial: Trial, rung_index: int, reason: str) -> None:
    """Log and record that a trial has failed."""
    write_stderr(f"trial {trial.number} failed: {reason}")
    study.record_failure(trial.number, rung_index, reason)


def _train_trial(
    study: SweepStudy,
    trial: Trial,
    rung_index: int,
    trainer: Trainer,
    experiment: str,
    run_name: str,
    record_run: Callable[[Store, str], None],
) -> None:
    """Train one trial in the current process, and record its result in MLflow."""
    # create a new Store, because the parent process uses the connections of its own Store
    study = SweepStudy(Store.from_env(), study.root, study.sweep)
    if trainer.needs_mlflow and experiment:
        run_id = _start_child_run(trial, experiment, run_name)
    else:
        run_id = _try_tracking(lambda: _start_child_run(trial, experiment, run_name)) or ""

    if run_id:
        record_run(study.store, run_id)

    trainer.train(study, trial, rung_index, run_id)

    if run_id:
        _try_tracking(
            lambda: _record_result(
                study.read_result(TrialJob(trial.number, rung_index)) or {}, run_id
            )
        )


def _start_child_run(trial: Trial, experiment: str, run_name: str) -> str:
    parent_run_name = f"{experiment}/{run_name}"
    run_id = tracking.start_run(
        experiment,
        f"{run_name}.trial-{trial.number}",
        {tracking.PARENT: tracking.resolve_run_id(parent_run_name)},
    )
    tracking.log_to_run(run_id, run_params=trial.settings)
    return run_id


def _record_result(job_result: Mapping[str, Any], run_id: str) -> None:
    metric_value = job_result.get("value")
    if metric_value is not None:
        tracking.log_metrics(run_id, [(OBJECTIVE_METRIC, metric_value, job_result["steps"])])
    tracking.finish(run_id, "FAILED" if job_result.get("why") else "FINISHED")


def _try_tracking(tracking_call: Callable[[], ResultT]) -> ResultT | None:
    """Return the result of `tracking_call`. If MLflow is unavailable, log this and return None,
    because the object store also has the results."""
    try:
        return tracking_call()
    except TrackingError as error:
        write_stderr(f"the trial is not recorded in MLflow: {error}")
        return None


def run_in_child(child_function: Callable[[], None], record_progress: Callable[[], None]) -> int:
    """Run `child_function` in a child process, and return its exit code.

    Until the child exits, forward SIGTERM to the child and call `record_progress` every
    RECORD_INTERVAL_S seconds.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent_pid = os.getpid()
    # block SIGTERM until the handler below is installed
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    child_pid = os.fork()
    if not child_pid:
        _run_child(child_function, parent_pid)

    previous_handler = signal.signal(signal.SIGTERM, lambda *_: os.kill(child_pid, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    pid_descriptor = os.pidfd_open(child_pid)

    try:
        while not select.select([pid_descriptor], [], [], RECORD_INTERVAL_S)[0]:
            record_progress()

        return os.waitstatus_to_exitcode(os.waitpid(child_pid, 0)[1])
    finally:
        os.close(pid_descriptor)
        signal.signal(signal.SIGTERM, previous_handler)


def _run_child(child_function: Callable[[], None], parent_pid: int) -> None:
    exit_code: Any = 1
    try:
        die_with_parent(parent_pid)
        child_function()
        exit_code = 0
    except SystemExit as exit_request:
        exit_code = exit_request.code or 0
    except RekindleError as error:
        write_stderr(f"error: {error}")
        is_unavailable = isinstance(error, StorageError | TrackingError)
        exit_code = exit_codes.UNAVAILABLE if is_unavailable else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code if isinstance(exit_code, int) else 1)
