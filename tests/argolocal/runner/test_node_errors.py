"""An invalid name or an unexpected exception ends only one node, with a clear message, and the exit
handler runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from argolocal.common import object_names
from argolocal.controllers.controller import Controller
from argolocal.controllers.controller_kinds import Kinds
from argolocal.errors import ConfigError
from argolocal.pods import filesystem
from argolocal.runner.cluster import LocalCluster
from tests import builders
from tests.argolocal.running import execute_manifest, resume_run

ECHO = {"image": "busybox", "command": ["echo", "hi"]}
TAG = "{{workflow.parameters.branch}}"
needs_mounts = pytest.mark.skipif(
    not filesystem.supports_namespaces(), reason="needs mount namespaces"
)


def make_exit_workflow(
    template: dict[str, Any], branch: str = "feature/login", **spec: Any
) -> dict[str, Any]:
    templates = [{"name": "main", **template}, {"name": "bye", "container": ECHO}]
    arguments = {"parameters": [{"name": "branch", "value": branch}]}

    return builders.make_workflow(*templates, **{"onExit": "bye", "arguments": arguments, **spec})


def make_memoized_template(name: str) -> dict[str, Any]:
    return {"memoize": {"key": "k", "cache": {"configMap": {"name": name}}}, "container": ECHO}


def make_resource_template(manifest: dict[str, Any]) -> dict[str, Any]:
    return {"resource": {"action": "apply", "manifest": json.dumps(manifest)}}


def check_that_only_the_node_failed(status: dict[str, Any], reason: str) -> None:
    nodes = {node["name"]: node for node in status["nodes"].values()}
    assert status["phase"] in ("Error", "Failed"), status
    assert {nodes["w"]["phase"]} <= {"Error", "Failed"}, nodes["w"]
    assert reason in nodes["w"]["message"], nodes["w"]
    assert nodes["w.onExit"]["phase"] == "Succeeded"
    assert "Running" not in {node["phase"] for node in nodes.values()}


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (make_memoized_template(f"cache-{TAG}"), "RFC 1123 subdomain"),
        (make_memoized_template(f"Cache_{TAG}"), "RFC 1123 subdomain"),
        ({"container": ECHO, "sidecars": [{"name": f"x{TAG}", **ECHO}]}, "RFC 1123 label"),
        ({"container": ECHO, "initContainers": [{"name": f"x{TAG}", **ECHO}]}, "RFC 1123 label"),
        ({"container": ECHO, "metadata": {"labels": {"branch": TAG}}}, "metadata.labels.branch"),
        ({"container": ECHO, "metadata": {"annotations": {f"a b{TAG}": "x"}}}, "qualified name"),
        ({"container": ECHO, "nodeSelector": {"zone": TAG}}, "spec.nodeSelector.zone"),
        (
            make_resource_template({"kind": "ConfigMap", "metadata": {"name": f"x-{TAG}"}}),
            "RFC 1123 subdomain",
        ),
        (
            make_resource_template(
                {"kind": "ConfigMap", "metadata": {"name": "x", "labels": {"a": TAG}}}
            ),
            "metadata.labels.a",
        ),
        (
            make_resource_template(
                {"kind": "ConfigMap", "metadata": {"name": "x"}, "data": {TAG: "1"}}
            ),
            "valid config key",
        ),
        (
            {"container": ECHO, "hostAliases": [{"ip": "1.2.3.4", "hostnames": [TAG]}]},
            "hostAliases.hostnames",
        ),
        ({"container": ECHO, "priorityClassName": TAG}, "spec.priorityClassName"),
        (
            {"container": ECHO, "podSpecPatch": json.dumps({"serviceAccountName": TAG})},
            "spec.serviceAccountName",
        ),
        (
            make_resource_template({"kind": "ConfigMap", "metadata": {"name": "x", "labels": TAG}}),
            "must map names to values",
        ),
        (
            make_resource_template(
                {"kind": "Secret", "metadata": {"name": "x"}, "data": {"a": f"%{TAG}"}}
            ),
            "not base64",
        ),
        (
            make_resource_template({"kind": ["ConfigMap"], "metadata": {"name": TAG}}),
            "kind must be text",
        ),
        (
            {"resource": {"action": "get", "flags": ["configmap", f"x-{TAG}"]}},
            "must name a kind and an object",
        ),
    ],
)
def test_a_name_that_tags_make_invalid_ends_the_node_and_runs_the_exit_handler(
    tmp_path: Path, template: dict[str, Any], reason: str
) -> None:
    cluster = LocalCluster(tmp_path)
    check_that_only_the_node_failed(
        execute_manifest(make_exit_workflow(template), {}, cluster), reason
    )
    check_that_only_the_node_failed(resume_run("w", cluster), reason)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"podMetadata": {"labels": {"branch": TAG}}}, "metadata.labels.branch"),
        ({"podMetadata": {"annotations": {f"a {TAG}": "x"}}}, "metadata.annotations"),
        ({"nodeSelector": {"zone": TAG}}, "spec.nodeSelector.zone"),
        ({"serviceAccountName": TAG}, "spec.serviceAccountName"),
        ({"podPriorityClassName": TAG}, "spec.priorityClassName"),
        ({"hostAliases": [{"ip": "1.2.3.4", "hostnames": [TAG]}]}, "spec.hostAliases.hostnames"),
        ({"podSpecPatch": json.dumps({"nodeSelector": {"zone": TAG}})}, "spec.nodeSelector.zone"),
    ],
)
def test_a_name_that_the_workflow_sets_for_all_pods_ends_each_of_its_pods(
    tmp_path: Path, spec: dict[str, Any], reason: str
) -> None:
    status = execute_manifest(
        make_exit_workflow({"container": ECHO}, **spec), {}, LocalCluster(tmp_path)
    )
    phases = {node["name"]: node["phase"] for node in status["nodes"].values()}
    assert phases == {"w": "Error", "w.onExit": "Error"}
    assert all(reason in node["message"] for node in status["nodes"].values())


def test_the_fields_of_a_template_win_over_those_of_the_workflow(tmp_path: Path) -> None:
    template = {
        "container": ECHO,
        "metadata": {"labels": {"branch": "main"}},
        "serviceAccountName": "own",
    }
    spec = {"podMetadata": {"labels": {"branch": TAG}}, "serviceAccountName": TAG, "onExit": None}
    assert (
        execute_manifest(make_exit_workflow(template, **spec), {}, LocalCluster(tmp_path))["phase"]
        == "Succeeded"
    )


@needs_mounts
@pytest.mark.parametrize("claim", ["../../outside", "a..b", "Upper"])
def test_a_claim_with_an_invalid_name_ends_the_node(tmp_path: Path, claim: str) -> None:
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": TAG}}]
    container = {**ECHO, "volumeMounts": [{"name": "v", "mountPath": "/v"}]}
    status = execute_manifest(
        make_exit_workflow({"container": container}, claim, volumes=volumes),
        {},
        LocalCluster(tmp_path / "home"),
    )
    check_that_only_the_node_failed(status, "RFC 1123 subdomain")
    assert not (tmp_path / "outside").exists()


def test_names_of_objects_are_never_paths_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text('{"data": {"key": "value"}}')
    cluster = LocalCluster(tmp_path / "home")
    (tmp_path / "home/objects/ConfigMap").mkdir(parents=True)
    assert cluster.find("ConfigMap", "../../../secret") is None
    with pytest.raises(KeyError):
        cluster.configmap("../../../secret")
    controller = Controller(cluster, "ConfigMap")
    for act in (controller.get, controller.delete):
        with pytest.raises(ConfigError, match="RFC 1123 subdomain"):
            act("../../../secret")
    with pytest.raises(ConfigError, match="bucket's name"):
        cluster.store({"bucket": "../../secret"})


@pytest.mark.parametrize("damage", ["folder", "text", "shape"])
def test_an_unexpected_exception_ends_the_node_and_runs_the_exit_handler(
    tmp_path: Path, damage: str
) -> None:
    cluster = LocalCluster(tmp_path)
    file = tmp_path / "objects/ConfigMap/cache.json"
    file.parent.mkdir(parents=True)
    if damage == "folder":
        file.mkdir()
    else:
        file.write_text({"text": "{", "shape": "[]"}[damage])
    status = execute_manifest(make_exit_workflow(make_memoized_template("cache")), {}, cluster)
    check_that_only_the_node_failed(
        status, {"folder": "Is a directory", "text": "Expecting", "shape": "must be an ob"}[damage]
    )


def test_the_pod_of_another_task_survives_an_unexpected_exception(tmp_path: Path) -> None:
    (tmp_path / "objects/ConfigMap/cache.json").mkdir(parents=True)
    tasks = [{"name": "good", "template": "bye"}, {"name": "bad", "template": "bad"}]
    spec = make_exit_workflow({"dag": {"tasks": tasks, "failFast": False}})
    spec["spec"]["templates"].append({"name": "bad", **make_memoized_template("cache")})
    status = execute_manifest(spec, {}, LocalCluster(tmp_path))
    phases = {node["displayName"]: node["phase"] for node in status["nodes"].values()}
    assert phases == {"w": "Error", "good": "Succeeded", "bad": "Error", "w.onExit": "Succeeded"}


class Broken(Controller):
    kind = "Broken"

    def poll(self) -> None:
        raise PermissionError(13, "Permission denied", "/broken")


def test_an_exception_of_a_controller_ends_the_nodes_that_wait_for_its_objects(
    tmp_path: Path,
) -> None:
    kinds = Kinds()
    kinds.register(Broken)
    template = make_resource_template({"kind": "Broken", "metadata": {"name": "x"}})
    template["resource"]["successCondition"] = "status.done == yes"
    status = execute_manifest(make_exit_workflow(template), {}, LocalCluster(tmp_path, kinds=kinds))
    check_that_only_the_node_failed(status, "Permission denied: /broken")


@pytest.mark.parametrize(
    ("rule", "valid_names", "invalid_names"),
    [
        (
            object_names.SUBDOMAIN_RULE,
            ["a", "a.b-c", "0"],
            ["", "A", "a/b", "..", "a..b", "a.", "-a", "a\n", "x" * 254, 5],
        ),
        (object_names.LABEL_RULE, ["a", "a-b"], ["a.b", "a" * 64, "a_b"]),
        (object_names.SERVICE_NAME_RULE, ["a1"], ["1a"]),
        (
            object_names.DATA_KEY_RULE,
            ["a.json", "_A-b", ".hidden"],
            [".", "..", "..a", "a/b", "a b"],
        ),
        (object_names.LABEL_VALUE_RULE, ["", "A_b.c"], ["a/b", "-a", "a" * 64, None]),
        (
            object_names.QUALIFIED_NAME_RULE,
            ["a", "a.b/c_D"],
            ["/a", "a/", "A_/b", "a/b/c", "a" * 64, f"{'x' * 254}/a"],
        ),
        (object_names.BUCKET_NAME_RULE, ["b", "my.bucket_1"], ["", ".", "..", "a/b", "-a"]),
    ],
)
def test_names_follow_the_rules_of_the_api_server(
    rule: object_names.NameRule, valid_names: list[str], invalid_names: list[Any]
) -> None:
    assert [name for name in valid_names if not rule.allows(name)] == []
    assert [name for name in invalid_names if rule.allows(name)] == []
