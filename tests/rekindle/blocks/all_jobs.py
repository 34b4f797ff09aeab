"""A pipeline with a job of every other framework, whose inputs are outputs of an earlier task."""

from typing import Any

from pipelines.trees import Config
from rekindle import blocks
from rekindle.blocks.jobs.kubeflow import FRAMEWORKS

__all__ = ["Config", "build"]


def build(config: Config) -> Any:
    train = config.train.identity()
    with blocks.pipeline(config) as workflow:
        data = blocks.prepare()
        for kind, framework in FRAMEWORKS.items():
            replicas = {role: max(1, limits.min_pods) for role, limits in framework.roles.items()}
            blocks.job(
                data,
                kind,
                "steps.boosting.boost",
                replicas,
                task=f"train-{kind.lower()}",
                train=train,
            )

    return workflow
