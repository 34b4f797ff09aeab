"""Tests of what Rekindle adds to the overview of a run: verdicts, internal steps, and artifacts of
its store."""

from pathlib import Path
from typing import Any

from argolocal.page.sources import Run
from argolocal.page.tabs.graph import Drawing
from argolocal.page.tabs.graph_plan import Plan
from rekindle.kubernetes_names import PART_OF_REKINDLE
from rekindle.page.artifacts import open_home_artifacts
from rekindle.page.steps import describe_verdicts, find_internal

POD: dict[str, Any] = {"name": "pod", "container": {"image": "x"}}
APPLY: dict[str, Any] = {"name": "apply", "resource": {"action": "apply"}}


def make_run(labels: dict[str, str], *nodes: dict[str, Any]) -> Run:
    """Return a run with a training, whose Secret is an internal step."""
    tasks = [
        {"name": "prepare", "template": "pod"},
        {"name": "train-secret", "template": "apply", "depends": "prepare"},
        {"name": "train", "template": "pod", "depends": "train-secret"},
    ]
    manifest = {
        "metadata": {"name": "run", "labels": labels},
        "spec": {
            "entrypoint": "main",
            "templates": [{"name": "main", "dag": {"tasks": tasks}}, POD, APPLY],
        },
    }
    records = {node["name"]: {"id": node["name"], "type": "Pod", **node} for node in nodes}
    return Run("run", manifest, {"phase": "Running", "nodes": records}, "1")


def list_labels(run: Run, **query: str) -> list[str]:
    plan = Plan(run)
    return [node.label for node in Drawing(plan, query, find_internal(plan)).draw().nodes]


def test_internal_steps_are_hidden_until_a_user_asks() -> None:
    run = make_run(dict(PART_OF_REKINDLE))
    assert list_labels(run) == ["prepare", "train"]
    assert list_labels(run, all="1") == ["prepare", "train-secret", "train"]


def test_an_internal_step_that_failed_is_shown() -> None:
    failed_node = {"name": "run.train-secret", "phase": "Failed"}
    assert "train-secret" in list_labels(make_run(dict(PART_OF_REKINDLE), failed_node))


def test_a_workflow_of_another_program_has_no_internal_steps() -> None:
    assert "train-secret" in list_labels(make_run({}))


def test_the_verdict_and_its_reason_are_the_first_sentence() -> None:
    parameters = [
        {"name": "verdict", "value": "release"},
        {"name": "reason", "value": "The candidate is better."},
        {"name": "metrics", "value": "{}"},
    ]
    evaluation = {
        "name": "run.evaluate",
        "displayName": "evaluate",
        "templateName": "evaluate",
        "phase": "Succeeded",
        "outputs": {"parameters": parameters},
    }
    sentences = describe_verdicts(make_run(dict(PART_OF_REKINDLE), evaluation))
    assert sentences == ["Passed the gate, the release is in progress. The candidate is better."]


def test_the_list_of_artifacts_does_not_start_the_object_store(tmp_path: Path) -> None:
    artifact = {"name": "dataset", "s3": {"key": "run/prepare/dataset"}}
    node = {
        "name": "run.prepare",
        "displayName": "prepare",
        "phase": "Succeeded",
        "outputs": {"artifacts": [artifact]},
    }
    [row] = open_home_artifacts(tmp_path).list(make_run({}, node))
    assert row.name == "prepare/dataset"
    assert list(tmp_path.iterdir()) == []
