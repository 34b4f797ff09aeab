"""Is what a model sees still what it was judged on? If not, people are told, and it may be trained again.

rekindle run configs/drift.yaml --set drift.model=demo
"""

from typing import Any

from hera.workflows import Task

import rekindle
from rekindle import blocks
from rekindle.blocks.serving.retraining import retraining
from rekindle.release.config import DriftConfig


class Config(rekindle.Config):
    drift: DriftConfig = DriftConfig()


def build(config: Config) -> Any:
    """The pipeline of `config`."""
    about = {"workflow": "{{workflow.name}}", "experiment": config.name}
    with blocks.pipeline(config) as workflow:
        look = blocks.step("steps.monitoring.drift", inputs=dict(config.drift) | about, pod="report")
        if config.drift.retrain:
            with blocks.group("retraining", when=look.outputs.again == True):  # noqa: E712  # a condition of Argo
                Task(name="retrain", template=retraining(config.drift.model))
    return workflow
