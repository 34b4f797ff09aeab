"""Boosted trees and a network: an XGBoostJob and a PyTorchJob train in parallel; the better model is released.

rekindle run configs/trees.yaml
"""

from typing import Any

from pydantic import Field

import rekindle
from rekindle import Section, blocks


class Trees(Section):
    rounds: int = Field(default=60, ge=1, description="number of trees per digit")
    workers: int = Field(default=2, ge=0, description="number of Worker pods of the XGBoostJob")


class Config(rekindle.Config):
    trees: Trees = Trees()


def build(config: Config) -> Any:
    replicas = {"Master": 1, "Worker": config.trees.workers}
    boosted = config.model.model_copy(update={"rounds": config.trees.rounds})
    with blocks.pipeline(config) as workflow:
        data = blocks.prepare()
        models = [
            blocks.train(data, task="train-network"),
            blocks.job(data, "XGBoostJob", "steps.boosting.boost", replicas, task="train-trees", model=boosted),
        ]
        with blocks.group("decide", mutex=config.name):
            network, trees = (
                blocks.evaluate(model, task=f"evaluate-{name}")
                for name, model in zip(("network", "trees"), models, strict=True)
            )
            better = network.outputs.metrics["accuracy"] >= trees.outputs.metrics["accuracy"]
            for name, evaluation, wins in (("network", network, better), ("trees", trees, ~better)):
                blocks.ship(evaluation, name=f"ship-{name}", when=wins)
    return workflow
