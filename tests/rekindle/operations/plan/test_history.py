"""The durations of a plan come from whole tasks of earlier runs."""

import pytest

from rekindle.operations.plan.history import parse_former_run


def parse_task(node_name: str, node_type: str = "Pod") -> list[str]:
    """Return the paths of the tasks in a run of one node."""
    node = {
        "name": node_name,
        "displayName": node_name.removeprefix("run."),
        "type": node_type,
        "phase": "Succeeded",
        "startedAt": "2026-01-01T00:00:00Z",
        "finishedAt": "2026-01-01T00:01:00Z",
    }
    workflow = {"kind": "Workflow", "metadata": {"name": "run"}, "spec": {"templates": []}}
    return list(parse_former_run("run", workflow, {"nodes": {"run-1": node}}).records)


def test_a_task_counts() -> None:
    assert parse_task("run.train") == ["train"]


@pytest.mark.parametrize("name", ["run.train(0)", "run.load(12:blue)", "run.load(0:a(b))"])
def test_an_attempt_or_an_item_of_a_loop_does_not_count_as_a_task(name: str) -> None:
    assert parse_task(name) == []
    assert parse_task(name, "TaskGroup") == [name.removeprefix("run.")]


def test_a_hostile_name_of_a_node_does_not_stop_the_plan() -> None:
    assert parse_task(100_000 * "(1:" + "x") == []
