"""Tests of submitting, stopping, resuming and scheduling runs on a cluster, with a small HTTP
server in place of the API server."""

import base64
import gzip
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from argolocal.manifest import object_labels
from argolocal.manifest.object_labels import NODE_ID_ANNOTATION, WORKFLOW
from rekindle.blocks.manifest.render import manifest_sha256
from rekindle.cluster import workflows
from rekindle.cluster.kubernetes_api import WORKFLOWS, Cluster
from rekindle.cluster.workflows import SHA256_ANNOTATION
from rekindle.errors import ConfigError, RekindleError
from tests.rekindle.cluster.server import ApiServer, make_status
from tests.rekindle.cluster.workflows import WORKFLOWS_AT, make_manifest, make_node

ARGO = "/apis/argoproj.io/v1alpha1/namespaces/models"
PODS_AT = "/api/v1/namespaces/models/pods"


FAILED = {
    "phase": "Failed",
    "startedAt": "2026-11-21T20:00:00Z",
    "finishedAt": "2026-11-21T20:01:00Z",
    "message": "child failed",
    "conditions": [
        {"type": "PodRunning", "status": "False"},
        {"type": "Completed", "status": "True"},
    ],
    "taskResultsCompletionStatus": {"demo.a": True, "demo.b(0)": True},
    "nodes": {
        tree_node["id"]: tree_node
        for tree_node in [
            make_node("demo", "DAG", "Failed", ("demo.a",)),
            make_node(
                "demo.a",
                children=("demo.b",),
                outputs={"parameters": [{"name": "x", "value": "1"}]},
            ),
            make_node("demo.b", "Retry", "Failed", ("demo.b(0)",), boundaryID="demo"),
            make_node("demo.b(0)", "Pod", "Failed", boundaryID="demo"),
            make_node("demo.onExit"),
        ]
    },
}


def make_failed_workflow(**more: Any) -> dict[str, Any]:
    labels = {
        object_labels.COMPLETED_LABEL: "true",
        object_labels.PHASE_LABEL: "Failed",
        "mine": "kept",
    }
    spec = {"entrypoint": "main", "shutdown": "Stop"}
    return {
        "kind": "Workflow",
        "metadata": {"name": "demo", "labels": labels},
        "spec": spec,
        "status": FAILED | more,
    }


def make_pod(name: str, node_id: str) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "labels": {WORKFLOW: "demo"},
            "annotations": {NODE_ID_ANNOTATION: node_id},
        }
    }


def test_a_submitted_workflow_has_the_same_hash_as_a_local_run():
    plain = make_manifest()
    submitted = workflows.build_submission(plain, {"n": "2"}, "models")
    assert submitted["metadata"]["annotations"][workflows.SHA256_ANNOTATION] == manifest_sha256(
        plain
    )
    assert submitted["spec"]["arguments"]["parameters"] == [{"name": "n", "value": "2"}]
    assert submitted["metadata"]["namespace"] == "models"
    assert submitted["metadata"]["name"].startswith("demo-")
    assert "uid" not in submitted["metadata"]
    with pytest.raises(ConfigError, match="does not have a parameter"):
        workflows.build_submission(plain, {"m": "2"}, "models")


def test_references_to_templates_are_submitted_unchanged():
    plain = make_manifest(workflowTemplateRef={"name": "cards"})
    del plain["spec"]["arguments"]
    submitted = workflows.build_submission(plain, {"n": "2"}, "models")
    assert submitted["spec"]["workflowTemplateRef"] == {"name": "cards"}
    assert submitted["spec"]["arguments"]["parameters"] == [{"name": "n", "value": "2"}]


def test_a_submit_with_a_lost_answer_creates_one_run(server: ApiServer, cluster: Cluster):
    submitted = workflows.build_submission(make_manifest(), {}, "models")
    cluster.create(WORKFLOWS, submitted)
    assert workflows.submit(cluster, submitted)["metadata"]["name"] == submitted["metadata"]["name"]
    other = workflows.build_submission(make_manifest(), {}, "models")
    other["metadata"]["name"] = submitted["metadata"]["name"]
    with pytest.raises(ConfigError, match="exists already"):
        workflows.submit(cluster, other)


