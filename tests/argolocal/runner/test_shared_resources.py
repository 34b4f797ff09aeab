"""A pod waits for a GPU that another run uses, and sees only its own GPUs."""

import threading
from pathlib import Path
from typing import Any

import pytest

from argolocal.common import program
from argolocal.runner.cluster import LocalCluster
from argolocal.runner.run import LocalRun
from argolocal.state.machine_resources import MachineResources, PodRequest, find_memory
from tests import builders
from tests.argolocal.running import execute_manifest
from tests.waiting import until

GPU = {"limits": {"nvidia.com/gpu": 1}}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalCluster:
    monkeypatch.setenv(program.environment_variable("GPUS"), "2")
    return LocalCluster(tmp_path)


def make_pod_workflow(script: str, **template: Any) -> dict[str, Any]:
    container = builders.make_shell_container(script, resources=GPU)
    return builders.make_workflow({"name": "main", "container": container, **template})


def test_a_pod_waits_for_a_gpu_and_sees_only_this_one(cluster: LocalCluster) -> None:
    other = MachineResources(cluster.home, 2, find_memory())
    assert other.acquire("first", PodRequest(gpus=1))
    assert other.acquire("second", PodRequest(gpus=1))
    log = cluster.home / "runs/w/logs/w.log"

    def release() -> None:
        until("the pod to wait", lambda: log.exists() and "waits for GPUs: 1" in log.read_text())
        other.release("second")

    thread = threading.Thread(target=release)
    thread.start()
    status = execute_manifest(make_pod_workflow("echo device $CUDA_VISIBLE_DEVICES"), {}, cluster)
    thread.join()
    assert status["phase"] == "Succeeded"
    assert "device 1" in log.read_text()
    # the first run has released its GPU
    assert other.acquire("third", PodRequest(gpus=2))


def test_a_pod_that_waits_for_a_gpu_ends_at_its_deadline(cluster: LocalCluster) -> None:
    other = MachineResources(cluster.home, 2, find_memory())
    assert other.acquire("all", PodRequest(gpus=2))
    run = LocalRun.create(make_pod_workflow("true", activeDeadlineSeconds=1), {}, cluster)
    status = run.run()
    assert status["phase"] == "Failed"
    assert "deadline" in status["message"]
