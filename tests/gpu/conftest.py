"""Fixtures with the device of the tests for GPUs. `REKINDLE_TEST_DEVICE=cpu` runs the same tests on
a machine without a GPU, which shows that the tests themselves work."""

import os

import pytest


@pytest.fixture(scope="session")
def device() -> str:
    """The device of the tests: `cuda`, or the device in REKINDLE_TEST_DEVICE. The test is skipped
    if this machine lacks the device."""
    import torch

    name = os.environ.get("REKINDLE_TEST_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return name


@pytest.fixture(scope="session")
def worker_devices(device: str) -> list[dict[str, str]]:
    """The environment variables of two workers, each with a device of its own. The test is skipped
    on a machine with a single GPU, because NCCL refuses two processes on one GPU."""
    import torch

    if device == "cpu":
        return [{}, {}]
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
