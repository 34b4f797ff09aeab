"""Tests of how nodes and workflows end: by shutdowns, deadlines, exits of containers, and ends of
daemons. The inputs of a pod are tested, too."""

from pathlib import Path
from typing import Any

import pytest

from argolocal.engine.nodes import KillPod, PodEnded, PodStarted, StartPod
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


def list_action_ids(actions: list[Any], kind: type = StartPod) -> list[str]:
    return [action.id for action in actions if isinstance(action, kind)]


def test_a_daemon_that_exits_by_itself_fails_and_is_not_killed() -> None:
    s = make_scheduler(
        make_steps_template([{"name": "server", "template": "daemon"}], [{"name": "client"}]),
        make_leaf("daemon", daemon=True),
        make_leaf(),
    )
    (server,) = list_action_ids(s.advance(1000.0))
    (client,) = list_action_ids(s.advance(1001.0, [PodStarted(server, "10.0.0.1")]))
    assert s.nodes[server]["daemoned"] is True
    assert s.nodes[server]["podIP"] == "10.0.0.1"
    s.advance(1002.0, [PodEnded(server, "Succeeded")])
    assert s.nodes[server]["phase"] == "Failed"
    assert "daemoned" not in s.nodes[server]
    assert s.advance(1003.0, [PodStarted(client), PodEnded(client, "Succeeded")]) == []
    assert s.status["phase"] == "Succeeded"


def test_a_daemon_is_killed_when_its_template_completes() -> None:
    s = make_scheduler(
        make_steps_template([{"name": "server", "template": "daemon"}], [{"name": "client"}]),
        make_leaf("daemon", daemon=True),
        make_leaf(),
    )
    (server,) = list_action_ids(s.advance(1000.0))
    (client,) = list_action_ids(s.advance(1001.0, [PodStarted(server)]))
    assert list_action_ids(
        s.advance(1002.0, [PodStarted(client), PodEnded(client, "Succeeded")]), KillPod
    ) == [server]
    assert s.nodes[server]["phase"] == "Succeeded"
    assert s.status["phase"] == "Succeeded"


def test_containers_of_a_failed_pod_fail() -> None:
    container = {"image": "x", "command": ["c"]}
    containers = [{"name": "a", **container}, {"name": "b", "dependencies": ["a"], **container}]
    s = make_scheduler({"name": "main", "containerSet": {"containers": containers}})
    (pod,) = list_action_ids(s.advance(1000.0))
    s.advance(1001.0, [PodStarted(pod), PodEnded(pod, "Failed", "it broke")])
    ended = {name: s.nodes[s.table.id(f"w.{name}")] for name in "ab"}
    assert {node["phase"] for node in ended.values()} == {"Failed"}
    assert {node["message"] for node in ended.values()} == {"Pod Failed whilst container running"}
    assert s.nodes[pod]["message"] == "it broke"
    assert s.status["phase"] == "Failed"


def test_an_exit_handler_continues_after_the_deadline_of_the_workflow() -> None:
    s = make_scheduler(make_leaf("main"), make_leaf("bye"), onExit="bye", activeDeadlineSeconds=10)
    (pod,) = list_action_ids(s.advance(1000.0))
    assert list_action_ids(s.advance(1009.9, [PodStarted(pod)])) == []
    assert s.nodes[pod]["phase"] == "Running"
    actions = s.advance(1010.0)
    (bye,) = list_action_ids(actions)
    assert list_action_ids(actions, KillPod) == [pod]
    assert s.advance(1011.0, [PodStarted(bye)]) == []
    assert s.nodes[bye]["phase"] == "Running"


