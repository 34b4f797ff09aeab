"""Helpers for tests of checkpoints: change the state of a process, and read the store."""

from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from rekindle.storage import Store
from rekindle.training.checkpoint.durable import RankAndGroupSize
from rekindle.training.checkpoint.manager import WorkerCheckpoints
from tests.chaos.faults import Proxy

numbers = count()
IDENTITY = "ab" * 32
Open = Callable[..., WorkerCheckpoints]
Events = list[tuple[str, dict[str, Any]]]


def soon() -> float:
    return 30.0


class Stream:
    """A data loader with a state: the sum of all steps."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def advance(self, step: int) -> None:
        self.position += step


def store_behind(proxy: Proxy, s3: Store) -> Store:
    return Store(s3.bucket, proxy.url)


def begin(checkpoints: WorkerCheckpoints) -> int:
    """Restore like a process that finds no other worker. Returns the step."""
    checkpoints.restore(checkpoints.state.step)
    return checkpoints.state.step


def update(checkpoints: WorkerCheckpoints, step: int) -> None:
    """Set the state after `step` updates. The first quarter of the state never changes."""
    checkpoints.state.step = step
    changing = checkpoints.state.memory[len(checkpoints.state.memory) // 4 :]
    changing.copy_(torch.randn(len(changing), generator=torch.Generator().manual_seed(step)))


def train(checkpoints: WorkerCheckpoints, step: int) -> None:
    update(checkpoints, step)
    assert checkpoints.upload_current_state(RankAndGroupSize(0, 1), soon)


def finish_upload(checkpoints: WorkerCheckpoints) -> bool:
    """Wait for the current upload. Returns True if it was successful."""
    assert checkpoints._thread
    assert checkpoints._upload
    checkpoints._thread.join(60)
    return not checkpoints._upload.problem


def keys(checkpoints: WorkerCheckpoints, kind: str = "") -> list[str]:
    return [
        entry.key for entry in checkpoints.remote.store.list(f"{checkpoints.remote.prefix}/{kind}")
    ]


def equal(checkpoints: WorkerCheckpoints, other: WorkerCheckpoints) -> bool:
    return checkpoints.state.step == other.state.step and torch.equal(
        checkpoints.state.memory, other.state.memory
    )
