"""Trains the trials of one pod, one after the other: each in a process of its own, forked with torch loaded.

A trial that has ended is not trained again, and one that was interrupted goes on from its checkpoint: a pod that is
started again begins with the list of before.
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
PARENT = "mlflow.parentRunId"


def train(study: Study, number: int, share: list[int], common: Mapping[str, Any], experiment: str, run: str) -> None:
    """Train the trials `share` of round `number` to its rung; `common` are the inputs of every training.

    Raises RekindleError if one of them crashed; exits with 143 after a SIGTERM.
    """
    rung = study.plan[number].rung
    trials = {trial.number: trial for trial in study.read(number + 1)}
    left = [trials[index] for index in share if rung not in trials[index].values]
    if not left:
        return
    import rekindle.training.loop  # noqa: F401  # torch, once for all of them

    for position, trial in enumerate(left, 1):
        say(f"trial {trial.number} ({position} of {len(left)}) to rung {rung}: {trial.settings}")
        code = forked(lambda trial=trial: _train(study, trial, rung, common, experiment, run))
        if code == 143:
            raise SystemExit(143)
        if code:
            raise RekindleError(f"trial {trial.number} ended with code {code}; started again, it goes on where it was.")


def specification(study: Study, trial: Trial, rung: int, common: Mapping[str, Any], run_id: str = "") -> TrainingSpec:
    """The training of a trial up to a rung. Raises ConfigError."""
    sections: dict[str, dict[str, Any]] = {name: dict(common[name]) for name in ("train", "model")}
    for path, value in trial.settings.items():
        section, _, key = path.partition(".")
        sections[section][key] = value
    inputs = {name: common[name] for name in ("workload", "dataset", "digest")} | sections["train"]
    alone = {"workers": 1, "min_workers": 1, "max_workers": 1}  # any number gives the same weights
    places = {"out": study.place(trial.number, rung), "checkpoints": study.checkpoints(trial.number)}
    inputs |= alone | places | {"model": sections["model"], "until": study.sweep.share(rung), "run_id": run_id}
    try:
        return TrainingSpec.model_validate(inputs)
    except ValueError as error:
        raise ConfigError(f"{trial.settings}: {error}") from error


def _train(study: Study, trial: Trial, rung: int, common: Mapping[str, Any], experiment: str, run: str) -> None:
    """In a process of its own."""
    import torch

    from rekindle.training.worker import work

    run_id = _tracked(lambda: _child_run(trial, experiment, run)) or ""
    try:
        work(specification(study, trial, rung, common, run_id))
    except (ConfigError, DataError, torch.OutOfMemoryError) as error:  # that of these settings
        say(f"trial {trial.number} failed: {error}")
        failed = json.dumps({"value": None, "why": str(error)})
        study.store.put(f"{study.place(trial.number, rung)}/failed.json", failed.encode())
    if run_id:
        _tracked(lambda: _record(study.result(trial.number, rung) or {}, run_id))


def _child_run(trial: Trial, experiment: str, run: str) -> str:
    name = f"{experiment}/{run}"
    run_id = tracking.start_run(experiment, f"{run}.trial-{trial.number}", {PARENT: tracking.resolve_run_id(name)})
    tracking.log(run_id, params=trial.settings)
    return run_id


def _record(result: Mapping[str, Any], run_id: str) -> None:
    if (value := result.get("value")) is not None:
        tracking.log_metrics(run_id, [(OBJECTIVE, value, result["steps"])])
    tracking.finish(run_id, "FAILED" if result.get("why") else "FINISHED")


def _tracked(call: Callable[[], Any]) -> Any:
    """A search goes on while MLflow is away: its own records are in the object store."""
    try:
        return call()
    except TrackingError as error:
        say(f"not recorded: {error}")
        return None


def forked(call: Callable[[], None]) -> int:
    """The exit code of `call` in a child process, to which a SIGTERM is passed on."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until somebody handles it
    pid = os.fork()
    if not pid:
        _be_child(call, parent)
    before = signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        signal.signal(signal.SIGTERM, before)


def _be_child(call: Callable[[], None], parent: int) -> None:
    code: Any = 1
    try:
        die_with_parent(parent)
        call()
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except RekindleError as error:
        say(f"error: {error}")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
