"""Functions for tests of checkpoints: change the state of a process, and read the store."""

from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from rekindle.storage import Store
from rekindle.training.checkpoint.durable import RankAndGroupSize
from rekindle.training.checkpoint.manager import WorkerCheckpoints
from tests.chaos.faults import Proxy

unique_numbers = count()
IDENTITY = "ab" * 32
OpenCheckpoints = Callable[..., WorkerCheckpoints]
LedgerEvents = list[tuple[str, dict[str, Any]]]


def get_remaining_seconds() -> float:
    """Return enough seconds for the upload of the last state."""
    return 30.0


class StatefulData:
    """Training data with a state: the sum of the steps with which `advance` was called."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def advance(self, step: int) -> None:
        self.position += step


def open_store_behind(proxy: Proxy, s3: Store) -> Store:
    """Return the store `s3`, whose requests go through `proxy`."""
    return Store(s3.bucket, proxy.url)


def restore_alone(checkpoints: WorkerCheckpoints) -> int:
    """Restore the newest state as the only worker of a group does. Return the step of the restored
    state."""
    checkpoints.restore(checkpoints.state.step)
    return checkpoints.state.step


def set_state(checkpoints: WorkerCheckpoints, step: int) -> None:
    """Replace the state of the process by the state after `step` updates. The first quarter of this
    state never changes."""
    checkpoints.state.step = step
    changing_part = checkpoints.state.memory[len(checkpoints.state.memory) // 4 :]
    changing_part.copy_(
        torch.randn(len(changing_part), generator=torch.Generator().manual_seed(step))
    )


def train_and_upload(checkpoints: WorkerCheckpoints, step: int) -> None:
    """Make step `step`, and upload the resulting state."""
    set_state(checkpoints, step)
    assert checkpoints.upload_current_state(RankAndGroupSize(0, 1), get_remaining_seconds)


def finish_upload(checkpoints: WorkerCheckpoints) -> bool:
    """Wait until the current upload of a checkpoint has ended. Return True if the upload was
    successful."""
    assert checkpoints._thread
    assert checkpoints._upload
    checkpoints._thread.join(60)
    return not checkpoints._upload.problem


def list_keys(checkpoints: WorkerCheckpoints, folder: str = "") -> list[str]:
    """Return the keys of the stored objects in `folder` (default: all objects)."""
    stored_objects = checkpoints.remote.store.list(f"{checkpoints.remote.prefix}/{folder}")
    return [stored_object.key for stored_object in stored_objects]


def have_equal_states(checkpoints: WorkerCheckpoints, other: WorkerCheckpoints) -> bool:
    return checkpoints.state.step == other.state.step and torch.equal(
        checkpoints.state.memory, other.state.memory
    )
