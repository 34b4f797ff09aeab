"""A pipeline is scheduled on this machine with the config that also schedules the pipeline on a
cluster."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from argolocal.common.json_text import to_json
from argolocal.state.journal import RunFiles
from argolocal.state.stored_objects import StoredObjects
from argolocal.view import runs
from tests import builders
from tests.commands import ROOT
from tests.forked import Prompt

CONFIG = str(ROOT / "configs/demo.yaml")


@pytest.fixture
def prompt(tmp_path: Path) -> Iterator[Prompt]:
    environment = {**os.environ, "REKINDLE_HOME": str(tmp_path / "home")}
    with Prompt(ROOT, environment) as prompt:
        yield prompt


def test_a_schedule_is_stored_listed_started_and_deleted(prompt: Prompt, tmp_path: Path) -> None:
    home = tmp_path / "home"
    result = prompt(f"rekindle schedule {CONFIG} --local --set schedule.timezone=Europe/Paris")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "WorkflowTemplate demo created",
        "CronWorkflow demo created",
        "no server runs on this machine: `rekindle server` starts the runs",
    ]

    cron = StoredObjects(home).get("CronWorkflow", "demo")
    # there is no deadline, so a machine that was off for a day starts the run that it has missed
    assert "startingDeadlineSeconds" not in cron["spec"]
    assert cron["spec"]["workflowSpec"]["workflowTemplateRef"] == {"name": "demo"}

    second_output = prompt(f"rekindle schedule {CONFIG} --local --set schedule.deadline_minutes=5")
    assert second_output.stdout.splitlines()[1] == "CronWorkflow demo configured"
    cron = StoredObjects(home).get("CronWorkflow", "demo")
    assert cron["spec"]["startingDeadlineSeconds"] == 300

    # the second command did not repeat the options of the first command
    assert 'spec.timezone: "Europe/Paris" → "UTC"' in second_output.stdout

    listing = prompt("rekindle schedule list -o json")
    (row,) = json.loads(listing.stdout)["schedules"]
    assert (row["schedule"], row["at"], row["last"]) == ("demo", "0 3 * * 1", None)
    assert row["next"]
    assert "`rekindle server`" in listing.stderr

    started = json.loads(prompt("rekindle run-now demo --local -o json").stdout)
    assert runs.load_status(home, started["workflow"])["phase"] == "Pending"
    workflow = RunFiles(home, started["workflow"]).workflow()
    assert workflow["metadata"]["labels"]["workflows.argoproj.io/workflow-template"] == "demo"

    assert prompt("rekindle unschedule demo --local").stdout == "unscheduled demo\n"
    assert StoredObjects(home).list("CronWorkflow") == []
    assert StoredObjects(home).list("WorkflowTemplate") == []


def test_a_schedule_is_paused_by_its_name_and_nothing_else_changes(
    prompt: Prompt, tmp_path: Path
) -> None:
    prompt(f"rekindle schedule {CONFIG} --local --set schedule.timezone=Europe/Paris")
    stored = StoredObjects(tmp_path / "home").get("CronWorkflow", "demo")["spec"]

    paused = prompt("rekindle schedule demo --local --suspend")
    assert paused.stdout == "CronWorkflow demo suspended\n", paused.stderr
    spec = StoredObjects(tmp_path / "home").get("CronWorkflow", "demo")["spec"]
    assert spec == {**stored, "suspend": True}

    assert prompt("rekindle schedule demo --local --unsuspend").returncode == 0
    spec = StoredObjects(tmp_path / "home").get("CronWorkflow", "demo")["spec"]
    assert spec == {**stored, "suspend": False}


def test_a_missing_schedule_and_a_cluster_of_this_machine_are_refused(prompt: Prompt) -> None:
    missing = prompt("rekindle run-now nothing --local")
    assert missing.returncode == 2
    assert "the schedule nothing does not exist on this machine" in missing.stderr
    local_and_cluster = prompt(f"rekindle schedule {CONFIG} --local -n models")
    assert local_and_cluster.returncode == 2
    assert "--local cannot be combined with --namespace" in local_and_cluster.stderr


def test_a_submitted_run_waits_for_the_server_of_this_machine(
    prompt: Prompt, tmp_path: Path
) -> None:
    manifest = tmp_path / "w.json"
    template = {"name": "main", "container": builders.make_shell_container("true")}
    manifest.write_text(to_json(builders.make_workflow(template, name="submitted", priority=3)))
    result = prompt(f"rekindle submit --manifest {manifest} --local")
    assert result.returncode == 0, result.stderr
    assert "submitted is queued, and starts when a server runs" in result.stdout
    assert runs.load_status(tmp_path / "home", "submitted")["phase"] == "Pending"
    watched = prompt(f"rekindle submit --manifest {manifest} --local --watch")
    assert "--local cannot be combined with --watch" in watched.stderr
