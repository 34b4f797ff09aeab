"""Resource templates on the local controllers: their actions have the same effect as kubectl's
actions, and their conditions decide how the step ends."""

import base64
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from argolocal.controllers import kubectl_check
from argolocal.controllers.controller import LAST_APPLIED_ANNOTATION, Controller
from argolocal.controllers.kubectl import Resources
from argolocal.controllers.kubectl_check import check_outputs
from argolocal.engine.nodes import PodEnded, StartPod
from argolocal.errors import ConfigError, Conflict
from argolocal.manifest.patch import PATCH_FUNCTIONS, PatchError, apply_merge_patch
from argolocal.runner.cluster import LocalCluster
from argolocal.runner.run import LocalRun
from argolocal.state.journal import DiskFull
from rekindle.blocks.jobs.members import build_run_secret
from rekindle.blocks.resource import render
from rekindle.local.local_objects import LocalObjects
from tests.argolocal.running import execute_manifest, resume_run
from tests.waiting import until


def make_workflow(
    *resources: dict[str, Any], outputs: dict[str, Any] | None = None
) -> dict[str, Any]:
    names = [f"r{i}" for i in range(len(resources))]
    templates: list[dict[str, Any]] = [
        {"name": n, "resource": r} for n, r in zip(names, resources, strict=True)
    ]
    templates[-1].update({"outputs": outputs} if outputs else {})
    steps = [[{"name": name, "template": name}] for name in names]
    spec = {"entrypoint": "main", "templates": [{"name": "main", "steps": steps}, *templates]}

    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"generateName": "w-"},
        "spec": spec,
    }


def make_config_map(**data: str) -> str:
    return json.dumps(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": data}
    )


@pytest.fixture
def cluster(tmp_path: Path) -> LocalCluster:
    return LocalCluster(tmp_path / ".rekindle")


def find_failure_message(status: dict[str, Any]) -> str:
    return next(
        node["message"]
        for node in status["nodes"].values()
        if node["type"] == "Pod" and node["phase"] == "Failed"
    )


def test_a_patch_by_a_dead_runner_is_not_repeated(cluster: LocalCluster, tmp_path: Path) -> None:
    execute_manifest(
        make_workflow({"action": "create", "manifest": make_config_map(a="1")}), {}, cluster
    )
    move = json.dumps([{"op": "move", "from": "/data/a", "path": "/data/b"}])
    patch = {"action": "patch", "mergeStrategy": "json", "flags": ["configmap/c"], "manifest": move}
    # the second runner does not know that the first runner has applied the patch
    for _ in range(2):
        _, ended = Resources(cluster, {}, tmp_path).start(
            StartPod("w-1", "w-1", {"resource": patch})
        )
        assert isinstance(ended, PodEnded), ended
        assert ended.phase == "Succeeded", ended
        assert cluster.configmap("c") == {"b": "1"}


def test_repeated_patches_do_not_grow_an_object(cluster: LocalCluster) -> None:
    execute_manifest(
        make_workflow({"action": "apply", "manifest": make_config_map(a="1", b="1")}), {}, cluster
    )
    stored = cluster.home / "objects/ConfigMap/c.json"
    objects = LocalObjects(cluster)
    sizes = list[int]()

    for number in range(20):
        objects.patch("ConfigMap", "c", {"data": {"a": str(number % 2)}})
        execute_manifest(
            make_workflow({"action": "patch", "manifest": make_config_map(a=str(number % 2))}),
            {},
            cluster,
        )
        sizes.append(len(stored.read_bytes()))

    # a difference of 2 bytes is allowed, because resourceVersion gets more digits
    assert max(sizes) - min(sizes) <= 2, sizes
    last_applied = json.loads(
        json.loads(stored.read_text())["metadata"]["annotations"][LAST_APPLIED_ANNOTATION]
    )
    assert last_applied == json.loads(make_config_map(a="1", b="1")), (
        "a patch does not change the last-applied annotation"
    )
    patched_object = json.loads(stored.read_text())

    for _ in range(20):  # apply the object as `kubectl get -o yaml | kubectl apply -f -` does
        Controller(cluster, "ConfigMap").apply(json.loads(stored.read_text()))

    assert len(stored.read_bytes()) < 3 * len(json.dumps(patched_object))
    execute_manifest(
        make_workflow({"action": "apply", "manifest": make_config_map(a="2")}), {}, cluster
    )
    assert cluster.configmap("c") == {"a": "2"}, "what was applied, and is no more, goes"