def test_only_active_runs_with_equal_manifest_and_parameters_are_duplicates(
    server: ApiServer, cluster: Cluster
):
    first_submission = workflows.build_submission(make_manifest(), {}, "models")
    workflows.submit(cluster, first_submission)
    equal_submission = workflows.build_submission(make_manifest(), {}, "models")
    assert (
        workflows.find_duplicate(cluster, equal_submission) == first_submission["metadata"]["name"]
    )
    assert (
        workflows.find_duplicate(
            cluster, workflows.build_submission(make_manifest(), {"n": "2"}, "models")
        )
        is None
    )
    assert (
        workflows.find_duplicate(
            cluster, workflows.build_submission(make_manifest(onExit="x"), {}, "models")
        )
        is None
    )
    server.put(WORKFLOWS_AT, first_submission | {"status": {"phase": "Succeeded"}})
    assert workflows.find_duplicate(cluster, equal_submission) is None


@pytest.mark.parametrize("compressed", [False, True])
def test_resume_of_a_failed_run_keeps_finished_steps_and_deletes_other_pods(
    server: ApiServer, cluster: Cluster, compressed: bool
):
    server.put(
        WORKFLOWS_AT,
        workflows.compress_nodes(make_failed_workflow()) if compressed else make_failed_workflow(),
    )
    for name, node_id in (("pod-a", "demo.a"), ("pod-b", "demo.b(0)"), ("pod-exit", "demo.onExit")):
        server.put(PODS_AT, make_pod(name, node_id))

    assert workflows.resume_run(cluster, "demo") == "retries its failed steps"
    stored = server.objects[WORKFLOWS_AT]["demo"]
    assert ("compressedNodes" in stored["status"]) == compressed
    resumed = workflows.decompress_nodes(stored)
    assert set(resumed["status"]["nodes"]) == {"demo", "demo.a"}
    assert resumed["status"]["nodes"]["demo"]["phase"] == "Running"
    assert resumed["status"]["nodes"]["demo.a"]["outputs"] == {
        "parameters": [{"name": "x", "value": "1"}]
    }
    assert resumed["status"]["phase"] == "Running"
    assert "finishedAt" not in resumed["status"]
    assert resumed["status"]["startedAt"] > FAILED["startedAt"]
    assert {"type": "Completed", "status": "False"} in resumed["status"]["conditions"]
    assert resumed["metadata"]["labels"] == {object_labels.PHASE_LABEL: "Running", "mine": "kept"}
    assert "shutdown" not in resumed["spec"]
    assert set(server.objects[PODS_AT]) == {"pod-a"}


def make_suspended_workflow(value: dict[str, Any]) -> dict[str, Any]:
    waiting = make_node(
        "demo.wait", "Suspend", "Running", outputs={"parameters": [{"name": "go", **value}]}
    )
    return make_failed_workflow(phase="Running", nodes={"demo.wait": waiting})


def test_resume_of_a_suspended_run_continues_it(server: ApiServer, cluster: Cluster):
    server.put(
        WORKFLOWS_AT, make_suspended_workflow({"valueFrom": {"supplied": {}, "default": "yes"}})
    )
    assert workflows.resume_run(cluster, "demo") == "continues"
    released = server.objects[WORKFLOWS_AT]["demo"]["status"]["nodes"]["demo.wait"]
    assert released["phase"] == "Succeeded"
    assert released["outputs"]["parameters"][0]["value"] == "yes"


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (make_failed_workflow(phase="Succeeded"), "there is nothing to resume"),
        (make_failed_workflow(phase="Running"), "there is nothing to resume"),
        (make_failed_workflow(offloadNodeStatusVersion="fnv:1", nodes=None), "in its database"),
        (make_suspended_workflow({"valueFrom": {"supplied": {}}}), "waits for the value of 'go'"),
    ],
)
def test_resume_explains_why_it_is_impossible(
    server: ApiServer, cluster: Cluster, stored: Any, words: str
):
    server.put(WORKFLOWS_AT, stored)
    with pytest.raises(ConfigError, match=words):
        workflows.resume_run(cluster, "demo")


