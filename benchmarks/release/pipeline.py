"""The pipeline of benchmarks/release/pairs.py: this pipeline creates a model without training, and
evaluates the model with or without the mutex."""

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
        step_inputs = {
            "quality": config.candidate.quality,
            "name": config.name,
            "workflow": "{{workflow.name}}",
        }
        candidate_step = blocks.step(
            "benchmarks.workloads.quality", task="candidate", inputs=step_inputs
        )
        if config.candidate.mutex:
            blocks.decide(candidate_step)
        else:
            blocks.ship(blocks.evaluate(candidate_step))
    return workflow
