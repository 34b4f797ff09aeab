"""Tests of the state machine of a workflow, without processes and without a clock."""

import json
from itertools import pairwise
from typing import Any

import pytest

from argolocal.engine import nodes
from argolocal.engine.nodes import KillPod, PodEnded, PodStarted, StartPod, format_time, hash_fnv32a
from argolocal.engine.scheduler import Scheduler
from argolocal.state.journal import reset_interrupted
from tests.argolocal.runner.played import (
    make_dag,
    make_leaf,
    make_parameters,
    make_scheduler,
    make_steps_template,
    phase_of,
    play,
)
from tests.effort import count_calls


def test_dependents_run_after_a_skipped_but_not_after_an_omitted_task() -> None:
    s = make_scheduler(
        make_dag(
            {"name": "a", "when": "false"},
            {"name": "b", "depends": "a"},
            {"name": "c", "depends": "a.Succeeded"},
            {"name": "d", "depends": "c"},
        ),
        make_leaf(),
    )
    assert play(s) == ["b"]
    assert [phase_of(s, name) for name in "abcd"] == ["Skipped", "Succeeded", "Omitted", "Omitted"]
    assert s.status["phase"] == "Succeeded"


def test_a_successful_cleanup_leaf_makes_the_dag_succeed() -> None:
    s = make_scheduler(
        make_dag({"name": "train"}, {"name": "cleanup", "depends": "train.Failed"}), make_leaf()
    )
    play(s, {"train": "Failed"})
    assert s.status["phase"] == "Succeeded"


def test_an_omitted_leaf_below_a_failed_task_makes_the_dag_fail() -> None:
    s = make_scheduler(
        make_dag({"name": "train"}, {"name": "deploy", "depends": "train"}), make_leaf()
    )
    play(s, {"train": "Failed"})
    assert s.status["phase"] == "Failed"
    assert phase_of(s, "deploy") == "Omitted"


def test_a_failed_dag_target_fails_the_dag_even_if_a_leaf_below_it_succeeds() -> None:
    tasks = ({"name": "verify"}, {"name": "restore", "depends": "verify.Failed"})
    s = make_scheduler(make_dag(*tasks, target="verify restore"), make_leaf())
    play(s, {"verify": "Failed"})
    assert s.status["phase"] == "Failed"
    assert phase_of(s, "restore") == "Succeeded"


def test_an_error_of_a_step_is_a_failure_of_a_steps_template_and_an_error_of_a_dag() -> None:
    s = make_scheduler(make_steps_template([{"name": "a"}]), make_leaf())
    play(s, {"w[0].a": "Error"})
    assert s.status["phase"] == "Failed"
    s = make_scheduler(make_dag({"name": "a"}), make_leaf())
    play(s, {"a": "Error"})
    assert s.status["phase"] == "Error"


def test_a_limit_of_two_retries_allows_three_attempts_and_no_limit_allows_any_number() -> None:
    s = make_scheduler(make_leaf("main", retryStrategy={"limit": "2"}))
    assert len(play(s, {f"w({i})": "Failed" for i in range(9)})) == 3
    assert s.status["phase"] == "Failed"
    assert s.status["message"] == "No more retries left"
    s = make_scheduler(make_leaf("main", retryStrategy={}))
    assert len(play(s, {f"w({i})": "Failed" for i in range(50)})) == 51
    assert s.status["phase"] == "Succeeded"


def test_a_failure_without_retry_still_waits_for_one_backoff() -> None:
    backoff = {"duration": "10m"}
    s = make_scheduler(
        make_leaf("main", retryStrategy={"limit": 3, "retryPolicy": "OnError", "backoff": backoff})
    )
    assert play(s, {"w(0)": "Failed"}) == ["w(0)"]
    assert s.table.now >= 1601
    # without a limit of the retry strategy, there is no backoff
    s = make_scheduler(
        make_leaf("main", retryStrategy={"retryPolicy": "OnError", "backoff": backoff})
    )
    play(s, {"w(0)": "Failed"})
    assert s.table.now < 1010


