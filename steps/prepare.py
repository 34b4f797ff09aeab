"""Turn raw data into a dataset with a digest, and record the properties of the dataset in MLflow.

    rekindle step steps.prepare --data='{"source": "simulate://7"}' --workflow=try \\
      --output dataset=dataset

The workload's `prepare` defines how the data is processed.
"""

import os
import sys
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from argolocal.common.json_text import to_json
from rekindle import Artifact, Prepared, Reuse, StepInputs, StepOutputs
from rekindle.content.recorded_manifest import unpack_manifest
from rekindle.kubernetes_names import KUBERNETES_SERVICE_HOST, S3_BUCKET
from rekindle.step import SHA256_PATTERN, decode_parameter, parse_time

# maximum factor by which a fraction in `Prepared.shares` may change between two runs without a
# warning
MAX_SHARE_RATIO = 2


def must_compare(inputs: "Inputs") -> str:
    """Return the reason why the dataset must not come from the cache, or "" if it may come from the
    cache."""
    if inputs.skip and inputs.scheduled and not inputs.backfill:
        return "a scheduled run compares its data with the data of the last run"
    return ""


def other_files(inputs: "Inputs") -> list[str]:
    """Return the existing files that the section `data` names, except the data source."""
    from rekindle.sections import iterate_leaves, parse_section
    from rekindle.workload import load

    data_settings = parse_section(load(inputs.workload).Data, inputs.data, "data")
    return [
        str(setting_path)
        for _, setting_path in iterate_leaves(data_settings, "data")
        if isinstance(setting_path, Path) and setting_path.exists()
    ]


def files_read(inputs: "Inputs") -> list[str]:
    """Return the source of the data, and the other files that the section `data` names."""
    return [inputs.data["source"], *other_files(inputs)]


# inputs that do not affect the dataset, so that they are not part of the cache key
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
    digest: str = Field(pattern=SHA256_PATTERN, description="sha256 that identifies the dataset")
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
            "the input `cached`, extended by the earlier trainings whose models the task copies to"
            " this run"
        )
    )


def run(inputs: Inputs) -> Outputs:
    """Prepare the dataset, compare it with earlier runs, and record its properties in MLflow."""
    from rekindle import tracking
    from rekindle.cache.key import data_digest_or_empty, digest_if_unchanged
    from rekindle.sections import parse_section
    from rekindle.training.rehearsal import check_trainable
    from rekindle.workload import load
    from steps.monitoring import moving_window

    run_time = parse_time(inputs.scheduled or inputs.created)
    workload_module = load(inputs.workload)

    # check the workload for runs that `rekindle run` has not started; `rekindle run` checks it
    # before, which makes this check cheap
    if inputs.config.get("workload") == inputs.workload:
        check_trainable(inputs.config | {"data": inputs.data}, inputs.scheduled)

    data_settings = parse_section(workload_module.Data, inputs.data, "data").at(run_time)
    run_id = _start_run(inputs, workload_module, data_settings)

    dataset_folder = inputs.workdir / "dataset"
    digest_before = data_digest_or_empty(data_settings.source)
    prepared, dataset_digest = moving_window.prepare(
        workload_module, data_settings, dataset_folder, run_time
    )
    tags_text = f"; {to_json(prepared.tags, default=str)}" if prepared.tags else ""
    sys.stderr.write(
        f"prepared {prepared.rows:,} rows, {prepared.rejected:,} rejected{tags_text}\n"
    )

    last_runs = tracking.find_last_prepared_runs(inputs.experiment, inputs.workload, run_id)
    if last_runs:
        share_warnings = warn_of_changed_shares(prepared.shares, last_runs[0].metrics)
    else:
        share_warnings = []

    stale_data_warnings = moving_window.warn_of_stale_data(
        prepared, data_settings, run_time, last_runs, is_past=bool(inputs.backfill)
    )
    comparison = _compare_with_earlier_run(inputs, run_id, prepared, run_time)
    source_digest, mixed_source_warnings = digest_if_unchanged(data_settings.source, digest_before)
    warnings = [
        *prepared.warnings,
        *share_warnings,
        *stale_data_warnings,
        *comparison.warnings,
        *mixed_source_warnings,
    ]
    sys.stderr.writelines(f"warning: {warning}\n" for warning in warnings)

    run_tags = comparison.run_tags | _describe_dataset(inputs, prepared, run_time, warnings)
    run_tags[tracking.DIGEST] = dataset_digest
    if data_settings.moves:
        run_tags[tracking.WINDOW_END] = run_time.isoformat()

    row_counts = {"rows": prepared.rows, "rejected": prepared.rejected}
    tracking.log_to_run(
        run_id,
        run_params={"data.digest": dataset_digest},
        run_metrics=row_counts | prepared.shares,
        run_tags=run_tags,
    )
    tracking.log_dataset(
        run_id, inputs.experiment, dataset_digest, data_settings.source, row_counts
    )

    return Outputs(
        dataset=dataset_folder,
        digest=dataset_digest,
        rows=prepared.rows,
        run_id=run_id,
        source_digest=source_digest,
        warnings=warnings,
        unchanged=comparison.unchanged_reason,
        reused_models=inputs.cached,
    )


def _start_run(inputs: Inputs, workload_module: Any, data_settings: Any) -> str:
    """Create the MLflow run of the workflow with its config and manifest, unless it exists, and
    return its id. On a cluster, the run's folder in the object store is marked, too."""
    from rekindle import tracking

    run_id = tracking.start_run(
        inputs.experiment, inputs.workflow, {tracking.WORKLOAD: inputs.workload}
    )
    metric_names = (workload_metric.name for workload_metric in workload_module.metrics)
    tracking.show_columns(inputs.experiment, metric_names)
    config_document = inputs.config or {"data": data_settings.model_dump(mode="json")}
    record(run_id, config_document, inputs.manifest)
    mark_run(inputs)
    return run_id


