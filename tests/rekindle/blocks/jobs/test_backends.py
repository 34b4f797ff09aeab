"""Tests of trainings in a JobSet and in a TrainJob: the conditions of these jobs, evaluated on
statuses recorded from a cluster, and their pods.

Statuses: The statuses were recorded with JobSet 0.12 and Kubeflow Trainer 2.3 on Kubernetes 1.34,
with and without Kueue 0.19.
"""

import json
from typing import Any

import pytest

from argolocal.language.selector import evaluate_conditions
from rekindle.blocks.jobs.backends import BACKENDS
from rekindle.blocks.jobs.members import member_commands
from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.blocks.settings import ClusterConfig
from rekindle.errors import ConfigError, RekindleError
from rekindle.kubernetes_names import WORKLOAD_MODULES
from rekindle.training.spec import TrainConfig
from tests.kinds import pod_specs

QUEUE_SETTINGS = {"gang": "kueue", "queue": "train"}


def make_conditions(*kinds: str, **status: Any) -> dict[str, Any]:
    return {
        "status": {"conditions": [{"type": kind, "status": "True"} for kind in kinds], **status}
    }


WORKERS_DONE = [{"name": "worker", "succeeded": 2}, {"name": "lead", "succeeded": 0}]


@pytest.mark.parametrize(
    "backend, cluster, document, expected",
    [
        ("jobset", {}, {"metadata": {}}, None),
        ("jobset", {}, make_conditions(replicatedJobsStatus=WORKERS_DONE), None),
        ("jobset", {}, make_conditions("Suspended", "Completed", terminalState="Completed"), True),
        ("jobset", {}, make_conditions("Failed", terminalState="Failed"), False),
        ("trainjob", {}, {"metadata": {}}, None),
        ("trainjob", {}, make_conditions(jobsStatus=WORKERS_DONE), None),
        ("trainjob", {}, make_conditions("Complete"), True),
        ("trainjob", {}, make_conditions("Failed"), False),
        ("trainjob", QUEUE_SETTINGS, make_conditions("Suspended"), None),
        ("trainjob", QUEUE_SETTINGS, make_conditions("Suspended", "Complete"), True),
        ("trainjob", QUEUE_SETTINGS, make_conditions("Suspended", "Failed"), False),
    ],
)
def test_the_step_ends_with_the_job(
    backend: str, cluster: dict[str, Any], document: dict[str, Any], expected: bool | None
) -> None:
    kind = BACKENDS[backend]
    config = ClusterConfig.model_validate(cluster)
    assert (
        evaluate_conditions(document, kind.success(config), ",".join(kind.failure))[0] is expected
    )


def render(
    backend: str, cluster: dict[str, Any] | None = None, runtime: bool = False, **train: Any
) -> dict[str, Any]:
    config = ClusterConfig.model_validate({"backend": backend} | (cluster or {}))
    maker = BACKENDS[backend].runtime if runtime else BACKENDS[backend].job
    assert maker
    return maker(
        "j",
        TrainConfig.model_validate(train),
        config,
        member_commands(WORKLOAD_MODULES, ["--seed=7"]),
    )


