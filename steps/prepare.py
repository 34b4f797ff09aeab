"""Turn raw data into a dataset with a digest, and record its properties in MLflow.

    rekindle step steps.prepare --data='{"source": "simulate://7"}' --workflow=try \\
      --output dataset=dataset

The workload's `prepare` defines how the data is processed.
"""

import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from argolocal.common.json_text import to_json
from rekindle import Artifact, Prepared, Reuse, StepInputs, StepOutputs
from rekindle.content.recorded_manifest import unpack_manifest
from rekindle.kubernetes_names import KUBERNETES_SERVICE_HOST, S3_BUCKET
from rekindle.step import SHA256, decode_parameter, parse_time

# maximum factor by which a fraction in `Prepared.shares` may change between two runs without a
# warning
MAX_SHARE_RATIO = 2


def must_compare(inputs: "Inputs") -> str:
    """Return the reason why the dataset must not come from the cache, or "" if it may come from the
    cache."""
    compares = inputs.skip and inputs.scheduled and not inputs.backfill
    if compares:
        return "a scheduled run compares its data with the data of the last run"
    return ""


def other_files(inputs: "Inputs") -> list[str]:
    """Return the existing files that the section `data` names, except its source."""
    from rekindle.sections import leaves, parse_section
    from rekindle.workload import load

    data = parse_section(load(inputs.workload).Data, inputs.data, "data")
    return [
        str(file) for _, file in leaves(data, "data") if isinstance(file, Path) and file.exists()
    ]


def files_read(inputs: "Inputs") -> list[str]:
    return [inputs.data["source"], *other_files(inputs)]


# inputs that do not affect the cache key: the dataset does not depend on the workflow that prepared
# it
IGNORED_INPUTS = ("workflow", "experiment", "config", "manifest", "cached", "backfill", "skip")
REUSE = Reuse(IGNORED_INPUTS, data_read=files_read, not_reused_if=must_compare)


class Inputs(StepInputs):
    workload: str = Field(description="module that defines the data, the model and its metrics")
    data: dict[str, Any] = Field(description="the config's section `data`, as JSON")
    workflow: str = Field(
        description=(
            "name of the workflow; its MLflow run has this name, and is created if it does not"
            " exist"
        )
    )
    experiment: str = Field("rekindle", description="MLflow experiment of the run")
    config: dict[str, Any] = Field(
        default_factory=dict, description="the resolved config, to record on the run"
    )
    created: str = Field("", description="time when the workflow was created, ISO 8601")
    scheduled: str = Field(
        "",
        description=(
            "scheduled time of the run, ISO 8601; a moving window ends at this time; empty: not"
            " scheduled"
        ),
    )
    manifest: str = Field(
        "", description="the manifest (YAML or JSON, as zlib in base64), to record on the run"
    )
    cached: dict[str, Any] = Field(
        default_factory=dict, description="earlier runs whose outputs are reused, by task"
    )
    backfill: str = Field(
        "", description="if not empty, this is the run of a backfill, which always trains"
    )
    skip: bool = Field(
        False,
        description="train nothing in a scheduled run whose source, code and config did not change",
    )


class Outputs(StepOutputs):
    dataset: Artifact = Field(description="directory of the dataset")
    digest: str = Field(pattern=SHA256, description="sha256 that identifies the dataset")
    rows: int = Field(description="number of rows in the dataset")
    run_id: str = Field(description="MLflow run of this workflow")
    source_digest: str = Field(
        description="digest of the content of data.source; empty if it cannot be verified"
    )
    warnings: list[str] = Field(description="suspicious properties of the data, one sentence each")
    unchanged: str = Field(
        description="why this scheduled run trains nothing; empty: the run trains"
    )
    reused_models: dict[str, Any] = Field(
        description=(
            "the input `cached`; as a task, also the earlier trainings whose models are copied to"
            " this run"
        )
    )


