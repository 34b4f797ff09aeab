"""Init containers, sidecars and daemons, which are ready before the main container starts, and end
after it."""

import json
from pathlib import Path
from typing import Any

import pytest

from argolocal.engine.nodes import KillPod, PodEnded, PodStarted, StartPod, format_time
from argolocal.engine.scheduler import Scheduler
from argolocal.pods import filesystem
from argolocal.runner.cluster import LocalCluster
from argolocal.state.journal import reset_interrupted
from tests.argolocal.runner.played import (
    make_dag,
    make_leaf,
    make_parameters,
    make_scheduler,
    make_steps_template,
    phase_of,
)
from tests.argolocal.running import execute_manifest
from tests.builders import make_shell_container, make_workflow

needs_namespaces = pytest.mark.skipif(
    not filesystem.supports_namespaces(), reason="needs mount namespaces"
)


def run_pod(template: dict[str, Any], home: Path) -> dict[str, Any]:
    return execute_manifest(make_workflow({"name": "main", **template}), {}, LocalCluster(home))


MOUNT = {"volumeMounts": [{"name": "work", "mountPath": "/work"}]}
VOLUMES = {"volumes": [{"name": "work", "emptyDir": {}}]}


@needs_namespaces
def test_init_containers_run_in_order_before_main_and_share_only_their_volumes(
    tmp_path: Path,
) -> None:
    first_container = {
        "name": "first",
        **make_shell_container("echo one > /work/x; echo hidden > /tmp/x", **MOUNT),
    }
    second_container = {
        "name": "second",
        "mirrorVolumeMounts": True,
        **make_shell_container("cat /work/x > /work/y; echo two >> /work/y"),
    }

    main_container = make_shell_container(
        "cat /work/y > /tmp/out; ls /tmp/x >> /tmp/out 2>/dev/null; true", **MOUNT
    )
    outputs = {"parameters": [{"name": "out", "valueFrom": {"path": "/tmp/out"}}]}
    status = run_pod(
        {
            "initContainers": [first_container, second_container],
            "container": main_container,
            "outputs": outputs,
            **VOLUMES,
        },
        tmp_path,
    )
    assert status["phase"] == "Succeeded", status
    assert status["nodes"]["w"]["outputs"]["parameters"][0]["value"] == "one\ntwo"


@needs_namespaces
def test_mirrored_mounts_include_the_input_artifacts_of_main(tmp_path: Path) -> None:
    files = {"in": "/in/data.txt", "vol": "/work/sub/v.txt", "odd": "/opt/x"}
    raw = [{"name": name, "path": path, "raw": {"data": name}} for name, path in files.items()]
    read = f"cat {' '.join(files.values())} > /work/$0 && echo -n + >> /in/data.txt"
    init = {
        "name": "first",
        "mirrorVolumeMounts": True,
        **make_shell_container(read),
        "args": [read, "init"],
    }

    side = {
        "name": "side",
        "mirrorVolumeMounts": True,
        **make_shell_container(read),
        "args": [f"{read}; sleep 600", "side"],
    }

    main_container = make_shell_container(
        "until [ -s /work/side ]; do sleep 0.02; done; cat /work/init /work/side > /work/out",
        **MOUNT,
    )

    status = run_pod(
        {
            "inputs": {"artifacts": raw},
            "initContainers": [init],
            "sidecars": [side],
            "container": main_container,
            "outputs": {"parameters": [{"name": "out", "valueFrom": {"path": "/work/out"}}]},
            **VOLUMES,
        },
        tmp_path,
    )

    assert status["phase"] == "Succeeded", status
    assert status["nodes"]["w"]["outputs"]["parameters"][0]["value"] == "involoddin+volodd"


@needs_namespaces
def test_artifacts_of_main_are_hidden_without_mirrored_mounts(tmp_path: Path) -> None:
    raw = {"name": "in", "path": "/in/data.txt", "raw": {"data": "x"}}
    init = {"name": "first", **make_shell_container("[ ! -e /in/data.txt ]")}
    status = run_pod(
        {
            "inputs": {"artifacts": [raw]},
            "initContainers": [init],
            "container": make_shell_container("true"),
        },
        tmp_path,
    )
    assert status["phase"] == "Succeeded", status


@needs_namespaces
def test_main_does_not_run_after_an_init_container_that_failed(tmp_path: Path) -> None:
    init = {"name": "check", **make_shell_container("exit 3")}
    status = run_pod(
        {"initContainers": [init], "container": make_shell_container("touch /tmp/ran")}, tmp_path
    )
    assert status["phase"] == "Failed"
    assert status["message"] == "check: Error (exit code 3)"


@needs_namespaces
def test_a_sidecar_runs_in_parallel_with_main_and_ends_with_it(tmp_path: Path) -> None:
    side = {"name": "side", **make_shell_container("echo up > /work/up; sleep 600", **MOUNT)}
    main_container = make_shell_container("until [ -s /work/up ]; do sleep 0.02; done", **MOUNT)
    status = run_pod({"sidecars": [side], "container": main_container, **VOLUMES}, tmp_path)
    assert status["phase"] == "Succeeded", status


