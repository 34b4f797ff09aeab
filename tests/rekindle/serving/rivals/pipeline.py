"""A model without a training, and a rival that becomes the champion between the model's evaluation
and promotion."""

from typing import Any

from pydantic import Field

import rekindle
from rekindle import Section, blocks


class Rivalry(Section):
    quality: float = Field(description="quality of the model")
    rival: float = Field(description="quality of the rival; 0: none")


class Config(rekindle.Config):
    rivalry: Rivalry


def build(config: Config) -> Any:
    with blocks.pipeline(config) as workflow:
        inputs = {"name": config.name, "workflow": "{{workflow.name}}"}
        quality = config.rivalry.quality
        model = blocks.step(
            "benchmarks.workloads.quality", task="candidate", inputs=inputs, quality=quality
        )

        with blocks.group("decide", mutex=config.name):
            evaluation = blocks.evaluate(model)
            if config.rivalry.rival:
                module = "tests.rekindle.serving.rivals.rival"
                rival = blocks.step(
                    module, after=[evaluation], name=config.name, quality=config.rivalry.rival
                )
                with blocks.group("ship", when=evaluation.outputs.verdict == "release") as shipped:
                    blocks.verify(blocks.deploy(blocks.release(evaluation)))

                rival.next(shipped)
            else:
                blocks.ship(evaluation)

    return workflow
