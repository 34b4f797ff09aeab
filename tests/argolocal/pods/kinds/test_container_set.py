"""Tests of containerSet templates: the order of the containers, and the messages of failed
containers."""

from pathlib import Path
from typing import Any

import pytest

from argolocal.engine.nodes import PodEnded, PodStarted, StartPod
from argolocal.errors import ConfigError
from argolocal.pods import filesystem
from argolocal.runner.cluster import LocalCluster
from tests import builders
from tests.argolocal.runner.played import make_scheduler, make_steps_template
from tests.argolocal.running import execute_manifest
from tests.builders import make_workflow

needs_namespaces = pytest.mark.skipif(
    not filesystem.supports_namespaces(), reason="needs mount namespaces"
)
WORK = {"volumeMounts": [{"name": "work", "mountPath": "/work"}]}
OUT_OUTPUTS = {"parameters": [{"name": "out", "valueFrom": {"path": "/work/out"}}]}


def make_shell_container(name: str, source: str, *needs: str, **more: Any) -> dict[str, Any]:
    dependencies = {"dependencies": list(needs)} if needs else {}
    return builders.make_shell_container(source, name=name, **dependencies, **more)


def run_set(
    home: Path, *containers: dict[str, Any], outputs: dict[str, Any] | None = None, **group: Any
) -> dict[str, Any]:
    template = {
        "name": "set",
        "containerSet": {"containers": [*containers], **WORK, **group},
        "outputs": outputs or {},
    }

    main_template = {"name": "main", "steps": [[{"name": "set", "template": "set"}]]}

    volumes = [{"name": "work", "emptyDir": {}}]
    return execute_manifest(
        make_workflow(main_template, template, volumes=volumes), {}, LocalCluster(home)
    )


