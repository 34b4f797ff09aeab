"""Tests of the status of a queued job: the quota that it waits for, and the jobs ahead of it."""

from typing import Any

import pytest

from argolocal.manifest.object_labels import REPLICA_TYPE_LABEL, WORKFLOW
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.cluster.queue import describe_waiting_jobs, find_waiting_jobs
from rekindle.training.cost.pod_requests import QUEUE_LABEL
from rekindle.view.cluster_overview import format_run
from tests.rekindle.cluster.server import ApiServer
from tests.rekindle.cluster.workflows import (
    REASON,
    WORKFLOWS_AT,
    WORKLOADS,
    make_kueue_workload,
    make_workflow,
)


@pytest.mark.parametrize("version", ["v1beta2", "v1beta1"])
def test_a_waiting_job_names_its_reason_and_the_jobs_ahead(
    server: ApiServer, cluster: Cluster, version: str
) -> None:
    if version == "v1beta1":
        server.refuse("GET", "/apis/kueue.x-k8s.io/v1beta2/", 404, "404 page not found", times=9)

    for obj in (
        make_kueue_workload("demo-1-train", 9, QuotaReserved="False"),
        make_kueue_workload("late-1-train", 10, QuotaReserved="False"),
        make_kueue_workload("early-1-train", 1, QuotaReserved="False"),
        make_kueue_workload("urgent-1-train", 11, priority=5, QuotaReserved="False"),
        make_kueue_workload("runs-1-train", 2, QuotaReserved="True", Admitted="True"),
        make_kueue_workload("done-1-train", 3, Finished="True"),
    ):
        server.put(WORKLOADS.format(version), obj)

    (line,) = describe_waiting_jobs(cluster, "demo-1")
    assert line == f"train waits in the queue train, behind urgent-1-train early-1-train: {REASON}"
    assert (
        describe_waiting_jobs(cluster, "runs-1") == describe_waiting_jobs(cluster, "done-1") == []
    )


def test_waiting_harvest_workers_are_counted(server: ApiServer, cluster: Cluster) -> None:
    for number in range(3):
        quota, admitted = ("True", "True") if number == 0 else ("False", "False")
        pod = make_kueue_workload(
            f"demo-1-train-{number}", number, "Pod", QuotaReserved=quota, Admitted=admitted
        )
        server.put(WORKLOADS.format("v1beta2"), pod)
    assert describe_waiting_jobs(cluster, "demo-1") == [
        "2 more workers wait for idle quota in the queue train"
    ]


def test_the_jobs_of_all_runs_are_listed_in_the_order_of_the_queue(
    server: ApiServer, cluster: Cluster
) -> None:
    for workload in (
        make_kueue_workload("late-1-train", 9, QuotaReserved="False"),
        make_kueue_workload("early-1-train", 1, QuotaReserved="False"),
        make_kueue_workload("early-1-train-extra", 2, "Pod", QuotaReserved="False"),
        make_kueue_workload("late-1-train-extra", 3, "Pod", QuotaReserved="False"),
        make_kueue_workload("runs-1-train", 2, QuotaReserved="True", Admitted="True"),
    ):
        server.put(WORKLOADS.format("v1beta2"), workload)
    assert [str(waiting_job) for waiting_job in find_waiting_jobs(cluster)] == [
        f"early-1-train waits in the queue train: {REASON}",
        "late-1-train waits in the queue train, behind early-1-train early-1-train-extra"
        f" late-1-train-extra: {REASON}",
        "2 more workers wait for idle quota in the queue train",
    ]


def test_the_pod_of_a_step_is_not_counted_as_a_harvested_worker(
    server: ApiServer, cluster: Cluster
) -> None:
    for name, labels in {
        "demo-1-prepare-77": {WORKFLOW: "demo-1"},
        "demo-1-train-harvest": {WORKFLOW: "demo-1", REPLICA_TYPE_LABEL: "harvest"},
    }.items():
        pod = make_kueue_workload(name, 1, "Pod", QuotaReserved="False")
        pod["spec"]["podSets"] = [{"name": "main", "template": {"metadata": {"labels": labels}}}]
        server.put(WORKLOADS.format("v1beta2"), pod)
    assert describe_waiting_jobs(cluster, "demo-1") == [
        f"prepare-77 waits in the queue train: {REASON}",
        "1 more workers wait for idle quota in the queue train",
    ]


