"""Run your own training program on a group of pods. When a pod is lost, leaves or joins, the
program is restarted from its newest complete checkpoint.

    rekindle step steps.program --workload=steps.sentiment --program='{"command": ["train.py"]}' \\
      --dataset=runs/a/dataset --digest=... --out=runs/a/model --checkpoints=runs/a/checkpoints

The step runs as the agent (first process) of a pod, under a coordinator at MASTER_ADDR and
MASTER_PORT. The step writes `<out>/result/` and `<out>/model.json`. Exit code 143 after a SIGTERM
means that the training is unfinished and the step must be started again.
"""

from rekindle.keys import MODEL
from rekindle.program.spec import ProgramSpec
from rekindle.step import Reuse, StepOutputs

REUSE = Reuse(
    ignored_inputs=tuple(sorted(ProgramSpec.NOT_IN_RESULT & ProgramSpec.model_fields.keys())),
    not_reused_if=lambda inputs: "the cache does not know which files a program loads",
    stored=(MODEL,),
)


class Inputs(ProgramSpec):
    """The inputs of one run of a program, which all pods and the coordinator get."""


class Outputs(StepOutputs):
    """The step has no outputs, because the agent of rank 0 stores the model in the object store."""


def run(inputs: Inputs) -> Outputs:
    """Run the program until its result is in the object store. Raises RekindleError; exits with
    code 143 after a SIGTERM."""
    from rekindle.program.agent import run_agent

    exit_code = run_agent(inputs)
    if exit_code:
        raise SystemExit(exit_code)
    return Outputs()