def test_stop_shuts_down_active_runs_only(server: ApiServer, cluster: Cluster):
    server.put(WORKFLOWS_AT, make_failed_workflow(phase="Running"))
    workflows.stop_run(cluster, "demo")
    assert server.objects[WORKFLOWS_AT]["demo"]["spec"]["shutdown"] == "Stop"
    server.put(WORKFLOWS_AT, make_failed_workflow())
    with pytest.raises(ConfigError, match=r"has completed \(Failed\)"):
        workflows.stop_run(cluster, "demo")
    with pytest.raises(ConfigError, match='Did you mean "demo"'):
        workflows.stop_run(cluster, "dmeo")


def test_delete_frees_the_name_after_all_objects_are_deleted(server: ApiServer, cluster: Cluster):
    server.put(WORKFLOWS_AT, make_failed_workflow())
    workflows.delete_run(cluster, "demo")
    assert server.requests[-1][0::2] == ("DELETE", {"propagationPolicy": "Foreground"})


def test_compressed_nodes_are_read():
    nodes = {"x": make_node("x")}
    text = base64.b64encode(gzip.compress(json.dumps(nodes).encode())).decode()
    packed = {"metadata": {}, "status": {"phase": "Running", "compressedNodes": text}}
    assert workflows.decompress_nodes(packed)["status"] == {"phase": "Running", "nodes": nodes}


@pytest.mark.slow
@pytest.mark.parametrize(
    "packed",
    [
        lambda: b"no gzip",
        lambda: gzip.compress(b"[" * 2000),
        lambda: gzip.compress(b"[" + bytes(200 << 20), 1),
    ],
    ids=["no-gzip", "cut", "too-large"],
)
def test_invalid_compressed_nodes_are_one_error(packed: Callable[[], bytes]):
    workflow = {
        "metadata": {"name": "a"},
        "status": {"compressedNodes": base64.b64encode(packed()).decode()},
    }
    with pytest.raises(RekindleError, match="the compressed nodes of workflow a cannot be read"):
        workflows.decompress_nodes(workflow)


CRON = {
    "apiVersion": "argoproj.io/v1alpha1",
    "kind": "CronWorkflow",
    "metadata": {"name": "cards", "uid": "1", "resourceVersion": "7", "managedFields": []},
    "spec": {
        "schedules": ["0 3 * * 1"],
        "suspend": True,
        "workflowMetadata": {"annotations": {SHA256_ANNOTATION: "of the template"}},
        "workflowSpec": {"workflowTemplateRef": {"name": "cards"}},
    },
    "status": {"lastScheduledTime": "2026-11-21T20:00:00Z"},
}


def test_run_now_creates_the_run_that_the_schedule_would_start(
    server: ApiServer, cluster: Cluster
) -> None:
    server.put(f"{ARGO}/cronworkflows", json.loads(json.dumps(CRON)))
    workflow = workflows.build_scheduled_workflow(cluster, "cards")
    assert workflow["spec"]["workflowTemplateRef"] == {"name": "cards"}
    assert workflow["kind"] == "Workflow"
    assert workflow["metadata"]["name"].startswith("cards-")
    assert workflow["metadata"]["labels"][object_labels.CRON_WORKFLOW_LABEL] == "cards"
    assert workflow["metadata"]["annotations"][SHA256_ANNOTATION] == "of the template", (
        "so that a duplicate is noticed"
    )
    workflows.submit(cluster, workflow)
    assert workflow["metadata"]["name"] in server.objects[WORKFLOWS_AT]

    with pytest.raises(
        ConfigError, match=r"schedule card does not exist in namespace models.*Did you mean"
    ):
        workflows.build_scheduled_workflow(cluster, "card")


def test_unschedule_keeps_the_runs(server: ApiServer, cluster: Cluster) -> None:
    server.put(f"{ARGO}/cronworkflows", json.loads(json.dumps(CRON)))
    server.put(
        f"{ARGO}/workflowtemplates",
        {"metadata": {"name": "cards", "annotations": {SHA256_ANNOTATION: "0"}}, "spec": {}},
    )
    workflows.delete_schedule(cluster, "cards")

    deleted = [
        (path.rpartition("/")[0], body)
        for method, path, body in server.requests
        if method == "DELETE"
    ]

    assert deleted == [
        # the runs must be orphaned, because the CronWorkflow owns them
        (f"{ARGO}/cronworkflows", {"propagationPolicy": "Orphan"}),
        (f"{ARGO}/workflowtemplates", {}),
    ]

    with pytest.raises(ConfigError, match="schedule cards does not exist"):
        workflows.delete_schedule(cluster, "cards")


