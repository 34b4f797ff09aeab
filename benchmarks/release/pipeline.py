"""The pipeline of benchmarks/release/pairs.py: it creates a model without training, and evaluates
the model with or without the mutex."""

from typing import Any

from pydantic import Field

import rekindle
from rekindle import Section, blocks


class Candidate(Section):
    quality: float = Field(default=0.5, description="quality of the model")
    mutex: bool = Field(default=True, description="judge one run at a time")


class Config(rekindle.Config):
    candidate: Candidate = Candidate()


def build(config: Config) -> Any:
    with blocks.pipeline(config) as workflow:
        inputs = {
            "quality": config.candidate.quality,
            "name": config.name,
            "workflow": "{{workflow.name}}",
        }
        model = blocks.step("benchmarks.workloads.quality", task="candidate", inputs=inputs)
        if config.candidate.mutex:
            blocks.decide(model)
        else:
            blocks.ship(blocks.evaluate(model))
    return workflow
