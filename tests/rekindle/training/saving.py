"""What tests of checkpoints do to those of one process, and how they look at what is in the store."""

from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from rekindle.storage import Store
from rekindle.training.checkpoint.manager import Checkpoints
from tests.chaos.faults import Proxy

numbers = count()
US = "ab" * 32
Open = Callable[..., Checkpoints]
Events = list[tuple[str, dict[str, Any]]]


def soon() -> float:
    return 30.0


class Stream:
    """A user's data loader that counts."""

    def __init__(self) -> None:
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]

    def advance(self, step: int) -> None:
        self.place += step


def behind(proxy: Proxy, s3: Store) -> Store:
    return Store(s3.bucket, proxy.url)


def begin(checkpoints: Checkpoints) -> int:
    """As a process that finds nobody training."""
    checkpoints.restore(checkpoints.state.step)
    return checkpoints.state.step


def update(checkpoints: Checkpoints, step: int) -> None:
    """As if `step` updates had been made; the first quarter of the state never changes."""
    checkpoints.state.step = step
    changing = checkpoints.state.memory[len(checkpoints.state.memory) // 4 :]
    changing.copy_(torch.randn(len(changing), generator=torch.Generator().manual_seed(step)))


def train(checkpoints: Checkpoints, step: int) -> None:
    update(checkpoints, step)
    assert checkpoints.flush((0, 1), soon)


def finished(checkpoints: Checkpoints) -> bool:
    """Wait for a checkpoint that is under way."""
    assert checkpoints._thread and checkpoints._upload
    checkpoints._thread.join(60)
    return not checkpoints._upload.problem


def keys(checkpoints: Checkpoints, kind: str = "") -> list[str]:
    return [entry.key for entry in checkpoints.remote.store.list(f"{checkpoints.remote.prefix}/{kind}")]


def same(checkpoints: Checkpoints, other: Checkpoints) -> bool:
    return checkpoints.state.step == other.state.step and torch.equal(checkpoints.state.memory, other.state.memory)
