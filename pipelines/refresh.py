"""Update a served model with newer data, without training: refresh → release → deploy → verify →
switch.

    rekindle run configs/refresh.yaml --set data.source=october.parquet

A refresh keeps the weights of the model, and changes only its serving state (data for predictions).
The step `verify` checks the new release like every other release.
"""

from typing import Any

from rekindle import Config, blocks
from rekindle.blocks.manifest.provenance import BACKFILL, parameter_tag


def build(config: Config) -> Any:
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
            backfill=parameter_tag(BACKFILL),
        )

        blocks.ship(refreshed)

    return workflow
