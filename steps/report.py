"""Close the workflow's MLflow run with what became of it: the exit handler of every pipeline.

    python -m steps report --workflow=fraud-x7k2p --status=Failed --failures='[{"displayName": "train"}]'

Works whatever happened before, and any number of times; where no run was made there is nothing to close.
"""

import json
import sys
from typing import Any

from pydantic import Field

from steps.step import StepInputs, StepOutputs

STATUS = {"Succeeded": "FINISHED", "Failed": "FAILED", "Error": "FAILED"}
STOPPED = ("stopped with strategy", "shutdown with strategy", "terminated with strategy")  # Argo's words for `stop`
SHOWN = 5  # failures in the tag; MLflow takes 5,000 characters


class Inputs(StepInputs):
    workflow: str = Field(description="name of the workflow")
    status: str = Field(description="{{workflow.status}}: Succeeded, Failed or Error")
    failures: str = Field(default="", description="{{workflow.failures}}: JSON list of the nodes that failed")
    experiment: str = Field(default="rekindle", description="MLflow experiment of the run")


class Outputs(StepOutputs):
    run_id: str = Field(description="the run that was closed, empty if there is none")


def run(inputs: Inputs) -> Outputs:
    """Set the run's final status and, if it failed, why. Raises TrackingError if MLflow is away."""
    from steps import tracking

    run_id = tracking.find_run(inputs.experiment, inputs.workflow)
    if not run_id:
        sys.stderr.write(f"no MLflow run of {inputs.workflow} was made: nothing to close\n")
        return Outputs(run_id="")
    failed = failures(inputs.failures)
    lines = [f"{f.get('displayName', '?')}: {f.get('message') or f.get('phase', 'failed')}" for f in failed]
    if lines:
        tracking.log(run_id, tags={"rekindle.failures": "\n".join(line[:900] for line in lines[:SHOWN])})
    tracking.finish(run_id, status(inputs.status, lines))
    return Outputs(run_id=run_id)


def status(workflow: str, reasons: list[str]) -> str:
    """Argo's phase of a workflow → MLflow's status of a run; one that was stopped is `Failed`, its reasons say so."""
    if workflow != "Succeeded" and any(word in reason.lower() for reason in reasons for word in STOPPED):
        return "KILLED"
    return STATUS.get(workflow, "FAILED")


def failures(text: str) -> list[dict[str, Any]]:
    """The failed nodes; Argo quotes its JSON once more (strconv.Quote), and gives `null` for none."""
    value: Any = text
    while isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except ValueError:
            return [{"displayName": "workflow", "message": value}]
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
