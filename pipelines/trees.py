"""Boosted trees and a network: an XGBoostJob and a PyTorchJob train in parallel, and validation
chooses one of the two models.

    rekindle run configs/trees.yaml
"""

from typing import Any

from pydantic import Field

import rekindle
from rekindle import Section, blocks


class Trees(Section):
    workers: int = Field(default=2, ge=0, description="number of Worker pods of the XGBoostJob")


class Config(rekindle.Config):
    trees: Trees = Trees()


def build(config: Config) -> Any:
    replicas = {"Master": 1, "Worker": config.trees.workers}
    train = config.train.identity()
    with blocks.pipeline(config) as workflow:
        data = blocks.prepare()
        network = blocks.train(data, family="network", task="train-network")
        stumps = blocks.job(
            data, "XGBoostJob", "steps.boosting.boost", replicas, task="train-trees", train=train
        )
        blocks.decide(blocks.choose(data, {"stumps": stumps, "network": network}))
    return workflow