def test_a_change_based_on_an_old_resource_version_is_a_conflict(cluster: LocalCluster) -> None:
    get = {"action": "get", "flags": ["configmap", "c", "--ignore-not-found"]}
    outputs = {
        "parameters": [
            {"name": "version", "valueFrom": {"jsonPath": "{.metadata.resourceVersion}"}}
        ]
    }

    def version() -> str:
        status = execute_manifest(make_workflow(get, outputs=outputs), {}, cluster)
        return next(node for node in status["nodes"].values() if node["type"] == "Pod")["outputs"][
            "parameters"
        ][0]["value"]

    def applied(version: str, **data: str) -> dict[str, Any]:
        obj = json.loads(make_config_map(**data))
        obj["metadata"]["resourceVersion"] = version
        return execute_manifest(
            make_workflow({"action": "apply", "manifest": json.dumps(obj)}), {}, cluster
        )

    assert version() == ""
    assert applied("", a="1")["phase"] == "Succeeded"
    read = version()
    LocalObjects(cluster).patch("ConfigMap", "c", {"data": {"a": "2"}})
    assert "the object has been modified" in find_failure_message(applied(read, a="3"))

    with pytest.raises(Conflict, match="the object has been modified"):
        LocalObjects(cluster).patch(
            "ConfigMap", "c", {"metadata": {"resourceVersion": read}, "data": {"a": "3"}}
        )

    assert cluster.configmap("c") == {"a": "2"}
    assert applied(version(), a="3")["phase"] == "Succeeded"
    assert cluster.configmap("c") == {"a": "3"}


def test_a_full_disk_is_reported_and_the_run_can_be_resumed(cluster: LocalCluster) -> None:
    draft = cluster.home / "objects/ConfigMap/c.new"
    draft.parent.mkdir(parents=True)
    draft.symlink_to("/dev/full")
    run = LocalRun.create(
        make_workflow({"action": "create", "manifest": make_config_map(a="1")}), {}, cluster
    )
    with pytest.raises(DiskFull, match=f"Free some space, then `rekindle resume {run.name}`"):
        run.run()
    draft.unlink()
    assert resume_run(run.name, cluster)["phase"] == "Succeeded"


def test_the_secret_of_a_training_is_new_for_each_run_and_only_in_its_own_file(
    cluster: LocalCluster,
) -> None:
    template = {
        "action": "apply",
        "flags": ["--server-side"],
        "manifest": render(build_run_secret("{{workflow.name}}-train")),
    }

    values = set[str]()

    for _ in range(2):
        run = LocalRun.create(make_workflow(template), {}, cluster)
        assert run.run()["phase"] == "Succeeded"
        name = f"{run.name}-train"
        values.add(value := cluster.secret(name)["secret"])
        assert re.fullmatch("[A-Za-z0-9]{43}", value)
        encoded = base64.b64encode(value.encode())
        files = [path for path in cluster.home.rglob("*") if path.is_file()]

        holders = [
            path
            for path in files
            if value.encode() in (data := path.read_bytes()) or encoded in data
        ]

        assert holders == [cluster.home / f"objects/Secret/{name}.json"]
        assert holders[0].stat().st_mode & 0o777 == 0o600

    assert len(values) == 2


def test_an_object_can_be_created_patched_read_and_deleted(cluster: LocalCluster) -> None:
    patch = {"action": "patch", "mergeStrategy": "merge", "manifest": make_config_map(b="2")}
    outputs = {"parameters": [{"name": "b", "valueFrom": {"jsonPath": "{.data.b}"}}]}
    get = {"action": "get", "manifest": make_config_map()}

    status = execute_manifest(
        make_workflow(
            {"action": "create", "manifest": make_config_map(a="1")}, patch, get, outputs=outputs
        ),
        {},
        cluster,
    )

    assert status["phase"] == "Succeeded", status
    assert cluster.configmap("c") == {"a": "1", "b": "2"}
    node = next(node for node in status["nodes"].values() if node["displayName"] == "r2")
    assert node["outputs"]["parameters"][0]["value"] == "2"

    status = execute_manifest(
        make_workflow(
            {"action": "delete", "flags": ["configmap", "c"]},
            {"action": "delete", "flags": ["configmap/c"]},
        ),
        {},
        cluster,
    )

    # a missing object counts as deleted
    assert status["phase"] == "Succeeded", status
    assert Controller(cluster, "ConfigMap").get("c") is None


