"""A step is Pending, with the reason, while the pods that it needs do not start."""

from typing import Any

import pytest

from argolocal.view.runs import format_steps_table
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.cluster.waiting_pods import add_waiting_reasons, find_waiting_reason
from tests.rekindle.cluster.server import ApiServer, make_status
from tests.rekindle.cluster.workflows import REASON, WORKLOADS, make_kueue_workload, make_node

PODS_AT = "/api/v1/namespaces/models/pods"
EVENTS_AT = "/api/v1/namespaces/models/events"
CPU = "0/1 nodes are available: 1 Insufficient cpu."
NO_ROOM = {
    "phase": "Pending",
    "conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": CPU}
    ],
}
UNSCHEDULABLE = f"Unschedulable: {CPU}"
RUNNING = {"phase": "Running", "conditions": [{"type": "PodScheduled", "status": "True"}]}
WORKFLOW = "workflows.argoproj.io/workflow"
TEMPLATES = [{"name": "apply", "resource": {}}, {"name": "step", "container": {}}]


def run(*nodes: dict[str, Any]) -> dict[str, Any]:
    return {
        "metadata": {"name": "demo"},
        "spec": {"templates": TEMPLATES},
        "status": {"phase": "Running", "nodes": {item["id"]: item for item in nodes}},
    }


def make_training_node(name: str = "train", **fields: Any) -> dict[str, Any]:
    return make_node(
        f"demo.{name}(0)", phase="Running", displayName=f"{name}(0)", templateName="apply", **fields
    )


def put_pod(server: ApiServer, name: str, pod_status: dict[str, Any], **metadata: Any) -> None:
    labels = {"labels": {WORKFLOW: "demo"}}
    server.put(PODS_AT, {"metadata": {"name": name, **labels, **metadata}, "status": pod_status})


