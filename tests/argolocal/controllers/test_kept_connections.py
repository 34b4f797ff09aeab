"""Clients with keep-alive connections, during switches between real model servers behind the local
Service."""

import asyncio
import json
import random
import select
import socket
from collections import Counter
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import psutil
import pytest

from argolocal.runner.cluster import LocalCluster
from rekindle.local.local_objects import LocalObjects
from rekindle.storage import Store
from tests.rekindle.serving import running
from tests.waiting import until

DRAIN_S = 0.5
GRACE_S = 2.0
SERVE = ["python", "-m", "rekindle", "step", "steps.serve", "--host=$(POD_IP)", "--port=8080"]
SERVE += [f"--drain-seconds={DRAIN_S}"]
BODY = b'{"instances": [{"id": "a"}]}'
SLOW_BODY = b'{"instances": [{"id": "a", "sleep": 0.5}]}'
REQUEST, SLOW_REQUEST = (
    f"POST {running.PREDICT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    + body
    for body in (BODY, SLOW_BODY)
)


class Releases:
    """Deployments of versions 1 and 2 of a model, each with a ready server, and the Service of
    version 1."""

    def __init__(
        self, cluster: LocalCluster, port: int, env: dict[str, str], grace_s: float = GRACE_S
    ) -> None:
        self.cluster = cluster
        self.port = port
        self.kinds = cluster.kinds.controllers(cluster, cluster.home / "run")
        self.objects = LocalObjects(cluster)
        for version in ("1", "2"):
            running.write_release(Store.from_env(), make_prefix(version), version=version)
            self.kinds["Deployment"].apply(make_deployment(version, env, grace_s))
        for version in ("1", "2"):
            self.await_replicas(version, 1)
        self.kinds["Service"].apply(make_service("1", port))
        until("version 1 to answer", lambda: self.answering() == "1")

    def switch(self, version: str) -> None:
        """Let the Service connect new clients to this version."""
        self.kinds["Service"].apply(make_service(version, self.port))
        until("the version to answer", lambda: self.answering() == version)

    def answering(self) -> str:
        """Return the version that answers a new client, or "" if no version answers."""
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}{running.MODEL}").json()["version"]
        except httpx.TransportError:
            return ""

    def scale(self, version: str, count: int) -> None:
        self.objects.patch("Deployment", f"echo-{version}", {"spec": {"replicas": count}})

    def await_replicas(self, version: str, count: int) -> None:
        """Wait until `count` pods are ready, and all other pods have ended."""
        pods = self.cluster.home / "deployments" / f"echo-{version}" / "pods"

        def read_status() -> dict[str, Any]:
            return (self.kinds["Deployment"].read(f"echo-{version}") or {}).get("status", {})

        until(
            "all pods to be ready",
            lambda: (
                read_status().get("readyReplicas", 0) == read_status().get("replicas", 0) == count
            ),
        )
        until("other pods to be gone", lambda: len(list(pods.iterdir())) <= count)

    def supervisor(self) -> psutil.Process:
        record = json.loads((self.cluster.home / "deployments/supervisor.json").read_text())
        return psutil.Process(record["pid"])


@pytest.fixture
def env(s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in s3_environment.items():
        monkeypatch.setenv(name, value)
    return s3_environment


def make_prefix(version: str) -> str:
    return running.prefix_of(f"kept-{version}")


def make_deployment(version: str, env: dict[str, str], grace_s: float) -> dict[str, Any]:
    probe = {
        "httpGet": {"path": "/health/ready", "port": "http"},
        "periodSeconds": 0.1,
        "failureThreshold": 300,
    }

    variables = {**env, "PYTHONPATH": str(Path(running.__file__).parent)}

    container = {
        "name": "serve",
        "image": "any",
        "command": [*SERVE, f"--grace-seconds={grace_s}", f"--model={make_prefix(version)}"],
        "ports": [{"name": "http", "containerPort": 8080}],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *({"name": name, "value": value} for name, value in variables.items()),
        ],
        "startupProbe": probe,
        "readinessProbe": probe | {"failureThreshold": 2},
    }

    labels = {"version": version}
    pod = {"containers": [container], "terminationGracePeriodSeconds": int(grace_s + DRAIN_S) + 5}
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {"selector": {"matchLabels": labels}, "replicas": 1, "template": template}
    metadata = {"name": f"echo-{version}", "labels": labels}

    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


def make_service(version: str, port: int) -> dict[str, Any]:
    spec = {
        "selector": {"version": version},
        "ports": [{"name": "http", "port": port, "targetPort": "http"}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "echo"}, "spec": spec}


