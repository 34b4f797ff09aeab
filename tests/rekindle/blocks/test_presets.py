"""Presets select nodes, GPUs and the spreading of pods; gang scheduling starts all pods of a job
together."""

from typing import Any

import pytest

from rekindle.blocks.jobs.members import SHARED_MOUNT, member_commands
from rekindle.blocks.jobs.pytorch_job import build_pytorch_job
from rekindle.blocks.pod_settings import (
    WORKFLOW_LABEL,
    node_affinity,
    pod_spec,
    pod_tolerations,
    resource_requirements,
)
from rekindle.blocks.presets import read_presets
from rekindle.blocks.serving.model_deployment import build_deployment
from rekindle.blocks.settings import ClusterConfig, PodConfig
from rekindle.kubernetes_names import WORKLOAD_MODULES
from rekindle.release.serve_config import ServeConfig
from rekindle.training.spec import TrainConfig
from tests.kinds import kinds, pod_specs

TRAIN = TrainConfig.model_validate({})
SERVE = ServeConfig.model_validate({})


def make_cluster_config(**values: Any) -> ClusterConfig:
    return ClusterConfig.model_validate(values)


def make_train_pod(preset: Any, **settings: Any) -> PodConfig:
    return make_cluster_config(pods={"train": {"preset": preset, **settings}}).pod("train")


@pytest.mark.parametrize("name", read_presets()["pods"])
def test_every_preset_changes_a_pod(name: str) -> None:
    # trainings cannot share a GPU by MPS
    kind = "serve" if name == "gpu-mps" else "train"
    other_presets = ["gke-spot"] if name.startswith("on-demand-") else []
    before, after = (
        make_cluster_config(
            signal_account="c", pods={kind: {"preset": [*other_presets, *names]}}
        ).pod(kind)
        for names in ([], [name])
    )
    assert after != before.model_copy(update={"preset": after.preset})


@pytest.mark.parametrize(
    "name, label, taint",
    [
        ("gke-spot", {"cloud.google.com/gke-spot": "true"}, "cloud.google.com/gke-spot"),
        (
            "aks-spot",
            {"kubernetes.azure.com/scalesetpriority": "spot"},
            "kubernetes.azure.com/scalesetpriority",
        ),
        ("karpenter-spot", {"karpenter.sh/capacity-type": "spot"}, "karpenter.sh/capacity-type"),
        ("eks-spot", {"eks.amazonaws.com/capacityType": "SPOT"}, None),
    ],
)
def test_workers_run_on_preemptible_nodes_and_the_coordinator_never_does(
    name: str, label: Any, taint: str | None
) -> None:
    cluster = make_cluster_config(pods={"train": {"preset": name}})
    pod = cluster.pod("train")
    assert pod.node_selector == label
    assert not node_affinity(pod)
    assert taint is None or taint in {each["key"] for each in pod_tolerations(pod)}
    coordinator = cluster.pod("coordinator")
    assert not coordinator.node_selector
    assert coordinator.avoid == label
    assert node_affinity(coordinator)
    with pytest.raises(ValueError, match="Remove its preset"):
        make_cluster_config(pods={"coordinator": {"preset": name}})


def test_presets_are_merged_and_the_pods_own_settings_win() -> None:
    pod = make_train_pod(
        ["gke-spot", "gpu", "spread-zones"],
        gpus=2,
        node_selector={"gpu": "l4"},
        node_lost_seconds=5,
    )

    assert pod.node_selector == {"gpu": "l4", "cloud.google.com/gke-spot": "true"}
    assert pod.gpus == 2
    assert pod.spread == ["topology.kubernetes.io/zone"]
    keys = [each["key"] for each in pod_tolerations(pod)]
    assert keys[:2] == ["cloud.google.com/gke-spot", "nvidia.com/gpu"]
    assert {
        each["tolerationSeconds"] for each in pod_tolerations(pod) if "tolerationSeconds" in each
    } == {5}


def test_a_users_preset_may_set_any_field_of_a_pod() -> None:
    presets = {"night": {"priority_class": "batch", "cpu": 3}}
    pod = make_cluster_config(presets=presets, pods={"train": {"preset": "night"}}).pod("train")
    assert pod.priority_class == "batch"
    assert pod.cpu == "3"


