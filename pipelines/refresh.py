"""Newer data for a model that serves, without a training: refresh → release → deploy → verify → switch.

    rekindle run configs/refresh.yaml --set data.source=october.parquet

The weights stay. What the servers know of the past reaches up to the newest data, and goes through the same checks.
"""

from typing import TYPE_CHECKING

from rekindle import blocks

if TYPE_CHECKING:
    from hera.workflows import Workflow

    from rekindle.blocks.manifest.config import Config


def build(config: "Config") -> "Workflow":
    """The pipeline of `config`."""
    data = config.data.model_dump(mode="json")
    with blocks.pipeline(config) as workflow, blocks.group("decide", mutex=config.name):
        refreshed = blocks.step(
            "steps.refresh",
            pod="evaluate",
            workload=config.workload,
            name=config.name,
            data=data,
            workflow="{{workflow.name}}",
            experiment=config.name,
        )
        blocks.ship(refreshed)
    return workflow
