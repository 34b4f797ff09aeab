"""Fine-tuning: the training starts with the weights of another model's champion.

rekindle run configs/language.yaml && rekindle run configs/finetuning.yaml
"""

from typing import Any

from pydantic import Field

import rekindle
from rekindle import Section, blocks


class Finetuning(Section):
    base: str = Field(
        default="language", description="registered model whose champion has the initial weights"
    )


class Config(rekindle.Config):
    finetuning: Finetuning = Finetuning()


def build(config: Config) -> Any:
    with blocks.pipeline(config) as workflow:
        data = blocks.prepare()
        base = blocks.step("steps.champion", name=config.finetuning.base)
        model = blocks.train(data, start=base.outputs.model_uri)
        blocks.decide(model)
    return workflow