def run_json_paths(cluster: LocalCluster, *paths: str, **source: str) -> dict[str, Any]:
    names = [
        {"name": f"p{i}", "valueFrom": {"jsonPath": path, **source}} for i, path in enumerate(paths)
    ]
    create = {"action": "apply", "manifest": make_config_map(**{"x": "1", "y.z": "2"})}
    status = execute_manifest(make_workflow(create, outputs={"parameters": names}), {}, cluster)
    return next(node for node in status["nodes"].values() if node["displayName"] == "r0")


def test_outputs_of_a_resource_step_equal_the_output_of_kubectl(cluster: LocalCluster) -> None:
    node = run_json_paths(
        cluster,
        "{.kind}/{.data.x}",
        r"{.data.y\.z}",
        "{range .data.*}{@},{end}",
        "{.data.none}",
        default="d",
    )

    assert [parameter["value"] for parameter in node["outputs"]["parameters"]] == [
        "ConfigMap/1",
        "2",
        "1,2,",
        "",
    ]

    node = run_json_paths(cluster, "{.kind[0]}")
    assert node["phase"] == "Failed"
    assert node["message"].split(": ")[-1] == "string is not array or slice"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"jsonPath": "{.data.x"}, "jsonPath is '{.data.x': unclosed action"),
        ({"jsonPath": "{end}"}, "not in range, nothing to end"),
        ({"jsonPath": "{.a[?(@.b=='c' && @.d)]}"}, "unrecognized character in action"),
        ({"default": "x"}, "valueFrom.jsonPath is missing"),
    ],
)
def test_an_invalid_json_path_is_rejected_before_the_run(
    source: dict[str, str], message: str
) -> None:
    check_outputs(
        {"outputs": {"parameters": [{"name": "a", "valueFrom": {"jsonPath": "{.x[{{item}}]}"}}]}},
        "t",
    )
    with pytest.raises(ConfigError) as raised:
        check_outputs({"outputs": {"parameters": [{"name": "a", "valueFrom": source}]}}, "t")
    assert message in str(raised.value)
    assert str(raised.value).startswith("t.outputs.parameters[0].valueFrom.jsonPath")


def test_a_delete_with_outputs_fails_and_deletes_nothing(cluster: LocalCluster) -> None:
    run_json_paths(cluster, "{.kind}")
    outputs = {"parameters": [{"name": "a", "valueFrom": {"jsonPath": "{.kind}"}}]}
    status = execute_manifest(
        make_workflow({"action": "delete", "flags": ["configmap/c"]}, outputs=outputs), {}, cluster
    )
    assert "are not supported for delete action" in find_failure_message(status)
    assert Controller(cluster, "ConfigMap").get("c")


def test_an_error_of_kubectl_fails_the_step(cluster: LocalCluster) -> None:
    create = {"action": "create", "manifest": make_config_map()}
    assert "already exists" in find_failure_message(
        execute_manifest(make_workflow(create, create), {}, cluster)
    )

    assert "not found" in find_failure_message(
        execute_manifest(
            make_workflow({"action": "get", "manifest": make_config_map().replace('"c"', '"d"')}),
            {},
            cluster,
        )
    )

    assert 'no matches for kind "Gadget"' in find_failure_message(
        execute_manifest(
            make_workflow({"action": "apply", "manifest": "{kind: Gadget, metadata: {name: g}}"}),
            {},
            cluster,
        )
    )


def test_a_step_waits_for_its_condition_and_fails_if_its_object_is_deleted(
    cluster: LocalCluster,
) -> None:
    wait = {
        "action": "apply",
        "manifest": make_config_map(a="1"),
        "successCondition": "data.ready == yes",
    }

    objects = Controller(cluster, "ConfigMap")

    def apply_later(act: Any) -> None:
        until("the step to apply its object", lambda: objects.get("c"))
        act()

    ready = {"data": {"ready": "yes"}}
    threading.Thread(
        target=apply_later, args=[lambda: objects.change("c", lambda obj: {**(obj or {}), **ready})]
    ).start()
    assert execute_manifest(make_workflow(wait), {}, cluster)["phase"] == "Succeeded"
    objects.delete("c")
    threading.Thread(target=apply_later, args=[lambda: objects.delete("c")]).start()
    assert "has been deleted" in find_failure_message(
        execute_manifest(make_workflow(wait), {}, cluster)
    )


