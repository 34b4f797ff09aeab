"""Close the workflow's MLflow run with the results of the workflow and its trainings. The step is
the exit handler of every pipeline.

    rekindle step steps.report --workflow=demo-x7k2p --status=Failed \\
      --failures='[{"displayName": "train"}]'

The step works after any failure of the workflow, and can be repeated. If the workflow has no MLflow
run, the step does nothing. The step logs the summary of each training's ledger as metrics, as tags,
and as artifacts below `ledger/` (text, JSON and a plot).
"""

import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pydantic import Field

from argolocal.common.json_text import to_json
from rekindle.content.recorded_manifest import unpack_manifest
from rekindle.documents import Document, parse
from rekindle.errors import RekindleError, without_secrets
from rekindle.kubernetes_names import KUBERNETES_SERVICE_HOST
from rekindle.release.watch.notification import convert_phase, describe_failures, parse_verdicts
from rekindle.step import StepInputs, StepOutputs

if TYPE_CHECKING:
    from rekindle.storage import Store
    from rekindle.training.cost.tariff import TrainingTariff
    from rekindle.training.ledger.ledger_summary import LedgerSummary

# maximum number of failures in a tag, and maximum number of characters of a failure, because MLflow
# limits a tag to 5,000 characters
MAX_FAILURES = 5
FAILURE_LENGTH = 900


class Inputs(StepInputs):
    workflow: str = Field(description="name of the workflow")
    status: str = Field(description="{{workflow.status}}: Succeeded, Failed or Error")
    failures: str = Field(
        default="", description="{{workflow.failures}}: JSON list of the nodes that failed"
    )
    experiment: str = Field(default="rekindle", description="MLflow experiment of the run")
    ledgers: list[str] = Field(
        default_factory=list, description="key prefixes of the ledgers, one per training"
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="the resolved config, which is recorded unless a step has recorded it",
    )
    manifest: str = Field(
        default="",
        description=(
            "the manifest (as zlib in base64), which is recorded unless a step has recorded it"
        ),
    )
    cached: dict[str, Any] = Field(
        default_factory=dict, description="earlier runs whose outputs were reused, by task"
    )
    backfill: str = Field(
        default="",
        description="if not empty, this is the run of a backfill, which `keep_runs` does not count",
    )


class CachedTask(Document):
    """A task that may reuse the outputs of an earlier run; `source` is the RUN/TASK whose outputs
    the task reuses, or "" if the source is not known yet."""

    task: str
    source: str = Field(alias="at")
    digest: str = ""


class Outputs(StepOutputs):
    run_id: str = Field(
        description="MLflow run that was closed; empty if the workflow did not create a run"
    )
    training_costs: dict[str, float] = Field(
        description="cost of each training by task; empty without prices"
    )
    warnings: list[str] = Field(
        default=[], description="what could not be recorded or removed, one sentence each"
    )


class Problems:
    """Collects errors that do not fail the step. Each error is printed, and becomes a warning of
    the step."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    @contextmanager
    def record_errors(self, consequence: str) -> Iterator[None]:
        """Record an error of the body as a warning that starts with `consequence`, such as "old
        runs are not removed"."""
        try:
            yield
        except RekindleError as error:
            self._record(f"{consequence}: {error}")
        # catch any exception, since the run must be closed
        except Exception as error:
            traceback.print_exc()
            self._record(f"{consequence}: {error!r}")

    def _record(self, problem_sentence: str) -> None:
        self.texts.append(problem_sentence)
        sys.stderr.write(f"warning: {problem_sentence}\n")


