"""Workers beside a job: what is rendered for them, so that a queue can take each of them back alone."""

import json
from typing import Any

import pytest

from rekindle.blocks.jobs.backends import BACKENDS
from rekindle.blocks.jobs.harvest import harvest
from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.blocks.settings import ClusterConfig
from rekindle.errors import ConfigError, RekindleError
from rekindle.training.spec import TrainConfig

HARVEST = ["cluster.harvest=true", "train.workers=2", "train.min_workers=1", "train.max_workers=4"]
QUEUED = {"gang": "kueue", "queue": "train", "queue_priority": "normal", "harvest_priority": "idle"}


def rendered(*sets: str) -> dict[str, dict[str, Any]]:
    """The templates that apply an object, by its kind."""
    manifest = render_manifest(load_config("configs/demo.yaml", [*HARVEST, *sets], {}).config)
    resources = [template for template in manifest["spec"]["templates"] if "manifest" in template.get("resource", {})]
    return {
        json.loads(template["resource"]["manifest"])["kind"]: template
        for template in resources
        if template["name"].startswith("train")
    }


def workers(cluster: dict[str, Any], backend: str = "pytorchjob", **train: Any) -> dict[str, Any]:
    config = ClusterConfig.model_validate({"harvest": True, "backend": backend} | cluster)
    section = TrainConfig.model_validate({"min_workers": 1, "workers": 2, "max_workers": 4} | train)
    return harvest("j", section, config, ["--seed=7"], BACKENDS[backend].host)


@pytest.mark.parametrize(("backend", "kind"), [("pytorchjob", "PyTorchJob"), ("jobset", "JobSet")])
def test_the_job_has_the_workers_that_it_needs_and_the_deployment_the_others(backend: str, kind: str) -> None:
    templates = rendered(f"cluster.backend={backend}")
    job, others = (json.loads(templates[each]["resource"]["manifest"]) for each in (kind, "Deployment"))
    if backend == "pytorchjob":
        assert job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 1
    else:
        assert [role["replicas"] for role in job["spec"]["replicatedJobs"]] == [1, 1]
    assert others["spec"]["replicas"] == 3
    assert others["metadata"]["name"] == job["metadata"]["name"]
    assert templates["Deployment"]["resource"]["setOwnerReference"], "it goes when the workflow does"


@pytest.mark.parametrize("backend", BACKENDS)
def test_they_are_told_where_the_coordinator_is_and_know_the_secret(backend: str) -> None:
    (container,) = workers({}, backend)["spec"]["template"]["spec"]["containers"]
    env = {variable["name"]: variable for variable in container["env"]}
    assert env["MASTER_ADDR"]["value"] == BACKENDS[backend].host.format("j")
    assert env["REKINDLE_SECRET"]["valueFrom"]["secretKeyRef"]["name"] == "j"


def test_each_is_a_workload_of_low_priority_and_the_job_is_not() -> None:
    labels = workers(QUEUED)["metadata"]["labels"]
    assert (labels["kueue.x-k8s.io/queue-name"], labels["kueue.x-k8s.io/priority-class"]) == ("train", "idle")
    assert "priorityClassName" not in workers(QUEUED)["spec"]["template"]["spec"]
    assert workers({"harvest_priority": "idle"})["spec"]["template"]["spec"]["priorityClassName"] == "idle"


def test_a_pod_with_two_gpus_is_two_workers() -> None:
    cluster = {"pods": {"train": {"gpus": 2}}}
    assert workers(cluster, min_workers=2, workers=2)["spec"]["replicas"] == 1
    with pytest.raises(ConfigError, match="must be a multiple of"):
        workers(cluster, max_workers=3)


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["cluster.harvest_priority=idle"], "cluster.harvest is off. Set it to true"),
        (["cluster.harvest=true", "cluster.gang=volcano", "cluster.queue=q"], "only Kueue queues pods one by one"),
        (["cluster.harvest=true"], "train.max_workers is 2"),
    ],
)
def test_what_cannot_be_harvested_is_said(sets: list[str], says: str) -> None:
    with pytest.raises(RekindleError, match=says):
        render_manifest(load_config("configs/demo.yaml", ["train.min_workers=2", *sets], {}).config)
