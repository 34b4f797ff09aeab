"""Turn raw data into a dataset with a digest, and record its properties in MLflow.

    rekindle step steps.prepare --data='{"source": "simulate://7"}' --workflow=try --output dataset=dataset

The workload's `prepare` defines how the data is processed.
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

MAX_SHARE_RATIO = 2  # warn if a share grew or shrank by a larger factor since the last run
MIN_ROWS_RATIO = 0.9  # warn if a moving window has a smaller share of the last run's rows
NEWEST_TAG = "data.newest"  # tag with the time of the newest row
WINDOW_END_TAG = "data.window_until"  # tag with the end of the moving window
# the dataset does not depend on the workflow that prepared it
REUSE = Reuse(aside=("workflow", "experiment", "config", "manifest"), reads=lambda inputs: [inputs.data["source"]])


class Inputs(StepInputs):
    workload: str = Field(description="module that defines the data, the model and its metrics")
    data: dict[str, Any] = Field(description="the config's section `data`, as JSON")
    workflow: str = Field(
        description="name of the workflow; its MLflow run has this name, and is created if it does not exist"
    )
    experiment: str = Field("rekindle", description="MLflow experiment of the run")
    config: dict[str, Any] = Field(default_factory=dict, description="the resolved config, to record on the run")
    created: str = Field("", description="time when the workflow was created, ISO 8601")
    scheduled: str = Field(
        "", description="scheduled time of the run, ISO 8601; a moving window ends at this time; empty: not scheduled"
    )
    manifest: str = Field("", description="the manifest (YAML or JSON, as zlib in base64), to record on the run")


class Outputs(StepOutputs):
    dataset: Artifact = Field(description="directory of the dataset")
    digest: str = Field(description="sha256 that identifies the dataset")
    rows: int = Field(description="number of rows in the dataset")
    run_id: str = Field(description="MLflow run of this workflow")
    source_digest: str = Field(description="digest of the content of data.source; empty if it cannot be verified")
    warnings: list[str] = Field(description="suspicious properties of the data, one sentence each")


def run(inputs: Inputs) -> Outputs:
    from rekindle import tracking
    from rekindle.cache.key import content_or_empty
    from rekindle.sections import parse_section
    from rekindle.training.rehearsal import check_trainable
    from rekindle.workload import load, prepare

    workload = load(inputs.workload)
    if inputs.config.get("workload") == inputs.workload:  # `rekindle run` may already have checked this config
        check_trainable(inputs.config | {"data": inputs.data})
    data = parse_section(workload.Data, inputs.data, "data")
    time = parse_time(inputs.scheduled or inputs.created)
    data = data.at(time)
    run_id = tracking.start_run(inputs.experiment, inputs.workflow, {"rekindle.workload": inputs.workload})
    tracking.show_columns(inputs.experiment, (metric.name for metric in workload.metrics))
    record(run_id, inputs.config or {"data": data.model_dump(mode="json")}, inputs.manifest)

    dataset = inputs.workdir / "dataset"
    prepared, digest = prepare(workload, data, dataset)
    tags = f"; {json.dumps(prepared.tags, default=str)}" if prepared.tags else ""
    sys.stderr.write(f"prepared {prepared.rows:,} rows, {prepared.rejected:,} rejected{tags}\n")
    last = tracking.last_prepared(inputs.experiment, inputs.workload, run_id)
    shares = warn_of_changed_shares(prepared.shares, last[0].metrics) if last else []
    warnings = [*prepared.warnings, *shares, *warn_of_stale_data(prepared, data, time, last)]
    sys.stderr.writelines(f"warning: {warning}\n" for warning in warnings)
    facts = {f"data.{name}": str(value) for name, value in prepared.tags.items()}
    counts = {"rows": prepared.rows, "rejected": prepared.rejected}
    facts |= {"rekindle.scheduled": time.isoformat()} if inputs.scheduled else {}
    facts |= {"data.warnings": " ".join(warnings)} if warnings else {}
    facts |= {NEWEST_TAG: prepared.newest} if prepared.newest else {}
    facts |= {WINDOW_END_TAG: time.isoformat()} if data.moves else {}
    figures = counts | prepared.shares
    tracking.log(run_id, params={"data.digest": digest}, metrics=figures, tags={tracking.DIGEST: digest} | facts)
    tracking.log_dataset(run_id, inputs.experiment, digest, data.source, counts)
    outputs = {"digest": digest, "rows": prepared.rows, "run_id": run_id, "warnings": warnings}
    return Outputs(dataset=dataset, source_digest=content_or_empty(data.source), **outputs)


def parse_time(text: str) -> datetime:
    """Parse an ISO 8601 time (UTC if a time zone is missing); return the current time for an empty text.

    Raises ConfigError.
    """
    try:
        time = datetime.fromisoformat(text) if text else datetime.now(UTC)
    except ValueError as error:
        raise ConfigError(f"scheduled-time is {text!r}: it must be ISO 8601, such as 2026-11-23T03:00:00Z.") from error
    return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)


def warn_of_changed_shares(shares: dict[str, float], last: dict[str, float]) -> list[str]:
    """Return a warning for each share that is less than half or more than twice the share in the last run."""
    return [
        f"{name} is {share:.3%}; it was {last[name]:.3%} in the last run."
        for name, share in shares.items()
        if name in last and not last[name] / MAX_SHARE_RATIO <= share <= last[name] * MAX_SHARE_RATIO
    ]


def warn_of_stale_data(prepared: Prepared, data: Any, time: datetime, runs: list["RunData"]) -> list[str]:
    """Return a warning if the window has moved since the previous run, but the data lacks newer rows or has far
    fewer rows."""
    if not data.moves:
        return []
    earlier = {
        until: run
        for run in reversed(runs)
        if WINDOW_END_TAG in run.tags
        and (until := datetime.fromisoformat(run.tags[WINDOW_END_TAG])) < time
        and (moved := data.at(until)) != data
        and _unmoved_params(data, moved).items() <= run.params.items()
    }
    if not earlier:
        return []
    until, last = max(earlier.items(), key=lambda pair: pair[0])
    rows, last_rows, newest = prepared.rows, int(last.metrics["rows"]), last.tags.get(NEWEST_TAG)
    counts = f"this run has {rows:,} rows; the run for {until:%Y-%m-%d} had {last_rows:,}."
    if prepared.newest and newest and datetime.fromisoformat(prepared.newest) <= datetime.fromisoformat(newest):
        return [f"{data.source} does not contain newer rows, its newest row is of {prepared.newest}: {counts}"]
    ends = f" Its newest row is of {prepared.newest}." if prepared.newest else ""
    return [counts + ends] if rows < MIN_ROWS_RATIO * last_rows else []


def _unmoved_params(data: Any, moved: Any) -> dict[str, str]:
    """Return the text settings of `data` that are equal in `moved`, as parameters of an MLflow run."""
    other = moved.model_dump(mode="json")
    same = {name: value for name, value in data.model_dump(mode="json").items() if other[name] == value}
    return {f"data.{name}": to_text(value) for name, value in same.items() if isinstance(value, str)}


def record(run_id: str, config: dict[str, Any], manifest: str) -> None:
    """Log the config as parameters of the run, and the config and the manifest as artifacts."""
    from rekindle import tracking

    tracking.log(run_id, params=config)
    tracking.log_artifact(run_id, "config.yaml", yaml.safe_dump(config, sort_keys=False).encode())
    if manifest:
        tracking.log_artifact(run_id, "manifest.yaml", zlib.decompress(base64.b64decode(manifest)))
