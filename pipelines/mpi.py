"""An MPIJob: its Launcher starts a process in every slot of its Workers, and all of them train one model.

rekindle run configs/mpi.yaml
"""

from typing import Any

from pydantic import Field

import rekindle
from rekindle import Section, blocks


class Mpi(Section):
    workers: int = Field(default=2, ge=1, description="pods beside the Launcher")
    slots: int = Field(default=2, ge=1, description="processes in each of them")


class Config(rekindle.Config):
    mpi: Mpi = Mpi()


def build(config: Config) -> Any:
    """The pipeline of `config`."""
    replicas, spec = {"Launcher": 1, "Worker": config.mpi.workers}, {"slotsPerWorker": config.mpi.slots}
    with blocks.pipeline(config) as workflow:
        data = blocks.prepare()
        model = blocks.job(data, "MPIJob", "steps.boosting.boost", replicas, task="train", spec=spec)
        blocks.decide(model)
    return workflow