@pytest.mark.parametrize(
    "name, resource",
    [
        ("gpu", "nvidia.com/gpu"),
        ("mig-1g.10gb", "nvidia.com/mig-1g.10gb"),
        ("gpu-mps", "nvidia.com/gpu.shared"),
        ("gpu-time-slicing", "nvidia.com/gpu.shared"),
        ("gke-gpu-time-sharing", "nvidia.com/gpu"),
        ("gke-mig-1g.10gb", "nvidia.com/gpu"),
    ],
)
def test_a_pod_requests_the_gpu_resource_of_its_preset(name: str, resource: str) -> None:
    pod = make_cluster_config(pods={"evaluate": {"preset": name}}).pod("evaluate")
    assert resource_requirements(pod)["limits"][resource] == "1"
    if name != "gpu":
        with pytest.raises(ValueError, match="a pod can have only one"):
            make_cluster_config(pods={"evaluate": {"preset": name, "gpus": 2}})


SHARED = [
    ("gpu-time-slicing", "nvidia.com/gpu.sharing-strategy", "time-slicing"),
    ("gpu-mps", "nvidia.com/gpu.sharing-strategy", "mps"),
    ("gke-gpu-time-sharing", "cloud.google.com/gke-gpu-sharing-strategy", "time-sharing"),
    ("gke-mig-1g.10gb", "cloud.google.com/gke-gpu-partition-size", "1g.10gb"),
]


@pytest.mark.parametrize("name, label, value", SHARED)
def test_a_pod_with_a_shared_gpu_selects_nodes_that_share_gpus(
    name: str, label: str, value: str
) -> None:
    assert make_cluster_config(pods={"serve": {"preset": name}}).pod("serve").node_selector == {
        label: value
    }


def test_mps_is_rejected_for_training_because_it_would_hide_the_snapshots() -> None:
    wrong = {"node_selector": {"nvidia.com/gpu.sharing-strategy": "mps"}, "gpus": 1}
    for train in ({"preset": "gpu-mps"}, wrong):
        with pytest.raises(
            ValueError,
            match=r"cluster\.pods\.train .*/dev/shm.* Use gpu-time-slicing or a mig preset",
        ):
            make_cluster_config(pods={"train": train})
    assert SHARED_MOUNT["mountPath"] == "/dev/shm"


