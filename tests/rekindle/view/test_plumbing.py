"""`rekindle status RUN` shows the steps of the pipeline; internal steps only with --all."""

import io
import json
import os
from pathlib import Path
from typing import Any

import click
import pytest

from argolocal.common.processes import read_start_ticks
from argolocal.state.journal import RunFiles
from argolocal.view import runs
from argolocal.view.display import format_log_line
from rekindle.cli.group import commands
from rekindle.cli.options import add_config_key
from rekindle.view.overview import format_steps_table

WHEN = "{{=tasks.evaluate.outputs.parameters.verdict == 'release'}}"
LABELS = {"app.kubernetes.io/part-of": "rekindle"}


def make_template(name: str, *tasks: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"name": name, **({"dag": {"tasks": list(tasks)}} if tasks else {}), **fields}


MANIFEST = {
    "metadata": {"name": "demo", "labels": LABELS},
    "spec": {
        "entrypoint": "main",
        "templates": [
            make_template(
                "main", {"name": "train"}, {"name": "train-secret"}, {"name": "ship", "when": WHEN}
            ),
            make_template("train-secret", resource={"action": "create"}),
        ],
    },
}


def make_node(
    path: str, parent: str | None, phase: str = "Succeeded", **fields: Any
) -> dict[str, Any]:
    task = path.rpartition(".")[2]
    boundary = {"boundaryID": parent} if parent else {}

    return {
        "id": path,
        "name": path,
        "displayName": task,
        "type": "Pod",
        "phase": phase,
        "templateName": task,
        "startedAt": "2026-01-01T00:00:00Z",
        "finishedAt": "2026-01-01T00:00:01Z",
        **boundary,
        **fields,
    }


def make_status(secret_phase: str = "Succeeded") -> dict[str, Any]:
    nodes = [
        make_node("demo", None, type="DAG", templateName="main"),
        make_node("demo.train", "demo"),
        make_node("demo.train-secret", "demo", secret_phase),
        make_node("demo.ship", "demo", "Skipped", message="when 'false' evaluated false"),
    ]
    return {"phase": "Succeeded", "nodes": {each["id"]: each for each in nodes}}


def test_internal_steps_are_hidden_and_conditions_are_readable():
    text = format_steps_table("demo", make_status(), MANIFEST)
    assert "train-secret" not in text
    assert "1 internal steps are not shown" in text
    assert "not true: evaluate.verdict == 'release'" in text
    assert "train-secret" in format_steps_table("demo", make_status(), MANIFEST, shows_all=True)


def test_an_internal_step_that_failed_is_shown():
    assert "train-secret" in format_steps_table("demo", make_status("Failed"), MANIFEST)


def test_no_step_of_another_manifest_is_hidden():
    own_manifest = {**MANIFEST, "metadata": {"name": "demo"}}
    assert "train-secret" in format_steps_table("demo", make_status(), own_manifest)


def test_a_step_of_the_newest_run_and_the_pids_of_its_pods_are_found_by_name(tmp_path: Path):
    files = RunFiles(tmp_path, "demo")
    files.create(MANIFEST)
    files.snapshot(make_status())
    (files.logs / "demo-train-worker-0.log").write_text("10 %\r50 %\r100 %\r\n")
    (files.root / "pids").mkdir()

    for pod, started in (
        ("demo-train-worker-0", read_start_ticks(os.getpid())),
        ("demo-train-worker-1", 1),
    ):
        (files.root / "pids" / pod).write_text(json.dumps([os.getpid(), started]))

    assert runs.list_processes(tmp_path, "demo") == [{"pod": "train-worker-0", "pid": os.getpid()}]
    files.close()
    out = io.StringIO()
    runs.copy_logs(tmp_path, "train", "", False, out, False)
    assert out.getvalue() == "demo-train-worker-0 | 100 %\n"


def test_a_carriage_return_is_not_shown_as_text():
    assert format_log_line("a", "1/2\r2/2", as_json=False) == "a | 2/2"


def test_an_option_that_is_a_key_of_the_config_points_to_set():
    with pytest.raises(click.NoSuchOption) as caught:
        commands.main(["run", "demo.yaml", "--workers", "3"], standalone_mode=False)
    assert "--set train.workers=VALUE" in add_config_key(caught.value).message
