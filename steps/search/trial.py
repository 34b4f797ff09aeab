"""Train the trials of one pod in a round of a sweep, one after the other.

    rekindle step steps.search.trial --sweep='{...}' --root=runs/a/search --round=0 --part=1 ...

Finished trials are skipped; an interrupted trial continues from its checkpoint.
"""

from typing import Any

from pydantic import Field

from rekindle import StepInputs, StepOutputs
from rekindle.training.search.config import Sweep


class Inputs(StepInputs):
    sweep: Sweep = Field(description="the `sweep` section of the config")
    root: str = Field(description="key prefix of the sweep in the object store")
    round: int = Field(ge=0, description="number of the round")
    part: int = Field(0, ge=0, description="index of the pod, which trains every `sweep.parallel`-th trial")
    workload: str = Field(description="module that defines the data, the model and its loss")
    family: str = Field("", description="family to train, if the workload has several")
    dataset: str = Field(description="key prefix of the dataset in the object store")
    digest: str = Field(description="digest of the dataset")
    model: dict[str, Any] = Field(default_factory=dict, description="the `model` section, without a trial's settings")
    train: dict[str, Any] = Field(default_factory=dict, description="the `train` section, without a trial's settings")
    experiment: str = Field("", description="MLflow experiment")
    run: str = Field("", description="name of the workflow, whose MLflow run is the parent of the trials' runs")


class Outputs(StepOutputs):
    """No outputs: the results are in the object store."""


def run(inputs: Inputs) -> Outputs:
    """Train the trials of this pod. Raises RekindleError if a trial crashed; exits with code 143 after SIGTERM."""
    from rekindle import Store
    from rekindle.training.search.rounds import shares
    from rekindle.training.search.study import Study
    from rekindle.training.search.trials import train

    study = Study(Store.from_env(), inputs.root, inputs.sweep)
    record = study.record(inputs.round) or {"run": []}
    numbers = shares(record["run"], inputs.sweep.parallel)[inputs.part]
    train(study, inputs.round, numbers, inputs.model_dump(), inputs.experiment, inputs.run)
    return Outputs()
