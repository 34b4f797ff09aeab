"""Train the model on virtual workers, so that the weights do not depend on the number of processes.
An interrupted training resumes.

    rekindle step steps.train --workload=steps.fraud --dataset=runs/a/dataset --digest=... \\
      --out=runs/a/model --checkpoints=runs/a/checkpoints

The step runs as a single process, or within a group under a coordinator (at MASTER_ADDR and
MASTER_PORT) or under torchrun. The step writes `<out>/model.safetensors` and `<out>/model.json`.
Exit code 143 after a SIGTERM means that the training is unfinished: start the step again.
"""

from rekindle.keys import MODEL
from rekindle.step import Reuse, StepOutputs
from rekindle.training.spec import TrainConfig, TrainingSpec
from rekindle.training.worker import run_worker

# the ignored inputs do not affect the trained model, but all other inputs do
# (TrainingSpec.identity)
REUSE = Reuse(
    ignored_inputs=(
        *sorted(TrainConfig.NOT_IN_RESULT),
        "dataset",
        "out",
        "checkpoints",
        "run_id",
        "part",
        "reuse",
    ),
    stored=(MODEL,),
)


class Inputs(TrainingSpec):
    """The inputs of one training run, which all its processes and its coordinator get."""


class Outputs(StepOutputs):
    """The step has no outputs, because the model is written to the object store: this process may
    be one of several."""


def run(inputs: Inputs) -> Outputs:
    """Train until the model is in the object store.

    Raises ConfigError or DataError; exits with code 143 after a SIGTERM.
    """
    run_worker(inputs)
    return Outputs()
