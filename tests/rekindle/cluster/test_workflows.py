"""What would be lost: the run that equals the local one, a second submit unnoticed, the work that a retry keeps."""

import base64
import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest

from argolocal.manifest import names
from argolocal.manifest.names import NODE_ID, WORKFLOW
from rekindle.blocks.manifest.render import manifest_sha256
from rekindle.cluster import workflows
from rekindle.cluster.api import WORKFLOWS, Cluster
from rekindle.cluster.workflows import SHA256
from rekindle.errors import ConfigError, RekindleError
from tests.rekindle.cluster.server import ApiServer, status
from tests.rekindle.cluster.test_api import WORKFLOWS_AT

ARGO = "/apis/argoproj.io/v1alpha1/namespaces/models"
PODS_AT = "/api/v1/namespaces/models/pods"


def manifest(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"generateName": "demo-", "namespace": "ours"},
        "spec": {"entrypoint": "main", "arguments": {"parameters": [{"name": "n", "value": 1}]}, **spec},
    }


def node(name: str, kind: str = "Pod", phase: str = "Succeeded", children: tuple[str, ...] = (), **more: Any) -> Any:
    return {"id": name, "name": name, "type": kind, "phase": phase, "children": list(children),
            "startedAt": "2026-11-21T20:00:00Z", "finishedAt": "2026-11-21T20:01:00Z", **more}  # fmt: skip


FAILED = {
    "phase": "Failed",
    "startedAt": "2026-11-21T20:00:00Z",
    "finishedAt": "2026-11-21T20:01:00Z",
    "message": "child failed",
    "conditions": [{"type": "PodRunning", "status": "False"}, {"type": "Completed", "status": "True"}],
    "taskResultsCompletionStatus": {"demo.a": True, "demo.b(0)": True},
    "nodes": {
        tree_node["id"]: tree_node
        for tree_node in [
            node("demo", "DAG", "Failed", ("demo.a",)),
            node("demo.a", children=("demo.b",), outputs={"parameters": [{"name": "x", "value": "1"}]}),
            node("demo.b", "Retry", "Failed", ("demo.b(0)",), boundaryID="demo"),
            node("demo.b(0)", "Pod", "Failed", boundaryID="demo"),
            node("demo.onExit"),
        ]
    },
}


def failed(**more: Any) -> dict[str, Any]:
    labels = {names.COMPLETED: "true", names.PHASE: "Failed", "mine": "kept"}
    spec = {"entrypoint": "main", "shutdown": "Stop"}
    return {"kind": "Workflow", "metadata": {"name": "demo", "labels": labels}, "spec": spec, "status": FAILED | more}


