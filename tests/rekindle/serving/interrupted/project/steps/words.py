"""A workload that predicts the text in its weights."""

from pydantic import BaseModel

from rekindle import Section
from rekindle.gate import Metric
from rekindle.workload import DataConfig

Model = Section
metrics = (Metric("loss", max),)
prepare = dataset = model = loss = examples = None


class Data(DataConfig):
    source: str = ""


class Instance(BaseModel):
    id: int


class Request(BaseModel):
    instances: list[Instance]


class Predictor:
    Request = Request

    def __init__(self, release):
        self.words = (release / "model.safetensors").read_text()

    def example(self):
        return {"instances": [{"id": 0}]}

    def predict(self, requests):
        return [[self.words] * len(request.instances) for request in requests]


def predictor(release):
    return Predictor(release)
