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
    pod_replicas = {"Master": 1, "Worker": config.trees.workers}
    train_identity = config.train.identity()
    with blocks.pipeline(config) as workflow:
        prepare_step = blocks.prepare()
        network_step = blocks.train(prepare_step, family="network", task="train-network")
        boosting_job = blocks.job(
            prepare_step,
            "XGBoostJob",
            "steps.boosting.boost",
            pod_replicas,
            task="train-trees",
            train=train_identity,
        )
        blocks.decide(
            blocks.choose(prepare_step, {"stumps": boosting_job, "network": network_step})
        )
    return workflow
