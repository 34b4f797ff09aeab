"""Runs one trial of a sweep: a training program on this pod, with the settings of the trial.

The coordinator and the agent of the program are processes of this pod. If the pod is killed, the
next one continues the program from its newest complete checkpoint.
"""

import math
import os
import secrets
import signal
import time
from collections.abc import Mapping
from typing import Any

from argolocal.common import exit_codes
from rekindle.errors import ConfigError, say
from rekindle.kubernetes_names import POD_IP, POD_NAME, REKINDLE_COORDINATOR, REKINDLE_SECRET
from rekindle.program.spec import ProgramSpec
from rekindle.program.trials.metric import MissingMetric, find_metric
from rekindle.step import flag, to_text
from rekindle.training.ledger.events import read_events
from rekindle.training.membership.completion import read_completed_model
from rekindle.training.spec import SINGLE_WORKER
from rekindle.training.sweep.halving import Trial
from rekindle.training.sweep.study import Study
from rekindle.training.sweep.trials import record_failure

LOCALHOST = "127.0.0.1"
SECRET_BYTES = 32
TRAIN_SETTINGS = ("silence_seconds", "hung_seconds")  # `train` settings used for programs


class ProgramTrainer:
    """Trains each trial by running a program. `shared_inputs`: the inputs that are equal for all
    trials."""

    # the metric of the trials may be in MLflow only
    needs_mlflow = True

    def __init__(self, shared_inputs: Mapping[str, Any]) -> None:
        self.shared_inputs = shared_inputs

    def import_modules(self) -> None:
        import rekindle.program.job_pod  # noqa: F401

    def train(self, study: Study, trial: Trial, rung: int, run_id: str) -> None:
        """Run the program to its end, and record its metric or its failure."""
        try:
            spec = make_program_spec(study, trial, rung, self.shared_inputs, run_id)
            # an earlier process may have ended before it recorded the metric
            if not read_completed_model(spec):
                pod = f"trial-{trial.number}-pod-{self.shared_inputs['part']}"
                _run_program(study, spec, pod)

            events = read_events(study.store, spec.ledger)
            value = find_metric(study.sweep.metric, events, run_id)
        except (ConfigError, ProgramFailed, MissingMetric) as error:
            record_failure(study, trial, rung, str(error))
        else:
            say(f"trial {trial.number}: {study.sweep.metric} {value:.5g}")
            study.record_metric(trial.number, rung, value if math.isfinite(value) else None)


class ProgramFailed(Exception):
    """Raised if the program has failed and a restart would not help."""


def make_program_spec(
    study: Study, trial: Trial, rung: int, shared_inputs: Mapping[str, Any], run_id: str = ""
) -> ProgramSpec:
    """Return the inputs of a trial's program. Raises ConfigError."""
    model = dict(shared_inputs["model"])
    for path, value in trial.settings.items():
        model[path.partition(".")[2]] = value

    train = shared_inputs["train"]
    inputs = {
        **{name: shared_inputs[name] for name in ("program", "workload", "dataset", "digest")},
        **{name: train[name] for name in TRAIN_SETTINGS if name in train},
        **SINGLE_WORKER,
        "out": study.output_prefix(trial.number, rung),
        "checkpoints": study.checkpoint_prefix(trial.number),
        "model": model,
        "run_id": run_id,
    }

    try:
        return ProgramSpec.model_validate(inputs)
    except ValueError as error:
        raise ConfigError(f"{trial.settings}: {error}") from error


def _run_program(study: Study, spec: ProgramSpec, pod: str) -> None:
    """Run the program until its result is in the object store. `pod`: name of this pod, which its
    replacement also has, so that it finds the checkpoints on the disk.

    Raises ProgramFailed if the coordinator has ended the run; exits with 143 after SIGTERM, and
    with another code after an error of this pod.
    """
    from rekindle.program.job_pod import SIGNALS, JobPod
    from rekindle.program.processes.environment import find_free_port

    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    os.environ.pop(REKINDLE_COORDINATOR, None)
    os.environ |= {
        "MASTER_ADDR": LOCALHOST,
        "MASTER_PORT": str(find_free_port(LOCALHOST)),
        POD_IP: LOCALHOST,
        POD_NAME: pod,
        REKINDLE_SECRET: secrets.token_hex(SECRET_BYTES),
    }

    start_time = time.time()
    flags = [f"{flag(name)}={to_text(getattr(spec, name))}" for name in ProgramSpec.model_fields]
    code = JobPod(flags, is_leader=True, restart_code=1).run()
    if code == 0:
        return

    if code != exit_codes.TERMINATED:
        verdicts = [
            event
            for event in read_events(study.store, spec.ledger)
            if event["event"] == "verdict" and event["t"] >= start_time
        ]
        if verdicts:
            raise ProgramFailed(verdicts[-1].get("message", ""))

    raise SystemExit(code)
