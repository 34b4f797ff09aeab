"""Choose between the trained families of a workload, by their loss or a measure of the held-out samples.

    rekindle step steps.families.choose --workload=... --models='{"trees": "a/fit/model", "network": "a/train/model"}'
        --dataset=dataset/ --train='{"validation": 0.1}' --output model=model/

The model.json of the output has the values of all families as `chosen`.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from rekindle import Artifact, Reuse, StepInputs, StepOutputs


class Inputs(StepInputs):
    workload: str = Field(description="module that defines the data and the families")
    models: dict[str, str] = Field(description="by family: key prefix of its model in the object store")
    dataset: Artifact = Field(description="output of prepare")
    train: dict[str, Any] = Field(default_factory=dict, description="the config's section `train`, as JSON")


class Outputs(StepOutputs):
    model: Artifact = Field(description="model.safetensors and model.json of the best family")
    family: str = Field(description="name of the best family")


def _uris(inputs: Inputs) -> Iterator[str]:
    from rekindle import Store

    yield from map(Store.from_env().uri, inputs.models.values())


REUSE = Reuse(aside=("models",), reads=_uris)


def run(inputs: Inputs) -> Outputs:
    """Raises ConfigError, or DataError if no family has a finite value."""
    from rekindle import Store, workload
    from rekindle.training.selection.choice import choose
    from rekindle.training.spec import TrainingSpec

    store, folders = Store.from_env(), {name: inputs.workdir / name for name in inputs.models}
    for name, folder in folders.items():
        store.download(f"{inputs.models[name].rstrip('/')}/", folder)
    spec = TrainingSpec.local(inputs.workload, {}, inputs.train)
    model = inputs.workdir / "chosen"
    family = choose(spec, workload.load(inputs.workload), folders, inputs.dataset, model)
    return Outputs(model=model, family=family)