@pytest.mark.parametrize("name", ["prepare", "evaluate", "release", "verify", "report"])
def test_spreading_a_single_pod_is_rejected(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"cluster\.pods\.{name} is spread over .* it is a single pod"
    ):
        make_cluster_config(pods={name: {"preset": "spread-zones"}})


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"pods": {"train": {"preset": "gke-spto"}}}, 'Did you mean "gke-spot"'),
        ({"gang": "volcanoo"}, 'Did you mean "volcano"'),
        ({"gang": "kueue"}, "requires cluster.queue"),
        ({"pods": {"serve": {"preset": "gke-gpu-mps"}}}, "hostIPC.* Use gke-gpu-time-sharing"),
    ],
)
def test_an_unknown_preset_is_rejected_when_the_config_is_read(
    wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_cluster_config(**wrong)


def test_pods_are_spread_over_nodes_and_zones() -> None:
    pod = make_cluster_config(pods={"serve": {"preset": "spread-zones"}}).pod("serve")
    constraints = pod_spec(pod, "default", [], {"app": "x"})["topologySpreadConstraints"]
    assert [each["topologyKey"] for each in constraints] == [
        "kubernetes.io/hostname",
        "topology.kubernetes.io/zone",
    ]
    for each in constraints:
        assert each["labelSelector"] == {"matchLabels": {"app": "x"}}
        # with this setting, a full zone does not block pods
        assert each["whenUnsatisfiable"] == "ScheduleAnyway"


GANGS = {
    "": {},
    "volcano": {"queue": "nightly", "priorityClass": "batch"},
    "coscheduling": {"scheduleTimeoutSeconds": 120},
    "kueue": {},
}


@pytest.mark.parametrize("gang, policy", GANGS.items())
def test_an_elastic_job_starts_with_the_minimum_of_workers_and_the_coordinator(
    gang: str, policy: dict[str, Any]
) -> None:
    pods = {"train": {"priority_class": "batch"}}
    job = kinds(gang=gang, queue="nightly" if gang else "", pods=pods)["PyTorchJob"].manifest
    # the setting min_workers is 1
    assert job["spec"]["runPolicy"]["schedulingPolicy"] == {"minAvailable": 2, **policy}
    assert job["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") == (
        "nightly" if gang == "kueue" else None
    )
    # Kueue suspends a job itself; with the field in the manifest, another apply would suspend a
    # running job
    assert "suspend" not in job["spec"]["runPolicy"]


def test_a_training_runtime_has_the_policy_of_its_gang_scheduler() -> None:
    groups = {
        gang: kinds(gang=gang)["TrainingRuntime"].manifest["spec"]
        for gang in ("", "volcano", "coscheduling")
    }
    assert [spec.get("podGroupPolicy") for spec in groups.values()] == [
        None,
        {"volcano": {}},
        {"coscheduling": {"scheduleTimeoutSeconds": 120}},
    ]
    assert all(pod_specs(spec) for spec in groups.values())


QUEUE = {"scheduling.volcano.sh/queue-name": "nightly"}


def test_pods_of_a_training_runtime_have_the_gang_scheduler_and_its_queue() -> None:
    """Trainer creates only the PodGroup; without schedulerName the default scheduler places pods
    one by one."""
    for gang, scheduler in (
        ("", None),
        ("volcano", "volcano"),
        ("coscheduling", "scheduler-plugins-scheduler"),
    ):
        template = kinds(gang=gang, queue="nightly")["TrainingRuntime"].manifest["spec"]["template"]
        # one pod spec of the coordinator and one of the nodes
        assert [pod.get("schedulerName") for pod in pod_specs(template)] == 2 * [scheduler]
        assert template.get("metadata", {}).get("annotations") == (
            QUEUE if gang == "volcano" else None
        )

    # the template has no metadata, because Volcano's own default is used
    assert "metadata" not in kinds(gang="volcano")["TrainingRuntime"].manifest["spec"]["template"]
    labels = kinds(gang="kueue", queue="nightly")["TrainJob"].manifest["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "nightly"


def test_a_worker_gets_the_grace_period_of_its_preemptible_node() -> None:
    for preset, grace in ({"gke-spot": 15, "aks-spot": 25, "eks-spot": 60}).items():
        cluster = make_cluster_config(pods={"train": {"preset": preset}})
        spec = build_pytorch_job("a", TRAIN, cluster, member_commands(WORKLOAD_MODULES, []))[
            "spec"
        ]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
        variables = {each["name"]: each.get("value") for each in spec["containers"][0]["env"]}
        assert spec["terminationGracePeriodSeconds"] == grace
        assert variables["REKINDLE_GRACE"] == str(grace)


def test_labels_and_annotations_are_set_on_pods_without_replacing_required_labels() -> None:
    settings = {
        "labels": {"team": "risk", "workflows.argoproj.io/workflow": "another"},
        "annotations": {"a/b": "c"},
    }
    cluster = make_cluster_config(pods={"train": settings, "serve": settings})
    worker = build_pytorch_job("a", TRAIN, cluster, member_commands(WORKLOAD_MODULES, []))["spec"][
        "pytorchReplicaSpecs"
    ]["Worker"]["template"]["metadata"]
    assert worker == {"labels": {"team": "risk"} | WORKFLOW_LABEL, "annotations": {"a/b": "c"}}
    server = build_deployment("m", "m-1", SERVE, cluster, [])["spec"]
    assert server["template"]["metadata"]["annotations"] == {"a/b": "c"}
    assert (
        server["selector"]["matchLabels"].items()
        <= server["template"]["metadata"]["labels"].items()
    )


def test_a_pod_requests_its_disk_and_is_limited_to_it() -> None:
    pod = make_cluster_config(pods={"train": {"disk": "7Gi"}}).pod("train")
    spec = pod_spec(pod, "default", [{"resources": resource_requirements(pod)}])
    assert spec["containers"][0]["resources"]["requests"]["ephemeral-storage"] == "7Gi"
    assert spec["volumes"] == [{"name": "tmp", "emptyDir": {"sizeLimit": "7Gi"}}]


def test_a_workflow_deadline_before_the_training_deadline_is_rejected() -> None:
    with pytest.raises(ValueError, match="before the 1440 minutes of"):
        make_cluster_config(deadline_hours=12)
    assert (
        make_cluster_config(
            deadline_hours=12, pods={"train": {"deadline_minutes": 720}}
        ).deadline_hours
        == 12
    )


def test_workers_do_not_preempt_their_coordinator() -> None:
    cluster = make_cluster_config(pods={"train": {"priority_class": "high"}})
    assert {cluster.pod(name).priority_class for name in ("train", "coordinator", "executor")} == {
        "high"
    }
    cluster = make_cluster_config(
        pods={"train": {"priority_class": "high"}, "coordinator": {"priority_class": "higher"}}
    )
    assert cluster.pod("coordinator").priority_class == "higher"
