"""A run of a pipeline in the foreground: the display of argolocal, plus the model, its verdict and its endpoint.

run(home, manifest, parameters, as_json=False, ask=True)     # → also 3: not released by the gate
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from argolocal.controllers.deployment import Deployments
from argolocal.runner.run import LocalRun
from argolocal.view import foreground
from argolocal.view.summary import Status, Step
from rekindle.blocks.manifest.render import manifest_sha256
from rekindle.local.cluster import LocalCluster
from rekindle.view import outcome
from rekindle.view.progress import LogProgress


def run(
    home: Path,
    manifest: Mapping[str, Any],
    parameters: Mapping[str, str],
    *,
    as_json: bool,
    ask: bool,
    full_status: bool = False,
    other_objects: Iterable[Mapping[str, Any]] = (),
) -> int:
    """Run a manifest. Raises ConfigError before anything starts.

    `full_status`: print notes of `lint`, and add the status to the JSON output.
    """
    # notes on manifests that Rekindle rendered would only be noise
    local = foreground.begun(LocalCluster(home), manifest, parameters, other_objects, notes=full_status)
    return Pipeline(local, manifest).run(as_json=as_json, ask=ask, full_status=full_status)


def resume(home: Path, name: str | None, values: Mapping[str, str], *, as_json: bool, ask: bool) -> int:
    """Resume a run, or its suspended steps if another process runs it. Raises ConfigError, Busy."""
    if not (local := foreground.resumed(LocalCluster(home), name, values, as_json)):
        return 0
    pipeline = Pipeline(local, local.workflow)
    return pipeline.run(as_json=as_json, ask=ask, full_status=not pipeline.is_rekindle)


class Pipeline(foreground.Foreground):
    """Runs a workflow; `is_rekindle` if Rekindle rendered it."""

    def __init__(self, local: LocalRun, manifest: Mapping[str, Any]) -> None:
        super().__init__(local)
        self.manifest, self.is_rekindle = manifest, self._label("part-of") == "rekindle"

    def begin(self) -> None:
        """Restart the deployments that `rekindle down` stopped: a run may end with its model still released."""
        name, cluster = self._label("name"), self.local.cluster
        if name and (cluster.home / "objects/Service" / f"{name}.json").exists():
            Deployments(cluster).start()

    def progress(self, row: Step) -> str:
        return LogProgress(self.name, self.local.files.logs, self.deployments).of(row)

    def exit_code(self, status: Status) -> int:
        return outcome.exit_code(status, self.is_rekindle)

    def succeeded(self, code: int) -> bool:
        return code in (0, outcome.NOT_RELEASED)

    def as_json(self, status: Status) -> dict[str, Any]:
        return outcome.as_json(
            self.name, status, manifest_sha256=manifest_sha256(self.manifest), endpoint=self._endpoint()
        )

    def success(self, status: Status) -> str:
        endpoint = self._endpoint()
        model = f"{endpoint}/v1/models/{self._label('name')}"
        facts = {
            "endpoint": endpoint,
            "try it": endpoint and f"curl -s {model}/example | curl -s {model}:predict -d @-",
            "mlflow": "rekindle ui" if outcome.parameters(status).get("run_id") else None,
        }
        return outcome.success(status, facts, self.is_rekindle)

    def _label(self, name: str) -> str | None:
        return self.local.workflow["metadata"]["labels"].get(f"app.kubernetes.io/{name}")

    def _endpoint(self) -> str | None:
        """Return the URL of the pipeline's Service, if its deployment is running."""
        cluster, name = LocalCluster(self.local.cluster.home), self._label("name")
        if not name or not (service := cluster.find("Service", name)):
            return None
        address = f"http://127.0.0.1:{service['spec']['ports'][0]['port']}"
        return address if any(row.get("address") == address and row["running"] for row in cluster.overview()) else None
