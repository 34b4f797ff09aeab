"""Trains the trials of one pod, one after the other, each in its own process, forked after torch was imported.

A pod may be restarted: finished trials are skipped, and an interrupted trial continues from its checkpoint.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from argolocal.common.linux import die_with_parent
from rekindle import tracking
from rekindle.errors import ConfigError, DataError, RekindleError, TrackingError, say
from rekindle.training.search.rounds import Trial
from rekindle.training.search.study import Study
from rekindle.training.spec import TrainingSpec

OBJECTIVE = "objective"  # metric of a trial's MLflow run
PARENT_TAG = "mlflow.parentRunId"


def train(study: Study, number: int, share: list[int], common: Mapping[str, Any], experiment: str, run: str) -> None:
    """Train the trials `share` of round `number` to its rung. `common`: the inputs of all trainings.

    Raises RekindleError if a trial crashed; exits with 143 after SIGTERM.
    """
    rung = study.plan[number].rung
    trials = {trial.number: trial for trial in study.read(number + 1)}
    pending_trials = [trials[index] for index in share if rung not in trials[index].values]
    if not pending_trials:
        return
    import rekindle.training.loop  # noqa: F401  # imports torch once for all trials

    for position, trial in enumerate(pending_trials, 1):
        say(f"trial {trial.number} ({position} of {len(pending_trials)}) to rung {rung}: {trial.settings}")
        code = run_forked(lambda trial=trial: _train(study, trial, rung, common, experiment, run))
        if code == 143:
            raise SystemExit(143)
        if code:
            raise RekindleError(
                f"trial {trial.number} exited with code {code}. A restarted pod continues from its checkpoint."
            )


def specification(study: Study, trial: Trial, rung: int, common: Mapping[str, Any], run_id: str = "") -> TrainingSpec:
    """Return the inputs of a trial's training up to a rung. Raises ConfigError."""
    sections: dict[str, dict[str, Any]] = {name: dict(common[name]) for name in ("train", "model")}
    for path, value in trial.settings.items():
        section, _, key = path.partition(".")
        sections[section][key] = value
    inputs = {name: common[name] for name in ("workload", "family", "dataset", "digest")} | sections["train"]
    # the number of workers does not change the weights
    single_worker = {"workers": 1, "min_workers": 1, "max_workers": 1}
    prefixes = {"out": study.output(trial.number, rung), "checkpoints": study.checkpoints(trial.number)}
    inputs |= (
        single_worker | prefixes | {"model": sections["model"], "until": study.sweep.share(rung), "run_id": run_id}
    )
    try:
        return TrainingSpec.model_validate(inputs)
    except ValueError as error:
        raise ConfigError(f"{trial.settings}: {error}") from error


def _train(study: Study, trial: Trial, rung: int, common: Mapping[str, Any], experiment: str, run: str) -> None:
    """Train one trial, in its own process."""
    import torch

    from rekindle.training.worker import work

    run_id = _try_tracking(lambda: _start_child_run(trial, experiment, run)) or ""
    try:
        work(specification(study, trial, rung, common, run_id))
    except (ConfigError, DataError, torch.OutOfMemoryError) as error:  # errors that the settings of the trial cause
        say(f"trial {trial.number} failed: {error}")
        failure = json.dumps({"value": None, "why": str(error)})
        study.store.put(f"{study.output(trial.number, rung)}/failed.json", failure.encode())
    if run_id:
        _try_tracking(lambda: _record_result(study.result(trial.number, rung) or {}, run_id))


def _start_child_run(trial: Trial, experiment: str, run: str) -> str:
    name = f"{experiment}/{run}"
    run_id = tracking.start_run(experiment, f"{run}.trial-{trial.number}", {PARENT_TAG: tracking.resolve_run_id(name)})
    tracking.log(run_id, params=trial.settings)
    return run_id


def _record_result(result: Mapping[str, Any], run_id: str) -> None:
    if (value := result.get("value")) is not None:
        tracking.log_metrics(run_id, [(OBJECTIVE, value, result["steps"])])
    tracking.finish(run_id, "FAILED" if result.get("why") else "FINISHED")


def _try_tracking(call: Callable[[], Any]) -> Any:
    """Return `call()`, or None if MLflow is unavailable: the results are also in the object store."""
    try:
        return call()
    except TrackingError as error:
        say(f"the trial is not recorded in MLflow: {error}")
        return None


def run_forked(call: Callable[[], None]) -> int:
    """Run `call` in a child process, which also receives the SIGTERM of this process. Returns the exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # blocked until our handler is installed
    pid = os.fork()
    if not pid:
        _run_child(call, parent)
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _run_child(call: Callable[[], None], parent: int) -> None:
    code: Any = 1
    try:
        die_with_parent(parent)
        call()
        code = 0
    except SystemExit as exit_request:
        code = exit_request.code or 0
    except RekindleError as error:
        say(f"error: {error}")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
