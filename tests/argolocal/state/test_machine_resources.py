"""All runs of one home (directory of runs) share the GPUs and the memory of the machine."""

from pathlib import Path

import pytest

from argolocal.common import program
from argolocal.errors import ConfigError
from argolocal.state.machine_resources import (
    MachineResources,
    PodRequest,
    count_gpus,
    sum_requests,
)

MEMORY = 64 << 30


def visible_gpus(resources: MachineResources, pod: str, gpus: int) -> str | None:
    """Return the GPUs of a pod, or None if the pod must wait."""
    allocation = resources.acquire(pod, PodRequest(gpus=gpus))
    if allocation is None:
        return None
    return allocation.variables.get("CUDA_VISIBLE_DEVICES", "")


def test_a_gpu_is_used_by_one_run_at_a_time(tmp_path: Path) -> None:
    first_runner = MachineResources(tmp_path, 2, MEMORY)
    second_runner = MachineResources(tmp_path, 2, MEMORY)
    assert visible_gpus(first_runner, "a", 1) == "0"
    assert visible_gpus(second_runner, "b", 2) is None
    assert visible_gpus(second_runner, "b", 1) == "1"
    assert visible_gpus(second_runner, "c", 0) == ""
    first_runner.release("a")
    assert visible_gpus(second_runner, "d", 2) == "0,1"
    assert visible_gpus(first_runner, "a", 1) is None


def test_the_pods_of_one_run_share_its_gpus_instead_of_waiting_for_each_other(
    tmp_path: Path,
) -> None:
    resources = MachineResources(tmp_path, 1, MEMORY)
    assert visible_gpus(resources, "worker-0", 1) == "0"
    assert visible_gpus(resources, "worker-1", 1) == "0"
    # the request exceeds the GPUs of the machine, so the pod gets all GPUs
    assert visible_gpus(resources, "worker-2", 8) == "0"

    other = MachineResources(tmp_path, 1, MEMORY)
    for pod in ("worker-0", "worker-1"):
        resources.release(pod)
        assert visible_gpus(other, "b", 1) is None
    resources.release("worker-2")
    assert visible_gpus(other, "b", 1) == "0"


def test_a_pod_waits_for_memory_that_other_runs_have_requested(tmp_path: Path) -> None:
    first_runner = MachineResources(tmp_path, 1, MEMORY)
    second_runner = MachineResources(tmp_path, 1, MEMORY)
    assert first_runner.acquire("a", PodRequest(memory_bytes=48 << 30))
    assert second_runner.acquire("b", PodRequest(gpus=1, memory_bytes=32 << 30)) is None
    # a waiting pod has not reserved anything
    assert visible_gpus(first_runner, "c", 1) == "0"
    first_runner.release("c")
    assert second_runner.acquire("d", PodRequest(memory_bytes=16 << 30))
    first_runner.release("a")
    assert second_runner.acquire("b", PodRequest(gpus=1, memory_bytes=200 << 30))


def test_the_default_of_a_request_is_the_limit() -> None:
    containers = [
        {"resources": {"limits": {"nvidia.com/gpu": 1, "memory": "2Gi"}}},
        {"resources": {"requests": {"memory": "1Gi"}, "limits": {"memory": "4Gi"}}},
        {},
    ]
    assert sum_requests(containers) == PodRequest(1, 3 << 30)
    assert str(PodRequest(1, 3 << 30)) == "GPUs: 1 and 3.2 GB of memory"


def test_a_setting_overrides_the_number_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    name = program.environment_variable("GPUS")
    monkeypatch.setenv(name, "3")
    assert count_gpus() == 3
    monkeypatch.setenv(name, "many")
    with pytest.raises(ConfigError, match=rf"{name} is 'many': it must be a number"):
        count_gpus()
