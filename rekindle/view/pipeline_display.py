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
from rekindle.errors import RekindleError, write_stderr
from rekindle.local.cluster import LocalCluster
from rekindle.local.jobs.model_services import may_use_any_port
from rekindle.operations import results
from rekindle.view import outcome, overview
from rekindle.view.progress import LogProgress


def create_run(
    home: Path,
    manifest: Mapping[str, Any],
    parameter_values: Mapping[str, str],
    other_objects: Iterable[Mapping[str, Any]] = (),
    shows_notes: bool = False,
    is_queued: bool = False,
) -> "Pipeline":
    """Create the run of a manifest, without starting it. Raises ConfigError.

    `shows_notes` is True to print the notes of `rekindle lint`. `is_queued` is True if the run
    waits until `rekindle server` starts it.
    """
    local_run = foreground.create_run(
        LocalCluster(home),
        manifest,
        parameter_values,
        [*other_objects, *_cache_claims(manifest)],
        shows_notes=shows_notes,
        checks_ports=not (may_use_any_port(manifest) or parameter_values.get(BACKFILL) == "true"),
        is_queued=is_queued,
    )
    return Pipeline(local_run)


def _cache_claims(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the PersistentVolumeClaim that `cluster.cache` names, if any. A run on this machine
    creates a folder in place of the PersistentVolumeClaim."""
    cluster_section = (
        workflow_origin.read_config_or_empty(manifest).get("cluster")
        if manifest.get("spec")
        else None
    )
    claim_name = cluster_section.get("cache") if isinstance(cluster_section, dict) else None
    if isinstance(claim_name, str) and claim_name:
        return [volume_claim(claim_name, "1Gi")]
    return []


def load_run(
    home: Path, run_name: str | None, parameter_values: Mapping[str, str], as_json: bool
) -> "Pipeline | None":
    """Load a run to resume. If another process executes the run, resume its suspended steps and
    return None.

    Raises ConfigError, Busy.
    """
    local_run = foreground.load_run(LocalCluster(home), run_name, parameter_values, as_json)
    if local_run:
        return Pipeline(local_run)
    return None


def run_here(pipeline: "Pipeline", *, as_json: bool, ask: bool, full_status: bool) -> int:
    """Run a pipeline in the foreground, and then remove old runs of this pipeline according to its
    config. Return the exit code of the run."""
    code = pipeline.run(as_json=as_json, ask=ask, full_status=full_status)

    workflow = pipeline.local.workflow
    limits = workflow_origin.read_config_or_empty(workflow).get("retention")
    if code < exit_codes.SIGNAL_OFFSET and isinstance(limits, dict) and any(limits.values()):
        # imported in this function, because the module needs the clients of MLflow and the object
        # store
        from rekindle.operations import retention

        retention.apply_limits_after_run(pipeline.local.cluster.home, workflow)

    return code


def execute_queued(home: Path, run_name: str) -> int:
    """Execute a queued run to its end, and return the exit code of the run. Raises Busy,
    NotQueued."""
    cluster = LocalCluster(home)
    pipeline = Pipeline(LocalRun.load(run_name, cluster, is_queued=True))
    if pipeline.is_rekindle:
        # start the services now, so that they are ready when the first step needs them
        cluster.prefetch()
    return run_here(pipeline, as_json=False, ask=False, full_status=False)


class Pipeline(foreground.Foreground):
    """Runs a workflow with the display of Rekindle. `is_rekindle` is True if Rekindle has rendered
    the workflow."""

    def __init__(self, local_run: LocalRun) -> None:
        super().__init__(local_run)
        self.is_rekindle = workflow_origin.is_rekindle_manifest(local_run.workflow)

    def begin(self) -> None:
        """Mark the run's folder in the object store. Also restart the deployments that `rekindle
        down` stopped, since the run may not replace these deployments by a new release."""
        if self._writes_artifacts():
            self._mark_run()

        name = workflow_origin.pipeline_label(self.local.workflow)
        cluster = self.local.cluster
        if name and (cluster.home / "objects/Service" / f"{name}.json").exists():
            Deployments(cluster).start()

    def _writes_artifacts(self) -> bool:
        """Return True if the run writes artifacts to the object store."""
        workflow_spec = self.local.workflow["spec"]
        workflow_templates = workflow_spec.get("templates") or []
        has_artifacts = any(
            (template.get("outputs") or {}).get("artifacts") for template in workflow_templates
        )
        has_logs = any(
            (log_settings_owner.get("archiveLocation") or log_settings_owner).get("archiveLogs")
            for log_settings_owner in (workflow_spec, *workflow_templates)
        )
        return self.is_rekindle or has_artifacts or has_logs

    def _mark_run(self) -> None:
        # imported in this function, because the module needs the client of the object store
        from rekindle.release.retention import ownership
        from rekindle.storage import Store

        workflow = self.local.workflow
        object_store = self.local.cluster.store()
        if not isinstance(object_store, Store):
            return

        try:
            is_counted = not workflow_origin.read_parameter(workflow, BACKFILL)
            pipeline_name = workflow_origin.read_pipeline_name(workflow)
            ownership.begin_run(
                object_store.short_retries(), workflow, pipeline_name, is_counted=is_counted
            )
        except RekindleError as error:
            write_stderr(f"note: retention will keep the artifacts of {self.name}: {error}")

    def progress(self, step: Step) -> str:
        return LogProgress(self.name, self.local.files.logs, self.deployments).of(step)

    def exit_code(self, status: Status) -> int:
        return results.compute_exit_code(status, self.is_rekindle)

    def succeeded(self, exit_code: int) -> bool:
        return exit_code in (0, results.NOT_RELEASED_EXIT_CODE)

    def as_json(self, status: Status) -> dict[str, Any]:
        run_facts = overview.collect_run_facts(self.local.cluster.home, self.local.workflow, status)
        return outcome.build_outcome(self.name, status, **run_facts)

    def success(self, status: Status) -> str:
        model_endpoint = overview.find_endpoint(self.local.cluster.home, self.local.workflow)
        model_url = (
            f"{model_endpoint}/v1/models/{workflow_origin.pipeline_label(self.local.workflow)}"
        )
        curl_command = (
            f"curl -s{overview.format_token_header(self.local.cluster.home, self.local.workflow)}"
        )
        outcome_facts = {
            "endpoint": model_endpoint,
            "try it": model_endpoint
            and f"{curl_command} {model_url}/example | {curl_command} {model_url}:predict -d @-",
            "page": f"rekindle ui {self.name}",
            "cost": results.compute_costs(status, self.local.workflow).get("words"),
        }
        return outcome.describe_success(status, outcome_facts, self.is_rekindle)
