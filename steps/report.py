"""Close the workflow's MLflow run with the results of the workflow and its trainings: the exit
handler of every pipeline.

    rekindle step steps.report --workflow=demo-x7k2p --status=Failed \\
      --failures='[{"displayName": "train"}]'

The step works after any failure of the workflow, and can be repeated. Without an MLflow run of the
workflow, it does nothing. The step logs the summary of each training's ledger as metrics, as tags,
and as artifacts below `ledger/` (text, JSON and a plot).
"""

import os
import sys
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
    from rekindle.training.cost.tariff import Tariff
    from rekindle.training.ledger.ledger_summary import Summary

# maximum number of failures in a tag, and maximum number of characters of each: MLflow limits a tag
# to 5,000 characters
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
    """A task that may reuse the outputs of an earlier run; `source`: RUN/TASK whose outputs it
    reuses, or "" if this is not known yet."""

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
    """Collects errors that do not fail the step. They are printed, and become warnings of the
    step."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    @contextmanager
    def noted(self, effect: str) -> Iterator[None]:
        """Record an error that the body raises; `effect`: the consequence of the error, as the
        start of the warning."""
        try:
            yield
        except RekindleError as error:
            self._record(f"{effect}: {error}")
        # catch any exception, since the run must be closed
        except Exception as error:
            traceback.print_exc()
            self._record(f"{effect}: {error!r}")

    def _record(self, text: str) -> None:
        self.texts.append(text)
        sys.stderr.write(f"warning: {text}\n")


def run(inputs: Inputs) -> Outputs:
    """Set the final status of the run and the reasons of a failure. Raises TrackingError if MLflow
    is unavailable."""
    from rekindle import tracking

    problems = Problems()

    limits = inputs.config.get("cache")
    if limits:
        with problems.noted("the cache is not trimmed"):
            trim_cache(limits)

    run_id = tracking.find_run(inputs.experiment, inputs.workflow)
    if not run_id:
        sys.stderr.write(f"no MLflow run found for {inputs.workflow}: nothing to close\n")
        return Outputs(run_id="", training_costs={}, warnings=problems.texts)

    if inputs.cached:
        record_cached(run_id, inputs)

    lines = describe_failures(inputs.failures)
    is_single_training = len(inputs.ledgers) == 1
    prefixes = list[str]()
    costs = dict[str, float]()
    # WORKFLOW/TASK/checkpoints/ledger
    tasks = {ledger.split("/")[1]: ledger for ledger in inputs.ledgers}
    recorded = dict[str, Any]()
    tariffs = dict[str, "Tariff"]()

    with problems.noted("the costs of the training are not recorded"):
        recorded = unpack_manifest(inputs.manifest)
        tariffs = training_tariffs(recorded, tasks)

    for task, ledger in tasks.items():
        # an error here must not prevent the end of the workflow
        with problems.noted("the summary of the training is not recorded"):
            summary = training_summary(ledger)
            if not summary:
                continue

            prefix = "" if is_single_training else f"{task}/"
            prefixes.append(prefix)

            if lines and summary.state == "failed":
                label = "training" if is_single_training else task
                lines.insert(0, f"{label}: {without_secrets(summary.message)}")

            cost = log(run_id, summary, inputs.workdir / task, prefix, tariffs.get(task))
            if cost is not None:
                costs[task] = cost

    sweep = inputs.config.get("sweep")
    if sweep:
        with problems.noted("the costs of the trials are not recorded"):
            log_trial_costs(run_id, inputs.workflow, sweep, recorded)

    if lines:
        failures = "\n".join(line[:FAILURE_LENGTH] for line in lines[:MAX_FAILURES])
        tracking.log(run_id, tags={tracking.FAILURES: failures})

    tracking.log(run_id, tags={tracking.NOTE: description(run_id, lines, prefixes)})
    tracking.finish(run_id, convert_phase(inputs.status, lines))
    with problems.noted("the end of the run is not recorded"):
        record_end(inputs, recorded, run_id)

    with problems.noted("old runs are not removed"):
        apply_retention(inputs, run_id)

    return Outputs(run_id=run_id, training_costs=costs, warnings=problems.texts)


def trim_cache(limits: dict[str, Any]) -> None:
    """Remove entries of the cache until it is within its limits."""
    from rekindle.cache import entries
    from rekindle.cache.difference import remove_unused_code
    from rekindle.storage import Store

    store = Store.from_env().short_retries()
    removed = entries.trim_cache(
        store, limits["keep_days"], limits["keep_entries"], limits["keep_size"]
    )
    if removed:
        remove_unused_code(store)
        sys.stderr.write(
            f"removed {len(removed):,} of the oldest cache entries (config section cache)\n"
        )


def apply_retention(inputs: Inputs, run_id: str) -> None:
    """Remove old runs and releases, unless `rekindle run` removes them on this machine."""
    from rekindle import tracking
    from rekindle.release.retention import cluster_retention, listing
    from rekindle.storage import Store

    store = Store.from_env().short_retries()
    tracking.log(run_id, tags={listing.STORE_TAG: listing.store_id(store)})

    if KUBERNETES_SERVICE_HOST not in os.environ or not inputs.config.get("retention"):
        return

    promoted = find_promoted(store, inputs, run_id)
    names = cluster_retention.apply(store, inputs.workflow, inputs.config, promoted)
    if names:
        sys.stderr.write(f"removed {len(names):,} runs (config section retention)\n")


def find_promoted(store: "Store", inputs: Inputs, run_id: str) -> str:
    """Return the model whose release the run has promoted, if the run has succeeded, else "".

    The tag in MLflow only names the model: everybody can set it.
    """
    from rekindle import tracking
    from rekindle.names import ModelName
    from rekindle.release import promotion

    tag = tracking.read_tags(run_id).get(tracking.PROMOTED, "")
    model = ModelName.or_none(tag.rpartition(" ")[0])
    if inputs.status != "Succeeded" or not model:
        return ""

    own_names = run_id, f"{inputs.experiment}/{inputs.workflow}"
    return model if promotion.was_promoted_by(store, model, own_names) else ""


def record_end(inputs: Inputs, manifest: dict[str, Any], run_id: str) -> None:
    """Record in the object store that the run has ended."""
    from rekindle.release.retention import ownership
    from rekindle.storage import Store

    metadata = (manifest.get("metadata") or {}) | {"name": inputs.workflow}
    store = Store.from_env().short_retries()
    succeeded = inputs.status == "Succeeded"
    counted = not inputs.backfill
    ownership.end(
        store, {"metadata": metadata}, inputs.experiment, succeeded, run_id, counted=counted
    )


def _recorded_source(store: "Store", key: str) -> str:
    """Read the object `key`, and return the RUN/TASK whose outputs a task has reused; "" if the
    object is missing or invalid."""
    from rekindle.errors import NotFound
    from rekindle.names import TaskReference

    try:
        text = store.get(key).decode(errors="replace")
    except NotFound:
        return ""

    return TaskReference.or_none(text) or ""


def record_cached(run_id: str, inputs: Inputs) -> None:
    """Record the runs whose outputs were reused, and the facts that cached steps would have
    recorded."""
    from rekindle import tracking
    from rekindle.storage import Store
    from steps.prepare import record

    rows = [
        parse(CachedTask, to_json(row), f"the entry {name} of the input cached")
        for name, row in inputs.cached.items()
        if isinstance(row, dict)
    ]
    store = Store.from_env() if rows else None
    sources: dict[str, str] = {}  # task → RUN/TASK whose outputs this task has reused

    for row in rows:
        source = row.source
        if store and not source:
            source = _recorded_source(store, f"{inputs.workflow}/{row.task}/cached")
        if source:
            sources[row.task] = source

    if not sources:
        return

    params = tracking.read_params(run_id)
    if "name" not in params:
        record(run_id, inputs.config, inputs.manifest)

    digests = [row.digest for row in rows if row.digest]
    if digests and "data.digest" not in params:
        tracking.log(run_id, params={"data.digest": digests[0]}, tags={tracking.DIGEST: digests[0]})

    tags = {f"{tracking.CACHED}{task}": source for task, source in sources.items()}
    tracking.log(
        run_id, tags=tags | ({tracking.REFERS: "yes"} if any(row.source for row in rows) else {})
    )


def training_summary(ledger: str) -> "Summary | None":
    """Return the summary of a training; None if its ledger is missing or empty."""
    from rekindle.storage import Store
    from rekindle.training.ledger.accounting import summarize
    from rekindle.training.ledger.events import read_events

    summary = summarize(read_events(Store.from_env(), ledger))
    if summary.intervals:
        return summary
    return None


def training_tariffs(manifest: dict[str, Any], tasks: Iterable[str]) -> "dict[str, Tariff]":
    """Return the prices and pods of the trainings, from the recorded manifest; {} if the manifest
    has no prices."""
    from rekindle.training.cost import tariff

    if manifest:
        return tariff.build_tariffs(manifest, tariff.read_prices(manifest), tasks)
    return {}


def log_trial_costs(
    run_id: str, workflow: str, sweep: dict[str, Any], manifest: dict[str, Any]
) -> None:
    """Log the total cost of the trials of a sweep as metrics `cost/`."""
    from rekindle import tracking
    from rekindle.storage import Store
    from rekindle.training.cost import tariff
    from rekindle.training.sweep.costs import compute_trial_bills, sum_amounts
    from rekindle.training.sweep.study import FOLDER, Study
    from rekindle.training.sweep.sweep_config import Sweep

    prices = tariff.build_trial_tariff(manifest, tariff.read_prices(manifest))
    if not prices:
        return

    study = Study(Store.from_env(), f"{workflow}/{FOLDER}", Sweep.model_validate(sweep))
    study.read()
    amounts = sum_amounts(compute_trial_bills(study, prices).values())
    metrics = {f"cost/{name}": value for name, value in amounts.items()}
    tracking.log(run_id, metrics=metrics, tags={tracking.CURRENCY: prices.prices.currency})


def log(
    run_id: str, summary: "Summary", folder: Path, prefix: str, tariff: "Tariff | None"
) -> float | None:
    """Log the summary as metrics below `workers/` and `cost/`, as tags, and as artifacts below
    `ledger/`; all names begin with `prefix`.

    Return the cost of the training; None without prices.
    """
    from rekindle import tracking
    from rekindle.training.cost import bill
    from rekindle.training.ledger import publish

    report = bill.build_report(summary, tariff)
    cost = report.get("cost") or {}
    tags = {f"{prefix}{name}": value for name, value in publish.compute_tags(summary).items()}
    tags.update({tracking.CURRENCY: cost["currency"]} if cost else {})
    metrics = publish.compute_metrics(summary, f"{prefix}workers")
    metrics.update(
        {f"{prefix}cost/{name}": value for name, value in cost.items() if isinstance(value, float)}
    )
    tracking.log(run_id, metrics=metrics, tags=tags)
    publish.write_files(summary, folder, report)
    tracking.log_dir(run_id, folder, f"{prefix}ledger")

    return cost.get("total")


def description(run_id: str, failures: list[str], prefixes: list[str]) -> str:
    """Return the note of the MLflow run: Markdown with verdicts, failures, and plots of evaluations
    and trainings."""
    from rekindle import tracking

    evaluations = parse_verdicts(tracking.read_tags(run_id))
    lines = [f"**{prefix}{verdict}**: {reason}" for prefix, verdict, reason in evaluations]
    lines += [f"**failed**: {failure[:FAILURE_LENGTH]}" for failure in failures[:MAX_FAILURES]]
    folders = [f"{prefix}evaluation" for prefix, *_ in evaluations or [("",)]]
    folders += [f"{prefix}ledger" for prefix in prefixes]

    paths = [
        path
        for folder in folders
        for path in tracking.artifacts(run_id, folder)
        if path.endswith(".png")
    ]

    lines += [f"![{path}](get-artifact?path={quote(path)}&run_uuid={run_id})" for path in paths]

    return "\n\n".join(lines)
