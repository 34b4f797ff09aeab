"""Fixtures: the nodes of a program."""

from itertools import count
from pathlib import Path

import pytest

from rekindle.storage import Store
from rekindle.training.checkpoint import chunks
from tests.rekindle.program.checkpoints.nodes import Node

numbers = count()


@pytest.fixture
def prefix() -> str:
    return f"program-{next(numbers)}"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 400)


@pytest.fixture
def node(s3: Store, prefix: str, tmp_path: Path) -> Node:
    return Node(s3, prefix, tmp_path / "checkpoints")


@pytest.fixture
def other(s3: Store, prefix: str, tmp_path: Path) -> Node:
    """The node that replaces `node`, with an empty disk."""
    return Node(s3, prefix, tmp_path / "other")
