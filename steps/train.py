"""Train the model on virtual workers: any number of processes, the same weights; it goes on where it was.

    rekindle step steps.train --workload=steps.fraud --dataset=runs/a/dataset --digest=... --out=runs/a/model \\
        --checkpoints=runs/a/checkpoints

One process, or every process of a group: under a coordinator (MASTER_ADDR and MASTER_PORT say where), or under
torchrun. Leaves `<out>/model.safetensors` and `<out>/model.json`. Exit code 143 after a SIGTERM: not finished, start
it again.
"""

from rekindle.step import Reuse, StepOutputs
from rekindle.training.spec import TrainConfig, TrainingSpec
from rekindle.training.worker import work

# the rest of what an identity leaves out (TrainingSpec.identity)
REUSE = Reuse(aside=(*sorted(TrainConfig.NOT_IN_RESULT), "dataset", "out", "checkpoints", "run_id", "part", "reuse"))


class Inputs(TrainingSpec):
    """One training run; every process of the run, and its coordinator, is given the same."""


class Outputs(StepOutputs):
    """Nothing: the weights are in the object store, because the step may be one of many processes."""


def run(inputs: Inputs) -> Outputs:
    """Train until the model is in the object store. Raises ConfigError, DataError; exits 143 after a SIGTERM."""
    work(inputs)
    return Outputs()
