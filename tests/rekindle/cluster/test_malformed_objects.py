"""A malformed object of the API server leads to one error or, in a list, to one warning, without a
traceback."""

import base64
import gzip
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from argolocal.manifest.types import Object
from rekindle.cluster import kubernetes_api, workflows
from rekindle.cluster.cluster_nodes import read_nodes
from rekindle.cluster.cluster_objects import ClusterObjects
from rekindle.cluster.cluster_scale import scale_workers
from rekindle.cluster.errors import ApiError, MalformedObject
from rekindle.cluster.kubernetes_api import PODS, WORKFLOWS, Cluster
from rekindle.cluster.waiting_pods import add_waiting_reasons
from rekindle.errors import RekindleError
from rekindle.operations.plan.capacity import find_shortages
from rekindle.operations.plan.history import read_cluster_runs
from rekindle.operations.retention import find_references
from rekindle.step import encode_parameter
from rekindle.training.cost.prices import PRICES_ANNOTATION
from rekindle.view import cluster_overview, cluster_watch
from rekindle.view.cluster_logs import Logs
from rekindle.view.explain import explain_on_cluster
from tests.rekindle.cluster import valid_objects
from tests.rekindle.cluster.server import ApiServer
from tests.rekindle.cluster.workflows import WORKFLOWS_AT
from tests.rekindle.mutations import make_mutations

NAMESPACE = "/namespaces/models"
PODS_AT = f"/api/v1{NAMESPACE}/pods"
CRONS_AT = f"/apis/argoproj.io/v1alpha1{NAMESPACE}/cronworkflows"
DEPLOYMENTS_AT = f"/apis/apps/v1{NAMESPACE}/deployments"
RUN = "demo-4k2xp"
RUN_AT = f"{WORKFLOWS_AT}/{RUN}"
COMPLETED_WORKFLOW = {
    **valid_objects.WORKFLOW,
    "status": {
        **valid_objects.WORKFLOW["status"],
        "phase": "Failed",
        "finishedAt": valid_objects.CREATION_TIME,
    },
}


JOB = {
    "kind": "PyTorchJob",
    "metadata": {"name": "x"},
    "spec": {
        "pytorchReplicaSpecs": {
            "Worker": {
                "replicas": 2,
                "template": {
                    "spec": {"containers": [valid_objects.CONTAINER], **valid_objects.SELECTION}
                },
            }
        }
    },
}
TEMPLATE = {"name": "job", "resource": {"action": "apply", "manifest": json.dumps(JOB)}}
PIPELINE: dict[str, Any] = {
    "metadata": {"annotations": {PRICES_ANNOTATION: json.dumps(valid_objects.PRICES)}},
    "spec": {**valid_objects.SPEC, "templates": [*valid_objects.TEMPLATES[:2], TEMPLATE]},
}
JOB_NODE = {
    **valid_objects.NODE,
    "id": "demo-4k2xp-2",
    "name": "demo-4k2xp.job",
    "templateName": "job",
    "templateScope": "local/demo",
}


def run_of(pipeline: object) -> Object:
    """Return a run that has recorded a pipeline with the job of another framework."""
    packed = encode_parameter(pipeline if isinstance(pipeline, str) else json.dumps(pipeline))
    spec = {
        **PIPELINE["spec"],
        "arguments": {"parameters": [{"name": "manifest", "value": packed}]},
    }
    status = {
        **valid_objects.WORKFLOW["status"],
        "nodes": {"demo-4k2xp-1": valid_objects.NODE, "demo-4k2xp-2": JOB_NODE},
        "storedWorkflowTemplateSpec": spec,
    }
    return {**valid_objects.WORKFLOW, "spec": spec, "status": status}


def run_with_job(job: object) -> Object:
    template = {**TEMPLATE, "resource": {"action": "apply", "manifest": json.dumps(job)}}
    return run_of({**PIPELINE, "spec": {**PIPELINE["spec"], "templates": [template]}})


