"""Train the model on virtual workers: any number of processes gives the same weights. Resumes after interruptions.

    rekindle step steps.train --workload=steps.fraud --dataset=runs/a/dataset --digest=... --out=runs/a/model \\
        --checkpoints=runs/a/checkpoints

Runs as a single process, or within a group under a coordinator (at MASTER_ADDR and MASTER_PORT) or under torchrun.
Writes `<out>/model.safetensors` and `<out>/model.json`. Exit code 143 after a SIGTERM means that the training is
unfinished: start the step again.
"""

from rekindle.step import Reuse, StepOutputs
from rekindle.training.spec import TrainConfig, TrainingSpec
from rekindle.training.worker import work

# all other inputs are the identity of a training (TrainingSpec.identity)
REUSE = Reuse(aside=(*sorted(TrainConfig.NOT_IN_RESULT), "dataset", "out", "checkpoints", "run_id", "part", "reuse"))


class Inputs(TrainingSpec):
    """One training run; all its processes and its coordinator get the same inputs."""


class Outputs(StepOutputs):
    """Empty: the step may be one of many processes, so the weights go to the object store."""


def run(inputs: Inputs) -> Outputs:
    """Train until the model is in the object store. Raises ConfigError, DataError; exits 143 after a SIGTERM."""
    work(inputs)
    return Outputs()
