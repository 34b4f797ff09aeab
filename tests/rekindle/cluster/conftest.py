"""Fixtures: a simulated cluster, which is a small HTTP server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.cluster import kubernetes_api
from rekindle.cluster.kubernetes_api import Cluster
from tests.rekindle.cluster.server import ApiServer


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_api, "BACKOFF_S", 0.01)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    with ApiServer(tmp_path) as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        monkeypatch.delenv("ARGO_SERVER", raising=False)
        yield running


@pytest.fixture
def cluster(server: ApiServer) -> Cluster:
    return Cluster.connect()