def test_a_failed_attempt_is_retried_only_while_the_expression_is_true() -> None:
    strategy = {
        "limit": 5,
        "expression": "asInt(lastRetry.exitCode) != 1 or lastRetry.status == 'Error'",
    }
    s = make_scheduler(make_leaf("main", retryStrategy=strategy))
    assert play(s, {"w(0)": "Error", "w(1)": "Failed"}) == ["w(0)", "w(1)"]
    assert s.status["message"] == "retryStrategy.expression evaluated to false"


def test_each_attempt_can_read_its_number_and_the_last_exit_code() -> None:
    template = make_leaf("main", retryStrategy={"limit": 2})
    template["container"]["args"] = ["{{retries}} {{lastRetry.exitCode}} {{pod.name}}"]
    s = make_scheduler(template)
    seen = []
    events = []

    for now in range(1000, 1010):
        for action in s.advance(float(now), events):
            assert isinstance(action, StartPod)
            seen.append(action.template["container"]["args"][0].rpartition("-")[0])
            events = [PodEnded(action.id, "Failed", "", {"exitCode": "4"})]

        if s.done:
            break

    assert seen == ["0 0 w-main", "1 4 w-main", "2 4 w-main"]


@pytest.mark.parametrize("items", ["[]", " null "])
def test_an_empty_loop_is_skipped_and_its_successor_runs(items: str) -> None:
    s = make_scheduler(
        make_dag({"name": "a", "withParam": items}, {"name": "b", "depends": "a"}), make_leaf()
    )
    assert play(s) == ["b"]
    assert s.table.get("w.a")["message"] == "Skipped, empty params"  # type: ignore[index]


def test_a_loop_collects_the_outputs_of_its_items() -> None:
    leaf_template = make_leaf("one", inputs={"parameters": [{"name": "x"}]})
    tasks = (
        {
            "name": "a",
            "withItems": [1, "b", {"k": "v"}],
            "arguments": make_parameters(x="{{item}}"),
        },
        {
            "name": "b",
            "depends": "a",
            "arguments": make_parameters(
                x="{{tasks.a.outputs.parameters.p}} {{tasks.a.outputs.result}}"
            ),
        },
    )

    s = make_scheduler(make_dag(*tasks), leaf_template)
    names = ["a(0:1)", "a(1:b)", "a(2:k:v)"]
    outputs = {
        name: {"result": str(i), "parameters": [{"name": "p", "value": f"p{i}"}]}
        for i, name in enumerate(names)
    }
    assert play(s, outputs=outputs) == [*names, "b"]
    assert s.table.get("w.b")["inputs"]["parameters"][0]["value"] == '["p0","p1","p2"] [0,1,2]'  # type: ignore[index]


def test_an_output_of_a_skipped_step_is_its_default_or_the_default_of_the_input() -> None:
    outputs = {
        "parameters": [
            {"name": "p", "valueFrom": {"path": "/p"}},
            {"name": "q", "valueFrom": {"path": "/q", "default": "Q"}},
        ]
    }

    skipped = make_leaf("made", outputs=outputs)
    used = make_leaf("one", inputs={"parameters": [{"name": "x", "default": "X"}, {"name": "y"}]})
    arguments = make_parameters(
        x="{{tasks.a.outputs.parameters.p}}", y="{{tasks.a.outputs.parameters.q}}"
    )

    s = make_scheduler(
        make_dag(
            {"name": "a", "template": "made", "when": "false"},
            {"name": "b", "depends": "a", "arguments": arguments},
        ),
        skipped,
        used,
    )

    play(s)
    assert [each["value"] for each in s.table.get("w.b")["inputs"]["parameters"]] == ["X", "Q"]  # type: ignore[index]


def test_a_false_condition_does_not_resolve_arguments() -> None:
    argument = make_parameters(x="{{tasks.a.outputs.result}}")
    s = make_scheduler(
        make_dag(
            {"name": "a"}, {"name": "b", "depends": "a", "when": "1 == 2", "arguments": argument}
        ),
        make_leaf(),
    )
    play(s)
    assert phase_of(s, "b") == "Skipped"