def jobs_of(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    if manifest["kind"] == "TrainingRuntime":
        spec = manifest["spec"]["template"]["spec"]
    else:
        spec = manifest["spec"]
    return {job["name"]: job for job in spec["replicatedJobs"]}


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_runs_the_same_processes_with_a_secret(backend: str) -> None:
    processes = []
    for pod in pod_specs(render(backend, runtime=backend == "trainjob", workers=3)):
        (container,) = pod["containers"]
        assert container["args"][-1] == "--seed=7"
        assert "REKINDLE_SECRET" in {variable["name"] for variable in container["env"]}
        processes.append(container["args"][1].rpartition(".")[2])
    assert processes == ["server", "launcher"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_a_coordinator_with_an_account_has_a_token(backend: str) -> None:
    is_runtime = backend == "trainjob"
    for account in ("", "rekindle-coordinator"):
        pods = pod_specs(render(backend, {"signal_account": account}, runtime=is_runtime))
        has_token = [pod["automountServiceAccountToken"] for pod in pods]
        variables = {variable["name"] for variable in pods[0]["containers"][0]["env"]}
        assert has_token == [bool(account), False]
        assert ("REKINDLE_JOB" in variables) == bool(account)
        assert pods[0]["serviceAccountName"] == (account or "default")
        assert pods[1]["serviceAccountName"] == "default"


def test_each_worker_has_its_own_job_and_the_job_set_ends_with_the_coordinator() -> None:
    manifest = render("jobset", workers=3)
    jobs = jobs_of(manifest)
    assert manifest["spec"]["successPolicy"] == {
        "operator": "All",
        "targetReplicatedJobs": ["lead"],
    }
    assert manifest["spec"]["failurePolicy"] == {"maxRestarts": 0}
    worker = jobs["worker"]["template"]["spec"]
    assert jobs["worker"]["replicas"] == 3
    assert worker["completions"] == worker["parallelism"] == 1
    assert worker["template"]["spec"]["restartPolicy"] == "OnFailure"
    assert worker["backoffLimit"] > 10_000
    lead = jobs["lead"]["template"]["spec"]
    codes = lead["podFailurePolicy"]["rules"][-1]["onExitCodes"]
    assert lead["template"]["spec"]["restartPolicy"] == "Never", "a podFailurePolicy needs it"
    assert codes["values"] == sorted(codes["values"])
    assert {137, 143} <= set(codes["values"])
    (container,) = worker["template"]["spec"]["containers"]
    assert {"name": "MASTER_ADDR", "value": "j-lead-0-0.j"} in container["env"]


def test_with_the_feature_gate_a_lost_worker_is_replaced_without_back_off() -> None:
    manifest = render("jobset", {"restart_job": True})
    (rule,) = manifest["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobAndIgnoreMaxRestarts"
    assert rule["targetReplicatedJobs"] == ["worker"]
    assert jobs_of(manifest)["worker"]["template"]["spec"]["backoffLimit"] == 0


def test_a_train_job_sets_its_nodes_and_its_runtime_has_all_other_settings() -> None:
    job = render("trainjob", workers=3)
    runtime = render("trainjob", runtime=True, workers=3)
    assert job["spec"]["runtimeRef"] == {"name": "j", "kind": "TrainingRuntime"}
    assert job["spec"]["trainer"] == {"numNodes": 3, "numProcPerNode": 1}
    node = jobs_of(runtime)["node"]["template"]
    assert node["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert node["spec"]["template"]["spec"]["containers"][0]["name"] == "node"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_queue_and_its_priority_are_labels_of_the_job(backend: str) -> None:
    labels = render(backend, QUEUE_SETTINGS | {"queue_priority": "low"})["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "train"
    assert labels["kueue.x-k8s.io/priority-class"] == "low"


@pytest.mark.parametrize("backend", BACKENDS)
def test_pods_with_two_gpus_run_two_workers_each(backend: str) -> None:
    cluster = {"pods": {"train": {"gpus": 2}}}
    text = json.dumps(render(backend, cluster, workers=4))
    assert any(
        field in text
        for field in ('"nprocPerNode": "2"', '"numProcPerNode": 2', '"PET_NPROC_PER_NODE"')
    )
    with pytest.raises(ConfigError, match=r"multiple of cluster\.pods\.train\.gpus"):
        render(backend, cluster, workers=3)


@pytest.mark.parametrize(
    "sets, message",
    [
        (["cluster.backend=job_set"], "'pytorchjob', 'jobset' or 'trainjob'"),
        (["cluster.restart_job=true"], "requires JobSet, but cluster.backend is pytorchjob"),
        (
            ["cluster.queue_priority=low"],
            "only Kueue has such priorities. Set cluster.gang to kueue",
        ),
        (
            ["cluster.backend=jobset", f"name={'n' * 30}"],
            'the task name "train-transformer" must have at most 3 characters',
        ),
    ],
)
def test_conflicting_settings_are_rejected(sets: list[str], message: str) -> None:
    with pytest.raises(RekindleError, match=message):
        render_manifest(load_config("configs/demo.yaml", sets, {}).config)
