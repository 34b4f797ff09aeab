"""The page of `argolocal ui`: its tabs, and the start of its server."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from argolocal.common import program
from argolocal.page import server
from argolocal.page.actions.processes import Commands
from argolocal.page.actions.run_actions import make_actions
from argolocal.page.application import Page, Parts, RunDocument
from argolocal.page.run_list import RowReader, RunRows
from argolocal.page.sources import LocalRuns, Run, RunSource
from argolocal.page.tab import Tab
from argolocal.page.tabs.artifact_source import StoredArtifacts
from argolocal.page.tabs.artifacts import ArtifactsTab
from argolocal.page.tabs.logs import LogsTab
from argolocal.page.tabs.overview import OverviewTab
from argolocal.page.tabs.timeline import TimelineTab
from argolocal.runner.cluster import LocalCluster
from argolocal.view import runs


def make_tabs(source: RunSource, overview: OverviewTab, artifacts: ArtifactsTab) -> list[Tab]:
    """Return the tabs of a run that the pages of argolocal and rekindle share."""
    return [overview, LogsTab(source), TimelineTab(), artifacts]


def serve(home: Path, port: int | None, announce: Callable[[str], None]) -> None:
    """Serve the page of a home (a directory of runs) until SIGINT or SIGTERM. Raises ConfigError if
    the port is taken."""
    page = Page(make_parts(home))
    server.serve(page.application(), server.read_token(home), server.listen(port), announce)


def make_parts(home: Path) -> Parts:
    """Return the parts of the page of a home (a directory of runs)."""
    source = LocalRuns(home)
    stored_artifacts = StoredArtifacts.in_home(home, LocalCluster.bucket)
    overview = OverviewTab(source, stored_artifacts)
    artifacts = ArtifactsTab(source, stored_artifacts)

    def build_status(run: Run) -> dict[str, Any]:
        return runs.make_status_object(home, run.name, run.status)

    title = f"The object of `{program.name} status -o json`"
    return Parts(
        source,
        make_tabs(source, overview, artifacts),
        rows=RunRows(source, RowReader(source.logs)),
        routes=artifacts.routes(),
        actions=make_actions(home, Commands(home, os.environ)),
        documents=[RunDocument("status", title, build_status)],
    )
