"""The run that a command without a name means."""

from pathlib import Path
from typing import Any

import pytest

from argolocal.errors import ConfigError
from argolocal.state.journal import RunFiles
from argolocal.view import runs

MAIN = {"entrypoint": "main", "templates": [{"name": "main", "suspend": {}}]}
PAUSE = {"id": "n", "name": "paused", "displayName": "paused", "type": "Suspend", "phase": "Running"}


def create(home: Path, name: str, spec: dict[str, Any], status: dict[str, Any]) -> RunFiles:
    """Create a run whose runner is this process."""
    files = RunFiles(home, name)
    files.create({"kind": "Workflow", "metadata": {"name": name}, "spec": spec | MAIN})
    files.snapshot({"nodes": {}, "startedAt": "2026-01-01T00:00:00Z", **status})
    return files


@pytest.mark.parametrize(
    ("spec", "nodes"), [({}, {"n": PAUSE | {"startedAt": "2026-01-01T00:00:00Z"}}), ({"suspend": True}, {})]
)
def test_resume_without_a_name_finds_a_suspended_run(tmp_path: Path, spec: Any, nodes: Any) -> None:
    paused = create(tmp_path, "paused", spec, {"phase": "Running", "nodes": nodes})
    create(tmp_path, "done", {}, {"phase": "Succeeded"}).close()
    active = create(tmp_path, "active", {}, {"phase": "Running"})
    assert runs.resumable(tmp_path) == "paused"
    active.close()
    paused.close()


def test_resume_without_a_name_does_not_take_an_active_run(tmp_path: Path) -> None:
    active = create(tmp_path, "active", {}, {"phase": "Running"})
    with pytest.raises(ConfigError, match="suspended"):
        runs.resumable(tmp_path)
    active.close()