def explain_run(cluster: Cluster) -> object:
    return explain_on_cluster(cluster, RUN, False)


def show_logs(cluster: Cluster) -> object:
    return Logs(cluster, RUN, io.StringIO()).print(workflows.read_run(cluster, RUN))


def show_outcome(cluster: Cluster) -> object:
    return cluster_watch.print_outcome(cluster, workflows.read_run(cluster, RUN), False)


def read_history(cluster: Cluster) -> object:
    return list(read_cluster_runs(cluster, valid_objects.WORKFLOW, "demo-", print))


# name → path of the changed object, the object, and a function that reads it
Read = Callable[[Cluster], object]
READERS: dict[str, tuple[str, Any, Read]] = {
    "event": (
        f"/api/v1{NAMESPACE}/events",
        valid_objects.EVENT,
        lambda cluster: add_waiting_reasons(cluster, valid_objects.WORKFLOW),
    ),
    "pod": (PODS_AT, valid_objects.POD, show_logs),
    "pod that waits": (
        PODS_AT,
        valid_objects.POD,
        lambda cluster: add_waiting_reasons(cluster, valid_objects.WORKFLOW),
    ),
    "cron": (
        CRONS_AT,
        valid_objects.CRON,
        lambda cluster: cluster_overview.format_overview(cluster, False),
    ),
    "schedule": (
        f"{CRONS_AT}/demo",
        valid_objects.CRON,
        lambda cluster: workflows.build_scheduled_workflow(cluster, "demo"),
    ),
    "deployment": (
        f"{DEPLOYMENTS_AT}/{RUN}-train",
        valid_objects.DEPLOYMENT,
        lambda cluster: scale_workers(ClusterObjects(cluster), RUN, "train", 2),
    ),
    "node": (
        "/api/v1/nodes",
        valid_objects.CLUSTER_NODE,
        lambda cluster: read_nodes(cluster, reads_pods=False),
    ),
    "quota": (
        f"/api/v1{NAMESPACE}/resourcequotas",
        valid_objects.QUOTA,
        lambda cluster: find_shortages(cluster, {}, {"cpu": 9.0}, []),
    ),
    "table of runs": (
        WORKFLOWS_AT,
        valid_objects.WORKFLOW,
        lambda cluster: cluster_overview.format_overview(cluster, True),
    ),
    "run": (
        RUN_AT,
        valid_objects.WORKFLOW,
        lambda cluster: cluster_overview.format_run(cluster, RUN, False),
    ),
    "outcome": (RUN_AT, COMPLETED_WORKFLOW, show_outcome),
    "resumed run": (
        RUN_AT,
        COMPLETED_WORKFLOW,
        lambda cluster: workflows.resume_run(cluster, RUN),
    ),
    "history": (RUN_AT, COMPLETED_WORKFLOW, read_history),
    "explained run": (RUN_AT, run_of(PIPELINE), explain_run),
}
# name → the changed document, and the run that contains it
CONTENTS: dict[str, tuple[Any, Callable[[object], Object]]] = {
    "recorded pipeline": (PIPELINE, run_of),
    "applied job": (JOB, run_with_job),
    "prices": (
        valid_objects.PRICES,
        lambda prices: run_of(
            {**PIPELINE, "metadata": {"annotations": {PRICES_ANNOTATION: json.dumps(prices)}}}
        ),
    ),
}


def check_mutations(server: ApiServer, cluster: Cluster, name: str, every_nth: int) -> None:
    """Check that a command reads mutations of an object without a traceback: the first mutation,
    and then every N-th."""
    path, valid, read = READERS[name]
    server.fixed[WORKFLOWS_AT] = {"items": [valid_objects.WORKFLOW]}
    server.fixed[RUN_AT] = valid_objects.WORKFLOW
    is_list = path not in (RUN_AT, f"{CRONS_AT}/demo", f"{DEPLOYMENTS_AT}/{RUN}-train")

    for body in list(make_mutations(valid))[::every_nth]:
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            continue

        server.fixed[path] = {"items": [value]} if is_list else value
        try:
            read(cluster)
        except RekindleError as error:
            assert not re.search("[\x00-\x1f\x7f-\x9f]", str(error)), (body, str(error))