@pytest.mark.parametrize(("shutdown", "handled"), [("Stop", True), ("Terminate", False)])
def test_stop_runs_the_exit_handler_and_terminate_does_not(shutdown: str, handled: bool) -> None:
    first_run = make_scheduler(
        make_steps_template(
            [{"name": "a"}, {"name": "pause", "template": "wait"}], [{"name": "b"}]
        ),
        make_leaf(),
        {"name": "wait", "suspend": {}},
        make_leaf("bye"),
        onExit="bye",
    )

    (pod,) = list_action_ids(first_run.advance(1000.0))
    first_run.advance(1001.0, [PodStarted(pod)])
    s = Scheduler(first_run.workflow, first_run.status, shutdown)
    actions = s.advance(1002.0)
    assert list_action_ids(actions, KillPod) == [pod, s.table.id("w[0].pause")]
    assert s.nodes[pod]["message"] == f"workflow shutdown with strategy:  {shutdown}"
    assert s.nodes[s.table.id("w[0].pause")]["message"] == f"Stopped with strategy '{shutdown}'"
    assert phase_of(s, "onExit") == ("Pending" if handled else "")

    if handled:
        (bye,) = list_action_ids(actions)
        assert s.advance(1003.0, [PodStarted(bye)]) == []
        assert s.nodes[bye]["phase"] == "Running"
        s.advance(1004.0, [PodEnded(bye, "Succeeded")])

    assert s.status["phase"] == "Failed"
    assert s.status["message"] == f"Stopped with strategy '{shutdown}'"


def test_the_phase_of_a_failed_exit_handler_becomes_the_phase_of_the_workflow() -> None:
    s = make_scheduler(make_leaf("main"), make_leaf("bye"), onExit="bye")
    (pod,) = list_action_ids(s.advance(1000.0))
    (bye,) = list_action_ids(s.advance(1001.0, [PodStarted(pod), PodEnded(pod, "Succeeded")]))
    assert s.status["phase"] == "Running"
    s.advance(1002.0, [PodStarted(bye), PodEnded(bye, "Failed", "it broke")])
    assert s.status["phase"] == "Failed"
    assert s.status["message"] == "it broke"
    s = make_scheduler(
        make_leaf("main"), make_leaf("bye", inputs={"parameters": [{"name": "x"}]}), onExit="bye"
    )
    play(s)
    assert s.status["phase"] == "Error"
    assert s.status["message"].startswith("error in exit template execution : ")


def test_an_invalid_entrypoint_ends_the_workflow_with_an_error() -> None:
    with_input = make_leaf("main", inputs={"parameters": [{"name": "x"}]})
    s = make_scheduler(with_input)
    play(s)
    assert s.status["phase"] == "Error"
    assert s.nodes["w"]["phase"] == "Error"
    assert s.status["message"].startswith("error in entry template execution: ")


def test_a_task_with_an_invalid_template_ends_in_an_error() -> None:
    with_input = make_leaf("given", inputs={"parameters": [{"name": "x"}]})
    s = make_scheduler(
        make_dag({"name": "a"}, {"name": "b", "template": "given"}), make_leaf(), with_input
    )
    assert play(s) == ["a"]
    assert phase_of(s, "b") == "Error"
    assert s.status["phase"] == "Error"


def test_a_pod_gets_its_name_volumes_and_log_archive() -> None:
    template = make_leaf("main")
    template["container"]["args"] = ["{{pod.name}} {{node.name}}"]
    template["container"]["volumeMounts"] = [
        {"name": "v", "mountPath": "/v"},
        {"name": "claim", "mountPath": "/c"},
    ]
    claim = {"metadata": {"name": "claim"}, "spec": {}}
    volume = {"name": "v", "emptyDir": {}}
    s = make_scheduler(template, volumes=[volume], volumeClaimTemplates=[claim], archiveLogs=True)
    (pod,) = s.advance(1000.0)
    assert isinstance(pod, StartPod)
    assert pod.template["container"]["args"] == [f"{pod.pod} w"]
    claim_volume = {"name": "claim", "persistentVolumeClaim": {"claimName": "w-claim"}}
    assert pod.template["volumes"] == [volume, claim_volume]
    assert s.status["persistentVolumeClaims"] == [claim_volume]
    assert pod.template["archiveLocation"] == {"archiveLogs": True}
    s.advance(1001.0, [PodStarted(pod.id), PodEnded(pod.id, "Succeeded")])
    assert "persistentVolumeClaims" not in s.status
    (plain,) = make_scheduler(make_leaf("main")).advance(1000.0)
    assert isinstance(plain, StartPod)
    assert not {"volumes", "archiveLocation"} & plain.template.keys()


