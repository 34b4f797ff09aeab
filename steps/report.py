"""Close the workflow's MLflow run with the results of the workflow and its workers: the exit handler of every pipeline.

    rekindle step steps.report --workflow=demo-x7k2p --status=Failed --failures='[{"displayName": "train"}]'

Works after any failure, and repeatedly; without a run there is nothing to close. The ledger's report is logged to the
run as metrics and tags, and as artifacts below `ledger/`: in words, as JSON and as a picture.
"""

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pydantic import Field

from rekindle.errors import RekindleError
from rekindle.notify import reasons, status, verdicts
from rekindle.step import StepInputs, StepOutputs

if TYPE_CHECKING:
    from rekindle.training.ledger.report import Summary

SHOWN = 5  # failures in the tag; MLflow takes 5,000 characters


class Inputs(StepInputs):
    workflow: str = Field(description="name of the workflow")
    status: str = Field(description="{{workflow.status}}: Succeeded, Failed or Error")
    failures: str = Field(default="", description="{{workflow.failures}}: JSON list of the nodes that failed")
    experiment: str = Field(default="rekindle", description="MLflow experiment of the run")
    ledgers: list[str] = Field(default_factory=list, description="key prefixes of the ledgers, one a training")
    config: dict[str, Any] = Field(default_factory=dict, description="the resolved config, if no step recorded it")
    manifest: str = Field(default="", description="the manifest, the same: as zlib in base64")
    cached: dict[str, Any] = Field(default_factory=dict, description="by task, the earlier run whose outputs it took")


class Outputs(StepOutputs):
    run_id: str = Field(description="the run that was closed, empty if there is none")


def run(inputs: Inputs) -> Outputs:
    """Set the run's final status and, if it failed, why. Raises TrackingError if MLflow is away."""
    from rekindle import tracking

    run_id = tracking.find_run(inputs.experiment, inputs.workflow)
    if not run_id:
        sys.stderr.write(f"no MLflow run of {inputs.workflow} was made: nothing to close\n")
        return Outputs(run_id="")
    if inputs.cached:
        adopt(run_id, inputs)
    lines = reasons(inputs.failures)
    alone, parts = len(inputs.ledgers) == 1, list[str]()
    for ledger in inputs.ledgers:
        if summary := training_summary(ledger):
            task = ledger.split("/")[1]  # WORKFLOW/TASK/checkpoints/ledger
            parts.append("" if alone else f"{task}/")
            log(run_id, summary, inputs.workdir / task, parts[-1])
            if lines and summary.state == "failed":
                lines.insert(0, f"training: {summary.message}" if alone else f"{task}: {summary.message}")
    if lines:
        tracking.log(run_id, tags={"rekindle.failures": "\n".join(line[:900] for line in lines[:SHOWN])})
    tracking.log(run_id, tags={tracking.NOTE: description(run_id, lines, parts)})
    tracking.finish(run_id, status(inputs.status, lines))
    return Outputs(run_id=run_id)


def adopt(run_id: str, inputs: Inputs) -> None:
    """What the run has of earlier ones: their names, and what the steps would have recorded that did not run."""
    from rekindle import tracking
    from rekindle.storage import NotFound, Store
    from steps.prepare import record

    rows = [row for row in inputs.cached.values() if isinstance(row, dict)]
    store = Store.from_env() if rows else None
    taken: dict[str, str] = {}
    for row in rows:
        place = row["at"]
        if store and not place:
            with suppress(NotFound):
                place = store.get(f"{inputs.workflow}/{row['task']}/cached").decode()
        taken |= {row["task"]: place} if place else {}
    if not taken:
        return
    if "name" not in (params := tracking.params_of(run_id)):
        record(run_id, inputs.config, inputs.manifest)
    digests = [row["digest"] for row in rows if row.get("digest")]
    if digests and "data.digest" not in params:
        tracking.log(run_id, params={"data.digest": digests[0]}, tags={"rekindle.digest": digests[0]})
    tracking.log(run_id, tags={f"rekindle.cached.{task}": place for task, place in taken.items()})


def training_summary(ledger: str) -> "Summary | None":
    """The report of a training; None if there is no ledger, or it cannot be read."""
    from rekindle.storage import Store
    from rekindle.training.ledger.accounting import summarize
    from rekindle.training.ledger.events import read

    try:
        summary = summarize(read(Store.from_env(), ledger))
    except RekindleError as error:  # the end of a workflow must not depend on it
        sys.stderr.write(f"where the time went is not recorded: {error}\n")
        return None
    return summary if summary.intervals else None


def log(run_id: str, summary: "Summary", folder: Path, part: str) -> None:
    """`workers/` metrics, tags and `ledger/` artifacts of the MLflow run; `part` begins those of one of several."""
    from rekindle import tracking
    from rekindle.training.ledger import publish

    tags = {f"{part}{name}": value for name, value in publish.tags(summary).items()}
    tracking.log(run_id, metrics=publish.metrics(summary, f"{part}workers"), tags=tags)
    publish.write_files(summary, folder)
    tracking.log_dir(run_id, folder, f"{part}ledger")


def description(run_id: str, failures: list[str], parts: list[str]) -> str:
    """Markdown: the verdict, what failed, and the pictures of the evaluation and the training."""
    from rekindle import tracking

    judged = verdicts(tracking.tags_of(run_id))
    lines = [f"**{part}{verdict}**: {reason}" for part, verdict, reason in judged]
    lines += [f"**failed**: {failure[:900]}" for failure in failures[:SHOWN]]
    folders = [f"{part}evaluation" for part, *_ in judged or [("",)]] + [f"{part}ledger" for part in parts]
    paths = [path for folder in folders for path in tracking.artifacts(run_id, folder) if path.endswith(".png")]
    lines += [f"![{path}](get-artifact?path={quote(path)}&run_uuid={run_id})" for path in paths]
    return "\n\n".join(lines)
