"""Close the workflow's MLflow run with what became of it and of its workers: the exit handler of every pipeline.

    rekindle step steps.report --workflow=fraud-x7k2p --status=Failed --failures='[{"displayName": "train"}]'

Works whatever happened before, and any number of times; where no run was made there is nothing to close. The ledger's
account goes to the run as metrics and tags, and as artifacts `ledger/` in words, as JSON and as a picture.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from rekindle.errors import RekindleError
from rekindle.step import StepInputs, StepOutputs

if TYPE_CHECKING:
    from rekindle.ledger.report import Summary

STATUS = {"Succeeded": "FINISHED", "Failed": "FAILED", "Error": "FAILED"}
STOPPED = ("stopped with strategy", "shutdown with strategy", "terminated with strategy")  # Argo's words for `stop`
COUNTED = ("preemptions", "steps_repeated", "steps_per_second", "generations", "coordinator_restarts")
SHOWN = 5  # failures in the tag; MLflow takes 5,000 characters


class Inputs(StepInputs):
    workflow: str = Field(description="name of the workflow")
    status: str = Field(description="{{workflow.status}}: Succeeded, Failed or Error")
    failures: str = Field(default="", description="{{workflow.failures}}: JSON list of the nodes that failed")
    experiment: str = Field(default="rekindle", description="MLflow experiment of the run")
    ledger: str = Field(default="", description="key prefix of the training's ledger (empty: there is none)")


class Outputs(StepOutputs):
    run_id: str = Field(description="the run that was closed, empty if there is none")


def run(inputs: Inputs) -> Outputs:
    """Set the run's final status and, if it failed, why. Raises TrackingError if MLflow is away."""
    from rekindle import tracking

    run_id = tracking.find_run(inputs.experiment, inputs.workflow)
    if not run_id:
        sys.stderr.write(f"no MLflow run of {inputs.workflow} was made: nothing to close\n")
        return Outputs(run_id="")
    summary = account_of(inputs.ledger)
    lines = [reason(failure) for failure in failures(inputs.failures)]
    if summary:
        log(run_id, summary, inputs.workdir / "ledger")
        if lines and summary.state == "failed":
            lines.insert(0, f"training: {summary.message}")
    if lines:
        tracking.log(run_id, tags={"rekindle.failures": "\n".join(line[:900] for line in lines[:SHOWN])})
    tracking.finish(run_id, status(inputs.status, lines))
    return Outputs(run_id=run_id)


def account_of(ledger: str) -> "Summary | None":
    """What became of the workers' time; None if nobody wrote it down, or it cannot be read."""
    if not ledger:
        return None
    from rekindle.ledger.accounting import summarize
    from rekindle.ledger.events import read
    from rekindle.storage import Store

    try:
        summary = summarize(read(Store.from_env(), ledger))
    except RekindleError as error:  # the end of a workflow must not depend on it
        sys.stderr.write(f"where the time went is not recorded: {error}\n")
        return None
    return summary if summary.intervals else None


def log(run_id: str, summary: "Summary", folder: Path) -> None:
    """Metrics and tags of the MLflow run, and `ledger/` of its artifacts. Raises TrackingError if MLflow is away."""
    from rekindle import tracking
    from rekindle.ledger.plot import draw
    from rekindle.ledger.text import describe

    found = summary.as_json()
    metrics = {f"worker_seconds_{kind}": value for kind, value in found["worker_seconds"].items()}
    metrics |= {"wall_seconds": summary.ended - summary.began, "bytes_uploaded": summary.uploaded}
    metrics |= {name: found[name] for name in COUNTED}
    tags = {name: found[name] for name in ("preemptions", "steps_repeated")}
    tags |= {"workers": len(summary.intervals), "device": summary.run.get("device", "unknown")}
    tracking.log(
        run_id,
        metrics={f"ledger/{name}": value for name, value in metrics.items()},
        tags={f"rekindle.{name}": value for name, value in tags.items()},
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(found, indent=1))
    (folder / "story.txt").write_text("\n".join(describe(summary)) + "\n")
    try:
        draw(summary, folder / "timeline.png")
    except ImportError as error:
        sys.stderr.write(f"no picture of the timeline: {error}. The image of `report` needs matplotlib for it.\n")
    tracking.log_dir(run_id, folder, "ledger")


def reason(failure: dict[str, Any]) -> str:
    """A failed node in a line."""
    return f"{failure.get('displayName', '?')}: {failure.get('message') or failure.get('phase', 'failed')}"


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