@needs_namespaces
def test_a_sidecar_that_failed_by_itself_fails_the_pod(tmp_path: Path) -> None:
    side = {"name": "side", **make_shell_container("echo > /work/up; exit 7", **MOUNT)}
    main_container = make_shell_container(
        "until [ -e /work/up ]; do sleep 0.02; done; sleep 0.3", **MOUNT
    )
    status = run_pod({"sidecars": [side], "container": main_container, **VOLUMES}, tmp_path)
    assert status["phase"] == "Failed"
    assert status["message"] == "side: Error (exit code 7)"


def test_steps_know_the_address_of_a_daemon_which_ends_after_them() -> None:
    use = make_leaf("use", inputs={"parameters": [{"name": "x"}]})
    arguments = make_parameters(x="{{steps.db.ip}}")

    s = make_scheduler(
        make_steps_template(
            [{"name": "db"}], [{"name": "use", "template": "use", "arguments": arguments}]
        ),
        make_leaf(daemon=True),
        use,
    )

    (db,) = [action for action in s.advance(1) if isinstance(action, StartPod)]

    (user,) = [
        action
        for action in s.advance(2, [PodStarted(db.id, "127.0.0.1")])
        if isinstance(action, StartPod)
    ]

    assert s.nodes[user.id]["inputs"]["parameters"][0]["value"] == "127.0.0.1"
    assert s.advance(3, [PodEnded(user.id, "Succeeded")]) == [KillPod(db.id)]
    assert s.status["phase"] == "Succeeded"
    assert s.nodes[db.id]["phase"] == "Succeeded"


def test_a_daemon_that_ends_before_its_steps_has_failed() -> None:
    s = make_scheduler(
        make_dag({"name": "db"}, {"name": "use", "depends": "db", "template": "use"}),
        make_leaf(daemon=True),
        make_leaf("use"),
    )
    (db,) = [action for action in s.advance(1) if isinstance(action, StartPod)]
    s.advance(2, [PodStarted(db.id)])
    s.advance(3, [PodEnded(db.id, "Succeeded")])
    assert phase_of(s, "db") == "Failed"


def test_a_dead_daemon_is_retried_and_ends_after_its_clients() -> None:
    tasks = {"name": "db"}, {"name": "use", "depends": "db", "template": "use"}
    s = make_scheduler(
        make_dag(*tasks), make_leaf(daemon=True, retryStrategy={"limit": 1}), make_leaf("use")
    )
    (first_action,) = s.advance(1)
    (use,) = s.advance(2, [PodStarted(first_action.id)])
    assert s.nodes[use.id]["name"] == "w.use"
    assert s.nodes[s.table.ids["w.db"]]["daemoned"]
    (second_action,) = s.advance(3, [PodEnded(first_action.id, "Failed")])
    assert isinstance(second_action, StartPod)
    assert s.nodes[second_action.id]["name"] == "w.db(1)"
    assert s.advance(4, [PodStarted(second_action.id), PodStarted(use.id)]) == []
    assert s.advance(5, [PodEnded(use.id, "Succeeded")]) == [KillPod(second_action.id)]
    assert s.status["phase"] == "Succeeded"

    assert [phase_of(s, name) for name in ("db", "db(0)", "db(1)")] == [
        "Succeeded",
        "Failed",
        "Succeeded",
    ]


def test_steps_wait_again_for_a_daemon_with_retries_whose_runner_died() -> None:
    s = make_scheduler(
        make_steps_template([{"name": "db"}], [{"name": "use", "template": "use"}]),
        DAEMON,
        make_leaf("use"),
    )
    (db,) = s.advance(1)
    assert len(s.advance(2, [PodStarted(db.id)])) == 1
    resumed_scheduler = Scheduler(
        s.workflow,
        reset_interrupted({**s.status, "nodes": json.loads(json.dumps(s.nodes))}, format_time(3)),
    )
    started = [
        resumed_scheduler.nodes[action.id]["name"] for action in resumed_scheduler.advance(3)
    ]
    assert started == ["w[0].db(0)"]
    (use,) = resumed_scheduler.advance(4, [PodStarted(db.id)])
    assert resumed_scheduler.nodes[use.id]["name"] == "w[1].use"


DAEMON = make_leaf(daemon=True, retryStrategy={"limit": 1})


@needs_namespaces
def test_the_process_of_a_daemon_ends_with_the_run(tmp_path: Path) -> None:
    main_template = {
        "name": "main",
        "steps": [[{"name": "a", "template": "db"}], [{"name": "b", "template": "use"}]],
    }
    db = {"name": "db", "daemon": True, "container": make_shell_container("sleep 600")}
    use = {"name": "use", "container": make_shell_container("true")}

    status = execute_manifest(make_workflow(main_template, db, use), {}, LocalCluster(tmp_path))
    assert status["phase"] == "Succeeded", status