def test_the_owner_of_an_object_is_its_workflow(cluster: LocalCluster) -> None:
    execute_manifest(
        make_workflow(
            {"action": "apply", "manifest": make_config_map(), "setOwnerReference": True}
        ),
        {},
        cluster,
    )
    obj = Controller(cluster, "ConfigMap").get("c")
    assert obj
    assert [owner["kind"] for owner in obj["metadata"]["ownerReferences"]] == ["Workflow"]


def test_a_merge_patch_removes_null_fields_and_replaces_lists() -> None:
    assert apply_merge_patch({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": None, "e": [1]}}) == {
        "a": {"c": 2, "e": [1]},
        "d": 3,
    }


def test_a_json_patch_applies_to_the_object_in_the_flags(cluster: LocalCluster) -> None:
    create = {"action": "create", "manifest": make_config_map(a="1", b="2")}
    operations = [
        {"op": "add", "path": "/metadata/annotations/x~1y", "value": "3"},
        {"op": "remove", "path": "/data/a"},
    ]

    patch = {
        "action": "patch",
        "mergeStrategy": "json",
        "flags": ["configmap", "c"],
        "manifest": json.dumps(operations),
    }

    change = json.dumps({"data": {"b": None}})

    named = {
        "action": "patch",
        "mergeStrategy": "merge",
        "flags": ["configmap/c"],
        "manifest": change,
    }

    status = execute_manifest(make_workflow(create, patch, named), {}, cluster)
    assert status["phase"] == "Succeeded", status
    obj = Controller(cluster, "ConfigMap").get("c")
    assert obj
    assert obj["metadata"]["annotations"]["x/y"] == "3"
    assert not obj.get("data")
    operations[1]["path"] = "/data/none"
    status = execute_manifest(
        make_workflow({**patch, "manifest": json.dumps(operations)}), {}, cluster
    )
    assert "missing path: /data/none" in find_failure_message(status)
    assert Controller(cluster, "ConfigMap").get("c") == obj


def test_a_json_patch_follows_rfc_6902() -> None:
    base = {"a": [1, 2], "b": {"c": 1}}
    for operation, expected in (
        ({"op": "add", "path": "/a/-", "value": 3}, {"a": [1, 2, 3], "b": {"c": 1}}),
        ({"op": "add", "path": "/a/0", "value": 0}, {"a": [0, 1, 2], "b": {"c": 1}}),
        ({"op": "remove", "path": "/a/0"}, {"a": [2], "b": {"c": 1}}),
        ({"op": "replace", "path": "/b", "value": None}, {"a": [1, 2], "b": None}),
        ({"op": "move", "from": "/b/c", "path": "/d"}, {"a": [1, 2], "b": {}, "d": 1}),
        ({"op": "copy", "from": "/a", "path": "/b/a"}, {"a": [1, 2], "b": {"c": 1, "a": [1, 2]}}),
        ({"op": "test", "path": "/b/c", "value": 1}, base),
        ({"op": "replace", "path": "", "value": 5}, 5),
    ):
        assert PATCH_FUNCTIONS["json"](base, [operation]) == expected, operation
        assert base == {"a": [1, 2], "b": {"c": 1}}

    for operation in (
        {"op": "test", "path": "/b/c", "value": 2},
        {"op": "remove", "path": "/a/5"},
        {"op": "replace", "path": "/none", "value": 1},
        {"op": "add", "path": "/none/x", "value": 1},
        {"op": "add", "path": "no", "value": 1},
        {"op": "add", "path": "/x"},
        {"op": "frob", "path": "/a"},
    ):
        with pytest.raises(PatchError):
            PATCH_FUNCTIONS["json"](base, [operation])


def test_a_strategic_patch_changes_only_the_named_container() -> None:
    container = {"name": "a", "image": "1", "args": ["x"], "env": [{"name": "E", "value": "1"}]}
    base = {"spec": {"containers": [container, {"name": "b", "image": "1"}], "x": 1}}
    change = {"name": "a", "args": ["y"], "env": [{"name": "F", "value": "2"}]}
    patched = PATCH_FUNCTIONS["strategic"](base, {"spec": {"containers": [change], "x": None}})
    # the items of env have the order of apimachinery
    env = [{"name": "F", "value": "2"}, {"name": "E", "value": "1"}]
    changed = {"name": "a", "image": "1", "args": ["y"], "env": env}
    assert patched == {"spec": {"containers": [changed, {"name": "b", "image": "1"}]}}


@pytest.mark.parametrize("strategy", ["json", "merge", "strategic"])
@pytest.mark.parametrize("flags", [[], ["configmap", "c"]])
def test_a_patch_that_is_a_list_fails_with_a_sentence_unless_it_is_a_json_patch_with_flags(
    cluster: LocalCluster, strategy: str, flags: list[str]
) -> None:
    create = {"action": "create", "manifest": make_config_map(a="1")}
    patch = {
        "action": "patch",
        "mergeStrategy": strategy,
        "flags": flags,
        "manifest": json.dumps([{"op": "remove", "path": "/data/a"}]),
    }
    status = execute_manifest(make_workflow(create, patch), {}, cluster)
    if strategy == "json" and flags:
        assert status["phase"] == "Succeeded", status
        return

    message = find_failure_message(status)
    if strategy == "json":
        assert "flags [] must name a kind and an object" in message
    else:
        assert "the manifest does not contain an object" in message


def test_a_strategic_patch_with_items_that_are_no_maps_is_an_error() -> None:
    base = {"spec": {"containers": [{"name": "a"}]}}
    with pytest.raises(PatchError, match="the items of the list containers must be maps"):
        PATCH_FUNCTIONS["strategic"](base, {"spec": {"containers": ["name"]}})


@pytest.mark.parametrize(
    "resource",
    [
        {"action": "patch", "mergeStrategy": "json", "flags": ["pod", "x"], "manifest": "[]"},
        {"action": "get", "flags": ["pods/x"]},
        {"action": "create", "manifest": "kind: Job"},
    ],
)
def test_an_unknown_kind_is_rejected_before_the_run(
    cluster: LocalCluster, resource: dict[str, Any]
) -> None:
    with pytest.raises(
        ConfigError, match=r"spec\.templates\[1\]\.resource\.(flags|manifest) is a (pods?|Job),"
    ):
        execute_manifest(make_workflow(resource), {}, cluster)


def test_a_delete_by_labels_deletes_only_matching_objects(cluster: LocalCluster) -> None:
    for name, labels in {
        "a": {"app.kubernetes.io/x": "1"},
        "b": {"app.kubernetes.io/x": "2"},
        "c": {},
    }.items():
        Controller(cluster, "ConfigMap").apply(
            {"kind": "ConfigMap", "metadata": {"name": name, "labels": labels}}
        )

    delete = {
        "action": "delete",
        "flags": ["configmap", "--selector", "app.kubernetes.io/x=1", "-n", "default"],
    }
    assert execute_manifest(make_workflow(delete), {}, cluster)["phase"] == "Succeeded"
    assert Controller(cluster, "ConfigMap").names() == ["b", "c"]
    delete = {"action": "delete", "flags": ["configmaps", "--selector=app.kubernetes.io/x"]}
    assert execute_manifest(make_workflow(delete), {}, cluster)["phase"] == "Succeeded"
    assert Controller(cluster, "ConfigMap").names() == ["c"]


@pytest.mark.parametrize(
    ("resource", "message"),
    [
        ({"action": "delete", "flags": ["configmap", "--all"]}, "flag --all is not supported here"),
        (
            {"action": "create", "manifest": make_config_map(), "flags": ["--dry-run=server"]},
            "flag --dry-run",
        ),
        ({"action": "get", "flags": ["configmap", "-l", "a=b"]}, "has a selector: only delete"),
    ],
)
def test_a_flag_with_an_unsupported_effect_is_rejected(
    cluster: LocalCluster, resource: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=r"resource\.flags.*" + message):
        execute_manifest(make_workflow(resource), {}, cluster)


NESTED_ANCHORS = "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


@pytest.mark.parametrize("text", ["[" * 100_000, f"a0: &a0 [1]\n{NESTED_ANCHORS}"])
def test_an_object_that_exceeds_the_limits_of_yaml_has_no_traceback(text: str) -> None:
    assert kubectl_check._parse_objects({"manifest": text}) == []