def run(inputs: Inputs) -> Outputs:
    """Set the final status of the run and the reasons of a failure. Raises TrackingError if MLflow
    is unavailable."""
    from rekindle import tracking

    problems = Problems()

    cache_limits = inputs.config.get("cache")
    if cache_limits:
        with problems.record_errors("the cache is not trimmed"):
            trim_cache(cache_limits)

    run_id = tracking.find_run(inputs.experiment, inputs.workflow)
    if not run_id:
        sys.stderr.write(f"no MLflow run found for {inputs.workflow}: nothing to close\n")
        return Outputs(run_id="", training_costs={}, warnings=problems.texts)

    if inputs.cached:
        record_cached(run_id, inputs)

    failure_lines = describe_failures(inputs.failures)
    is_single_training = len(inputs.ledgers) == 1
    metric_prefixes = list[str]()
    cost_by_training = dict[str, float]()
    # WORKFLOW/TASK/checkpoints/ledger
    ledger_by_task = {ledger.split("/")[1]: ledger for ledger in inputs.ledgers}
    recorded_manifest = dict[str, Any]()
    tariff_by_task = dict[str, "TrainingTariff"]()

    with problems.record_errors("the costs of the training are not recorded"):
        recorded_manifest = unpack_manifest(inputs.manifest)
        tariff_by_task = training_tariffs(recorded_manifest, ledger_by_task)

    for task_name, ledger in ledger_by_task.items():
        # an error of the summary must not prevent the end of the workflow
        with problems.record_errors("the summary of the training is not recorded"):
            ledger_summary = training_summary(ledger)
            if failure_lines and has_failed(task_name, failure_lines):
                failure_lines[:0] = describe_wait(task_name, ledger_summary, inputs.config)
            if not ledger_summary.intervals:
                continue

            metric_prefix = "" if is_single_training else f"{task_name}/"
            metric_prefixes.append(metric_prefix)

            if failure_lines and ledger_summary.state == "failed":
                training_label = "training" if is_single_training else task_name
                failure_lines.insert(
                    0, f"{training_label}: {without_secrets(ledger_summary.message)}"
                )

            training_cost = log_training(
                run_id,
                ledger_summary,
                inputs.workdir / task_name,
                metric_prefix,
                tariff_by_task.get(task_name),
            )
            if training_cost is not None:
                cost_by_training[task_name] = training_cost

    sweep_section = inputs.config.get("sweep")
    if sweep_section:
        with problems.record_errors("the costs of the trials are not recorded"):
            log_trial_costs(run_id, inputs.workflow, sweep_section, recorded_manifest)

    tag_run(run_id, failure_lines, metric_prefixes)
    tracking.finish(run_id, convert_phase(inputs.status, failure_lines))
    with problems.record_errors("the end of the run is not recorded"):
        record_end(inputs, recorded_manifest, run_id)

    with problems.record_errors("old runs are not removed"):
        apply_retention(inputs, run_id)

    return Outputs(run_id=run_id, training_costs=cost_by_training, warnings=problems.texts)


def trim_cache(cache_limits: dict[str, Any]) -> None:
    """Remove entries of the cache until the cache is within its limits."""
    from rekindle.cache import entries
    from rekindle.cache.difference import remove_unused_code
    from rekindle.storage import Store

    object_store = Store.from_env().short_retries()
    removed_entries = entries.trim_cache(
        object_store,
        cache_limits["keep_days"],
        cache_limits["keep_entries"],
        cache_limits["keep_size"],
    )
    if removed_entries:
        remove_unused_code(object_store)
        sys.stderr.write(
            f"removed {len(removed_entries):,} of the oldest cache entries (config section cache)\n"
        )


def apply_retention(inputs: Inputs, run_id: str) -> None:
    """Remove old runs and releases, unless `rekindle run` removes them on this machine."""
    from rekindle import tracking
    from rekindle.release.retention import cluster_retention, listing
    from rekindle.storage import Store

    object_store = Store.from_env().short_retries()
    store_id = listing.read_or_create_store_id(object_store)
    tracking.log_to_run(run_id, run_tags={listing.STORE_TAG: store_id})

    if KUBERNETES_SERVICE_HOST not in os.environ or not inputs.config.get("retention"):
        return

    promoted_model = find_promoted(object_store, inputs, run_id)
    removed_names = cluster_retention.apply(
        object_store, inputs.workflow, inputs.config, promoted_model
    )
    if removed_names:
        sys.stderr.write(f"removed {len(removed_names):,} runs (config section retention)\n")


def find_promoted(object_store: "Store", inputs: Inputs, run_id: str) -> str:
    """Return the model whose release the run has promoted, if the run has succeeded, else "".

    The tag in MLflow is used only for the name of the model, because everybody can set the tag.
    """
    from rekindle import tracking
    from rekindle.names import ModelName
    from rekindle.release import promotion

    promoted_tag = tracking.read_tags(run_id).get(tracking.PROMOTED, "")
    model_name = ModelName.parse_or_none(promoted_tag.rpartition(" ")[0])
    if inputs.status != "Succeeded" or not model_name:
        return ""

    own_names = run_id, f"{inputs.experiment}/{inputs.workflow}"
    return model_name if promotion.was_promoted_by(object_store, model_name, own_names) else ""


