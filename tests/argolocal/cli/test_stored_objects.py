"""Templates and schedules of one `argolocal apply` are either all stored or not at all; `argolocal`
lists and deletes them."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from argolocal.state.stored_objects import StoredObjects
from tests import builders
from tests.commands import ROOT

Run = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function that runs a command of argolocal in a new home (directory of runs)."""
    environment = {**os.environ, "ARGOLOCAL_HOME": str(tmp_path / "home")}

    def run(command: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-m", "argolocal", *shlex.split(command)]
        return subprocess.run(program, env=environment, cwd=ROOT, capture_output=True, text=True)

    return run


def write_schedules(folder: Path, **lines: str) -> Path:
    """Write a CronWorkflow for each name and schedule into a file, and return the path of the
    file."""
    spec = builders.make_workflow(
        {"name": "main", "container": builders.make_shell_container("true")}
    )["spec"]
    documents = [
        {
            "apiVersion": "argoproj.io/v1alpha1",
            "kind": "CronWorkflow",
            "metadata": {"name": name},
            "spec": {"schedules": [line], "workflowSpec": spec},
        }
        for name, line in lines.items()
    ]
    path = folder / "schedules.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    return path


def test_no_object_is_stored_if_one_is_invalid(run: Run, tmp_path: Path) -> None:
    file = write_schedules(tmp_path, good="* * * * *", evil="61 * * * *")
    result = run(f"apply {file}")
    assert result.returncode == 2
    assert f"{file}: CronWorkflow evil: " in result.stderr
    assert StoredObjects(tmp_path / "home").names("CronWorkflow") == []


def test_a_schedule_is_listed_with_its_next_time_and_deleted(run: Run, tmp_path: Path) -> None:
    file = write_schedules(tmp_path, nightly="0 3 * * *")
    assert run(f"apply {file}").stdout == "CronWorkflow nightly created\n"

    (row,) = json.loads(run("get -o json").stdout)["schedules"]
    assert (row["schedule"], row["at"], row["last"]) == ("nightly", "0 3 * * *", None)
    assert row["next"].endswith("T03:00:00Z")
    assert "nightly" in run("get").stdout

    deleted = run("delete CronWorkflow nightly")
    assert deleted.stdout == "CronWorkflow nightly deleted\n"
    assert "nothing is stored" in run("get").stdout
    second_delete = run("delete CronWorkflow nightly")
    assert second_delete.returncode == 2
    assert "does not exist" in second_delete.stderr


def test_a_workflow_is_not_stored_but_run(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "w.json"
    template = {"name": "main", "container": builders.make_shell_container("true")}
    file.write_text(json.dumps(builders.make_workflow(template, name="once")))
    result = run(f"apply {file}")
    assert result.returncode == 2
    assert f"Run it: `argolocal run {file}`" in result.stderr