def test_a_workflow_that_argo_would_never_end_ends_with_a_reason() -> None:
    s = make_scheduler(
        make_dag(
            {"name": "a"},
            {
                "name": "b",
                "depends": "a",
                "arguments": make_parameters(x="{{tasks.a.outputs.result}}"),
            },
        ),
        make_leaf(),
    )
    play(s)
    assert s.status["phase"] == "Error"
    assert "failed to resolve {{tasks.a.outputs.result}}" in s.status["message"]


def test_parallelism_is_never_exceeded() -> None:
    s = make_scheduler(
        make_dag({"name": "a", "withItems": list(range(20))}), make_leaf(), parallelism=3
    )
    running: set[str] = set()
    events: list[Any] = []
    most = 0
    for now in range(1000, 1100):
        running.update({action.id for action in s.advance(float(now), events)})
        most = max(most, len(running))
        if s.done:
            break
        events = [PodEnded(running.pop(), "Succeeded", "", {})]
    assert s.status["phase"] == "Succeeded"
    assert most == 3


def test_fail_fast_of_a_template_prevents_new_pods_but_fail_fast_of_a_dag_does_not() -> None:
    tasks = ({"name": "a"}, {"name": "b", "depends": "a || a.Failed"}, {"name": "c"})
    s = make_scheduler({**make_dag(*tasks), "failFast": True}, make_leaf())
    assert play(s, {"a": "Failed"}) == ["a", "c"]
    assert s.status["message"] == "template has failed or errored children and failFast enabled"
    s = make_scheduler(make_dag(*tasks, failFast=True), make_leaf())
    assert play(s, {"a": "Failed"}) == ["a", "c", "b"]


def test_an_exit_handler_runs_after_a_failure_and_its_own_failure_fails_the_workflow() -> None:
    s = make_scheduler(make_leaf("main"), make_leaf("bye"), onExit="bye")
    assert play(s, {"w": "Failed"}) == ["w", "onExit"]
    assert s.status["phase"] == "Failed"
    s = make_scheduler(make_leaf("main"), make_leaf("bye"), onExit="bye")
    play(s, {"onExit": "Failed"})
    assert s.status["phase"] == "Failed"


def test_a_task_hook_delays_dependents_and_cannot_fail_the_task() -> None:
    hook = {
        "exit": {
            "template": "bye",
            "arguments": make_parameters(x="{{tasks.a.outputs.parameters.p}}"),
        }
    }
    s = make_scheduler(
        make_dag({"name": "a", "hooks": hook}, {"name": "b", "depends": "a"}),
        make_leaf(),
        make_leaf("bye", inputs={"parameters": [{"name": "x"}]}),
    )
    ran = play(s, {"a.onExit": "Failed"}, {"a": {"parameters": [{"name": "p", "value": "P"}]}})
    assert ran == ["a", "a.onExit", "b"]
    assert s.status["phase"] == "Succeeded"
    assert s.table.get("w.a.onExit")["inputs"]["parameters"][0]["value"] == "P"  # type: ignore[index]


def test_outputs_with_a_global_name_are_outputs_of_the_workflow() -> None:
    s = make_scheduler(
        make_dag({"name": "a"}),
        make_leaf(),
        make_leaf(
            "bye",
            inputs={"parameters": [{"name": "x", "value": "{{workflow.outputs.parameters.g}}"}]},
        ),
        onExit="bye",
    )
    play(s, outputs={"a": {"parameters": [{"name": "p", "value": "P", "globalName": "g"}]}})
    assert s.status["outputs"] == {"parameters": [{"name": "g", "value": "P"}]}
    assert s.table.get("w.onExit")["inputs"]["parameters"][0]["value"] == "P"  # type: ignore[index]


