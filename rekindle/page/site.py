"""The page of `rekindle ui`: its tabs, its sections and its server."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from argolocal.common.checked_names import RunName
from argolocal.common.json_text import loads
from argolocal.page import server
from argolocal.page.actions.processes import Commands
from argolocal.page.actions.run_actions import make_actions
from argolocal.page.application import Page, Parts, RunDocument, Section
from argolocal.page.run_list import RunRows
from argolocal.page.site import make_tabs
from argolocal.page.sources import LocalRuns, Run, RunSource
from argolocal.page.tab import Tab
from argolocal.page.tabs.artifacts import ArtifactsTab
from argolocal.page.tabs.overview import OverviewTab
from rekindle import project, tracking
from rekindle.blocks.manifest.provenance import RESERVED_PARAMETERS
from rekindle.kubernetes_names import MLFLOW_TRACKING_URI
from rekindle.local.cluster import LocalCluster
from rekindle.local.local_objects import LocalObjects
from rekindle.local.services.services import Services
from rekindle.page.artifacts import TABLE_READERS, open_home_artifacts
from rekindle.page.home_schedules import HomeSchedules
from rekindle.page.mlflow import LocalTracking
from rekindle.page.models import ModelReader, Models, list_served_models
from rekindle.page.rows import RekindleRows
from rekindle.page.schedules import ProjectSchedules, Schedules
from rekindle.page.steps import describe_verdicts, find_internal
from rekindle.page.tabs.all_tabs import make_training_tabs
from rekindle.page.tabs.curve_points import DatabaseCurves, ServerCurves
from rekindle.page.tabs.records import open_records
from rekindle.page.training_actions import RollBack, Scale
from rekindle.view import overview
from rekindle.view.explain import explain_run

PACKAGES = ("rekindle.page", "argolocal.page")


def make_rekindle_tabs(
    home: Path, source: RunSource, overview: OverviewTab, artifacts: ArtifactsTab
) -> list[Tab]:
    """Return the tabs of a run. The tabs of trainings follow the overview."""
    curves = ServerCurves() if os.environ.get(MLFLOW_TRACKING_URI) else DatabaseCurves(home)
    first_tab, *general_tabs = make_tabs(source, overview, artifacts)
    training_tabs = make_training_tabs(source, open_records(home), curves)
    return [first_tab, *training_tabs, *general_tabs]


def find_mlflow_page(home: Path, run_name: str, environ: Mapping[str, str] | None = None) -> str:
    """Return the address of MLflow's page of a run or, without a name, of the newest run's
    experiment. Starts MLflow if needed. Raises TrackingError."""
    environ = dict(os.environ if environ is None else environ)
    services = Services(home, environ)
    os.environ.update(services.login(), MLFLOW_TRACKING_URI=services.url("mlflow"))
    page = tracking.find_page_address(run_name)
    if environ.get(MLFLOW_TRACKING_URI):
        return page
    return services.make_login_url(page)


def serve(
    home: Path, run_name: str | None, port: int | None, announce: Callable[[str], None]
) -> None:
    """Serve the page of REKINDLE_HOME until SIGINT or SIGTERM. Raises ConfigError if another
    program uses the port of the page."""
    app = Page(make_parts(home)).application()
    token = server.read_token(home)
    server.serve(app, token, server.listen(port), make_announcer(run_name, announce))


def make_announcer(run_name: str | None, announce: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that gets the address of the list of runs, and passes to `announce` the
    address of the run `run_name` instead. If `run_name` is empty, the address is passed
    unchanged."""

    def announce_run(address: str) -> None:
        if run_name:
            address = address.replace("/?", f"/runs/{run_name}?")
        announce(address)

    return announce_run


def make_parts(home: Path) -> Parts:
    """Create the sections, tabs and actions of the page of REKINDLE_HOME."""
    # commands that the page starts get this copy of the environment, because connecting to MLflow
    # changes os.environ
    environ = dict(os.environ)
    commands = Commands(home, environ)
    source = LocalRuns(home)
    rows = RunRows(source, RekindleRows(home, source.logs))
    stored_artifacts = open_home_artifacts(home)
    artifacts = ArtifactsTab(source, stored_artifacts, TABLE_READERS)
    overview_tab = OverviewTab(source, stored_artifacts, describe_verdicts, find_internal)

    def open_mlflow(request: Request) -> Response:
        run_name = RunName.parse_or_none(request.query_params.get("run", "")) or ""
        return RedirectResponse(find_mlflow_page(home, run_name, environ), 303)

    return Parts(
        source,
        make_rekindle_tabs(home, source, overview_tab, artifacts),
        sections=[
            Section("models", "Models", Models, make_model_reader(home, environ).read),
            Section(
                "schedules",
                "Schedules",
                Schedules,
                HomeSchedules(
                    home, ProjectSchedules(Path(project.search_path()[0]), rows.all)
                ).read,
            ),
        ],
        rows=rows,
        packages=PACKAGES,
        routes=[Route("/mlflow", open_mlflow), *artifacts.routes()],
        links={"MLflow": "/mlflow"},
        actions=[*make_actions(home, commands, RESERVED_PARAMETERS), Scale(home, None)],
        page_actions=[RollBack(commands, None)],
        documents=make_documents(home),
    )


def make_documents(home: Path) -> list[RunDocument]:
    """Return the JSON documents of a run, which contain the same as the output of `rekindle`
    commands."""

    def build_status(run: Run) -> dict[str, Any]:
        return overview.build_run_object(home, run.name, run.manifest, run.status)

    def build_explanation(run: Run) -> dict[str, Any]:
        return loads(explain_run(home, run.name, as_json=True))

    return [
        RunDocument("status", "The object of `rekindle status -o json`", build_status),
        RunDocument("explain", "The object of `rekindle explain -o json`", build_explanation),
    ]


def make_model_reader(home: Path, environ: Mapping[str, str]) -> ModelReader:
    """Return the reader of the models in REKINDLE_HOME."""
    cluster = LocalCluster(home)

    def list_names() -> set[str]:
        return list_served_models(cluster.deployments.objects().values())

    def server_address(service: Mapping[str, Any]) -> str:
        return f"http://127.0.0.1:{service['spec']['ports'][0]['port']}"

    return ModelReader(
        LocalTracking(home, environ),
        lambda: LocalObjects(cluster),
        list_names,
        server_address,
        lambda: bool(cluster.deployments.running()),
        can_roll_back=True,
    )