@pytest.mark.parametrize("name", READERS)
def test_some_malformed_objects_are_accepted_or_one_error(
    server: ApiServer, cluster: Cluster, name: str
) -> None:
    check_mutations(server, cluster, name, every_nth=61)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_every_malformed_object_is_accepted_or_one_error(
    server: ApiServer, cluster: Cluster, name: str
) -> None:
    check_mutations(server, cluster, name, every_nth=1)


def test_the_valid_run_is_explained(server: ApiServer, cluster: Cluster) -> None:
    server.fixed[RUN_AT] = run_of(PIPELINE)
    assert "job: PyTorchJob (Worker 2)" in explain_on_cluster(cluster, RUN, False)


@pytest.mark.parametrize("name", CONTENTS)
def test_a_run_with_malformed_content_is_explained_or_one_error(
    server: ApiServer, cluster: Cluster, name: str
) -> None:
    valid, build = CONTENTS[name]
    for body in list(make_mutations(valid))[::13]:
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            continue

        server.fixed[RUN_AT] = build(value)
        try:
            explain_on_cluster(cluster, RUN, False)
        except RekindleError as error:
            for line in error.lines:
                assert not re.search("[\x00-\x1f\x7f-\x9f]", line), (body, line)


FAULTS: list[tuple[Any, str]] = [
    ({"status": 5}, 'workflows "demo-bad": status: Input should be an object'),
    (
        {"status": {"finishedAt": "yesterday"}},
        '"status.finishedAt": it must be a time as 2026-01-31T12:00:00Z',
    ),
    ({"status": {"nodes": []}}, '"status.nodes": Input should be an object'),
    ({"spec": {"arguments": {"parameters": [{}]}}}, "spec.arguments.parameters.0.name"),
    ({"metadata": {"creationTimestamp": "x"}}, "workflows without a name: "),
    ({"metadata": {**valid_objects.METADATA, "name": "../x"}}, 'workflows "../x": '),
    (
        {"metadata": {**valid_objects.METADATA, "name": "demo-bad", "labels": "a=b"}},
        '"metadata.labels": Input should be an object',
    ),
]


@pytest.mark.parametrize(("change", "fault"), FAULTS)
def test_one_malformed_run_is_passed_over_with_one_warning(
    server: ApiServer,
    cluster: Cluster,
    capsys: pytest.CaptureFixture[str],
    change: Object,
    fault: str,
) -> None:
    invalid_workflow = valid_objects.WORKFLOW | {
        "metadata": {**valid_objects.METADATA, "name": "demo-bad"}
    }
    server.fixed[WORKFLOWS_AT] = {"items": [invalid_workflow | change, valid_objects.WORKFLOW]}

    tables = json.loads(cluster_overview.format_overview(cluster, True))
    cluster.list_objects(WORKFLOWS)

    assert [row["run"] for row in tables["runs"]] == [RUN]
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: an object is passed over: http://127.0.0.1:")
    assert fault.replace('"', "") in warning.replace('"', "")
    assert not any(".." in path for _, path, _ in server.requests)


COMPRESSED_NODES: dict[str, Callable[[], bytes]] = {
    "text": lambda: b"not gzip",
    "list": lambda: gzip.compress(b"[]"),
    "part of an object": lambda: gzip.compress(b"{"),
    "wrong node": lambda: gzip.compress(b'{"a": {"name": 5}}'),
    "deep list": lambda: gzip.compress(b"[" * 100_000),
    "bomb": lambda: gzip.compress(b" " * (101 << 20), 1),
}