def _describe_dataset(
    inputs: Inputs, prepared: Prepared, run_time: datetime, warnings: list[str]
) -> dict[str, str]:
    """Return the tags of the MLflow run that describe the dataset and the time of the run."""
    from rekindle import tracking
    from steps.monitoring import moving_window

    run_tags = {f"data.{tag_name}": str(tag_value) for tag_name, tag_value in prepared.tags.items()}
    if inputs.scheduled:
        run_tags[tracking.SCHEDULED_TIME_TAG] = run_time.isoformat()
    if inputs.backfill:
        run_tags[tracking.BACKFILL] = "yes"
    if warnings:
        run_tags["data.warnings"] = " ".join(warnings)
    if prepared.newest:
        run_tags[moving_window.NEWEST_TAG] = prepared.newest
    return run_tags


@dataclass(frozen=True)
class RunComparison:
    """The result of comparing a scheduled run with the last scheduled run."""

    # tags of the MLflow run that identify its code, config and manifest; the next run reads them
    run_tags: dict[str, str] = field(default_factory=dict)
    # reason why this run skips the training; "" if the run trains
    unchanged_reason: str = ""
    warnings: list[str] = field(default_factory=list)


def _compare_with_earlier_run(
    inputs: Inputs, run_id: str, prepared: Prepared, run_time: datetime
) -> RunComparison:
    """Compare a scheduled run with the last scheduled run; the result is empty for other runs.

    If the run trains although the source is unchanged, a warning names the changes of code or
    config.
    """
    from rekindle import tracking
    from steps.monitoring import moving_window, run_identity

    if not must_compare(inputs) or not inputs.manifest:
        return RunComparison()

    run_manifest = unpack_manifest(inputs.manifest)
    module_names = {inputs.workload, str(inputs.config.get("pipeline", inputs.workload))}
    code_identity = run_identity.find(run_manifest, module_names)
    run_tags = moving_window.identity_tags(run_manifest, code_identity.code)
    if code_identity.uncovered:
        run_tags[run_identity.UNCOVERED_TAG] = code_identity.uncovered

    last_run = moving_window.last_scheduled(inputs.experiment, inputs.workload, run_id, run_time)
    if not last_run or not moving_window.has_no_newer_rows(prepared.newest, last_run):
        return RunComparison(run_tags)

    unchanged_sentence = f"{inputs.data['source']} does not contain rows after {prepared.newest}"
    reference_text = (
        f"{last_run.tags[tracking.WORKFLOW]}, the run for"
        f" {last_run.tags[tracking.SCHEDULED_TIME_TAG]:.10}"
    )

    change_texts = moving_window.describe_changes(run_tags, inputs.config, last_run)
    if change_texts:
        warning = (
            f"{unchanged_sentence}, but since {reference_text}, {' and '.join(change_texts)}"
            " changed: this run trains."
        )
        return RunComparison(run_tags, warnings=[warning])

    uncovered_reason = code_identity.uncovered or run_identity.why_uncovered(last_run, run_manifest)
    if uncovered_reason:
        warning = f"{unchanged_sentence}, but this run trains, because {uncovered_reason}"
        return RunComparison(run_tags, warnings=[warning])

    unchanged_reason = (
        f"{unchanged_sentence}, and code and config have not changed since {reference_text}: this"
        " run trains nothing."
    )
    verdict_tags = {
        "verdict": "same",
        "reason": unchanged_reason,
        moving_window.SAME_TAG: last_run.tags[tracking.WORKFLOW],
    }
    return RunComparison(run_tags | verdict_tags, unchanged_reason)


def warn_of_changed_shares(
    current_shares: dict[str, float], last_shares: dict[str, float]
) -> list[str]:
    """Return a warning for each fraction in `current_shares` that is less than half or more than
    twice the fraction in the last run."""
    return [
        f"{share_name} is {current_share:.3%}; it was {last_shares[share_name]:.3%} in the last"
        " run."
        for share_name, current_share in current_shares.items()
        if share_name in last_shares
        and not last_shares[share_name] / MAX_SHARE_RATIO
        <= current_share
        <= last_shares[share_name] * MAX_SHARE_RATIO
    ]


def mark_run(inputs: Inputs) -> None:
    """On a cluster, mark the folder of the run in the object store; on this machine, the runner has
    already marked it."""
    from rekindle.release.retention import ownership
    from rekindle.storage import Store

    if KUBERNETES_SERVICE_HOST not in os.environ or not os.environ.get(S3_BUCKET):
        return
    run_manifest = unpack_manifest(inputs.manifest)
    workflow_metadata = (run_manifest.get("metadata") or {}) | {"name": inputs.workflow}
    workflow_document = {**run_manifest, "metadata": workflow_metadata}
    object_store = Store.from_env().short_retries()
    is_counted = not inputs.backfill
    ownership.begin_run(
        object_store, workflow_document, inputs.experiment, is_first=False, is_counted=is_counted
    )


def record(run_id: str, config_document: dict[str, Any], packed_manifest: str) -> None:
    """Log the config as parameters of the run, and the config and the manifest as artifacts."""
    from rekindle import tracking

    tracking.log_to_run(run_id, run_params=config_document)
    tracking.log_artifact(
        run_id, "config.yaml", yaml.safe_dump(config_document, sort_keys=False).encode()
    )
    if packed_manifest:
        tracking.log_artifact(run_id, "manifest.yaml", decode_parameter(packed_manifest).encode())
