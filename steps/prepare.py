"""Turn raw data into a dataset: checked rows, random access, and an identity.

    rekindle step steps.prepare --data='{"source": "simulate://7"}' --workflow=try --output dataset=dataset

How the data is processed is defined by the workload: see its `prepare`.
"""

import base64
import json
import sys
import zlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import Field

from rekindle import Artifact, ConfigError, Prepared, Reuse, StepInputs, StepOutputs
from rekindle.step import to_text

if TYPE_CHECKING:
    from rekindle.tracking import RunData

FAR = 2  # times another share
SHRUNK = 0.9  # of the rows of the last run
NEWEST, UNTIL = "data.newest", "data.window_until"  # tags: time of the newest row; the time that the data ends at
REUSE = Reuse(
    aside=("workflow", "experiment", "config", "manifest"), reads=lambda inputs: [inputs.data["source"]]
)  # its MLflow run is the run's own


class Inputs(StepInputs):
    workload: str = Field(description="module that defines the data, the model and its metrics")
    data: dict[str, Any] = Field(description="the config's section `data`, as JSON")
    workflow: str = Field(description="name of the workflow: its MLflow run is found by it, or made")
    experiment: str = Field("rekindle", description="MLflow experiment of the run")
    config: dict[str, Any] = Field(default_factory=dict, description="the resolved config, to record on the run")
    created: str = Field("", description="when the workflow was created: an ISO 8601 time")
    scheduled: str = Field("", description="when it was scheduled for, if it was: what a moving window ends at")
    manifest: str = Field("", description="the manifest, to record on the run: YAML or JSON, as zlib in base64")


class Outputs(StepOutputs):
    dataset: Artifact = Field(description="the dataset's directory")
    digest: str = Field(description="sha256 over the shards: the identity of this dataset")
    rows: int = Field(description="rows in it")
    run_id: str = Field(description="the MLflow run of this workflow")
    warnings: list[str] = Field(description="what looks wrong in the data, a sentence each")


def run(inputs: Inputs) -> Outputs:
    from rekindle import tracking
    from rekindle.sections import parse_section
    from rekindle.workload import load, prepare

    workload = load(inputs.workload)
    data = parse_section(workload.Data, inputs.data, "data")
    time = instant(inputs.scheduled or inputs.created)
    data = data.at(time)
    run_id = tracking.start_run(inputs.experiment, inputs.workflow, {"rekindle.workload": inputs.workload})
    tracking.show_columns(inputs.experiment, (metric.name for metric in workload.metrics))
    record(run_id, inputs.config or {"data": data.model_dump(mode="json")}, inputs.manifest)

    dataset = inputs.workdir / "dataset"
    prepared, digest = prepare(workload, data, dataset)
    tags = json.dumps(prepared.tags, default=str)
    sys.stderr.write(f"prepared {prepared.rows:,} rows, {prepared.rejected:,} rejected; {tags}\n")
    last = tracking.last_prepared(inputs.experiment, inputs.workload, run_id)
    shares = changed(prepared.shares, last[0].metrics) if last else []
    warnings = [*prepared.warnings, *shares, *stale(prepared, data, time, last)]
    sys.stderr.writelines(f"warning: {warning}\n" for warning in warnings)
    facts = {f"data.{name}": str(value) for name, value in prepared.tags.items()}
    counts = {"rows": prepared.rows, "rejected": prepared.rejected}
    facts |= {"rekindle.scheduled": time.isoformat()} if inputs.scheduled else {}
    facts |= {"data.warnings": " ".join(warnings)} if warnings else {}
    facts |= {NEWEST: prepared.newest} if prepared.newest else {}
    facts |= {UNTIL: time.isoformat()} if data.moves else {}
    figures = counts | prepared.shares
    tracking.log(run_id, params={"data.digest": digest}, metrics=figures, tags={tracking.DIGEST: digest} | facts)
    tracking.log_dataset(run_id, inputs.experiment, digest, data.source, counts)
    return Outputs(dataset=dataset, digest=digest, rows=prepared.rows, run_id=run_id, warnings=warnings)


def instant(text: str) -> datetime:
    """An ISO 8601 time, in UTC unless it says otherwise; now if there is none. Raises ConfigError."""
    try:
        time = datetime.fromisoformat(text) if text else datetime.now(UTC)
    except ValueError as error:
        raise ConfigError(f"scheduled-time is {text!r}: it must be such as 2026-11-23T03:00:00Z.") from error
    return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)


def changed(shares: dict[str, float], before: dict[str, float]) -> list[str]:
    """A sentence for each share that is less than half or more than twice that of the last run."""
    return [
        f"{name} is {share:.3%}; it was {before[name]:.3%} in the last run."
        for name, share in shares.items()
        if name in before and not before[name] / FAR <= share <= before[name] * FAR
    ]


def stale(prepared: Prepared, data: Any, time: datetime, runs: list["RunData"]) -> list[str]:
    """A sentence if the data has moved since the last run before and brought no newer rows, or far fewer."""
    if not data.moves:
        return []
    earlier = {
        until: run
        for run in reversed(runs)
        if UNTIL in run.tags
        and (until := datetime.fromisoformat(run.tags[UNTIL])) < time
        and (moved := data.at(until)) != data
        and _unmoved(data, moved).items() <= run.params.items()
    }
    if not earlier:
        return []
    until, last = max(earlier.items(), key=lambda pair: pair[0])
    rows, former, newest = prepared.rows, int(last.metrics["rows"]), last.tags.get(NEWEST)
    counts = f"this run has {rows:,} rows; that for {until:%Y-%m-%d} had {former:,}."
    if prepared.newest and newest and datetime.fromisoformat(prepared.newest) <= datetime.fromisoformat(newest):
        return [f"{data.source} stands still, its newest row is of {prepared.newest}: {counts}"]
    ends = f" Its newest row is of {prepared.newest}." if prepared.newest else ""
    return [counts + ends] if rows < SHRUNK * former else []


def _unmoved(data: Any, moved: Any) -> dict[str, str]:
    """The texts that are the same at both times, as an MLflow run has them in its parameters."""
    other = moved.model_dump(mode="json")
    same = {name: value for name, value in data.model_dump(mode="json").items() if other[name] == value}
    return {f"data.{name}": to_text(value) for name, value in same.items() if isinstance(value, str)}


def record(run_id: str, config: dict[str, Any], manifest: str) -> None:
    """The config as parameters of the run, and both as files."""
    from rekindle import tracking

    tracking.log(run_id, params=config)
    tracking.log_artifact(run_id, "config.yaml", yaml.safe_dump(config, sort_keys=False).encode())
    if manifest:
        tracking.log_artifact(run_id, "manifest.yaml", zlib.decompress(base64.b64decode(manifest)))
