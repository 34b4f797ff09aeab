"""Jobs that Kueue can never admit are found before a run is submitted, in one sentence with a remedy."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.cluster.kueue.admission import check_admission
from rekindle.cluster.kueue.queued_jobs import QueuedJob, list_queued_jobs, read_templates
from rekindle.errors import RekindleError
from tests.commands import ROOT
from tests.rekindle.cluster.kueue import objects
from tests.rekindle.cluster.kueue.objects import (
    API,
    QUEUES,
    ROOM,
    cluster_queue,
    configure_kueue,
    flavor_quota,
    put_cluster_objects,
)
from tests.rekindle.cluster.server import ApiServer, make_status
from tests.rekindle.mutations import make_mutations

QUEUED = ["cluster.gang=kueue", "cluster.queue=research", "cluster.queue_priority=low"]
GPUS = ["cluster.pods.train.gpus=1", "cluster.pods.train.node_selector={gpu: l4}"]


def queued_jobs(*sets: str) -> list[QueuedJob]:
    config = load_config(ROOT / "configs/digits.yaml", [*QUEUED, *sets], {}).config
    return list_queued_jobs(read_templates(render_manifest(config)))


@pytest.fixture(scope="module", autouse=True)
def work_outside_of_the_repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Work outside of a git repository, because git needs longer to read the commit than rendering
    takes."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
        yield


@pytest.fixture(scope="module")
def jobs() -> list[QueuedJob]:
    """The pods of a pipeline with a coordinator and three workers of 2 CPUs and one GPU each."""
    return queued_jobs("train.workers=3", "train.threads=2", *GPUS)


@pytest.fixture(autouse=True)
def kueue(server: ApiServer) -> None:
    objects.install_kueue(server)


def find_refusals(cluster: Cluster, jobs: list[QueuedJob]) -> list[str]:
    return [str(finding) for finding in check_admission(cluster, jobs) if finding.is_fatal]


def find_notes(cluster: Cluster, jobs: list[QueuedJob]) -> list[str]:
    return [str(finding) for finding in check_admission(cluster, jobs) if not finding.is_fatal]


def change_queue(server: ApiServer, amounts: dict[str, str] = ROOM, **spec: Any) -> dict[str, Any]:
    """Replace the ClusterQueue `shared`, and return it."""
    changed = cluster_queue("shared", flavor_quota("default", amounts), **spec)
    put_cluster_objects(server, "clusterqueues", changed)
    return changed


def test_jobs_that_fit_are_admitted_without_a_word(cluster: Cluster, jobs: list[QueuedJob]) -> None:
    assert check_admission(cluster, jobs) == []
    assert check_admission(cluster, []) == []


def test_pods_of_a_job_are_compared_together_and_pods_of_steps_one_by_one(
    jobs: list[QueuedJob],
) -> None:
    by_name = {job.name: job for job in jobs}
    assert by_name["train"].kind == "PyTorchJob"
    assert by_name["train"].sum_requests()["nvidia.com/gpu"] == 3
    assert by_name["train"].sum_requests()["cpu"] == 3 * 2 + 0.25
    assert by_name["prepare"].kind == "Pod"
    assert by_name["prepare"].sum_requests()["cpu"] == 2
    assert {job.priority_class for job in jobs} == {"low"}
    assert "ephemeral-storage" in by_name["prepare"].sum_requests()


def remove_queue(server: ApiServer) -> None:
    server.remove(QUEUES, "research")
    server.put(QUEUES, {"metadata": {"name": "night"}, "spec": {"clusterQueue": "shared"}})


def remove_kueue(server: ApiServer) -> None:
    server.refuse("GET", "/apis/kueue", 404, "404 page not found", times=9)


def hold_queue(server: ApiServer) -> None:
    server.put(
        QUEUES,
        {
            "metadata": {"name": "research"},
            "spec": {"clusterQueue": "shared", "stopPolicy": "Hold"},
        },
    )


def deactivate_queue(server: ApiServer) -> None:
    inactive = change_queue(server)
    message = "Can't admit new workloads: references missing ResourceFlavor(s): default."
    inactive["status"] = {"conditions": [{"type": "Active", "status": "False", "message": message}]}


def use_other_flavor(server: ApiServer) -> None:
    flavor = {"metadata": {"name": "default"}, "spec": {"nodeLabels": {"gpu": "a100"}}}
    put_cluster_objects(server, "resourceflavors", flavor)


def split_flavors(server: ApiServer) -> None:
    """No flavor has room for all workers, but both flavors together have."""
    small = ROOM | {"nvidia.com/gpu": "2"}
    queue = cluster_queue("shared", flavor_quota("default", small), flavor_quota("spot", small))
    put_cluster_objects(server, "clusterqueues", queue)


FAULTS: dict[str, tuple[Callable[[ApiServer], Any], str]] = {
    "larger than the quota": (
        lambda server: change_queue(server, ROOM | {"cpu": "4"}),
        "train exceeds the quota of the ClusterQueue shared, 6.25 cpu of 4: lower its requests",
    ),
    "larger than the quota of GPUs": (
        lambda server: change_queue(server, ROOM | {"nvidia.com/gpu": "2"}),
        "train exceeds the quota of the ClusterQueue shared, 3 nvidia.com/gpu of 2: lower",
    ),
    "missing queue": (
        remove_queue,
        "the LocalQueue research does not exist in namespace models: set cluster.queue to a"
        " LocalQueue of the namespace (night), or have the platform team create research.",
    ),
    "kueue missing": (remove_kueue, "but Kueue is not installed on the cluster: have Kueue"),
    "missing ClusterQueue": (
        lambda server: put_cluster_objects(server, "clusterqueues"),
        "the ClusterQueue shared of the LocalQueue research does not exist: have",
    ),
    "integration of the job off": (
        lambda server: configure_kueue(
            server, integrations={"frameworks": ["pod", "jobset.x-k8s.io/jobset"]}
        ),
        "Kueue does not manage PyTorchJobs on this cluster, so train would run without the queue"
        " research: have the line `- kubeflow.org/pytorchjob` added to integrations.frameworks in"
        " the ConfigMap kueue-manager-config of namespace kueue-system and Kueue's controller"
        " restarted, or set cluster.backend to jobset.",
    ),
    "integration of pods off": (
        lambda server: configure_kueue(
            server, integrations={"frameworks": ["kubeflow.org/pytorchjob"]}
        ),
        "`- pod` added to integrations.frameworks",
    ),
    "namespace not managed": (
        lambda server: configure_kueue(
            server, managedJobsNamespaceSelector={"matchLabels": {"team": "speech"}}
        ),
        "Kueue does not manage the namespace models, so",
    ),
    "stopped LocalQueue": (hold_queue, "the LocalQueue research is stopped (stopPolicy Hold)"),
    "stopped ClusterQueue": (
        lambda server: change_queue(server, stopPolicy="HoldAndDrain"),
        "the ClusterQueue shared is stopped (stopPolicy HoldAndDrain) and admits no job",
    ),
    "inactive": (
        deactivate_queue,
        "the ClusterQueue shared is not active and admits no job (Can't admit new workloads:"
        " references missing ResourceFlavor(s): default): have",
    ),
    "namespace not selected": (
        lambda server: change_queue(server, namespaceSelector={"matchLabels": {"team": "speech"}}),
        "admits no job of namespace models, but only of namespaces with team=speech: have",
    ),
    "no namespaces": (
        lambda server: change_queue(server, namespaceSelector=None),
        "the ClusterQueue shared admits no job, because its namespaceSelector is missing: have",
    ),
    "resource without quota": (
        lambda server: change_queue(
            server, {name: ROOM[name] for name in ("cpu", "memory", "nvidia.com/gpu")}
        ),
        "include ephemeral-storage, but the ClusterQueue shared has a quota only of cpu, memory and"
        " nvidia.com/gpu: have a quota of ephemeral-storage added to it",
    ),
    "no priority": (
        lambda server: put_cluster_objects(
            server, "workloadpriorityclasses", {"metadata": {"name": "idle"}}
        ),
        "because the WorkloadPriorityClass low does not exist: set cluster.queue_priority and"
        " cluster.harvest_priority to existing classes (idle)",
    ),
    "other nodes": (
        use_other_flavor,
        "no flavor of the ClusterQueue shared can run train (default: gpu=a100 instead of l4):",
    ),
    "two small flavors": (
        split_flavors,
        "can run train (default: 3 nvidia.com/gpu of 2; spot: 3 nvidia.com/gpu of 2):",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_job_that_can_never_be_admitted_is_refused_in_one_sentence(
    server: ApiServer, cluster: Cluster, jobs: list[QueuedJob], fault: str
) -> None:
    make_fault, sentence = FAULTS[fault]
    make_fault(server)
    (refusal,) = find_refusals(cluster, jobs)
    assert sentence in refusal
    assert refusal.endswith(".")
    assert {method for method, _, _ in server.requests} == {"GET"}


def test_a_quota_in_use_is_a_note_that_names_the_missing_amount(
    server: ApiServer, cluster: Cluster, jobs: list[QueuedJob]
) -> None:
    queue = change_queue(server, ROOM | {"cpu": "8"}, preemption={"withinClusterQueue": "Never"})
    used = [{"name": "default", "resources": [{"name": "cpu", "total": "5"}]}]
    queue["status"] |= {"flavorsReservation": used, "pendingWorkloads": 2}
    assert check_admission(cluster, jobs) == check_admission(cluster, jobs)
    assert find_refusals(cluster, jobs) == []
    assert find_notes(cluster, jobs) == [
        "train must wait for quota of the ClusterQueue shared, 6.25 cpu of 3 that are free now (2"
        " workloads wait there already; the queue does not preempt workloads of lower priority)"
    ]


def test_a_cohort_lends_only_up_to_its_limits(
    server: ApiServer, cluster: Cluster, jobs: list[QueuedJob]
) -> None:
    own = cluster_queue("shared", flavor_quota("default", ROOM | {"cpu": "4"}), cohortName="lab")

    def refused(amount: str, **limits: str) -> bool:
        other = cluster_queue(
            "other", flavor_quota("default", {"cpu": amount}, **limits), cohortName="lab"
        )
        put_cluster_objects(server, "clusterqueues", own, other)
        return bool(find_refusals(cluster, jobs))

    assert not refused("4")
    assert refused("2")
    assert refused("4", lendingLimit="1")

    cohort = {"metadata": {"name": "lab"}, "spec": {"resourceGroups": []}}
    cohort["spec"]["resourceGroups"] = [{"flavors": [flavor_quota("default", {"cpu": "1"})]}]
    put_cluster_objects(server, "cohorts", cohort)
    assert not refused("2"), "the cohort itself has one CPU"
    cohort["spec"]["parentName"] = "company"
    assert not refused("0"), "the quota of a larger cohort is unknown"


FORBIDDEN = make_status(403, "Forbidden", "forbidden")


@pytest.mark.parametrize(
    ("path", "note"),
    [
        (
            "configmaps/kueue-manager-config",
            "whether Kueue manages Pods and PyTorchJobs is unknown",
        ),
        ("/clusterqueues", "not compared with the ClusterQueue shared: "),
        ("/workloadpriorityclasses", "not compared with the WorkloadPriorityClass low: "),
        ("/localqueues", "not compared with the queue research: "),
    ],
)
def test_an_object_that_may_not_be_read_is_a_note_that_refuses_nothing(
    server: ApiServer, cluster: Cluster, jobs: list[QueuedJob], path: str, note: str
) -> None:
    server.refuse("GET", path, 403, FORBIDDEN, times=9)
    assert find_refusals(cluster, jobs) == []
    (only_note,) = find_notes(cluster, jobs)
    assert note in only_note


def test_resources_that_kueue_ignores_need_no_quota(
    server: ApiServer, cluster: Cluster, jobs: list[QueuedJob]
) -> None:
    change_queue(server, {name: ROOM[name] for name in ("cpu", "memory", "nvidia.com/gpu")})
    configure_kueue(server, resources={"excludeResourcePrefixes": ["ephemeral-"]})
    assert find_refusals(cluster, jobs) == []


def test_a_job_whose_pods_must_all_become_ready_has_a_note(
    server: ApiServer, cluster: Cluster
) -> None:
    jobs = queued_jobs("cluster.backend=jobset")
    configure_kueue(server, apiVersion="config.kueue.x-k8s.io/v1beta2")
    (note,) = find_notes(cluster, jobs)
    assert "train and queues it again if some of its pods are not ready 30m after" in note
    configure_kueue(server, waitForPodsReady={"enable": False})
    assert find_notes(cluster, jobs) == []


@pytest.mark.parametrize("backend", ["jobset", "trainjob"])
def test_the_pods_of_every_kind_of_job_count(backend: str) -> None:
    sets = [f"cluster.backend={backend}", "train.workers=3", "train.threads=2", *GPUS]
    (job,) = [job for job in queued_jobs(*sets) if job.kind != "Pod"]
    assert job.sum_requests()["nvidia.com/gpu"] == 3
    assert job.sum_requests()["cpu"] == 3 * 2 + 0.25


def test_harvested_workers_are_compared_one_by_one(cluster: Cluster, server: ApiServer) -> None:
    sets = ["train.min_workers=1", "train.max_workers=4", "cluster.harvest=true"]
    jobs = queued_jobs(*sets, "cluster.harvest_priority=low", "train.threads=2")
    change_queue(server, ROOM | {"cpu": "3"})
    assert find_refusals(cluster, jobs) == []
    change_queue(server, ROOM | {"cpu": "1"})
    exceeding = [line.partition(" exceeds")[0] for line in find_refusals(cluster, jobs)]
    assert "train-harvest" in exceeding


def test_pods_of_kueue_s_older_versions_are_compared_too(
    server: ApiServer, cluster: Cluster, jobs: list[QueuedJob]
) -> None:
    for path in [path for path in server.fixed if path.startswith(API)]:
        server.fixed[path.replace("v1beta2", "v1beta1")] = server.fixed.pop(path)
    server.objects[QUEUES.replace("v1beta2", "v1beta1")] = server.objects.pop(QUEUES)
    server.refuse("GET", "v1beta2", 404, "404 page not found", times=9)
    assert check_admission(cluster, jobs) == []


def set_configuration(server: ApiServer, value: object) -> None:
    data = {"controller_manager_config.yaml": json.dumps(value)}
    server.put(
        "/api/v1/namespaces/kueue-system/configmaps",
        {"metadata": {"name": "kueue-manager-config"}, "data": data},
    )


USAGE = [{"name": "default", "resources": [{"name": "cpu", "total": "5"}]}]
VALID: dict[str, Any] = {
    "clusterqueues": cluster_queue(
        "shared",
        flavor_quota("default", {"cpu": "8"}, borrowingLimit="2", lendingLimit="1"),
        cohortName="lab",
        stopPolicy="None",
        namespaceSelector={"matchExpressions": [{"key": "team", "operator": "Exists"}]},
    )
    | {"status": {"flavorsReservation": USAGE, "pendingWorkloads": 1}},
    "resourceflavors": {
        "metadata": {"name": "default"},
        "spec": {
            "nodeLabels": {"gpu": "l4"},
            "nodeTaints": [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}],
            "tolerations": [{"key": "gpu", "value": "yes"}],
        },
    },
    "cohorts": {"metadata": {"name": "lab"}, "spec": {"parentName": "company"}},
    "configuration": {
        "integrations": {"frameworks": objects.FRAMEWORKS},
        "managedJobsNamespaceSelector": {"matchLabels": {"team": "vision"}},
        "waitForPodsReady": {"enable": True, "timeout": "5m"},
        "resources": {"excludeResourcePrefixes": ["a/"], "transformations": [{"input": "b"}]},
    },
}


@pytest.mark.parametrize("plural", VALID)
def test_a_malformed_object_of_kueue_is_one_error_or_a_note(
    server: ApiServer, cluster: Cluster, jobs: list[QueuedJob], plural: str
) -> None:
    put_cluster_objects(server, "clusterqueues", VALID["clusterqueues"])
    for content in list(make_mutations(VALID[plural]))[::17]:
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            continue

        if plural == "configuration":
            set_configuration(server, value)
        else:
            put_cluster_objects(server, plural, value)
        try:
            check_admission(cluster, jobs)
        except RekindleError as error:
            assert not re.search("[\x00-\x1f\x7f-\x9f]", str(error)), (content, str(error))
