"""Fixtures for tests of controllers: a free port, and a cluster whose Deployments are stopped after
the test."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from argolocal.runner.cluster import LocalCluster
from tests.ports import free_port


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    cluster = LocalCluster(tmp_path)
    yield cluster
    cluster.down()
    assert not subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True).stdout, (
        "down left something"
    )
