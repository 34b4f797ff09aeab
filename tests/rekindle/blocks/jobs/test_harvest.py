"""Extra workers on idle capacity are rendered as a Deployment, so that a queue can evict each extra
worker individually."""

import json
from typing import Any

import pytest

from rekindle.blocks.jobs.backends import BACKENDS
from rekindle.blocks.jobs.harvest import harvest_deployment
from rekindle.blocks.jobs.members import member_commands
from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.blocks.settings import ClusterConfig
from rekindle.errors import ConfigError, RekindleError
from rekindle.kubernetes_names import WORKLOAD_MODULES
from rekindle.training.spec import TrainConfig

HARVEST = ["cluster.harvest=true", "train.workers=2", "train.min_workers=1", "train.max_workers=4"]
QUEUE_SETTINGS = {
    "gang": "kueue",
    "queue": "train",
    "queue_priority": "normal",
    "harvest_priority": "idle",
}


def render_templates(*sets: str) -> dict[str, dict[str, Any]]:
    """Map kinds of training objects to the templates that apply them."""
    manifest = render_manifest(load_config("configs/demo.yaml", [*HARVEST, *sets], {}).config)
    resources = [
        template
        for template in manifest["spec"]["templates"]
        if "manifest" in template.get("resource", {})
    ]
    return {
        json.loads(template["resource"]["manifest"])["kind"]: template
        for template in resources
        if template["name"].startswith("train")
    }


def make_worker_deployment(
    cluster: dict[str, Any], backend: str = "pytorchjob", **train: Any
) -> dict[str, Any]:
    config = ClusterConfig.model_validate({"harvest": True, "backend": backend} | cluster)
    section = TrainConfig.model_validate({"min_workers": 1, "workers": 2, "max_workers": 4} | train)
    return harvest_deployment(
        "j",
        section,
        config,
        member_commands(WORKLOAD_MODULES, ["--seed=7"]),
        BACKENDS[backend].host,
    )


@pytest.mark.parametrize(("backend", "kind"), [("pytorchjob", "PyTorchJob"), ("jobset", "JobSet")])
def test_the_job_has_the_minimum_of_workers_and_the_deployment_has_the_extra_workers(
    backend: str, kind: str
) -> None:
    templates = render_templates(f"cluster.backend={backend}")
    job, deployment = (
        json.loads(templates[each]["resource"]["manifest"]) for each in (kind, "Deployment")
    )
    if backend == "pytorchjob":
        assert job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 1
    else:
        assert [role["replicas"] for role in job["spec"]["replicatedJobs"]] == [1, 1]

    assert deployment["spec"]["replicas"] == 3
    assert deployment["metadata"]["name"] == job["metadata"]["name"]
    assert templates["Deployment"]["resource"]["setOwnerReference"], (
        "it is deleted with the workflow"
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_extra_workers_get_the_address_of_the_coordinator_and_the_secret(backend: str) -> None:
    (container,) = make_worker_deployment({}, backend)["spec"]["template"]["spec"]["containers"]
    env = {variable["name"]: variable for variable in container["env"]}
    assert env["MASTER_ADDR"]["value"] == BACKENDS[backend].host.format("j")
    assert env["REKINDLE_SECRET"]["valueFrom"]["secretKeyRef"]["name"] == "j"


def test_extra_workers_have_the_harvest_priority() -> None:
    labels = make_worker_deployment(QUEUE_SETTINGS)["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "train"
    assert labels["kueue.x-k8s.io/priority-class"] == "idle"
    assert (
        "priorityClassName"
        not in make_worker_deployment(QUEUE_SETTINGS)["spec"]["template"]["spec"]
    )
    assert (
        make_worker_deployment({"harvest_priority": "idle"})["spec"]["template"]["spec"][
            "priorityClassName"
        ]
        == "idle"
    )


def test_a_pod_with_two_gpus_runs_two_workers() -> None:
    cluster = {"pods": {"train": {"gpus": 2}}}
    assert make_worker_deployment(cluster, min_workers=2, workers=2)["spec"]["replicas"] == 1
    with pytest.raises(ConfigError, match="must be a multiple of"):
        make_worker_deployment(cluster, max_workers=3)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["cluster.harvest_priority=idle"], "cluster.harvest is off. Set cluster.harvest to true"),
        (
            ["cluster.harvest=true", "cluster.gang=volcano", "cluster.queue=q"],
            "only Kueue admits single pods",
        ),
        (["cluster.harvest=true"], "train.max_workers is 2"),
    ],
)
def test_settings_that_prevent_extra_workers_are_rejected(sets: list[str], message: str) -> None:
    with pytest.raises(RekindleError, match=message):
        render_manifest(load_config("configs/demo.yaml", ["train.min_workers=2", *sets], {}).config)