def has_server_closed(writer: asyncio.StreamWriter) -> bool:
    """Return True if the server has closed the connection; clients check this before they reuse a
    connection."""
    poll = select.poll()
    poll.register(writer.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return writer.is_closing() or bool(poll.poll(0))


class Clients:
    """Clients that keep a connection, pause for up to longer than a server needs to exit, and then
    send another request."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.over = Event()
        # version or error → count
        self.answers: Counter[str] = Counter()
        self.thread = Thread(target=lambda: asyncio.run(self.run()))

    def __enter__(self) -> "Clients":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    async def run(self) -> None:
        await asyncio.gather(*(self.client(random.Random(number)) for number in range(100)))

    async def client(self, draw: random.Random) -> None:
        while not self.over.is_set():
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                while not has_server_closed(writer) and not self.over.is_set():
                    writer.write(REQUEST)
                    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                    await reader.readexactly(
                        int(head.partition("content-length: ")[2].partition("\r")[0])
                    )
                    self.answers[head.partition("model-version: ")[2].partition("\r")[0]] += 1

                    if "connection: close" in head:
                        break

                    await asyncio.sleep(draw.uniform(0, 2 * (DRAIN_S + GRACE_S)))

                writer.close()
            except (OSError, asyncio.IncompleteReadError) as error:
                self.answers[repr(error)] += 1


def connect_client(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def send_request(client: socket.socket) -> str:
    """Send one request to the Service and return the head of the answer."""
    client.sendall(REQUEST)
    return read_answer_head(client)


def read_answer_head(client: socket.socket) -> str:
    """Return the head of the next answer, whose body ends with the model's bracket."""
    received = b""
    while not received.endswith(b"}]}"):
        data = client.recv(1000)
        assert data, f"closed after {received!r}"
        received += data
    return received.decode().lower()


@pytest.mark.slow
def test_a_switch_loses_no_request_of_a_client_that_keeps_its_connection(
    cluster: LocalCluster, port: int, env: dict[str, str]
) -> None:
    releases = Releases(cluster, port, env)
    with Clients(port) as clients:
        for new, old in [("2", "1"), ("1", "2")]:
            releases.switch(new)
            releases.scale(old, 0)
            releases.await_replicas(old, 0)
            releases.scale(old, 1)
            releases.await_replicas(old, 1)
    assert clients.answers.keys() == {"1", "2"}


@pytest.mark.slow
def test_a_request_to_a_terminating_server_is_answered_by_the_next_server(
    cluster: LocalCluster, port: int, env: dict[str, str]
) -> None:
    releases = Releases(cluster, port, env, grace_s=1)
    with connect_client(port) as client:
        assert "model-version: 1" in send_request(client)
        releases.switch("2")
        supervisor = releases.supervisor()
        (server,) = [
            child for child in supervisor.children() if make_prefix("1") in str(child.cmdline())
        ]
        releases.scale("1", 0)
        until("the server to stop listening", lambda: not is_listening(server))
        # the Service has already received the next request when the server ends
        supervisor.suspend()

        try:
            client.sendall(REQUEST)
            until("the server to end", lambda: server.status() == psutil.STATUS_ZOMBIE)
        finally:
            supervisor.resume()

        assert "model-version: 2" in read_answer_head(client)


@pytest.mark.slow
def test_an_idle_client_keeps_its_connection_when_its_server_ends(
    cluster: LocalCluster, port: int, env: dict[str, str]
) -> None:
    releases = Releases(cluster, port, env, grace_s=1)
    with connect_client(port) as client:
        assert "model-version: 1" in send_request(client)
        releases.switch("2")
        releases.scale("1", 0)
        releases.await_replicas("1", 0)
        head = send_request(client)
        assert "model-version: 2" in head
        assert "connection: close" not in head


@pytest.mark.slow
def test_a_client_that_ends_its_side_of_the_connection_gets_the_answer(
    cluster: LocalCluster, port: int, env: dict[str, str]
) -> None:
    Releases(cluster, port, env)
    with connect_client(port) as client:
        # the client's end of the connection arrives at the server before the answer begins
        client.sendall(SLOW_REQUEST)
        client.shutdown(socket.SHUT_WR)
        assert "connection: close" in read_answer_head(client)
        assert client.recv(1) == b""


def is_listening(server: psutil.Process) -> bool:
    return any(connection.status == psutil.CONN_LISTEN for connection in server.net_connections())


@pytest.mark.slow
def test_down_does_not_wait_for_clients_that_keep_their_connections(
    cluster: LocalCluster, port: int, env: dict[str, str]
) -> None:
    Releases(cluster, port, env, grace_s=600)
    with connect_client(port) as client, connect_client(port) as silent:
        assert "model-version: 1" in send_request(client)
        down_thread = Thread(target=cluster.down, daemon=True)
        down_thread.start()
        down_thread.join(60)
        assert not down_thread.is_alive()
        assert client.recv(1) == b""
        assert silent.recv(1) == b""