def test_a_deadline_ends_pods_but_not_the_exit_handler() -> None:
    s = make_scheduler(make_leaf("main"), make_leaf("bye"), onExit="bye", activeDeadlineSeconds=10)
    pod = s.advance(1000.0)[0]
    assert s.wake == 1010.0
    actions = s.advance(1010.0, [PodStarted(pod.id)])
    assert [type(action) for action in actions] == [KillPod, StartPod]
    assert s.nodes["w"]["message"] == "Step exceeded its deadline"
    s.advance(1020.0, [PodEnded(actions[1].id, "Succeeded", "", {})])
    assert s.status["phase"] == "Failed"
    assert s.table.get("w.onExit")["phase"] == "Succeeded"  # type: ignore[index]


def test_a_suspended_step_waits_for_its_duration() -> None:
    s = make_scheduler({"name": "main", "suspend": {"duration": "5m"}})
    assert s.advance(1000.0) == []
    assert s.wake == 1300.0
    s.advance(1300.0)
    assert s.status["phase"] == "Succeeded"


def test_a_template_overrides_template_defaults() -> None:
    defaults = {
        "retryStrategy": {"limit": 1},
        "container": {"env": [{"name": "A", "value": "0"}, {"name": "B", "value": "0"}]},
    }
    template = make_leaf("main")
    template["container"]["env"] = [{"name": "A", "value": "1"}]
    s = make_scheduler(template, templateDefaults=defaults)
    action = s.advance(1000.0)[0]
    assert isinstance(action, StartPod)
    assert {each["name"]: each["value"] for each in action.template["container"]["env"]} == {
        "A": "1",
        "B": "0",
    }
    assert s.nodes["w"]["type"] == "Retry"


def test_a_run_continues_from_a_status_on_disk() -> None:
    tasks = ({"name": "a"}, {"name": "b", "depends": "a"}, {"name": "c", "depends": "b"})
    s = make_scheduler(make_dag(*tasks), make_leaf())
    first_action = s.advance(1000.0)[0]
    s.advance(1001.0, [PodEnded(first_action.id, "Succeeded", "", {})])
    resumed_scheduler = Scheduler(s.workflow, s.status)
    assert play(resumed_scheduler) == ["b", "c"]


def test_node_ids_and_pod_names_are_the_same_as_in_argo() -> None:
    s = make_scheduler(make_dag({"name": "a"}), make_leaf())
    pod = s.advance(1000.0)[0]
    assert isinstance(pod, StartPod)
    assert pod.id == f"w-{hash_fnv32a('w.a')}"
    assert pod.pod == f"w-one-{hash_fnv32a('w.a')}"
    # node id that a real Argo has computed
    assert hash_fnv32a("wf-0008[0].t2") == 911381529


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("shape", ["loop", "wide", "chain", "steps"])
def test_the_cost_per_node_does_not_grow_with_the_number_of_nodes(shape: str) -> None:
    def measure_effort(count: int) -> float:
        names = [f"t{i}" for i in range(count)]
        if shape == "chain":
            dependency = {name: {"depends": last_name} for last_name, name in pairwise(names)}
        else:
            dependency = {}

        if shape in ("loop", "steps"):
            tasks = [{"name": "t", "withItems": names}]
        else:
            tasks = [{"name": n} for n in names]

        if shape == "steps":
            main_template = make_steps_template(tasks)
        else:
            main_template = make_dag(
                *({**task, **dependency.get(task["name"], {})} for task in tasks)
            )

        started: list[Any] = []
        total = count_calls(
            lambda: started.extend(play(make_scheduler(main_template, make_leaf(), parallelism=2)))
        )
        assert len(started) == count

        return total / count

    assert measure_effort(1000) < 1.5 * measure_effort(100)


def test_a_wide_loop_records_only_new_children() -> None:
    s = make_scheduler(
        make_dag({"name": "t", "withItems": list(range(500))}), make_leaf(), parallelism=2
    )
    written = 0
    events = []
    for _ in range(501):
        starts = [action for action in s.advance(1, events) if isinstance(action, StartPod)]
        written += len(json.dumps(s.table.drain_changes()))
        events = [
            event
            for start in starts
            for event in (PodStarted(start.id), PodEnded(start.id, "Succeeded"))
        ]
    assert s.done
    assert written < 3 * len(json.dumps(s.nodes))