def test_the_exit_handler_knows_how_the_workflow_ended_and_how_long_it_took() -> None:
    bye = make_leaf("bye")
    bye["container"]["args"] = ["{{workflow.status}} {{workflow.duration}} {{workflow.failures}}"]
    s = make_scheduler(make_leaf("main"), bye, onExit="bye")
    (pod,) = list_action_ids(s.advance(1000.0))
    (handler,) = s.advance(1002.5, [PodStarted(pod), PodEnded(pod, "Failed", "it broke")])
    assert isinstance(handler, StartPod)
    status, duration, failures = handler.template["container"]["args"][0].split(" ", 2)
    assert status == "Failed"
    assert duration == "2.500000"
    assert "it broke" in failures


def test_a_pod_that_does_not_start_in_time_fails_in_spite_of_retries() -> None:
    s = make_scheduler(make_leaf("main", timeout="10s"))
    (pod,) = list_action_ids(s.advance(1000.0))
    s.advance(1001.0, [PodStarted(pod)])
    s.advance(1020.0)
    assert s.nodes[pod]["phase"] == "Running", "the runner ends it, not the state machine"
    first_run = make_scheduler(make_leaf("main", timeout="10s"))
    first_run.advance(1000.0)

    for now, expected in ((1009.9, "Pending"), (1010.0, "Failed")):
        s = Scheduler(
            first_run.workflow,
            reset_interrupted(first_run.status, first_run.nodes["w"]["startedAt"]),
        )
        s.advance(now)
        assert s.nodes["w"]["phase"] == expected


def test_a_memoized_output_needs_no_pod(tmp_path: Path) -> None:
    memo = {"key": "k", "cache": {"configMap": {"name": "kept"}}}
    template = make_leaf(
        "main", memoize=memo, outputs={"parameters": [{"name": "p", "valueFrom": {"path": "/p"}}]}
    )
    with_input: dict[str, Any] = {"w": {"parameters": [{"name": "p", "value": "1"}]}}
    assert play(make_scheduler(template, home=tmp_path), outputs=with_input) == ["w"]
    s = make_scheduler(template, home=tmp_path)
    assert play(s) == []
    assert s.nodes["w"]["memoizationStatus"]["hit"]
    assert s.nodes["w"]["outputs"]["parameters"][0]["value"] == "1"


def test_an_event_for_a_completed_node_changes_nothing() -> None:
    s = make_scheduler(make_leaf("main"))
    (pod,) = list_action_ids(s.advance(1000.0))
    s.advance(
        1001.0, [PodStarted(pod, host="here"), PodEnded(pod, "Succeeded", "", {"exitCode": "0"})]
    )
    assert s.nodes[pod]["hostNodeName"] == "here"
    assert s.status["phase"] == "Succeeded"
    s.advance(1002.0, [PodEnded(pod, "Failed", "late", {"exitCode": "1"})])
    assert s.nodes[pod]["phase"] == "Succeeded"
    assert s.nodes[pod]["outputs"] == {"exitCode": "0"}


def test_a_suspended_workflow_starts_no_pod() -> None:
    s = make_scheduler(make_leaf("main"), suspend=True)
    assert s.advance(1000.0) == []
    assert s.status["phase"] == "Running"
    assert not s.nodes
    s = Scheduler(s.workflow, s.status, "Stop")
    s.advance(1001.0)
    assert s.status["phase"] == "Failed"


def test_a_workflow_whose_only_step_is_skipped_succeeds() -> None:
    s = make_scheduler(make_steps_template([{"name": "a", "when": "false"}]), make_leaf())
    assert play(s) == []
    assert s.status["phase"] == "Succeeded"
    s = make_scheduler(make_dag({"name": "a", "arguments": make_parameters()}), {"name": "one"})
    play(s)
    assert s.status["phase"] == "Error"
    assert "Template 'one' missing specification" in str(s.nodes)


def test_cache_keys_and_mutex_names_may_contain_the_pod_name(tmp_path: Path) -> None:
    memo = {"key": "{{pod.name}}", "cache": {"configMap": {"name": "kept"}}}
    s = make_scheduler(
        make_leaf("main", memoize=memo, synchronization={"mutexes": [{"name": "{{pod.name}}"}]}),
        home=tmp_path,
    )
    (pod,) = s.advance(1000.0)
    assert isinstance(pod, StartPod)
    assert s.nodes["w"]["memoizationStatus"]["key"] == pod.pod == "w"
