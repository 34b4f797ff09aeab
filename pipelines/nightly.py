"""A custom step augments the images, two networks train on them, and the pipeline releases the
better network.

    rekindle run configs/nightly.yaml
"""

from typing import Any

from pydantic import Field

import rekindle
from rekindle import Section, blocks


class Nightly(Section):
    channels: tuple[int, int] = Field(
        default=(8, 16), description="number of channels of each of the two networks"
    )


class Config(rekindle.Config):
    nightly: Nightly = Nightly()


def build(config: Config) -> Any:
    with blocks.pipeline(config) as workflow:
        prepare_step = blocks.prepare()
        shift_step = blocks.step("steps.shifted", dataset=prepare_step.outputs.dataset)

        train_steps = [
            blocks.train(
                shift_step,
                task=f"train-{network_name}",
                model=config.model.model_copy(update={"channels": channel_count}),
                run_id=prepare_step.outputs.run_id,
            )
            for network_name, channel_count in zip(
                ("small", "wide"), config.nightly.channels, strict=True
            )
        ]

        with blocks.group("decide", mutex=config.name):
            small_evaluation, wide_evaluation = (
                blocks.evaluate(train_step, task=f"evaluate-{network_name}")
                for network_name, train_step in zip(("small", "wide"), train_steps, strict=True)
            )
            is_small_better = (
                small_evaluation.outputs.metrics["accuracy"]
                >= wide_evaluation.outputs.metrics["accuracy"]
            )
            for network_name, evaluation, has_won in (
                ("small", small_evaluation, is_small_better),
                ("wide", wide_evaluation, ~is_small_better),
            ):
                blocks.ship(evaluation, name=f"ship-{network_name}", when=has_won)

    return workflow
