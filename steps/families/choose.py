"""Choose the best of the trained families of a workload, by their loss or a metric on the held-out
samples.

    rekindle step steps.families.choose --workload=... --dataset=dataset/ --output model=model/ \\
      --models='{"trees": "a/fit/model", "network": "a/train/model"}' --train='{"validation": 0.1}'

The field `chosen` of model.json in the output contains the validation values of all families.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from rekindle import Artifact, Reuse, StepInputs, StepOutputs
from rekindle.step import SHA256_OR_EMPTY


class Inputs(StepInputs):
    workload: str = Field(
        description="module of the workload, which defines the data and the families"
    )
    models: dict[str, str] = Field(
        description="key prefixes of the models in the object store, by family"
    )
    dataset: Artifact = Field(description="output of prepare")
    digest: str = Field(
        default="", pattern=SHA256_OR_EMPTY, description="digest of the dataset; empty: any"
    )
    train: dict[str, Any] = Field(
        default_factory=dict, description="the config's section `train`, as JSON"
    )


class Outputs(StepOutputs):
    model: Artifact = Field(description="model.safetensors and model.json of the best family")
    family: str = Field(description="name of the best family")


def _list_model_uris(inputs: Inputs) -> Iterator[str]:
    from rekindle import Store

    yield from map(Store.from_env().uri, inputs.models.values())


REUSE = Reuse(ignored_inputs=("models",), data_read=_list_model_uris)


def run(inputs: Inputs) -> Outputs:
    """Choose the best family. Raises ConfigError for an invalid setting, DataError if no family has
    a finite value."""
    from rekindle import Store, workload
    from rekindle.training.selection.choice import choose_family
    from rekindle.training.spec import TrainingSpec

    object_store = Store.from_env()

    folder_by_family = {family_name: inputs.workdir / family_name for family_name in inputs.models}
    for family_name, family_folder in folder_by_family.items():
        object_store.download(f"{inputs.models[family_name].rstrip('/')}/", family_folder)

    training_spec = TrainingSpec.for_local_training(inputs.workload, {}, inputs.train)
    chosen_model_folder = inputs.workdir / "chosen"
    best_family = choose_family(
        training_spec,
        workload.load(inputs.workload),
        folder_by_family,
        inputs.dataset,
        chosen_model_folder,
    )

    return Outputs(model=chosen_model_folder, family=best_family)
