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
    pod_replicas = {"Launcher": 1, "Worker": config.mpi.workers}
    job_spec = {"slotsPerWorker": config.mpi.slots}
    with blocks.pipeline(config) as workflow:
        prepare_step = blocks.prepare()
        training_job = blocks.job(
            prepare_step,
            "MPIJob",
            "steps.boosting.boost",
            pod_replicas,
            task="train",
            spec=job_spec,
        )
        blocks.decide(training_job)
    return workflow
