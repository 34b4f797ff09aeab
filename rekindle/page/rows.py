"""The rows of the list of runs, with facts of trainings."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from argolocal.manifest.object_labels import SCHEDULED_TIME_ANNOTATION
from argolocal.page.run_list import ReadLogs, RowReader
from argolocal.page.sources import Run
from argolocal.state.journal import RunFiles
from argolocal.view.summary import Step
from rekindle.blocks.manifest import workflow_origin
from rekindle.blocks.manifest.provenance import SCHEDULED_TIME, SCHEDULED_TIME_TAG
from rekindle.content.recorded_manifest import unpack_manifest
from rekindle.documents import InvalidDocument
from rekindle.errors import RekindleError
from rekindle.operations import results
from rekindle.view.progress import LogProgress

# title of the column with the time that a schedule or a backfill set
SCHEDULED = "Scheduled"
# maximum number of unpacked manifests in the cache; manifests are cached, because all runs of a
# config record the same manifest
MAX_CACHED_MANIFESTS = 16

VERDICT_WORDS = {
    "release": "released",
    "keep": "not released",
    "same": "nothing to release",
    "taken back": "rolled back",
}


class RekindleRows(RowReader):
    """Adds the verdict, the model and the cost of a run, and the progress of a training.

    `home` is REKINDLE_HOME with the logs of the runs, or None for the runs of a cluster.
    """

    filters = ("Model",)

    def __init__(self, home: Path | None, read_logs: ReadLogs = lambda run: {}) -> None:
        super().__init__(read_logs)
        self.home = home

    def pipeline(self, run: Run) -> str:
        return workflow_origin.pipeline_label(run.manifest) or super().pipeline(run)

    def facts(self, run: Run) -> Mapping[str, str]:
        return {
            "Verdict": describe_verdict(run),
            "Model": find_model(run),
            "Cost": describe_cost(run),
            SCHEDULED: read_scheduled_time(run.manifest),
        }

    def progress(self, name: str, running_steps: Sequence[Step]) -> str:
        if self.home is None:
            return super().progress(name, running_steps)
        if not running_steps:
            return ""
        reader = LogProgress(name, RunFiles(self.home, name).logs, self.home / "deployments")
        return next(filter(None, map(reader.of, running_steps)), "")


def read_scheduled_time(manifest: Mapping[str, Any]) -> str:
    """Return the time that a schedule or a backfill gave a run; "" for other runs."""
    value = workflow_origin.read_parameter(manifest, SCHEDULED_TIME)
    if value != SCHEDULED_TIME_TAG:
        return value
    annotations = manifest["metadata"].get("annotations") or {}
    return str(annotations.get(SCHEDULED_TIME_ANNOTATION) or "")


def describe_verdict(run: Run) -> str:
    """Return the verdict of a run in words; "" without a verdict."""
    verdict = results.read_parameters(run.status).get("verdict", "")
    if verdict == "release" and run.phase != "Succeeded":
        return "passed the gate"
    return VERDICT_WORDS.get(verdict, verdict)


def find_model(run: Run) -> str:
    """Return the registered model that a run trains or uses; "" without a model."""
    released_models = {release.model for release in results.list_releases(run.status)}
    if released_models:
        return ", ".join(sorted(released_models))
    if not workflow_origin.is_rekindle_manifest(run.manifest):
        return ""

    config = workflow_origin.read_config_or_empty(run.manifest)
    # a pipeline without a training names its model in a setting such as scoring.model
    for section in config.values():
        model = section.get("model") if isinstance(section, dict) else None
        if isinstance(model, str):
            return model
    return workflow_origin.pipeline_label(run.manifest) or ""


def describe_cost(run: Run) -> str:
    """Return the cost of a run, such as "1.20 USD"; "" if the prices are missing or malformed."""
    # imported here to keep the start of the page fast
    from rekindle.training.cost import tariff
    from rekindle.training.cost.run_cost import compute_run_costs

    try:
        manifest = _read_recorded_manifest(run.manifest)
        costs = compute_run_costs(run.status, manifest, tariff.read_prices(manifest))
    except RekindleError:
        return ""
    return str(costs.get("words", "")).partition(" (")[0]


def _read_recorded_manifest(workflow: Mapping[str, Any]) -> Any:
    text = workflow_origin.read_parameter(workflow, "manifest")
    if not text:
        return workflow
    try:
        return _unpack_manifest(text)
    except InvalidDocument:
        # ignore the value, because other programs may use a parameter with this name for another
        # purpose
        return workflow


@lru_cache(MAX_CACHED_MANIFESTS)
def _unpack_manifest(manifest_text: str) -> Any:
    return unpack_manifest(manifest_text)