def pod(name: str, node_id: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": {WORKFLOW: "demo"}, "annotations": {NODE_ID: node_id}}}


def test_what_is_sent_carries_the_hash_that_a_run_here_prints_whatever_its_parameters_and_namespace():
    given = manifest()
    sent = workflows.submission(given, {"n": "2"}, "models")
    assert sent["metadata"]["annotations"][workflows.SHA256] == manifest_sha256(given)
    assert sent["spec"]["arguments"]["parameters"] == [{"name": "n", "value": "2"}]
    assert sent["metadata"]["namespace"] == "models"
    assert sent["metadata"]["name"].startswith("demo-") and "uid" not in sent["metadata"]
    with pytest.raises(ConfigError, match="no parameter"):
        workflows.submission(given, {"m": "2"}, "models")


def test_a_run_of_a_template_in_the_cluster_leaves_finding_it_to_argo():
    given = manifest(workflowTemplateRef={"name": "cards"})
    del given["spec"]["arguments"]
    sent = workflows.submission(given, {"n": "2"}, "models")
    assert sent["spec"]["workflowTemplateRef"] == {"name": "cards"}
    assert sent["spec"]["arguments"]["parameters"] == [{"name": "n", "value": "2"}]


def test_a_submit_whose_answer_was_lost_makes_one_run(server: ApiServer, cluster: Cluster):
    sent = workflows.submission(manifest(), {}, "models")
    cluster.create(WORKFLOWS, sent)
    assert workflows.submit(cluster, sent)["metadata"]["name"] == sent["metadata"]["name"]
    other = workflows.submission(manifest(), {}, "models")
    other["metadata"]["name"] = sent["metadata"]["name"]
    with pytest.raises(ConfigError, match="exists already"):
        workflows.submit(cluster, other)


def test_only_what_runs_and_does_the_same_is_equal(server: ApiServer, cluster: Cluster):
    first = workflows.submission(manifest(), {}, "models")
    workflows.submit(cluster, first)
    same = workflows.submission(manifest(), {}, "models")
    assert workflows.find_duplicate(cluster, same) == first["metadata"]["name"]
    assert workflows.find_duplicate(cluster, workflows.submission(manifest(), {"n": "2"}, "models")) is None
    assert workflows.find_duplicate(cluster, workflows.submission(manifest(onExit="x"), {}, "models")) is None
    server.put(WORKFLOWS_AT, first | {"status": {"phase": "Succeeded"}})
    assert workflows.find_duplicate(cluster, same) is None


@pytest.mark.parametrize("compressed", [False, True])
def test_resume_of_a_failed_run_keeps_finished_steps_and_removes_the_pods_of_the_others(
    server: ApiServer, cluster: Cluster, compressed: bool
):
    server.put(WORKFLOWS_AT, workflows.compress_nodes(failed()) if compressed else failed())
    for name, of in (("pod-a", "demo.a"), ("pod-b", "demo.b(0)"), ("pod-exit", "demo.onExit")):
        server.put(PODS_AT, pod(name, of))
    assert workflows.resume(cluster, "demo") == "retries its failed steps"
    there = server.objects[WORKFLOWS_AT]["demo"]
    assert ("compressedNodes" in there["status"]) == compressed
    now = workflows.decompress_nodes(there)
    assert set(now["status"]["nodes"]) == {"demo", "demo.a"}
    assert now["status"]["nodes"]["demo"]["phase"] == "Running"
    assert now["status"]["nodes"]["demo.a"]["outputs"] == {"parameters": [{"name": "x", "value": "1"}]}
    assert now["status"]["phase"] == "Running" and "finishedAt" not in now["status"]
    assert now["status"]["startedAt"] > FAILED["startedAt"]
    assert {"type": "Completed", "status": "False"} in now["status"]["conditions"]
    assert now["metadata"]["labels"] == {names.PHASE: "Running", "mine": "kept"}
    assert "shutdown" not in now["spec"]
    assert set(server.objects[PODS_AT]) == {"pod-a"}


def suspended(value: dict[str, Any]) -> dict[str, Any]:
    waiting = node("demo.wait", "Suspend", "Running", outputs={"parameters": [{"name": "go", **value}]})
    return failed(phase="Running", nodes={"demo.wait": waiting})


def test_resume_of_a_suspended_run_releases_it(server: ApiServer, cluster: Cluster):
    server.put(WORKFLOWS_AT, suspended({"valueFrom": {"supplied": {}, "default": "yes"}}))
    assert workflows.resume(cluster, "demo") == "continues"
    released = server.objects[WORKFLOWS_AT]["demo"]["status"]["nodes"]["demo.wait"]
    assert (released["phase"], released["outputs"]["parameters"][0]["value"]) == ("Succeeded", "yes")


@pytest.mark.parametrize(("there", "words"), [
    (failed(phase="Succeeded"), "there is nothing to resume"),
    (failed(phase="Running"), "there is nothing to resume"),
    (failed(offloadNodeStatusVersion="fnv:1", nodes=None), "in its database"),
    (suspended({"valueFrom": {"supplied": {}}}), "waits for the value of 'go'"),
])  # fmt: skip
def test_resume_says_why_there_is_nothing_to_do(server: ApiServer, cluster: Cluster, there: Any, words: str):
    server.put(WORKFLOWS_AT, there)
    with pytest.raises(ConfigError, match=words):
        workflows.resume(cluster, "demo")


def test_stop_asks_argo_for_it_and_knows_what_is_over(server: ApiServer, cluster: Cluster):
    server.put(WORKFLOWS_AT, failed(phase="Running"))
    workflows.stop(cluster, "demo")
    assert server.objects[WORKFLOWS_AT]["demo"]["spec"]["shutdown"] == "Stop"
    server.put(WORKFLOWS_AT, failed())
    with pytest.raises(ConfigError, match=r"has completed \(Failed\)"):
        workflows.stop(cluster, "demo")
    with pytest.raises(ConfigError, match='Did you mean "demo"'):
        workflows.stop(cluster, "dmeo")


def test_delete_frees_the_name_only_when_all_is_gone(server: ApiServer, cluster: Cluster):
    server.put(WORKFLOWS_AT, failed())
    workflows.delete(cluster, "demo")
    assert server.requests[-1][0::2] == ("DELETE", {"propagationPolicy": "Foreground"})


def test_nodes_that_argo_compressed_are_read():
    nodes = {"x": node("x")}
    text = base64.b64encode(gzip.compress(json.dumps(nodes).encode())).decode()
    packed = {"metadata": {}, "status": {"phase": "Running", "compressedNodes": text}}
    assert workflows.decompress_nodes(packed)["status"] == {"phase": "Running", "nodes": nodes}


@pytest.mark.parametrize(
    "packed",
    [lambda: b"no gzip", lambda: gzip.compress(b"[" * 2000), lambda: gzip.compress(b"[" + bytes(200 << 20), 1)],
    ids=["no-gzip", "cut", "too-large"],
)
def test_nodes_that_cannot_be_decompressed_are_one_error(packed: Callable[[], bytes]):
    workflow = {"metadata": {"name": "a"}, "status": {"compressedNodes": base64.b64encode(packed()).decode()}}
    with pytest.raises(RekindleError, match="the compressed nodes of workflow a cannot be read"):
        workflows.decompress_nodes(workflow)


CRON = {
    "apiVersion": "argoproj.io/v1alpha1",
    "kind": "CronWorkflow",
    "metadata": {"name": "cards", "uid": "1", "resourceVersion": "7", "managedFields": []},
    "spec": {
        "schedules": ["0 3 * * 1"],
        "suspend": True,
        "workflowMetadata": {"annotations": {SHA256: "of the template"}},
        "workflowSpec": {"workflowTemplateRef": {"name": "cards"}},
    },
    "status": {"lastScheduledTime": "2026-11-21T20:00:00Z"},
}


def test_a_run_between_two_times_is_the_one_that_the_schedule_would_start(server: ApiServer, cluster: Cluster) -> None:
    server.put(f"{ARGO}/cronworkflows", json.loads(json.dumps(CRON)))
    workflow = workflows.scheduled_workflow(cluster, "cards")
    assert workflow["spec"]["workflowTemplateRef"] == {"name": "cards"} and workflow["kind"] == "Workflow"
    assert workflow["metadata"]["name"].startswith("cards-")
    assert workflow["metadata"]["labels"][names.CRON_WORKFLOW] == "cards"
    assert workflow["metadata"]["annotations"][SHA256] == "of the template", "so that a second one is noticed"
    workflows.submit(cluster, workflow)
    assert workflow["metadata"]["name"] in server.objects[WORKFLOWS_AT]
    with pytest.raises(ConfigError, match=r"schedule card does not exist in namespace models.*Did you mean"):
        workflows.scheduled_workflow(cluster, "card")


def test_the_end_of_a_schedule_leaves_its_runs(server: ApiServer, cluster: Cluster) -> None:
    server.put(f"{ARGO}/cronworkflows", json.loads(json.dumps(CRON)))
    server.put(f"{ARGO}/workflowtemplates", {"metadata": {"name": "cards"}, "spec": {}})
    workflows.unschedule(cluster, "cards")
    deleted = [(path.rpartition("/")[0], body) for method, path, body in server.requests if method == "DELETE"]
    assert deleted == [
        (f"{ARGO}/cronworkflows", {"propagationPolicy": "Orphan"}),  # it owns them
        (f"{ARGO}/workflowtemplates", {}),
    ]
    with pytest.raises(ConfigError, match="schedule cards does not exist"):
        workflows.unschedule(cluster, "cards")


def test_a_schedule_says_what_changes_and_leaves_what_others_wrote(server: ApiServer, cluster: Cluster):
    job = {"manifest": '{\n "kind": "Job",\n "replicas": 3\n}'}
    template = manifest(templates=[{"name": "main", "container": {"image": "a"}}, {"name": "job", "resource": job}])
    template |= {"kind": "WorkflowTemplate", "metadata": {"name": "cards", "labels": {"ours": "1"}}}
    cron = {"kind": "CronWorkflow", "metadata": {"name": "cards"}, "spec": {"schedules": ["0 3 * * 1"]}}
    put = lambda: list(workflows.schedule(cluster, template, cron))  # noqa: E731
    assert put() == ["WorkflowTemplate cards created", "CronWorkflow cards created"]
    assert put() == ["WorkflowTemplate cards unchanged", "CronWorkflow cards unchanged"]
    there = server.objects[f"{ARGO}/cronworkflows"]["cards"]
    assert there["spec"]["workflowMetadata"]["annotations"] == {workflows.SHA256: manifest_sha256(template)}
    server.put(f"{ARGO}/cronworkflows", there | {"status": {"active": []}})
    template["spec"]["templates"][0]["container"]["image"] = "b"
    job["manifest"] = job["manifest"].replace("3", "8")
    cron["spec"] = {"schedules": ["0 4 * * 1"], "suspend": True}
    said = put()
    assert "WorkflowTemplate cards updated" in said
    assert '  spec.templates.main.container.image: "a" → "b"' in said
    assert '  spec.templates.job.resource.manifest: + "replicas": 8' in said
    assert '  spec.schedules.0: "0 3 * * 1" → "0 4 * * 1"' in said
    assert "  spec.suspend: nothing → true" in said
    assert server.objects[f"{ARGO}/cronworkflows"]["cards"]["status"] == {"active": []}


def test_a_refused_run_is_not_hidden_by_the_look_for_its_first_attempt(server: ApiServer, cluster: Cluster):
    server.refuse("POST", "workflows", 422, status(422, "Invalid", "spec is wrong"))
    with pytest.raises(ConfigError, match="spec is wrong"):
        workflows.submit(cluster, workflows.submission(manifest(), {}, "models"))
