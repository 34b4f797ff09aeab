"""Tests of the conditions of the PyTorchJob, evaluated on statuses that the operator writes, and of
the fields that the operator requires.

Statuses: Kubeflow training operator 1.9, pkg/util/status.go and pytorchjob_controller.go.
"""

from typing import Any

import pytest

from argolocal.language.selector import evaluate_conditions
from rekindle.blocks.jobs.kubeflow import FAILURE
from rekindle.blocks.jobs.members import build_run_secret, member_commands
from rekindle.blocks.jobs.pytorch_job import SUCCESS, build_pytorch_job
from rekindle.blocks.settings import ClusterConfig
from rekindle.errors import ConfigError
from rekindle.kubernetes_names import REKINDLE_SECRET, WORKLOAD_MODULES
from rekindle.training.spec import TrainConfig


def make_status(*conditions: str, **replicas: dict[str, int]) -> dict[str, Any]:
    kinds = [{"type": each, "status": "True", "reason": f"PyTorchJob{each}"} for each in conditions]
    return {"status": {"conditions": kinds, "replicaStatuses": replicas}}


ONE_ACTIVE = {"active": 1}
RUNNING = {"Master": ONE_ACTIVE, "Worker": {"active": 2}}


@pytest.mark.parametrize(
    "name, document, expected",
    [
        ("just applied", {"metadata": {"name": "x"}}, None),
        ("created", make_status("Created"), None),
        ("running", make_status("Created", "Running", **RUNNING), None),
        (
            "worker evicted",
            make_status(
                "Created", "Restarting", Master=ONE_ACTIVE, Worker={"active": 1, "failed": 1}
            ),
            None,
        ),
        (
            "worker done before the master",
            make_status("Created", "Running", Master=ONE_ACTIVE, Worker={"succeeded": 1}),
            None,
        ),
        (
            "master done",
            make_status("Created", "Running", Master={"succeeded": 1}, Worker={"active": 1}),
            True,
        ),
        (
            "succeeded",
            make_status("Created", "Succeeded", Master={"succeeded": 1}, Worker={}),
            True,
        ),
        (
            "master gave up",
            make_status("Created", "Running", "Failed", Master={"failed": 1}, Worker={"active": 2}),
            False,
        ),
        ("deadline before it ran", make_status("Created", "Failed", Master={}, Worker={}), False),
        (
            "failed after restarts",
            make_status("Created", "Restarting", "Failed", Master={"failed": 1}),
            False,
        ),
        (
            "suspended, resumed, failed",
            make_status("Created", "Suspended", "Running", "Failed", Master={}),
            False,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_step_ends_with_the_job_and_with_the_same_outcome(
    name: str, document: Any, expected: bool | None
) -> None:
    assert evaluate_conditions(document, SUCCESS, ",".join(FAILURE))[0] is expected


GPUS = {"pods": {"train": {"gpus": 2}}}


def make_job(cluster: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
    config = TrainConfig.model_validate(train)
    return build_pytorch_job(
        "{{workflow.name}}-train",
        config,
        ClusterConfig.model_validate(cluster or {}),
        member_commands(WORKLOAD_MODULES, ["--seed=7"]),
    )


def test_the_operator_accepts_the_job() -> None:
    spec = make_job(workers=3, max_workers=4)["spec"]
    master = spec["pytorchReplicaSpecs"]["Master"]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    # the field is required, because the webhook does not set a default
    assert master["replicas"] == 1
    assert worker["replicas"] == 3
    # `rdzvConf: an empty list `rdzvConf` would crash the operator
    assert spec["elasticPolicy"] == {"minReplicas": 1, "maxReplicas": 4}

    for replica in (master, worker):
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert replica["template"]["metadata"]["labels"] == {
            "workflows.argoproj.io/workflow": "{{workflow.name}}"
        }

    # with this policy, workers are deleted when the coordinator is done
    assert spec["runPolicy"]["cleanPodPolicy"] == "Running"
    # a backoffLimit would count every restart of every worker
    assert "backoffLimit" not in spec["runPolicy"]


def test_a_preempted_worker_is_restarted_and_the_job_ends_with_the_coordinator() -> None:
    replicas = make_job()["spec"]["pytorchReplicaSpecs"]
    assert replicas["Worker"]["restartPolicy"] == "OnFailure"
    assert replicas["Master"]["restartPolicy"] == "ExitCode"


def test_all_processes_read_the_secret_and_the_manifest_does_not_contain_it() -> None:
    secret = build_run_secret("{{workflow.name}}-train")
    reference = {"name": secret["metadata"]["name"], "key": next(iter(secret["data"]))}
    for replica in make_job()["spec"]["pytorchReplicaSpecs"].values():
        (container,) = replica["template"]["spec"]["containers"]
        env = {variable["name"]: variable for variable in container["env"]}
        assert env[REKINDLE_SECRET] == {
            "name": REKINDLE_SECRET,
            "valueFrom": {"secretKeyRef": reference},
        }
    # Argo generates the value of the Secret
    assert set(secret["data"].values()) == {"{{=sprig.b64enc(sprig.randAlphaNum(43))}}"}


def test_all_processes_get_the_same_flags() -> None:
    replicas = make_job()["spec"]["pytorchReplicaSpecs"]
    commands = [
        replicas[name]["template"]["spec"]["containers"][0]["args"] for name in ("Master", "Worker")
    ]
    assert commands == [
        ["-m", f"rekindle.training.{name}", "--seed=7"]
        for name in ("membership.server", "launch.launcher")
    ]


def test_a_worker_gets_its_grace_period() -> None:
    pod = make_job()["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    environment = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    assert environment["REKINDLE_GRACE"] == str(pod["terminationGracePeriodSeconds"])


def test_hot_snapshots_are_not_limited_to_the_default_64_mb_of_shared_memory() -> None:
    pod = make_job()["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (volume,) = [
        mount["name"]
        for mount in pod["containers"][0]["volumeMounts"]
        if mount["mountPath"] == "/dev/shm"
    ]
    assert {"name": volume, "emptyDir": {"medium": "Memory"}} in pod["volumes"]


def test_a_pod_with_several_gpus_runs_one_worker_per_gpu() -> None:
    spec = make_job(GPUS, workers=4, min_workers=3, max_workers=8)["spec"]
    assert spec["nprocPerNode"] == "2"
    assert spec["pytorchReplicaSpecs"]["Worker"]["replicas"] == 2
    assert spec["elasticPolicy"] == {"minReplicas": 2, "maxReplicas": 4}


@pytest.mark.parametrize("train", [{"workers": 3}, {"workers": 2, "max_workers": 3}])
def test_a_number_of_workers_that_does_not_fill_the_pods_is_rejected(train: dict[str, int]) -> None:
    with pytest.raises(
        ConfigError, match=r"workers is 3: it must be a multiple of cluster.pods.train.gpus \(2\)"
    ):
        make_job(GPUS, **train)


def test_a_worker_requests_one_core_per_thread() -> None:
    worker = make_job(threads=6)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"][
        "containers"
    ][0]
    assert worker["resources"]["requests"]["cpu"] == "6"
