"""Fit a family of the workload that has no training loop, such as boosted trees.

    rekindle step steps.families.fit --workload=... --family=trees --dataset=dataset/ \\
      --output model=model/
"""

from typing import Any

from pydantic import Field

from rekindle import Artifact, Reuse, StepInputs, StepOutputs
from rekindle.step import SHA256_OR_EMPTY

REUSE = Reuse()


class Inputs(StepInputs):
    workload: str = Field(
        description="module of the workload, which defines the data and the families"
    )
    family: str = Field(description="name of the family")
    dataset: Artifact = Field(description="output of prepare")
    digest: str = Field(
        "", pattern=SHA256_OR_EMPTY, description="digest of the dataset, an output of prepare"
    )
    model: dict[str, Any] = Field(
        default_factory=dict, description="the config's section `model`, as JSON"
    )
    train: dict[str, Any] = Field(
        default_factory=dict, description="the config's section `train`, as JSON"
    )


class Outputs(StepOutputs):
    model: Artifact = Field(description="model.safetensors and model.json")


def run(inputs: Inputs) -> Outputs:
    """Fit the family. Raises ConfigError for an invalid setting, DataError for an unsuitable
    dataset."""
    from rekindle import workload
    from rekindle.training.selection.fitting import fit_family
    from rekindle.training.spec import TrainingSpec

    training_spec = TrainingSpec.for_local_training(
        inputs.workload, inputs.model, inputs.train, inputs.family, inputs.digest
    )
    model_folder = inputs.workdir / "model"
    fit_family(training_spec, workload.load(inputs.workload), inputs.dataset, model_folder)
    return Outputs(model=model_folder)