def test_a_parallelism_limit_of_nested_dags_does_not_block_their_tasks() -> None:
    inner_template = {
        "name": "inner",
        "parallelism": 1,
        "dag": {"tasks": [{"name": n, "template": "one"} for n in "xy"]},
    }

    outer = {
        "name": "outer",
        "parallelism": 1,
        "dag": {"tasks": [{"name": n, "template": "inner"} for n in "ab"]},
    }

    s = make_scheduler(
        {"name": "main", "steps": [[{"name": "s", "template": "outer"}]]},
        outer,
        inner_template,
        make_leaf(),
    )
    assert len(play(s)) == 4
    assert s.status["phase"] == "Succeeded"


def test_the_duration_of_an_attempt_is_in_whole_seconds_as_expressions_expect() -> None:
    strategy = {"limit": "2", "expression": "asInt(lastRetry.duration) < 5"}
    s = make_scheduler(make_leaf("main", retryStrategy=strategy))
    (first_action,) = s.advance(10.9)
    (retry_action,) = s.advance(
        11.2, [PodStarted(first_action.id), PodEnded(first_action.id, "Failed")]
    )
    assert isinstance(retry_action, StartPod)


def test_a_template_that_calls_itself_for_ever_ends_in_an_error_as_on_argo() -> None:
    s = make_scheduler(make_steps_template([{"name": "again", "template": "main"}]))
    play(s)
    deepest = [node for node in s.nodes.values() if node["phase"] == "Error"]
    assert len(deepest) == 1
    assert "Maximum recursion depth exceeded" in deepest[0]["message"]
    assert s.status["phase"] == "Failed"
    assert len(s.nodes) == 2 * 99 + 1
    s = make_scheduler(make_dag({"name": "again", "template": "main"}))
    play(s)
    assert s.status["phase"] == "Error"


def test_exponential_recursion_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "MAX_NODES", 1000)
    recursive_call = {"template": "twice"}
    twice = {
        "name": "twice",
        "dag": {"tasks": [{"name": "a", **recursive_call}, {"name": "b", **recursive_call}]},
    }
    s = make_scheduler(
        make_dag({"name": "pod"}, {"name": "tree", "depends": "pod", **recursive_call}),
        make_leaf(),
        twice,
    )
    assert play(s) == ["pod"]
    assert s.status["phase"] == "Error"
    assert len(s.nodes) == 1000
    assert "at most 1000" in s.status["message"]


def test_pods_of_a_dead_runner_restart_in_spite_of_a_parallelism_limit() -> None:
    tasks = make_dag({"name": "a"}, {"name": "b"}, {"name": "c"})
    first_run = make_scheduler(tasks, make_leaf(), parallelism=2)
    events = [PodStarted(action.id) for action in first_run.advance(1000.0, [])]
    first_run.advance(1001.0, events)
    s = Scheduler(first_run.workflow, reset_interrupted(first_run.status, format_time(1002.0)))
    assert play(s) == ["a", "b", "c"]
    assert s.status["phase"] == "Succeeded"


def test_a_daemon_of_a_dead_runner_restarts_before_its_clients() -> None:
    first_run = make_scheduler(
        make_steps_template([{"name": "server", "template": "daemon"}], [{"name": "client"}]),
        make_leaf("daemon", daemon=True),
        make_leaf(),
    )
    (server,) = first_run.advance(1000.0, [])
    (client,) = first_run.advance(1001.0, [PodStarted(server.id, "127.0.0.1")])
    s = Scheduler(first_run.workflow, reset_interrupted(first_run.status, format_time(1002.0)))
    assert [action.id for action in s.advance(1003.0, [])] == [server.id]
    assert [action.id for action in s.advance(1004.0, [PodStarted(server.id, "127.0.0.1")])] == [
        client.id
    ]