def record_end(inputs: Inputs, run_manifest: dict[str, Any], run_id: str) -> None:
    """Record in the object store that the run has ended."""
    from rekindle.release.retention import ownership
    from rekindle.storage import Store

    workflow_metadata = (run_manifest.get("metadata") or {}) | {"name": inputs.workflow}
    object_store = Store.from_env().short_retries()
    has_succeeded = inputs.status == "Succeeded"
    is_counted = not inputs.backfill
    ownership.end_run(
        object_store,
        {"metadata": workflow_metadata},
        inputs.experiment,
        has_succeeded,
        run_id,
        is_counted=is_counted,
    )


def _recorded_source(object_store: "Store", object_key: str) -> str:
    """Read the object `object_key`, and return the RUN/TASK whose outputs a task has reused; ""
    if the object is missing or invalid."""
    from rekindle.errors import NotFound
    from rekindle.names import TaskReference

    try:
        source_text = object_store.get(object_key).decode(errors="replace")
    except NotFound:
        return ""

    return TaskReference.parse_or_none(source_text) or ""


def record_cached(run_id: str, inputs: Inputs) -> None:
    """Record the runs whose outputs were reused, and the facts that cached steps would have
    recorded."""
    from rekindle import tracking
    from rekindle.storage import Store
    from steps.prepare import record

    cached_tasks = [
        parse(CachedTask, to_json(cached_task), f"the entry {task_name} of the input cached")
        for task_name, cached_task in inputs.cached.items()
        if isinstance(cached_task, dict)
    ]
    object_store = Store.from_env() if cached_tasks else None
    # task → RUN/TASK whose outputs this task has reused
    source_by_task: dict[str, str] = {}

    for cached_task in cached_tasks:
        source_task = cached_task.source
        if object_store and not source_task:
            source_task = _recorded_source(
                object_store, f"{inputs.workflow}/{cached_task.task}/cached"
            )
        if source_task:
            source_by_task[cached_task.task] = source_task

    if not source_by_task:
        return

    run_params = tracking.read_params(run_id)
    if "name" not in run_params:
        record(run_id, inputs.config, inputs.manifest)

    dataset_digests = [cached_task.digest for cached_task in cached_tasks if cached_task.digest]
    if dataset_digests and "data.digest" not in run_params:
        tracking.log_to_run(
            run_id,
            run_params={"data.digest": dataset_digests[0]},
            run_tags={tracking.DIGEST: dataset_digests[0]},
        )

    run_tags = {
        f"{tracking.CACHED}{task_name}": source_task
        for task_name, source_task in source_by_task.items()
    }
    if any(cached_task.source for cached_task in cached_tasks):
        run_tags[tracking.REFERS_TO_RUNS] = "yes"

    tracking.log_to_run(run_id, run_tags=run_tags)


def has_failed(task_name: str, failure_lines: list[str]) -> bool:
    """Return True if the task is one of the failed tasks."""
    return any(line.partition(":")[0] == task_name for line in failure_lines)


def describe_wait(
    task_name: str, ledger_summary: "LedgerSummary", run_config: dict[str, Any]
) -> list[str]:
    """Return a line that says what the job of a training was waiting for when the workflow ended;
    [] if the job was not waiting."""
    from rekindle.training.ledger.sentences import describe_unended_wait

    queue_name = str(run_config.get("cluster", {}).get("queue", ""))
    wait_text = describe_unended_wait(ledger_summary, queue_name, time.time())
    return [f"{task_name}: {wait_text}"] if wait_text else []


def training_summary(ledger_prefix: str) -> "LedgerSummary":
    """Return the summary of a training, which has no intervals if its ledger is missing."""
    from rekindle.storage import Store
    from rekindle.training.ledger.accounting import summarize_events
    from rekindle.training.ledger.events import read_events

    return summarize_events(read_events(Store.from_env(), ledger_prefix))


def training_tariffs(
    run_manifest: dict[str, Any], task_names: Iterable[str]
) -> "dict[str, TrainingTariff]":
    """Return the prices and pods of the trainings, from the recorded manifest; {} if the manifest
    has no prices."""
    from rekindle.training.cost import tariff

    if run_manifest:
        return tariff.build_tariffs(run_manifest, tariff.read_prices(run_manifest), task_names)
    return {}