def describe_nodes(cluster: Cluster, *nodes: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the phase and the message of each node of the run, and of the run itself."""
    workflow = add_waiting_reasons(cluster, run(*nodes))
    steps = [
        (item["phase"], item.get("message") or "") for item in workflow["status"]["nodes"].values()
    ]
    return [*steps, (workflow["status"]["phase"], "")]


def make_waiting_status(container: str, reason: str, message: str) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", container: [{"name": "main", "state": state}]}


@pytest.mark.parametrize(
    ("pod_status", "reason"),
    [
        (NO_ROOM, UNSCHEDULABLE),
        (
            {
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
                ]
            },
            "SchedulingGated",
        ),
        (
            make_waiting_status("containerStatuses", "ErrImagePull", "not\nfound"),
            "ErrImagePull: not found",
        ),
        (
            make_waiting_status("initContainerStatuses", "ImagePullBackOff", "x"),
            "ImagePullBackOff: x",
        ),
        (
            make_waiting_status("containerStatuses", "CreateContainerConfigError", "no secret"),
            "CreateContainerConfigError: no secret",
        ),
        (make_waiting_status("containerStatuses", "ContainerCreating", ""), ""),
        (make_waiting_status("containerStatuses", "PodInitializing", ""), ""),
        (RUNNING, ""),
        ({}, ""),
    ],
)
def test_a_pod_has_the_reason_of_its_scheduler_or_kubelet(
    pod_status: dict[str, Any], reason: str
) -> None:
    assert find_waiting_reason({"status": pod_status}) == reason


def test_a_job_whose_pods_fit_no_node_is_pending(server: ApiServer, cluster: Cluster) -> None:
    put_pod(
        server,
        "demo-train-executor",
        RUNNING,
        annotations={"workflows.argoproj.io/node-id": make_training_node()["id"]},
    )

    put_pod(server, "demo-train-master-0", NO_ROOM)
    put_pod(server, "demo-train-worker-0", NO_ROOM)
    assert describe_nodes(cluster, make_training_node()) == [
        ("Pending", UNSCHEDULABLE),
        ("Pending", ""),
    ]

    table = format_steps_table(
        "demo",
        add_waiting_reasons(
            cluster,
            run(make_node("demo.train", type="Retry", phase="Running"), make_training_node()),
        )["status"],
    )

    assert "demo: Pending" in table
    assert "Insufficient cpu" in table
    assert "Running" not in table

    put_pod(server, "demo-train-master-0", RUNNING)
    assert describe_nodes(cluster, make_training_node()) == [
        ("Running", f"1 of 2 pods wait: {UNSCHEDULABLE}"),
        ("Running", ""),
    ]
    put_pod(server, "demo-train-worker-0", RUNNING)
    assert describe_nodes(cluster, make_training_node()) == [("Running", ""), ("Running", "")]


def test_a_pod_of_a_step_is_pending_before_argo_reports_it(
    server: ApiServer, cluster: Cluster
) -> None:
    step = make_node("demo.prepare", phase="Running", templateName="step")
    put_pod(
        server, "demo-prepare", NO_ROOM, annotations={"workflows.argoproj.io/node-id": step["id"]}
    )
    assert describe_nodes(cluster, step) == [("Pending", UNSCHEDULABLE), ("Pending", "")]
    other = make_node("demo.other", phase="Running", templateName="step")
    assert describe_nodes(cluster, step, other)[1:] == [
        ("Running", ""),
        ("Running", ""),
    ], "the other step runs"


def test_pods_of_a_job_belong_to_the_task_with_the_longest_name(
    server: ApiServer, cluster: Cluster
) -> None:
    put_pod(server, "demo-train-worker-0", RUNNING)
    put_pod(server, "demo-train-b-worker-0", NO_ROOM)
    assert describe_nodes(cluster, make_training_node(), make_training_node("train-b")) == [
        ("Running", ""),
        ("Pending", UNSCHEDULABLE),
        ("Running", ""),
    ]


def test_servers_that_fit_no_node_are_the_reason_of_the_step_that_waits_for_them(
    server: ApiServer, cluster: Cluster
) -> None:
    put_pod(server, "fraud-1-abc", NO_ROOM, labels={"app.kubernetes.io/instance": "fraud-1"})
    step = make_training_node(
        "serve", inputs={"parameters": [{"name": "server", "value": "fraud-1"}]}
    )
    assert describe_nodes(cluster, step) == [("Pending", UNSCHEDULABLE), ("Pending", "")]


def test_a_job_without_pods_has_the_reason_of_its_controller_or_queue(
    server: ApiServer, cluster: Cluster
) -> None:
    message = (
        'pods "demo-train-master-0" is forbidden: exceeded quota: q, requested: cpu=64, limited:'
        " cpu=2"
    )
    for number, (owner, text) in enumerate(
        [("demo-trainer", "other"), ("demo-train", "old"), ("demo-train", message)]
    ):
        event = {
            "reason": "FailedCreatePod",
            "message": text,
            "lastTimestamp": f"2026-11-28T10:00:0{number}Z",
        }
        server.put(
            EVENTS_AT,
            {"metadata": {"name": f"e{number}"}, "involvedObject": {"name": owner}, **event},
        )

    assert describe_nodes(cluster, make_training_node())[0] == (
        "Pending",
        f"FailedCreatePod: {message}",
    )

    server.objects[EVENTS_AT].clear()
    assert describe_nodes(cluster, make_training_node())[0] == ("Running", "")
    server.put(
        WORKLOADS.format("v1beta2"), make_kueue_workload("demo-train", 1, QuotaReserved="False")
    )
    assert describe_nodes(cluster, make_training_node())[0] == (
        "Pending",
        f"waits in the queue train: {REASON}",
    )


def test_a_user_who_may_not_read_pods_sees_what_argo_reports(
    server: ApiServer, cluster: Cluster
) -> None:
    forbidden = make_status(403, "Forbidden", "no")
    for path in ("/pods", "/events", "/workloads"):
        server.refuse("GET", path, 403, forbidden)
    assert describe_nodes(cluster, make_training_node()) == [("Running", ""), ("Running", "")]