def test_a_pod_of_a_dead_runner_restarts_although_its_parents_completed() -> None:
    parallel_steps = [
        {"name": "a", "template": "given", "arguments": make_parameters(x="y")},
        {"name": "b", "template": "inline"},
    ]
    gives = {
        "parameters": [{"name": "r", "valueFrom": {"parameter": "{{steps.a.outputs.result}}"}}]
    }
    with_input = make_leaf(
        "given", inputs={"parameters": [{"name": "x"}]}, retryStrategy={"limit": "1"}
    )
    with_input["container"] = {
        **with_input["container"],
        "args": ["{{inputs.parameters.x}} {{retries}}"],
    }
    inline = {"name": "b", "template": "", "inline": {"container": make_leaf()["container"]}}
    first_run = make_scheduler(
        {**make_steps_template([parallel_steps[0], inline]), "outputs": gives}, with_input
    )
    pods = first_run.advance(1000.0, [])
    first_run.advance(1001.0, [PodStarted(pod.id) for pod in pods])
    status = reset_interrupted(first_run.status, format_time(1002.0))

    for name in ("w", "w[0]"):  # the node has failed, as after the time limit of another step
        status["nodes"][first_run.table.id(name)]["phase"] = "Failed"
        status["nodes"][first_run.table.id(name)]["finishedAt"] = format_time(1001.0)

    s = Scheduler(first_run.workflow, status)
    (first_action,) = (
        action for action in s.advance(1002.0, []) if s.nodes[action.id]["name"] == "w[0].a(0)"
    )
    assert isinstance(first_action, StartPod)
    assert first_action.template["container"]["args"] == ["y 0"]
    assert first_action.capture is True
    assert (
        s.nodes[s.table.id("w[0].b")]["message"] == "the runner of the pod died"
    )  # the scheduler cannot restart an inline template
    s.advance(
        1003.0,
        [PodStarted(first_action.id), PodEnded(first_action.id, "Succeeded", "", {"result": "1"})],
    )
    assert s.status["phase"] == "Failed"
    assert s.nodes[first_action.id]["phase"] == "Succeeded"


def test_a_workflow_with_an_error_waits_for_running_pods_even_after_a_resume() -> None:
    tasks = [{"name": "slow"}, {"name": "quick"}, {"name": "bad", "template": "bad"}]
    invalid_template = make_leaf(
        "bad", retryStrategy={"limit": "1", "expression": "nothing.here > 1"}
    )
    first_run = make_scheduler(make_steps_template(tasks), make_leaf(), invalid_template)
    slow, quick, wrong = first_run.advance(1000.0, [])
    first_run.advance(1001.0, [PodStarted(each.id) for each in (slow, quick, wrong)])
    first_run.advance(
        1002.0, [PodEnded(quick.id, "Succeeded", ""), PodEnded(wrong.id, "Failed", "")]
    )
    assert first_run.status["phase"] == "Running"
    s = Scheduler(first_run.workflow, reset_interrupted(first_run.status, format_time(1003.0)))
    assert [action.id for action in s.advance(1003.0, [])] == [slow.id]
    assert s.status["phase"] == "Running"
    s.advance(1004.0, [PodStarted(slow.id), PodEnded(slow.id, "Succeeded", "")])
    assert s.status["phase"] == "Failed"
    assert s.nodes[slow.id]["phase"] == "Succeeded"


def test_a_pod_of_a_dead_runner_restarts_even_if_parallelism_blocks_an_earlier_step() -> None:
    first_run = make_scheduler(
        make_dag({"name": "a"}, {"name": "b", "depends": "a"}, {"name": "c"}),
        make_leaf(),
        parallelism=2,
    )
    a, c = first_run.advance(1000.0, [])
    first_run.advance(1001.0, [PodStarted(a.id), PodStarted(c.id)])
    status = reset_interrupted(first_run.status, format_time(1002.0))
    status["nodes"][a.id]["phase"] = "Succeeded"
    status["nodes"][a.id]["finishedAt"] = format_time(1001.0)
    s = Scheduler(
        {**first_run.workflow, "spec": {**first_run.workflow["spec"], "parallelism": 1}}, status
    )
    assert play(s) == ["c", "b"]
    assert s.status["phase"] == "Succeeded"