def test_unschedule_keeps_a_template_that_no_schedule_has_made(
    server: ApiServer, cluster: Cluster
) -> None:
    server.put(f"{ARGO}/cronworkflows", json.loads(json.dumps(CRON)))
    server.put(f"{ARGO}/workflowtemplates", {"metadata": {"name": "cards"}, "spec": {}})
    workflows.delete_schedule(cluster, "cards")
    assert set(server.objects[f"{ARGO}/workflowtemplates"]) == {"cards"}


@pytest.mark.slow
def test_schedule_prints_changes_and_keeps_fields_that_others_have_set(
    server: ApiServer, cluster: Cluster
):
    job = {"manifest": '{\n "kind": "Job",\n "replicas": 3\n}'}
    template = make_manifest(
        templates=[{"name": "main", "container": {"image": "a"}}, {"name": "job", "resource": job}]
    )
    template["kind"] = "WorkflowTemplate"
    template["metadata"] = {"name": "cards", "labels": {"ours": "1"}}

    cron = {
        "kind": "CronWorkflow",
        "metadata": {"name": "cards"},
        "spec": {"schedules": ["0 3 * * 1"]},
    }

    apply = lambda: list(workflows.apply_schedule(cluster, template, cron))  # noqa: E731
    assert apply() == ["WorkflowTemplate cards created", "CronWorkflow cards created"]
    assert apply() == ["WorkflowTemplate cards unchanged", "CronWorkflow cards unchanged"]
    stored = server.objects[f"{ARGO}/cronworkflows"]["cards"]
    assert stored["spec"]["workflowMetadata"]["annotations"] == {
        workflows.SHA256_ANNOTATION: manifest_sha256(template)
    }
    server.put(f"{ARGO}/cronworkflows", stored | {"status": {"active": []}})
    template["spec"]["templates"][0]["container"]["image"] = "b"
    job["manifest"] = job["manifest"].replace("3", "8")
    cron["spec"] = {"schedules": ["0 4 * * 1"], "suspend": True}
    changes = apply()
    assert "WorkflowTemplate cards updated" in changes
    assert '  spec.templates.main.container.image: "a" → "b"' in changes
    assert '  spec.templates.job.resource.manifest: + "replicas": 8' in changes
    assert '  spec.schedules.0: "0 3 * * 1" → "0 4 * * 1"' in changes
    assert "  spec.suspend: nothing → true" in changes
    assert server.objects[f"{ARGO}/cronworkflows"]["cards"]["status"] == {"active": []}


def test_argo_has_time_to_read_a_new_template_before_the_schedule_exists(
    server: ApiServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    def kinds() -> list[str]:
        return [
            kind
            for kind in ("workflowtemplates", "cronworkflows")
            if server.objects.get(f"{ARGO}/{kind}")
        ]

    delays: list[tuple[float, list[str]]] = []
    # replace `time` only in this module, because threads of other tests also call time.sleep
    clock = SimpleNamespace(sleep=lambda seconds: delays.append((seconds, kinds())))
    monkeypatch.setattr(workflows, "time", clock)
    template = make_manifest() | {"kind": "WorkflowTemplate", "metadata": {"name": "cards"}}

    cron = {
        "kind": "CronWorkflow",
        "metadata": {"name": "cards"},
        "spec": {"schedules": ["0 3 * * 1"]},
    }

    for _ in range(2):  # the second call creates no objects
        list(workflows.apply_schedule(cluster, template, cron))

    assert delays == [(workflows.TEMPLATE_DELAY_S, ["workflowtemplates"])]


def test_the_error_of_a_refused_submit_has_the_servers_reason(server: ApiServer, cluster: Cluster):
    server.refuse("POST", "workflows", 422, make_status(422, "Invalid", "spec is wrong"))
    with pytest.raises(ConfigError, match="spec is wrong"):
        workflows.submit(cluster, workflows.build_submission(make_manifest(), {}, "models"))
