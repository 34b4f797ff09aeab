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
        prepare_step = blocks.prepare()
        champion_step = blocks.step("steps.champion", name=config.finetuning.base)
        train_step = blocks.train(prepare_step, start=champion_step.outputs.model_uri)
        blocks.decide(train_step)
    return workflow
