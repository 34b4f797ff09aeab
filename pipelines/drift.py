"""Compare the recent requests of a model with its test rows; on drift, send a notification and
optionally retrain.

    rekindle run configs/drift.yaml --set drift.model=demo
"""

from typing import Any

from hera.workflows import Task

import rekindle
from rekindle import blocks
from rekindle.blocks.serving.retraining import build_retraining_template
from rekindle.release.serve_config import DriftConfig


class Config(rekindle.Config):
    drift: DriftConfig = DriftConfig()


def build(config: Config) -> Any:
    inputs = dict(config.drift) | {"workflow": "{{workflow.name}}", "experiment": config.name}
    with blocks.pipeline(config) as workflow:
        drift = blocks.step("steps.monitoring.drift", inputs=inputs, pod="report")
        if config.drift.retrain:
            with blocks.group("retraining", when=drift.outputs.again == True):  # noqa: E712  # Argo evaluates it
                Task(name="retrain", template=build_retraining_template(config.drift.model))
    return workflow
