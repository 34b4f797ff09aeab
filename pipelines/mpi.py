"""Training in an MPIJob: the Launcher starts one process per slot of the Workers, and the processes
train one model together.

    rekindle run configs/mpi.yaml
"""

from typing import Any

from pydantic import Field

import rekindle
from rekindle import Section, blocks


class Mpi(Section):
    workers: int = Field(default=2, ge=1, description="number of Worker pods")
    slots: int = Field(default=2, ge=1, description="number of processes per Worker pod")


class Config(rekindle.Config):
    mpi: Mpi = Mpi()


def build(config: Config) -> Any:
    replicas = {"Launcher": 1, "Worker": config.mpi.workers}
    spec = {"slotsPerWorker": config.mpi.slots}
    with blocks.pipeline(config) as workflow:
        data = blocks.prepare()
        model = blocks.job(
            data, "MPIJob", "steps.boosting.boost", replicas, task="train", spec=spec
        )
        blocks.decide(model)
    return workflow