@pytest.mark.parametrize("name", COMPRESSED_NODES)
def test_malformed_compressed_nodes_are_one_error_and_a_row_in_the_table(
    server: ApiServer, cluster: Cluster, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    nodes = base64.b64encode(COMPRESSED_NODES[name]()).decode()
    status = {"phase": "Running", "compressedNodes": nodes}
    run = valid_objects.WORKFLOW | {"status": status}
    server.fixed[WORKFLOWS_AT] = {"items": [run]}
    server.fixed[RUN_AT] = run

    with pytest.raises(RekindleError, match=f"compressed nodes of workflow {RUN} cannot be read"):
        cluster_overview.format_run(cluster, RUN, False)

    assert RUN in cluster_overview.format_overview(cluster, False)
    assert f"compressed nodes of workflow {RUN}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ({}, "items: it must be a list"),
        ({"items": {}}, "items: it must be a list"),
        ({"items": [], "metadata": []}, "its fields must be texts"),
        ({"items": None}, None),
        ({"items": [], "metadata": {"continue": 5}}, "its fields must be texts"),
        ([], "is not a Kubernetes API"),
    ],
)
def test_a_malformed_list_is_an_error(
    server: ApiServer, cluster: Cluster, page: Any, fault: str | None
) -> None:
    server.fixed[PODS_AT] = page
    if fault is None:
        assert cluster.list_objects(PODS) == []
        return
    with pytest.raises(ApiError, match=fault):
        cluster.list_objects(PODS)


def test_a_watch_of_one_malformed_run_ends_with_an_error(
    server: ApiServer, cluster: Cluster
) -> None:
    events = cluster.watch(WORKFLOWS, name="demo")
    server.put(WORKFLOWS_AT, {"metadata": {"name": "demo"}, "spec": {}})
    assert next(events)[0] == "ADDED"
    server.put(WORKFLOWS_AT, {"metadata": {"name": "demo"}, "spec": {}, "status": 5})
    with pytest.raises(MalformedObject, match='workflows "demo": "status": Input should be'):
        next(events)


def test_a_watch_of_pods_passes_over_a_malformed_pod(
    server: ApiServer, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    server.put(PODS_AT, {"metadata": {"name": "bad"}, "status": []})
    events = cluster.watch(PODS)
    server.put(PODS_AT, {"metadata": {"name": "good"}})
    assert next(events)[1]["metadata"]["name"] == "good"
    assert 'pods "bad": "status": Input should be an object' in capsys.readouterr().err


def test_references_are_found_in_any_text() -> None:
    text = json.dumps({"cached": json.dumps({"a": {"at": "demo-1/prepare"}}), "x": "s3://b/r/t/o"})
    assert {"demo-1/prepare", "r/t"} <= find_references(text)


def test_a_long_word_in_a_workflow_does_not_stop_prune() -> None:
    assert find_references(500_000 * "a." + "/demo-1/prepare") >= {"demo-1/prepare"}
    assert find_references(1_000_000 * "a.") == set()


def test_commands_name_the_malformed_run(server: ApiServer, tmp_path: Path) -> None:
    server.fixed[RUN_AT] = valid_objects.WORKFLOW | {"status": 5}
    cluster = Cluster.connect()
    for read in (show_logs, lambda each: cluster_overview.format_run(each, RUN, True)):
        with pytest.raises(MalformedObject, match=f'workflows "{RUN}": "status": Input should be'):
            read(cluster)


@pytest.mark.parametrize("status", [200, 403])
def test_an_answer_of_unlimited_size_is_one_error(
    server: ApiServer, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(kubernetes_api, "MAX_ANSWER_BYTES", 100)
    server.refuse("GET", PODS_AT, status, {"items": [valid_objects.POD] * 10})
    with pytest.raises(ApiError, match="its answer has more than 100 bytes"):
        cluster.list_objects(PODS)
