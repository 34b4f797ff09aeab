"""Tests of the run that a command without a name refers to, and of the logs of its steps."""

import io
import os
from pathlib import Path
from typing import Any

import pytest

from argolocal.errors import ConfigError
from argolocal.state.journal import RunFiles
from argolocal.view import display, runs
from tests.builders import make_workflow

MAIN = {"entrypoint": "main", "templates": [{"name": "main", "suspend": {}}]}
PAUSE = {
    "id": "n",
    "name": "paused",
    "displayName": "paused",
    "type": "Suspend",
    "phase": "Running",
}


def create_run(home: Path, name: str, spec: dict[str, Any], status: dict[str, Any]) -> RunFiles:
    """Create a run whose runner is this process."""
    files = RunFiles(home, name)
    files.create({"kind": "Workflow", "metadata": {"name": name}, "spec": spec | MAIN})
    files.snapshot({"nodes": {}, "startedAt": "2026-01-01T00:00:00Z", **status})
    return files


@pytest.mark.parametrize(
    ("spec", "nodes"),
    [({}, {"n": PAUSE | {"startedAt": "2026-01-01T00:00:00Z"}}), ({"suspend": True}, {})],
)
def test_resume_without_a_name_finds_a_suspended_run(tmp_path: Path, spec: Any, nodes: Any) -> None:
    paused = create_run(tmp_path, "paused", spec, {"phase": "Running", "nodes": nodes})
    create_run(tmp_path, "done", {}, {"phase": "Succeeded"}).close()
    active = create_run(tmp_path, "active", {}, {"phase": "Running"})
    assert runs.find_resumable(tmp_path) == "paused"
    active.close()
    paused.close()


def test_resume_without_a_name_does_not_take_an_active_run(tmp_path: Path) -> None:
    active = create_run(tmp_path, "active", {}, {"phase": "Running"})
    with pytest.raises(ConfigError, match="suspended"):
        runs.find_resumable(tmp_path)
    active.close()


@pytest.mark.parametrize("step", ["clean", "cleaned-4k2xp-clean"])
def test_the_logs_of_a_step_are_not_those_of_a_run_with_this_word_in_its_name(
    tmp_path: Path, step: str
) -> None:
    tasks = [{"name": name, "template": name} for name in ("clean", "train", "report")]
    templates = [{"name": "main", "dag": {"tasks": tasks}}]
    files = RunFiles(tmp_path, "cleaned-4k2xp")

    files.create(make_workflow(*templates, name=files.name))

    files.snapshot({"nodes": {}, "phase": "Succeeded"})
    files.close()
    files.logs.mkdir(parents=True, exist_ok=True)

    for name in ("clean", "train"):
        (files.logs / f"cleaned-4k2xp-{name}-1234.log").write_text(f"line of {name}\n")

    out = io.StringIO()
    runs.copy_logs(tmp_path, "cleaned-4k2xp", step, False, out, False)
    assert (
        runs.copy_logs(tmp_path, "cleaned-4k2xp", "report", False, io.StringIO(), False)
        == "report has printed nothing."
    )
    assert "line of clean" in out.getvalue()
    assert "line of train" not in out.getvalue()


def test_a_cell_of_a_table_is_one_line() -> None:
    text = runs.format_table([{"name": "a\nb\tc\x1b[31m\u2028", "other": "x"}])
    assert text.splitlines()[1] == r"a\nb\tc\u2028  x"


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_log_that_has_no_end_is_not_copied(tmp_path: Path, kind: str) -> None:
    (tmp_path / "w-a.log").write_text("line\n")
    if kind == "fifo":
        os.mkfifo(tmp_path / "w-b.log")
    else:
        (tmp_path / "w-b.log").symlink_to("/dev/zero")
    out = io.StringIO()
    assert display.follow(tmp_path, "w", "", lambda: True, out)
    assert out.getvalue() == "w-a | line\n"
