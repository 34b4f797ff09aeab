"""Tests of probes: a hanging server must not fail other probes or delay the exit of the process."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from argolocal.pods.probes import Probe
from tests.http_server import Answer, HttpServer


@pytest.fixture
def answering_port() -> Iterator[int]:
    with HttpServer(lambda _: Answer()) as server:
        yield server.port


@pytest.fixture
def silent_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield server.getsockname()[1]


def make_probe(port: int) -> Probe:
    return Probe(
        {"readinessProbe": {"httpGet": {"port": port}, "timeoutSeconds": 3600}}, "readinessProbe"
    )


def test_hanging_servers_do_not_delay_other_probes(answering_port: int, silent_port: int) -> None:
    async def run_probes() -> bool:
        hanging = [
            asyncio.create_task(make_probe(silent_port).passes("127.0.0.1")) for _ in range(64)
        ]
        passed = await make_probe(answering_port).passes("127.0.0.1")
        assert not any(task.done() for task in hanging)
        return passed

    assert asyncio.run(run_probes())