FORBIDDEN = {
    "kind": "Status",
    "code": 403,
    "reason": "Forbidden",
    "message": (
        'workloads.kueue.x-k8s.io is forbidden: User "ann" cannot list resource "workloads" in API'
        ' group "kueue.x-k8s.io" in the namespace "models"'
    ),
}


def test_a_queue_that_may_not_be_read_is_reported_for_queued_runs_only(
    server: ApiServer, cluster: Cluster
) -> None:
    server.refuse("GET", "kueue", 404, "404 page not found", times=2)
    assert describe_waiting_jobs(cluster, "demo-1", is_queued=True) == []

    server.refuse("GET", "kueue", 403, FORBIDDEN, times=2)
    assert describe_waiting_jobs(cluster, "demo-1") == []
    (line,) = describe_waiting_jobs(cluster, "demo-1", is_queued=True)
    assert line.startswith("the queue of demo-1 cannot be read: ann may not list workloads")


def test_the_status_of_a_queued_run_names_the_missing_permission(
    server: ApiServer, cluster: Cluster
) -> None:
    queued = {"name": "trial", "metadata": {"labels": {QUEUE_LABEL: "train"}}}
    for name, templates in {"demo-1": [queued], "demo-2": []}.items():
        run = make_workflow(name)
        run["spec"] = {"entrypoint": "trial", "templates": templates}
        server.put(WORKFLOWS_AT, run)
    server.refuse("GET", "kueue", 403, FORBIDDEN, times=9)
    assert "the queue of demo-1 cannot be read" in format_run(cluster, "demo-1", as_json=False)
    assert "cannot be read" not in format_run(cluster, "demo-2", as_json=False)


def test_jobs_of_other_namespaces_with_the_same_quota_are_ahead_too(
    server: ApiServer, cluster: Cluster
) -> None:
    api = "/apis/kueue.x-k8s.io/v1beta2"
    own = make_kueue_workload("demo-1-train", 9, QuotaReserved="False")
    server.put(WORKLOADS.format("v1beta2"), own)

    others: list[dict[str, Any]] = []
    for owner, namespace, second in (
        ("vision-1-train", "vision", 1),
        ("late-1-train", "vision", 20),
        ("other-quota-1-train", "speech", 2),
    ):
        other = make_kueue_workload(owner, second, QuotaReserved="False")
        other["metadata"]["namespace"] = namespace
        others.append(other)
    server.fixed[f"{api}/workloads"] = {"items": others, "metadata": {}}
    server.fixed[f"{api}/localqueues"] = {
        "items": [
            {
                "metadata": {"name": "train", "namespace": namespace},
                "spec": {"clusterQueue": cluster_queue},
            }
            for namespace, cluster_queue in (
                ("models", "research"),
                ("vision", "research"),
                ("speech", "production"),
            )
        ],
        "metadata": {},
    }

    (waiting_job,) = find_waiting_jobs(cluster, "demo-1")
    assert waiting_job.behind == ("vision/vision-1-train",)
    assert waiting_job.sees_all_namespaces
    assert str(waiting_job).startswith(
        "train waits in the queue train, behind vision/vision-1-train:"
    )


def test_a_user_of_one_namespace_sees_the_jobs_of_this_namespace(
    server: ApiServer, cluster: Cluster
) -> None:
    forbidden = {"kind": "Status", "code": 403, "message": "no", "reason": "Forbidden"}
    for kind in ("workloads", "localqueues"):
        server.refuse("GET", f"v1beta2/{kind}", 403, forbidden, times=9)
    for owner, second in (("demo-1-train", 9), ("early-1-train", 1)):
        server.put(
            WORKLOADS.format("v1beta2"), make_kueue_workload(owner, second, QuotaReserved="False")
        )

    (waiting_job,) = find_waiting_jobs(cluster, "demo-1")
    assert waiting_job.behind == ("early-1-train",)
    assert not waiting_job.sees_all_namespaces
