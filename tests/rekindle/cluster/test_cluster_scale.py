"""Tests of scaling the number of workers of a training on a cluster, whose pods have several
GPUs."""

from pathlib import Path

import pytest
import yaml

from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.errors import ConfigError
from rekindle.operations.scale import scale_training
from tests.rekindle.cluster.server import ApiServer

CONFIG = Path(__file__).parents[3] / "configs/digits.yaml"
JOBS = "/apis/kubeflow.org/v1/namespaces/models/pytorchjobs"


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "example.com/chip"])
def test_workers_are_multiples_of_the_gpus_of_a_pod_whatever_other_devices_it_has(
    server: ApiServer, cluster: Cluster, resource: str
) -> None:
    sets = [
        "train.workers=4",
        "train.max_workers=8",
        "train.virtual_workers=8",
        "cluster.pods.train.gpus=2",
    ]

    manifest = render_manifest(
        load_config(CONFIG, [*sets, f"cluster.pods.train.gpu_resource={resource}"]).config
    )
    texts = [item.get("resource", {}).get("manifest", "") for item in manifest["spec"]["templates"]]
    (job,) = [yaml.safe_load(text) for text in texts if "PyTorchJob" in text]
    job["metadata"] = {"name": "digits-a-train"}
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    container["resources"]["limits"]["rdma/hca"] = 1
    container["resources"]["limits"]["vpc.amazonaws.com/efa"] = 4
    server.put(JOBS, job)

    with pytest.raises(ConfigError, match=r"5 workers: .* in multiples of 2, the GPUs of a pod"):
        scale_training(Path("none"), cluster, "digits-a", "train", 5)

    assert scale_training(Path("none"), cluster, "digits-a", "train", 6)["before"] == 4
    (patch,) = [body for method, _, body in server.requests if method == "PATCH"]
    assert patch == {"spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": 3}}}}


@pytest.mark.parametrize("processes", ["\u00b2", "0", "9" * 5000])
def test_a_job_with_a_strange_number_of_processes_can_be_scaled(
    server: ApiServer, cluster: Cluster, processes: str
) -> None:
    sets = ["train.workers=2", "train.max_workers=8", "train.virtual_workers=8"]
    manifest = render_manifest(load_config(CONFIG, sets).config)
    texts = [item.get("resource", {}).get("manifest", "") for item in manifest["spec"]["templates"]]
    (job,) = [yaml.safe_load(text) for text in texts if "PyTorchJob" in text]
    job["metadata"] = {"name": "digits-a-train"}
    job["spec"]["nprocPerNode"] = processes
    server.put(JOBS, job)
    assert scale_training(Path("none"), cluster, "digits-a", "train", 3)["before"] == 2
