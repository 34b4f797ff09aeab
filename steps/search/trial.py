"""Train trials of a sweep in one pod, one after the other, until no trial is left.

    rekindle step steps.search.trial --sweep='{...}' --root=runs/a/search --part=1 ...

The pods decide together which trial trains next; Optuna chooses the settings of new trials. Each
decision is written to the object store before a pod acts on it, so a pod may be killed and
restarted at any time: the restarted pod continues its trial from the checkpoint.
"""

from typing import Any

from pydantic import Field

from rekindle import StepInputs, StepOutputs
from rekindle.step import SHA256_PATTERN
from rekindle.training.sweep.sweep_config import Sweep


class Inputs(StepInputs):
    sweep: Sweep = Field(description="the `sweep` section of the config")
    root: str = Field(description="key prefix of the sweep in the object store")
    part: int = Field(0, ge=0, description="number of the pod")
    default: dict[str, Any] = Field(
        default_factory=dict, description="settings of the first trial (empty: Optuna chooses them)"
    )
    whole: dict[str, bool] = Field(
        default_factory=dict, description="for each setting, true if its values are integers"
    )
    workload: str = Field(description="module that defines the data, the model and its loss")
    family: str = Field("", description="family to train, if the workload has several")
    dataset: str = Field(description="key prefix of the dataset in the object store")
    digest: str = Field(pattern=SHA256_PATTERN, description="digest of the dataset")
    model: dict[str, Any] = Field(
        default_factory=dict, description="the `model` section, without a trial's settings"
    )
    train: dict[str, Any] = Field(
        default_factory=dict, description="the `train` section, without a trial's settings"
    )
    program: dict[str, Any] = Field(
        default_factory=dict, description="the `program` section; {}: train the workload's model"
    )
    experiment: str = Field("", description="MLflow experiment")
    run: str = Field(
        "", description="name of the workflow, whose MLflow run is the parent of the trials' runs"
    )


class Outputs(StepOutputs):
    """The step has no outputs, because the results of trials are in the object store."""


def run(inputs: Inputs) -> Outputs:
    """Train the trials of this pod. Raises RekindleError if a service is unavailable; exits with
    143 after SIGTERM."""
    from rekindle import Store
    from rekindle.names import RunName
    from rekindle.release.retention import ownership
    from rekindle.training.ledger.argo_progress import disable_progress
    from rekindle.training.sweep.study import SweepStudy
    from rekindle.training.sweep.trials import Trainer, WorkloadTrainer, train_trials

    # report no progress to Argo, because each trial has its own steps
    disable_progress()
    trial_trainer: Trainer
    if inputs.program:
        from rekindle.program.trials.run import ProgramTrainer

        trial_trainer = ProgramTrainer(inputs.model_dump())
    else:
        trial_trainer = WorkloadTrainer(inputs.model_dump())

    sweep_study = SweepStudy(Store.from_env(), inputs.root, inputs.sweep)
    train_trials(
        sweep_study,
        inputs.part,
        inputs.default,
        inputs.whole,
        trial_trainer,
        inputs.experiment,
        inputs.run,
        lambda object_store, run_id: ownership.record_trial(
            object_store, RunName(inputs.run), run_id
        ),
    )
    return Outputs()
