"""Fixtures: the pods of a run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rekindle.program.pods import Pods, StartPods


@pytest.fixture
def start_pods(s3_environment: dict[str, str], tmp_path: Path) -> Iterator[StartPods]:
    """Create the pods of a run, which are killed at the end of the test."""
    runs: list[Pods] = []

    def create(command: list[str], **settings: Any) -> Pods:
        runs.append(Pods(s3_environment, tmp_path / str(len(runs)), command, **settings))
        return runs[-1]

    yield create
    for pods in runs:
        pods.close()
