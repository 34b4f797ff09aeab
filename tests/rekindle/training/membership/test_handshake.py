"""Who takes part in a run: processes that know its secret. All others change nothing, and cost next to nothing."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import psutil
import pytest

from rekindle.storage import Store
from rekindle.training.membership import client, handshake
from rekindle.training.membership.protocol import PROTOCOL
from rekindle.training.membership.server import MAX_STRANGERS, Coordinator
from rekindle.training.spec import TrainingSpec
from tests.ports import free_port
from tests.rekindle.training.crew import SECRET, Crew, flags
from tests.waiting import until

HELLO = {"protocol": PROTOCOL, "id": "1", "name": "a", "address": "127.0.0.1:1", "fingerprint": {}, "step": -1}
JOIN = {"join": HELLO | {"generation": 0, "group": 0, "peers": []}}
VERDICT = {"failed": "it shall end", "code": 65, "name": "a", "temporary": False}
numbers = count()


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(handshake.VARIABLE, SECRET)


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Coordinator, tuple[str, int]]]:
    """A coordinator of a run of its own in this process, and its address."""
    prefix = f"handshake-{next(numbers)}"
    settings = {"workload": "w", "dataset": "d", "digest": "x", "out": f"{prefix}/model", "checkpoints": prefix}
    port = free_port()
    coordinator = Coordinator(TrainingSpec.model_validate(settings), SECRET.encode())
    run = asyncio.create_task(coordinator.run("127.0.0.1", port))
    await asyncio.to_thread(until, "the coordinator to listen", lambda: run.done() or listens(port))
    yield coordinator, ("127.0.0.1", port)
    coordinator.end(0)
    await run


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def lines(*messages: Any) -> bytes:
    return b"".join(json.dumps(message).encode() + b"\n" for message in messages)


FORGED = {"nonce": "n", "proof": handshake.proof(b"another secret", "worker", "", "n")}


@pytest.mark.parametrize(
    "attack",
    [
        lines(VERDICT),
        lines(JOIN, VERDICT),
        lines(FORGED, JOIN, VERDICT),
        lines({"nonce": "n", "proof": ""}, VERDICT),
        lines({"nonce": "n"}, VERDICT),
        lines({"nonce": 1, "proof": 2}, VERDICT),
        lines({"nonce": "\ud800", "proof": "\ud800"}, VERDICT),
        lines([], VERDICT),
        b"x" * 100_000,
        b"[" * 500 + b"\n",
        b"\xff\n" + lines(VERDICT),
    ],
    ids=["verdict", "join", "forged", "empty", "none", "numbers", "surrogates", "list", "endless", "deep", "bytes"],
)
def test_who_does_not_know_the_secret_is_not_heard(s3: Store, attack: bytes) -> None:
    async def scene() -> None:
        async with serving() as (coordinator, address):
            reader, writer = await asyncio.open_connection(*address)
            assert b"nonce" in await reader.readline()
            writer.write(attack)
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 10) == b""  # closed, and nothing said
            membership = coordinator.membership
            assert not (membership.alive or membership.verdict or membership.events or coordinator.exit_code.done())
            assert not coordinator.strangers

    asyncio.run(scene())


def test_a_proof_is_of_no_use_on_another_connection(s3: Store) -> None:
    async def scene() -> None:
        async with serving() as (coordinator, address):
            reader, writer = await asyncio.open_connection(*address)
            nonce = json.loads(await reader.readline())["nonce"]
            proof = lines({"nonce": "n", "proof": handshake.proof(SECRET.encode(), "worker", nonce, "n")})
            writer.write(proof + lines(JOIN))
            answer = json.loads(await reader.readline())
            assert answer == {"proof": handshake.proof(SECRET.encode(), "coordinator", nonce, "n")}
            assert b"open" in await reader.readline()
            assert list(coordinator.membership.alive) == ["1"]
            reader, writer = await asyncio.open_connection(*address)
            writer.write(proof + lines(VERDICT))
            await asyncio.wait_for(reader.read(), 10)
            assert not coordinator.membership.verdict

    asyncio.run(scene())


def test_who_says_nothing_is_not_waited_for(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "SECONDS", 0.1)

    async def scene() -> None:
        async with serving() as (coordinator, address):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b'{"nonce": ')
            await asyncio.wait_for(reader.read(), 10)
            assert not coordinator.strangers

    asyncio.run(scene())


def test_a_crowd_of_strangers_costs_no_memory_and_keeps_no_worker_out(crew: Crew) -> None:
    coordinator = crew.coordinator(flags("crowd", workers=1))
    address = crew.meeting["MASTER_ADDR"], int(crew.meeting["MASTER_PORT"])
    crew.until(lambda: _open(address))
    process, sizes = psutil.Process(coordinator.process.pid), list[int]()
    for _ in range(6):
        strangers = [socket.create_connection(address) for _ in range(3 * MAX_STRANGERS)]
        for stranger in strangers:
            with suppress(OSError):  # it is closed already
                stranger.sendall(b"x" * 400)
        with client.connect(address) as worker:
            worker.sendall(lines(JOIN))
            assert b"open" in worker.recv(1000)
        assert process.num_fds() < MAX_STRANGERS + 100
        for stranger in strangers:
            stranger.close()
        sizes.append(process.memory_info().rss)
    assert sizes[-1] - sizes[1] < 5 << 20, "the first rounds are its start"
    assert coordinator.process.exitcode is None
    assert coordinator.said().count("without this run's secret") == 1, "a log that strangers can fill"


def _open(address: tuple[str, int]) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(address) == 0


def test_a_worker_tells_nothing_to_who_only_says_that_it_is_the_coordinator() -> None:
    heard = list[bytes]()

    def pretend(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(lines({"nonce": "n"}))
            heard.append(connection.recv(4096))
            connection.sendall(lines({"proof": json.loads(heard[0])["proof"]}))  # its own, reflected
            heard.append(connection.recv(4096))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=pretend, args=(server,))
        thread.start()
        with pytest.raises(ConnectionError, match="does not prove that it is this run's coordinator"):
            client.connect(server.getsockname())
        thread.join(10)
    assert heard[1] == b"" and SECRET.encode() not in heard[0]


@pytest.mark.parametrize("given", ["", "short"])
def test_without_a_secret_nobody_begins(crew: Crew, given: str) -> None:
    argv, missing = flags("none"), {handshake.VARIABLE: given}
    for member in (crew.coordinator(argv, **missing), crew.light_launcher("a", argv, **missing)):
        assert member.code() == 78
        assert f"{handshake.VARIABLE} is {'too short' if given else 'not set'}" in member.said()
