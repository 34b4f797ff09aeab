"""Fixtures: checkpoints below a key prefix of a real S3 endpoint, and a simulated metadata service
of a cloud."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rekindle.storage import Store
from rekindle.training.checkpoint import durable
from rekindle.training.checkpoint.manager import WorkerCheckpoints
from rekindle.training.local_dataset import LoaderState
from rekindle.training.spec import TrainConfig
from rekindle.training.training_state import TrainingState
from tests.chaos.faults import Proxy
from tests.rekindle.training.launch.metadata import Metadata
from tests.rekindle.training.saving import IDENTITY, LedgerEvents, OpenCheckpoints, unique_numbers


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make chunks so small that a small state has several chunks, and write snapshots to a folder
    of the test."""
    monkeypatch.setattr(durable, "CHUNK_BYTES", 1024)
    monkeypatch.setenv("REKINDLE_SHM", str(tmp_path))


@pytest.fixture
def events() -> LedgerEvents:
    """Return the list to which `open_checkpoints` adds the events for the ledger."""
    return []


@pytest.fixture
def open_checkpoints(
    small_chunks: None, s3: Store, events: LedgerEvents, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OpenCheckpoints]:
    """Return a function that opens the checkpoints of one prefix as a new process does, on a new
    node or on the node `node`."""
    prefix = f"checkpoints-{next(unique_numbers)}"
    opened = list[WorkerCheckpoints]()

    def open_on_node(
        *,
        node: str = "",
        identity: str = IDENTITY,
        torch_build: str = "2",
        width: int = 40,
        store: Store = s3,
        data: Any = None,
        **config: Any,
    ) -> WorkerCheckpoints:
        monkeypatch.setenv("POD_NAME", node or f"node-{next(unique_numbers)}")
        torch.manual_seed(1)
        state = TrainingState(
            torch.nn.Linear(width, 20), TrainConfig.model_validate(config), torch.device("cpu")
        )

        checkpoints = WorkerCheckpoints(
            store.short_retries(),
            prefix,
            identity,
            {"torch": torch_build},
            state,
            LoaderState(data),
            lambda event, **fields: events.append((event, fields)),
            threading.Event(),
        )

        assert checkpoints.snapshots.ready.wait(10)
        opened.append(checkpoints)

        return checkpoints

    yield open_on_node
    for checkpoints in opened:
        checkpoints.close(remove_snapshots=True)


@pytest.fixture
def proxy(s3: Store) -> Iterator[Proxy]:
    with Proxy(s3.endpoint or "") as proxy:
        yield proxy


@pytest.fixture
def cloud() -> Iterator[Metadata]:
    with Metadata() as server:
        yield server
