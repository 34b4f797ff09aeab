"""Runs one trial of a sweep: a training program on this pod, with the settings of the trial.

The coordinator and the agent of the program are processes of this pod. If the pod is killed, the
next pod continues the program from its newest complete checkpoint.
"""

import math
import os
import secrets
import signal
import time
from collections.abc import Mapping
from typing import Any

from argolocal.common import exit_codes
from rekindle.errors import ConfigError, write_stderr
from rekindle.kubernetes_names import POD_IP, POD_NAME, REKINDLE_COORDINATOR, REKINDLE_SECRET
from rekindle.program.spec import ProgramSpec
from rekindle.program.trials.metric import MissingMetric, find_metric
from rekindle.step import format_flag, format_parameter
from rekindle.training.ledger.events import read_events
from rekindle.training.membership.completion import read_completed_model
from rekindle.training.spec import SINGLE_WORKER_SETTINGS
from rekindle.training.sweep.halving import Trial
from rekindle.training.sweep.study import SweepStudy
from rekindle.training.sweep.trials import record_failure

LOCALHOST = "127.0.0.1"
SECRET_BYTES = 32
# settings of the section `train` that are used for programs
TRAIN_SETTINGS = ("silence_seconds", "hung_seconds")


class ProgramTrainer:
    """Trains each trial by running a program. `shared_inputs`: the inputs that are equal for all
    trials."""

    # the metric of the trials may be in MLflow only
    needs_mlflow = True

    def __init__(self, shared_inputs: Mapping[str, Any]) -> None:
        self.shared_inputs = shared_inputs

    def import_modules(self) -> None:
        import rekindle.program.job_pod  # noqa: F401

    def train(self, study: SweepStudy, trial: Trial, rung_index: int, run_id: str) -> None:
        """Run the program to its end, and record its metric or its failure."""
        try:
            program_spec = make_program_spec(study, trial, rung_index, self.shared_inputs, run_id)
            # if the model is already complete, an earlier process ended before it recorded the
            # metric
            if not read_completed_model(program_spec):
                pod_name = f"trial-{trial.number}-pod-{self.shared_inputs['part']}"
                _run_program(study, program_spec, pod_name)

            ledger_events = read_events(study.store, program_spec.ledger)
            metric_value = find_metric(study.sweep.metric, ledger_events, run_id)
        except (ConfigError, ProgramFailed, MissingMetric) as error:
            record_failure(study, trial, rung_index, str(error))
        else:
            write_stderr(f"trial {trial.number}: {study.sweep.metric} {metric_value:.5g}")
            study.record_metric(
                trial.number, rung_index, metric_value if math.isfinite(metric_value) else None
            )


class ProgramFailed(Exception):
    """Raised if the program has failed and a restart would not help."""


def make_program_spec(
    study: SweepStudy,
    trial: Trial,
    rung_index: int,
    shared_inputs: Mapping[str, Any],
    run_id: str = "",
) -> ProgramSpec:
    """Return the inputs of a trial's program. Raises ConfigError."""
    model_settings = dict(shared_inputs["model"])
    for setting_path, setting_value in trial.settings.items():
        model_settings[setting_path.partition(".")[2]] = setting_value

    train_settings = shared_inputs["train"]
    program_inputs = {
        **{
            input_name: shared_inputs[input_name]
            for input_name in ("program", "workload", "dataset", "digest")
        },
        **{
            input_name: train_settings[input_name]
            for input_name in TRAIN_SETTINGS
            if input_name in train_settings
        },
        **SINGLE_WORKER_SETTINGS,
        "out": study.make_output_prefix(trial.number, rung_index),
        "checkpoints": study.make_checkpoint_prefix(trial.number),
        "model": model_settings,
        "run_id": run_id,
    }

    try:
        return ProgramSpec.model_validate(program_inputs)
    except ValueError as error:
        raise ConfigError(f"{trial.settings}: {error}") from error


def _run_program(study: SweepStudy, program_spec: ProgramSpec, pod_name: str) -> None:
    """Run the program until its result is in the object store. `pod_name`: name of this pod. A pod
    that replaces this pod has the same name, so that it finds the checkpoints on the disk.

    Raises ProgramFailed if the coordinator has ended the run. Raises SystemExit with 143 after
    SIGTERM, and with another code after an error of this pod.
    """
    from rekindle.program.job_pod import HANDLED_SIGNALS, JobPod
    from rekindle.program.processes.environment import find_free_port

    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    os.environ.pop(REKINDLE_COORDINATOR, None)
    os.environ |= {
        "MASTER_ADDR": LOCALHOST,
        "MASTER_PORT": str(find_free_port(LOCALHOST)),
        POD_IP: LOCALHOST,
        POD_NAME: pod_name,
        REKINDLE_SECRET: secrets.token_hex(SECRET_BYTES),
    }

    start_time_s = time.time()
    command_flags = [
        f"{format_flag(field_name)}={format_parameter(getattr(program_spec, field_name))}"
        for field_name in ProgramSpec.model_fields
    ]
    exit_code = JobPod(command_flags, is_leader=True, restart_code=1).run()
    if exit_code == 0:
        return

    if exit_code != exit_codes.TERMINATED:
        end_events = [
            ledger_event
            for ledger_event in read_events(study.store, program_spec.ledger)
            if ledger_event["event"] == "verdict" and ledger_event["t"] >= start_time_s
        ]
        if end_events:
            raise ProgramFailed(end_events[-1].get("message", ""))

    raise SystemExit(exit_code)
