"""Each lifecycle hook runs once, as soon as its expression is true."""

from typing import Any

from argolocal.engine.nodes import PodEnded, PodStarted, StartPod
from tests.argolocal.runner.played import (
    make_dag,
    make_leaf,
    make_parameters,
    make_scheduler,
    make_steps_template,
    phase_of,
    play,
)


def make_hook(expression: str, template: str = "note", **more: Any) -> dict[str, Any]:
    return {"template": template, "expression": expression, **more}


def test_a_hook_runs_once_when_its_expression_is_first_true_and_the_workflow_waits_for_it() -> None:
    s = make_scheduler(
        make_dag({"name": "a"}),
        make_leaf(),
        make_leaf("note"),
        hooks={"running": make_hook("workflow.status == 'Running'"), "never": make_hook("1 == 2")},
    )
    assert play(s) == ["a", "hooks.running"]
    assert s.nodes[s.table.id("w.hooks.running")]["nodeFlag"] == {"hooked": True}
    assert s.status["phase"] == "Succeeded"
    assert s.table.id("w.hooks.running") in s.nodes["w"]["children"]


def test_a_task_hook_runs_in_parallel_and_delays_dependents() -> None:
    hooks = {
        "running": make_hook("tasks.a.status == 'Running'"),
        "failed": make_hook("tasks.a.status == 'Failed'"),
    }
    s = make_scheduler(
        make_dag({"name": "a", "hooks": hooks}, {"name": "b", "depends": "a.Failed"}),
        make_leaf(),
        make_leaf("note"),
    )

    (first_action,) = [action for action in s.advance(1) if isinstance(action, StartPod)]
    (beside,) = [
        action
        for action in s.advance(2, [PodStarted(first_action.id)])
        if isinstance(action, StartPod)
    ]
    assert s.nodes[beside.id]["name"] == "w.a.hooks.running"

    (failed,) = [
        action
        for action in s.advance(3, [PodEnded(first_action.id, "Failed")])
        if isinstance(action, StartPod)
    ]

    assert s.nodes[failed.id]["name"] == "w.a.hooks.failed"
    assert phase_of(s, "b") == ""
    actions = s.advance(4, [PodEnded(beside.id, "Succeeded"), PodEnded(failed.id, "Failed")])
    assert [s.nodes[action.id]["name"] for action in actions] == ["w.b"]


def test_a_failed_hook_does_not_fail_its_step() -> None:
    hooks = {"done": make_hook("steps.a.status == 'Succeeded'")}
    s = make_scheduler(
        make_steps_template([{"name": "a", "hooks": hooks}], [{"name": "b"}]),
        make_leaf(),
        make_leaf("note"),
    )
    assert play(s, {"w[0].a.hooks.done": "Failed"}) == ["w[0].a", "w[0].a.hooks.done", "w[1].b"]


def test_a_hook_can_read_the_outputs_of_its_own_node() -> None:
    arguments = make_parameters(x="{{steps.a.outputs.parameters.y}}")
    note = make_leaf("note", inputs={"parameters": [{"name": "x"}]})
    hooks = {"done": make_hook("steps.a.status == 'Succeeded'", arguments=arguments)}
    s = make_scheduler(make_steps_template([{"name": "a", "hooks": hooks}]), make_leaf(), note)
    play(s, outputs={"w[0].a": {"parameters": [{"name": "y", "value": "42"}]}})
    assert s.nodes[s.table.id("w[0].a.hooks.done")]["inputs"]["parameters"] == [
        {"name": "x", "value": "42"}
    ]


def test_an_invalid_hook_expression_ends_the_workflow_with_an_error() -> None:
    s = make_scheduler(make_leaf("main"), make_leaf("note"), hooks={"h": make_hook("no.such > 1")})
    play(s)
    assert s.status["phase"] == "Error"
    assert "no" in s.status["message"]