def results_by_name(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return phase and message of the pod and its containers, by the last part of the pod's or
    container's name."""
    nodes = [node for node in status["nodes"].values() if node["type"] in ("Pod", "Container")]
    return {
        node["name"].rpartition(".")[2]: (node["phase"], node.get("message", "")) for node in nodes
    }


@needs_namespaces
def test_containers_run_after_their_dependencies_and_share_only_volumes(tmp_path: Path) -> None:
    first_container = make_shell_container(
        "first", "sleep 0.2; echo one > /work/x; echo own > /tmp/x"
    )
    beside = make_shell_container("beside", "echo two > /work/y")

    main_container = make_shell_container(
        "main",
        "cat /work/x /work/y > /work/out; cat /tmp/x >> /work/out 2>/dev/null; true",
        "first",
        "beside",
    )

    status = run_set(tmp_path, main_container, first_container, beside, outputs=OUT_OUTPUTS)
    assert status["phase"] == "Succeeded", status
    pod = next(node for node in status["nodes"].values() if node["type"] == "Pod")
    assert pod["outputs"]["parameters"][0]["value"] == "one\ntwo"
    assert pod["outputs"]["exitCode"] == "0"
    assert results_by_name(status) == {
        name: ("Succeeded", "") for name in ("set", "main", "first", "beside")
    }


def test_container_nodes_are_children_of_their_pod_and_parents_of_the_next_step() -> None:
    containers = [
        {"name": "a"},
        {"name": "b", "dependencies": ["a"]},
        {"name": "c", "dependencies": ["a"]},
    ]

    template = {"name": "one", "containerSet": {"containers": containers}}
    s = make_scheduler(make_steps_template([{"name": "x"}], [{"name": "y"}]), template)
    (pod,) = s.advance(1)
    assert isinstance(pod, StartPod)
    a, b, c = (s.nodes[pod.containers[name]] for name in "abc")
    assert [node["name"] for node in (a, b, c)] == ["w[0].x.a", "w[0].x.b", "w[0].x.c"]
    assert {(n["type"], n["phase"], n["boundaryID"], n["templateName"]) for n in (a, b, c)} == {
        ("Container", "Pending", pod.id, "one")
    }

    assert a["displayName"] == "a"
    assert s.nodes[pod.id]["children"] == [a["id"]]
    assert a["children"] == [b["id"], c["id"]]

    s.advance(2, [PodStarted(pod.id), *(PodStarted(id) for id in pod.containers.values())])
    assert a["phase"] == "Running"

    s.advance(
        3,
        [
            *(PodEnded(id, "Succeeded") for id in pod.containers.values()),
            PodEnded(pod.id, "Succeeded"),
        ],
    )

    group_id = s.nodes[s.table.ids["w[1]"]]["id"]
    assert b["children"] == c["children"] == [group_id]


def test_containers_of_a_pod_that_never_ran_fail() -> None:
    containers = [{"name": "a"}, {"name": "b", "dependencies": ["a"]}]
    s = make_scheduler({"name": "main", "containerSet": {"containers": containers}})
    (pod,) = s.advance(1)
    s.advance(2, [PodEnded(pod.id, "Error", "init: Error (exit code 64): no such key")])
    nodes = [
        (node["phase"], node["message"]) for node in s.nodes.values() if node["type"] == "Container"
    ]
    assert nodes == [("Failed", "Pod Failed whilst container running")] * 2


@needs_namespaces
def test_dependents_of_a_failed_container_do_not_run_and_name_the_dependency(
    tmp_path: Path,
) -> None:
    chain = (
        make_shell_container("a", "exit 3"),
        make_shell_container("b", "touch /work/b", "a"),
        make_shell_container("c", "touch /work/c", "b"),
    )
    main_container = make_shell_container(
        "main", "sleep 0.3; ls /work/b /work/c 2>/dev/null | wc -l > /work/out"
    )
    status = run_set(tmp_path, *chain, main_container, outputs=OUT_OUTPUTS)
    assert results_by_name(status) == {
        "set": ("Failed", "a: Error (exit code 3)"),
        "a": ("Failed", "a: Error (exit code 3): "),
        "b": ("Error", 'b: Error (exit code 64): dependency "a" exited with non-zero code: 3'),
        "c": ("Error", 'c: Error (exit code 64): dependency "b" exited with non-zero code: 3'),
        "main": ("Succeeded", ""),
    }
    pod = next(node for node in status["nodes"].values() if node["type"] == "Pod")
    assert pod["outputs"]["parameters"][0]["value"] == "0", "outputs are collected even then"


@needs_namespaces
def test_the_field_retries_is_the_number_of_attempts_of_a_container(tmp_path: Path) -> None:
    main_container = make_shell_container(
        "main", "echo . >> /work/out; [ $(wc -l < /work/out) = 3 ]"
    )
    status = run_set(
        tmp_path,
        main_container,
        outputs=OUT_OUTPUTS,
        retryStrategy={"retries": 3, "duration": "100ms"},
    )
    assert status["phase"] == "Succeeded", status
    status = run_set(
        tmp_path / "b", main_container, outputs=OUT_OUTPUTS, retryStrategy={"retries": "2"}
    )
    assert status["phase"] == "Failed"
    pod = next(node for node in status["nodes"].values() if node["type"] == "Pod")
    assert pod["message"] == "main: Error (exit code 1)"
    assert pod["outputs"]["parameters"][0]["value"] == ".\n."


@needs_namespaces
def test_a_container_set_past_its_deadline_ends_with_all_its_containers(tmp_path: Path) -> None:
    main_template = {
        "name": "main",
        "activeDeadlineSeconds": 1,
        "containerSet": {
            "containers": [
                make_shell_container("a", "exec sleep 600"),
                make_shell_container("b", "true", "a"),
            ]
        },
    }

    status = execute_manifest(make_workflow(main_template), {}, LocalCluster(tmp_path))
    assert status["message"] == "Pod was active on the node longer than the specified deadline"

    nodes = {
        n["displayName"]: (n["phase"], n["message"])
        for n in status["nodes"].values()
        if n["type"] == "Container"
    }

    assert nodes == {name: ("Failed", f"{name}: Error (exit code 143): ") for name in "ab"}


@needs_namespaces
def test_the_stdout_of_the_main_container_is_the_result(tmp_path: Path) -> None:
    template = {
        "name": "set",
        "containerSet": {
            "containers": [
                make_shell_container("main", "echo hello"),
                make_shell_container("b", "echo other"),
            ]
        },
    }
    use = {
        "name": "use",
        "inputs": {"parameters": [{"name": "x"}]},
        "container": make_shell_container("c", "true"),
    }

    arguments = {"parameters": [{"name": "x", "value": "{{steps.a.outputs.result}}"}]}
    main_template = {
        "name": "main",
        "steps": [[{"name": "a", "template": "set"}], [{"name": "b", "template": "use"}]],
    }
    main_template["steps"][1][0]["arguments"] = arguments
    status = execute_manifest(
        make_workflow(main_template, template, use), {}, LocalCluster(tmp_path)
    )
    assert [
        n["inputs"]["parameters"][0]["value"] for n in status["nodes"].values() if "inputs" in n
    ] == ["hello"]


@needs_namespaces
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"containers": []}, r"containers must have at least one container"),
        (
            {"containers": [make_shell_container("a", ""), make_shell_container("a", "")]},
            r"each with a different name",
        ),
        (
            {"containers": [make_shell_container("a", "", "z")]},
            r"containers\[0\]\.dependencies names 'z'",
        ),
        (
            {
                "containers": [
                    make_shell_container("a", "", "b"),
                    make_shell_container("b", "", "a"),
                ]
            },
            r"containers depend on each other: ",
        ),
        (
            {"containers": [make_shell_container("a", "")], "retryStrategy": {"retries": 0}},
            r"retries is 0",
        ),
        (
            {
                "containers": [make_shell_container("a", "")],
                "retryStrategy": {"retries": 1, "duration": "x"},
            },
            r"duration is 'x'",
        ),
        (
            {"containers": [{**make_shell_container("a", ""), "image": "nginx"}]},
            r"containers\[0\]\.image is 'nginx'",
        ),
    ],
)
def test_an_invalid_container_set_is_rejected_with_the_reason(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_set(tmp_path, **change)


@needs_namespaces
def test_a_container_set_with_outputs_needs_a_main_container(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'must include one named "main"'):
        run_set(tmp_path, make_shell_container("a", "true"), outputs=OUT_OUTPUTS)
