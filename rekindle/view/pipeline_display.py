"""Run a pipeline in the foreground, with the display of argolocal plus the model, its verdict and
its endpoint.

    create_run(home, manifest, parameters).run(as_json=False, ask=True)
    # exit code 3, which argolocal does not have: not released by the gate
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from argolocal.common import exit_codes
from argolocal.controllers.deployment import Deployments
from argolocal.runner.run import LocalRun
from argolocal.view import foreground
from argolocal.view.summary import Status, Step
from rekindle.blocks.manifest import workflow_origin
from rekindle.blocks.manifest.provenance import BACKFILL
from rekindle.blocks.volume import volume_claim
from rekindle.errors import RekindleError, say
from rekindle.local.cluster import LocalCluster
from rekindle.local.jobs.model_services import may_use_any_port
from rekindle.operations import results
from rekindle.view import outcome, overview
from rekindle.view.progress import LogProgress


def create_run(
    home: Path,
    manifest: Mapping[str, Any],
    parameters: Mapping[str, str],
    other_objects: Iterable[Mapping[str, Any]] = (),
    notes: bool = False,
    is_queued: bool = False,
) -> "Pipeline":
    """Create the run of a manifest, without starting it. Raises ConfigError.

    `notes`: whether to print the notes of `lint`. `is_queued`: the server of the home starts it.
    """
    local = foreground.create_run(
        LocalCluster(home),
        manifest,
        parameters,
        [*other_objects, *_cache_claims(manifest)],
        notes=notes,
        needs_ports=not (may_use_any_port(manifest) or parameters.get(BACKFILL) == "true"),
        is_queued=is_queued,
    )
    return Pipeline(local)


def _cache_claims(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the PersistentVolumeClaim that `cluster.cache` names, if any. A local run creates a
    folder in its place."""
    cluster = (
        workflow_origin.read_config_or_empty(manifest).get("cluster")
        if manifest.get("spec")
        else None
    )
    claim = cluster.get("cache") if isinstance(cluster, dict) else None
    if isinstance(claim, str) and claim:
        return [volume_claim(claim, "1Gi")]
    return []


def load_run(
    home: Path, name: str | None, values: Mapping[str, str], as_json: bool
) -> "Pipeline | None":
    """Load a run to resume. If another process executes the run, resume its suspended steps and
    return None.

    Raises ConfigError, Busy.
    """
    local = foreground.load_run(LocalCluster(home), name, values, as_json)
    if local:
        return Pipeline(local)
    return None


def run_here(pipeline: "Pipeline", *, as_json: bool, ask: bool, full_status: bool) -> int:
    """Run a pipeline in the foreground, and then remove old runs of this pipeline according to its
    config. Return the exit code of the run."""
    code = pipeline.run(as_json=as_json, ask=ask, full_status=full_status)

    workflow = pipeline.local.workflow
    limits = workflow_origin.read_config_or_empty(workflow).get("retention")
    if code < exit_codes.SIGNALLED and isinstance(limits, dict) and any(limits.values()):
        # imported in this function, because the module needs the clients of MLflow and the object
        # store
        from rekindle.operations import retention

        retention.end_of_run(pipeline.local.cluster.home, workflow)

    return code


def execute_queued(home: Path, name: str) -> int:
    """Run a queued run to its end, and return its exit code. Raises Busy, NotQueued."""
    cluster = LocalCluster(home)
    pipeline = Pipeline(LocalRun.load(name, cluster, is_queued=True))
    if pipeline.is_rekindle:
        # start the services now, so that they are ready when the first step needs them
        cluster.prefetch()
    return run_here(pipeline, as_json=False, ask=False, full_status=False)


class Pipeline(foreground.Foreground):
    """Runs a workflow. `is_rekindle` is True if Rekindle has rendered the workflow."""

    def __init__(self, local: LocalRun) -> None:
        super().__init__(local)
        self.is_rekindle = workflow_origin.is_rekindle(local.workflow)

    def begin(self) -> None:
        """Mark the run's folder in the object store. Also restart the deployments that `rekindle
        down` stopped, since the run may not replace them by a new release."""
        if self._writes_artifacts():
            self._mark_run()

        name = workflow_origin.pipeline_label(self.local.workflow)
        cluster = self.local.cluster
        if name and (cluster.home / "objects/Service" / f"{name}.json").exists():
            Deployments(cluster).start()

    def _writes_artifacts(self) -> bool:
        """Return True if the run writes artifacts to the object store."""
        spec = self.local.workflow["spec"]
        templates = spec.get("templates") or []
        has_artifacts = any(
            (template.get("outputs") or {}).get("artifacts") for template in templates
        )
        has_logs = any(
            (owner.get("archiveLocation") or owner).get("archiveLogs")
            for owner in (spec, *templates)
        )
        return self.is_rekindle or has_artifacts or has_logs

    def _mark_run(self) -> None:
        # imported in this function: it needs the client of the object store
        from rekindle.release.retention import ownership
        from rekindle.storage import Store

        workflow = self.local.workflow
        store = self.local.cluster.store()
        if not isinstance(store, Store):
            return

        try:
            counted = not workflow_origin.read_parameter(workflow, BACKFILL)
            pipeline = workflow_origin.pipeline_of(workflow)
            ownership.begin(store.short_retries(), workflow, pipeline, counted=counted)
        except RekindleError as error:
            say(f"note: retention will keep the artifacts of {self.name}: {error}")

    def progress(self, row: Step) -> str:
        return LogProgress(self.name, self.local.files.logs, self.deployments).of(row)

    def exit_code(self, status: Status) -> int:
        return results.exit_code(status, self.is_rekindle)

    def succeeded(self, code: int) -> bool:
        return code in (0, results.NOT_RELEASED)

    def as_json(self, status: Status) -> dict[str, Any]:
        facts = overview.facts(self.local.cluster.home, self.local.workflow, status)
        return outcome.as_json(self.name, status, **facts)

    def success(self, status: Status) -> str:
        endpoint = overview.endpoint(self.local.cluster.home, self.local.workflow)
        model = f"{endpoint}/v1/models/{workflow_origin.pipeline_label(self.local.workflow)}"
        curl = f"curl -s{overview.token_header(self.local.cluster.home, self.local.workflow)}"
        facts = {
            "endpoint": endpoint,
            "try it": endpoint and f"{curl} {model}/example | {curl} {model}:predict -d @-",
            "page": f"rekindle ui {self.name}",
            "cost": results.costs(status, self.local.workflow).get("words"),
        }
        return outcome.success(status, facts, self.is_rekindle)
