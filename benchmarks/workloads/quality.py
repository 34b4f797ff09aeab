"""A workload whose model is a single number, its quality, which it predicts for every row. A whole
pipeline with this workload therefore takes only seconds."""

import json
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from rekindle import Artifact, StepInputs, StepOutputs
from rekindle.content.dataset import record_files
from rekindle.gate import Evaluation, Metric
from rekindle.release.examples import Examples
from rekindle.release.release_files import record_predictions
from rekindle.sections import Section
from rekindle.workload import DataConfig

Model = Section
metrics = (Metric("quality", lambda predictions, truths: sum(predictions) / len(predictions)),)
prepare = dataset = model = loss = None
ROW_INSTANCES = [{"id": number} for number in range(20)]


class Data(DataConfig):
    source: str = "rows://"


class Instance(BaseModel):
    id: int


class Request(BaseModel):
    instances: list[Instance] = Field(min_length=1)


class Predictor:
    Request = Request

    def __init__(self, release: Path) -> None:
        self.quality = json.loads((release / "model.safetensors").read_text())[0]

    def example(self) -> dict[str, Any]:
        return {"instances": ROW_INSTANCES[:1]}

    def predict(self, requests: Sequence[Request]) -> list[list[float]]:
        return [[self.quality] * len(request.instances) for request in requests]


class Rows(Examples):
    """Test rows, which can be scored without importing torch."""

    def score(self, model: Path, dataset: Path) -> list[float]:
        return [Predictor(model).quality] * len(self)

    def report(self, out: Path, predictions: dict[str, Any], evaluation: Evaluation) -> Evaluation:
        record_predictions(out, [({"instances": ROW_INSTANCES}, predictions["candidate"])])
        return replace(evaluation)


def predictor(release: Path) -> Predictor:
    return Predictor(release)


def examples(path: Path) -> Rows:
    return Rows([0.0] * len(ROW_INSTANCES), ROW_INSTANCES)


class Inputs(StepInputs):
    quality: float
    name: str
    workflow: str


class Outputs(StepOutputs):
    run_id: str
    dataset: Artifact
    model: Artifact


def run(inputs: Inputs) -> Outputs:
    """Write a model of the quality `inputs.quality`, instead of training a model."""
    from rekindle import tracking

    weights_json = json.dumps([inputs.quality, inputs.workflow])
    model_card = {"workload": __name__, "sha256": sha256(weights_json.encode()).hexdigest()}

    file_texts = {
        "model/model.safetensors": weights_json,
        "model/model.json": json.dumps(model_card),
        "dataset/dataset.json": json.dumps({"facts": {}, "rows": len(ROW_INSTANCES)}),
    }
    for path, file_text in file_texts.items():
        (inputs.workdir / path).parent.mkdir(exist_ok=True)
        (inputs.workdir / path).write_text(file_text)

    record_files(inputs.workdir / "dataset")
    run_id = tracking.start_run(inputs.name, inputs.workflow)
    return Outputs(
        run_id=run_id, dataset=inputs.workdir / "dataset", model=inputs.workdir / "model"
    )
