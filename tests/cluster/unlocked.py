"""The pipeline of configs/demo.yaml without the mutex of `decide`: two runs judge and promote at
the same time."""

from typing import Any

from rekindle import Config, blocks


def build(config: Config) -> Any:
    with blocks.pipeline(config) as workflow:
        blocks.ship(blocks.evaluate(blocks.train(blocks.prepare())))
    return workflow