def run(inputs: Inputs) -> Outputs:
    from rekindle import tracking
    from rekindle.cache.key import data_digest_or_empty, digest_of_unchanged
    from rekindle.sections import parse_section
    from rekindle.training.rehearsal import check_trainable
    from rekindle.workload import load
    from steps.monitoring import moving_window

    time = parse_time(inputs.scheduled or inputs.created)
    workload = load(inputs.workload)

    # needed for runs without `rekindle run`, whose own check makes this one cheap
    if inputs.config.get("workload") == inputs.workload:
        check_trainable(inputs.config | {"data": inputs.data}, inputs.scheduled)

    data = parse_section(workload.Data, inputs.data, "data")
    data = data.at(time)
    run_id = tracking.start_run(
        inputs.experiment, inputs.workflow, {tracking.WORKLOAD: inputs.workload}
    )
    tracking.show_columns(inputs.experiment, (metric.name for metric in workload.metrics))
    record(run_id, inputs.config or {"data": data.model_dump(mode="json")}, inputs.manifest)
    mark_run(inputs)

    dataset = inputs.workdir / "dataset"
    digest_before = data_digest_or_empty(data.source)
    prepared, digest = moving_window.prepare(workload, data, dataset, time)
    tags = f"; {to_json(prepared.tags, default=str)}" if prepared.tags else ""
    sys.stderr.write(f"prepared {prepared.rows:,} rows, {prepared.rejected:,} rejected{tags}\n")

    last = tracking.find_last_prepared_runs(inputs.experiment, inputs.workload, run_id)
    if last:
        shares = warn_of_changed_shares(prepared.shares, last[0].metrics)
    else:
        shares = []

    stale = moving_window.warn_of_stale_data(
        prepared, data, time, last, is_past=bool(inputs.backfill)
    )
    facts, unchanged, changed = _compare(inputs, run_id, prepared, time)
    source_digest, mixed = digest_of_unchanged(data.source, digest_before)
    warnings = [*prepared.warnings, *shares, *stale, *changed, *mixed]
    sys.stderr.writelines(f"warning: {warning}\n" for warning in warnings)
    facts.update({f"data.{name}": str(value) for name, value in prepared.tags.items()})
    counts = {"rows": prepared.rows, "rejected": prepared.rejected}
    facts.update({tracking.SCHEDULED: time.isoformat()} if inputs.scheduled else {})
    facts.update({tracking.BACKFILL: "yes"} if inputs.backfill else {})
    facts.update({"data.warnings": " ".join(warnings)} if warnings else {})
    facts.update({moving_window.NEWEST_TAG: prepared.newest} if prepared.newest else {})
    facts.update({tracking.WINDOW_END: time.isoformat()} if data.moves else {})
    figures = counts | prepared.shares

    tracking.log(
        run_id,
        params={"data.digest": digest},
        metrics=figures,
        tags={tracking.DIGEST: digest} | facts,
    )

    tracking.log_dataset(run_id, inputs.experiment, digest, data.source, counts)

    outputs = {
        "dataset": dataset,
        "digest": digest,
        "rows": prepared.rows,
        "run_id": run_id,
        "warnings": warnings,
        "reused_models": inputs.cached,
    }

    return Outputs(**outputs, source_digest=source_digest, unchanged=unchanged)


def _compare(
    inputs: Inputs, run_id: str, prepared: Prepared, time: datetime
) -> tuple[dict[str, str], str, list[str]]:
    """Compare a scheduled run with the last scheduled run. Return the tags of the run, the reason
    to skip the training ("" if the run trains), and warnings.

    If the run trains although the source is unchanged, a warning names the changes of code or
    config.
    """
    from rekindle import tracking
    from steps.monitoring import moving_window, run_identity

    if not must_compare(inputs) or not inputs.manifest:
        return {}, "", []

    manifest = unpack_manifest(inputs.manifest)
    modules = {inputs.workload, str(inputs.config.get("pipeline", inputs.workload))}
    identity = run_identity.find(manifest, modules)
    tags = moving_window.identity_tags(manifest, identity.code)
    tags.update({run_identity.UNCOVERED_TAG: identity.uncovered} if identity.uncovered else {})

    last = moving_window.last_scheduled(inputs.experiment, inputs.workload, run_id, time)
    if not last or not moving_window.has_no_newer_rows(prepared.newest, last):
        return tags, "", []

    source = f"{inputs.data['source']} does not contain rows after {prepared.newest}"
    reference = f"{last.tags[tracking.WORKFLOW]}, the run for {last.tags[tracking.SCHEDULED]:.10}"

    changes = moving_window.describe_changes(tags, inputs.config, last)
    if changes:
        return (
            tags,
            "",
            [f"{source}, but since {reference}, {' and '.join(changes)} changed: this run trains."],
        )

    uncovered = identity.uncovered or run_identity.why_uncovered(last, manifest)
    if uncovered:
        return tags, "", [f"{source}, but this run trains, because {uncovered}"]

    reason = (
        f"{source}, and code and config have not changed since {reference}: this run trains"
        " nothing."
    )

    return (
        tags
        | {
            "verdict": "same",
            "reason": reason,
            moving_window.SAME_TAG: last.tags[tracking.WORKFLOW],
        },
        reason,
        [],
    )


def warn_of_changed_shares(shares: dict[str, float], last: dict[str, float]) -> list[str]:
    """Return a warning for each fraction in `shares` that is less than half or more than twice the
    fraction in the last run."""
    return [
        f"{name} is {share:.3%}; it was {last[name]:.3%} in the last run."
        for name, share in shares.items()
        if name in last
        and not last[name] / MAX_SHARE_RATIO <= share <= last[name] * MAX_SHARE_RATIO
    ]


def mark_run(inputs: Inputs) -> None:
    """On a cluster, mark the folder of the run in the object store; on this machine, the runner has
    already marked it."""
    from rekindle.release.retention import ownership
    from rekindle.storage import Store

    if KUBERNETES_SERVICE_HOST not in os.environ or not os.environ.get(S3_BUCKET):
        return
    manifest = unpack_manifest(inputs.manifest)
    metadata = (manifest.get("metadata") or {}) | {"name": inputs.workflow}
    workflow = {**manifest, "metadata": metadata}
    store = Store.from_env().short_retries()
    counted = not inputs.backfill
    ownership.begin(store, workflow, inputs.experiment, is_first=False, counted=counted)


def record(run_id: str, config: dict[str, Any], manifest: str) -> None:
    """Log the config as parameters of the run, and the config and the manifest as artifacts."""
    from rekindle import tracking

    tracking.log(run_id, params=config)
    tracking.log_artifact(run_id, "config.yaml", yaml.safe_dump(config, sort_keys=False).encode())
    if manifest:
        tracking.log_artifact(run_id, "manifest.yaml", decode_parameter(manifest).encode())
