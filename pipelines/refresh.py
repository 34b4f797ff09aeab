"""Newer data for a model that serves, without a training: refresh → release → deploy → verify → switch.

    rekindle run configs/refresh.yaml --set data.source=october.parquet

The weights stay. What the servers know of the past reaches up to the newest data, and goes through the same checks.
"""

from typing import Any

from rekindle import Config, blocks


def build(config: Config) -> Any:
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