def log_trial_costs(
    run_id: str, workflow_name: str, sweep_section: dict[str, Any], run_manifest: dict[str, Any]
) -> None:
    """Log the total cost of the trials of a sweep as metrics `cost/`."""
    from rekindle import tracking
    from rekindle.storage import Store
    from rekindle.training.cost import tariff
    from rekindle.training.sweep.costs import compute_trial_bills, sum_amounts
    from rekindle.training.sweep.study import SEARCH_FOLDER, SweepStudy
    from rekindle.training.sweep.sweep_config import Sweep

    trial_tariff = tariff.build_trial_tariff(run_manifest, tariff.read_prices(run_manifest))
    if not trial_tariff:
        return

    sweep_study = SweepStudy(
        Store.from_env(), f"{workflow_name}/{SEARCH_FOLDER}", Sweep.model_validate(sweep_section)
    )
    sweep_study.read()
    cost_amounts = sum_amounts(compute_trial_bills(sweep_study, trial_tariff).values())
    cost_metrics = {
        f"cost/{cost_name}": cost_amount for cost_name, cost_amount in cost_amounts.items()
    }
    tracking.log_to_run(
        run_id, run_metrics=cost_metrics, run_tags={tracking.CURRENCY: trial_tariff.prices.currency}
    )


def log_training(
    run_id: str,
    ledger_summary: "LedgerSummary",
    plot_folder: Path,
    metric_prefix: str,
    tariff: "TrainingTariff | None",
) -> float | None:
    """Log the summary as metrics below `workers/` and `cost/`, as tags, and as artifacts below
    `ledger/`; all names begin with `metric_prefix`.

    Return the cost of the training; None if the prices are unknown.
    """
    from rekindle import tracking
    from rekindle.training.cost import bill
    from rekindle.training.ledger import publish

    cost_report = bill.build_report(ledger_summary, tariff)
    cost_section = cost_report.get("cost") or {}
    summary_tags = {
        f"{metric_prefix}{tag_name}": tag_value
        for tag_name, tag_value in publish.compute_tags(ledger_summary).items()
    }
    summary_tags.update({tracking.CURRENCY: cost_section["currency"]} if cost_section else {})
    summary_metrics = publish.compute_metrics(ledger_summary, f"{metric_prefix}workers")
    summary_metrics.update(
        {
            f"{metric_prefix}cost/{cost_name}": cost_amount
            for cost_name, cost_amount in cost_section.items()
            if isinstance(cost_amount, float)
        }
    )
    tracking.log_to_run(run_id, run_metrics=summary_metrics, run_tags=summary_tags)
    publish.write_report_files(ledger_summary, plot_folder, cost_report)
    tracking.log_folder(run_id, plot_folder, f"{metric_prefix}ledger")

    return cost_section.get("total")


def tag_run(run_id: str, failure_lines: list[str], metric_prefixes: list[str]) -> None:
    """Store the failures and the description of the run in its tags."""
    from rekindle import tracking

    if failure_lines:
        failures_text = "\n".join(line[:FAILURE_LENGTH] for line in failure_lines[:MAX_FAILURES])
        tracking.log_to_run(run_id, run_tags={tracking.FAILURES: failures_text})

    run_note = describe_run(run_id, failure_lines, metric_prefixes)
    tracking.log_to_run(run_id, run_tags={tracking.NOTE: run_note})


def describe_run(run_id: str, failure_lines: list[str], metric_prefixes: list[str]) -> str:
    """Return the note of the MLflow run, which is Markdown with verdicts, failures, and plots of
    evaluations and trainings."""
    from rekindle import tracking

    evaluations = parse_verdicts(tracking.read_tags(run_id))
    markdown_lines = [
        f"**{evaluation_prefix}{evaluation_verdict}**: {verdict_reason}"
        for evaluation_prefix, evaluation_verdict, verdict_reason in evaluations
    ]
    markdown_lines += [
        f"**failed**: {failure_line[:FAILURE_LENGTH]}"
        for failure_line in failure_lines[:MAX_FAILURES]
    ]
    plot_folders = [
        f"{evaluation_prefix}evaluation" for evaluation_prefix, *_ in evaluations or [("",)]
    ]
    plot_folders += [f"{evaluation_prefix}ledger" for evaluation_prefix in metric_prefixes]

    plot_paths = [
        plot_path
        for plot_folder in plot_folders
        for plot_path in tracking.artifacts(run_id, plot_folder)
        if plot_path.endswith(".png")
    ]

    markdown_lines += [
        f"![{plot_path}](get-artifact?path={quote(plot_path)}&run_uuid={run_id})"
        for plot_path in plot_paths
    ]

    return "\n\n".join(markdown_lines)
