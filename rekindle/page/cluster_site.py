"""The page of `rekindle ui --cluster`: shows the runs of a namespace that the user may read."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from argolocal.engine.suspend import list_suspended_nodes
from argolocal.manifest.allowed_values import FAILED_PHASES
from argolocal.page import server
from argolocal.page.actions.action import Action, Outcome, Plan, address_of, command_line
from argolocal.page.actions.processes import Commands
from argolocal.page.application import Page, Parts, RunDocument, Section
from argolocal.page.run_list import RunRows
from argolocal.page.site import make_tabs
from argolocal.page.sources import Run
from argolocal.page.tabs.artifact_source import StoredArtifacts
from argolocal.page.tabs.artifacts import ArtifactsTab
from argolocal.page.tabs.overview import OverviewTab
from rekindle.cluster import workflows
from rekindle.cluster.cluster_objects import KINDS, ClusterObjects
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.errors import ConfigError
from rekindle.kubernetes_names import REKINDLE_SELECTOR, S3_BUCKET, S3_ENDPOINT_URL
from rekindle.page.artifacts import TABLE_READERS
from rekindle.page.cluster_runs import ClusterRuns
from rekindle.page.mlflow import ExternalTracking
from rekindle.page.models import ModelReader, Models, list_served_models
from rekindle.page.rows import RekindleRows
from rekindle.page.schedules import ClusterSchedules, Schedules
from rekindle.page.site import PACKAGES, make_announcer
from rekindle.page.steps import describe_verdicts, find_internal
from rekindle.page.tabs.all_tabs import make_training_tabs
from rekindle.page.tabs.curve_points import ServerCurves
from rekindle.page.tabs.records import Records
from rekindle.page.training_actions import RollBack, Scale
from rekindle.view.cluster_watch import describe_run

if TYPE_CHECKING:
    from rekindle.storage import Store


def serve(
    home: Path,
    cluster: Cluster,
    run_name: str | None,
    port: int | None,
    allow_actions: bool,
    announce: Callable[[str], None],
) -> None:
    """Serve the page of a namespace until SIGINT or SIGTERM. Raises ConfigError if another program
    uses the port of the page."""
    with TemporaryDirectory(prefix="rekindle-page-") as folder:
        app = Page(make_parts(home, cluster, Path(folder), allow_actions)).application()
        token = server.read_token(home)
        server.serve(app, token, server.listen(port), make_announcer(run_name, announce))


def make_parts(home: Path, cluster: Cluster, folder: Path, allow_actions: bool) -> Parts:
    """Return the parts of the page of a namespace. `folder`: private folder for logs of pods."""
    environ = dict(os.environ)
    source = ClusterRuns(cluster, folder)
    commands = Commands(home, environ)
    stored_artifacts = StoredArtifacts(open_store)
    artifacts = ArtifactsTab(source, stored_artifacts, TABLE_READERS)
    overview_tab = OverviewTab(source, stored_artifacts, describe_verdicts, find_internal)
    first_tab, *general_tabs = make_tabs(source, overview_tab, artifacts)
    training_tabs = make_training_tabs(source, Records(open_store), ServerCurves())
    actions: list[Action] = []
    if allow_actions:
        actions = [Resume(cluster), Stop(cluster), Scale(home, cluster)]

    def build_status(run: Run) -> Mapping[str, Any]:
        workflow = {**run.manifest, "status": run.status}
        return describe_run(cluster, workflow)

    return Parts(
        source,
        [first_tab, *training_tabs, *general_tabs],
        sections=[
            Section("models", "Models", Models, _make_model_reader(cluster, allow_actions).read),
            Section("schedules", "Schedules", Schedules, ClusterSchedules(cluster).read),
        ],
        rows=RunRows(source, RekindleRows(None)),
        packages=PACKAGES,
        routes=artifacts.routes(),
        actions=actions,
        page_actions=[RollBack(commands, cluster)] if allow_actions else [],
        documents=[
            RunDocument("status", "The object of `rekindle status --cluster -o json`", build_status)
        ],
    )


def open_store(s3: Mapping[str, Any] | None = None) -> "Store":
    """Return the object store whose address is set by the environment variables of the page's user.
    `s3`: location of an artifact, which may name another bucket. Raises ConfigError."""
    from rekindle.storage import Store

    if not os.environ.get(S3_BUCKET):
        raise ConfigError(
            "S3_BUCKET is not set, so the object store of the cluster is not known: set S3_BUCKET,"
            " S3_ENDPOINT_URL and your credentials before `rekindle ui --cluster`."
        )
    bucket = (s3 or {}).get("bucket") or os.environ[S3_BUCKET]
    return Store(bucket, os.environ.get(S3_ENDPOINT_URL) or None, short_retries=True)


def _make_model_reader(cluster: Cluster, can_roll_back: bool) -> ModelReader:
    def list_names() -> set[str]:
        return list_served_models(cluster.list_objects(KINDS["Deployment"], REKINDLE_SELECTOR))

    def server_address(service: Mapping[str, Any]) -> str:
        port = service["spec"]["ports"][0]["port"]
        return f"http://{service['metadata']['name']}.{cluster.namespace}:{port}"

    return ModelReader(
        ExternalTracking(os.environ),
        lambda: ClusterObjects(cluster),
        list_names,
        server_address,
        lambda: True,
        can_roll_back,
    )


class Stop:
    """Stops a run on a cluster; its exit steps still run."""

    name = "stop"

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def plan(self, run: Run) -> Plan | None:
        if run.is_finished:
            return None
        return Plan(
            self.name,
            "Stop",
            f"The pods of {run.name} end, then its exit steps run. The run fails; it can be"
            " resumed.",
            command_line("stop", run.name, "--cluster") + self.cluster.flags,
            address_of(run.name, self.name),
            f"/runs/{run.name}",
            ends_something=True,
        )

    def perform(self, run: Run, values: Mapping[str, str]) -> Outcome:
        workflows.stop_run(self.cluster, run.name)
        return Outcome(f"{run.name} is being stopped.", f"/runs/{run.name}")


class Resume:
    """Resumes a suspended run on a cluster, or retries a failed run."""

    name = "resume"

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def plan(self, run: Run) -> Plan | None:
        has_suspension = bool(list_suspended_nodes(run.status) or run.spec.get("suspend"))
        is_suspended = has_suspension and run.phase == "Running"
        if run.phase not in FAILED_PHASES and not is_suspended:
            return None

        if is_suspended:
            title = "Approve"
            effect = f"The suspended steps of {run.name} continue."
        else:
            title = "Resume"
            effect = f"The failed steps of {run.name} run again; steps that succeeded are kept."
        return Plan(
            self.name,
            title,
            effect,
            command_line("resume", run.name, "--cluster") + self.cluster.flags,
            address_of(run.name, self.name),
            f"/runs/{run.name}",
        )

    def perform(self, run: Run, values: Mapping[str, str]) -> Outcome:
        description = workflows.resume_run(self.cluster, run.name)
        return Outcome(f"{run.name} {description}.", f"/runs/{run.name}")
