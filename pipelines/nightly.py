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
        data = blocks.prepare()
        images = blocks.step("steps.shifted", dataset=data.outputs.dataset)

        models = [
            blocks.train(
                images,
                task=f"train-{name}",
                model=config.model.model_copy(update={"channels": channels}),
                run_id=data.outputs.run_id,
            )
            for name, channels in zip(("small", "wide"), config.nightly.channels, strict=True)
        ]

        with blocks.group("decide", mutex=config.name):
            small, wide = (
                blocks.evaluate(model, task=f"evaluate-{name}")
                for name, model in zip(("small", "wide"), models, strict=True)
            )
            better = small.outputs.metrics["accuracy"] >= wide.outputs.metrics["accuracy"]
            for name, evaluation, wins in (("small", small, better), ("wide", wide, ~better)):
                blocks.ship(evaluation, name=f"ship-{name}", when=wins)

    return workflow
