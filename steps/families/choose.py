"""Choose the best of the trained families of a workload, by their loss or a metric on the held-out
samples.

    rekindle step steps.families.choose --workload=... \\
      --models='{"trees": "a/fit/model", "network": "a/train/model"}'
        --dataset=dataset/ --train='{"validation": 0.1}' --output model=model/

In the output's model.json, `chosen` has the values of all families.
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


def _uris(inputs: Inputs) -> Iterator[str]:
    from rekindle import Store

    yield from map(Store.from_env().uri, inputs.models.values())


REUSE = Reuse(ignored_inputs=("models",), data_read=_uris)


def run(inputs: Inputs) -> Outputs:
    """Choose the best family. Raises ConfigError for an invalid setting, DataError if no family has
    a finite value."""
    from rekindle import Store, workload
    from rekindle.training.selection.choice import choose_family
    from rekindle.training.spec import TrainingSpec

    store = Store.from_env()

    folders = {name: inputs.workdir / name for name in inputs.models}
    for name, folder in folders.items():
        store.download(f"{inputs.models[name].rstrip('/')}/", folder)

    spec = TrainingSpec.for_local_training(inputs.workload, {}, inputs.train)
    model = inputs.workdir / "chosen"
    family = choose_family(spec, workload.load(inputs.workload), folders, inputs.dataset, model)

    return Outputs(model=model, family=family)
