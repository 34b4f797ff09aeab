"""Run and resume workflows without a display."""

from collections.abc import Callable, Mapping
from typing import Any

from argolocal.interfaces import Cluster
from argolocal.runner.run import LocalRun, OnChange, Status


def execute_manifest(
    manifest: Mapping[str, Any],
    parameters: Mapping[str, str] | None,
    cluster: Cluster,
    on_change: OnChange | None = None,
    note: Callable[[str], None] | None = None,
) -> Status:
    return LocalRun.create(manifest, parameters, cluster, note).run(on_change)


def resume_run(name: str, cluster: Cluster, on_change: OnChange | None = None) -> Status:
    """Resume a run that was stopped, that has failed, or whose runner has died."""
    return LocalRun.load(name, cluster).run(on_change)
