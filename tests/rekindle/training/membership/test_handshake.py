"""Only processes that know the run's secret take part in a group; other processes change nothing
and cost almost nothing."""

import asyncio
import json
import socket
import threading
from contextlib import suppress
from typing import Any

import psutil
import pytest

from rekindle.storage import Store
from rekindle.training.membership import client, handshake
from rekindle.training.membership.protocol import PROTOCOL_VERSION
from rekindle.training.membership.server import MAX_UNVERIFIED_CONNECTIONS
from tests.ports import is_listening
from tests.rekindle.training.crew import SECRET, Crew, make_flags
from tests.rekindle.training.membership.members import serve_coordinator

pytestmark = pytest.mark.usefixtures("secret")
HELLO = {
    "protocol": PROTOCOL_VERSION,
    "id": "1",
    "name": "a",
    "address": "127.0.0.1:1",
    "fingerprint": {},
    "step": -1,
}
JOIN = {"join": HELLO | {"generation": 0, "group": 0, "peers": []}}
VERDICT = {"failed": "end the run", "code": 65, "name": "a", "temporary": False}


def dump_lines(*messages: Any) -> bytes:
    return b"".join(json.dumps(message).encode() + b"\n" for message in messages)


FORGED_PROOF = {
    "nonce": "n",
    "proof": handshake.compute_proof(b"another secret", "worker", "", "n"),
}


@pytest.mark.parametrize(
    "attack",
    [
        dump_lines(VERDICT),
        dump_lines(JOIN, VERDICT),
        dump_lines(FORGED_PROOF, JOIN, VERDICT),
        dump_lines({"nonce": "n", "proof": ""}, VERDICT),
        dump_lines({"nonce": "n"}, VERDICT),
        dump_lines({"nonce": 1, "proof": 2}, VERDICT),
        dump_lines({"nonce": "\ud800", "proof": "\ud800"}, VERDICT),
        dump_lines([], VERDICT),
        b"x" * 100_000,
        b"[" * 500 + b"\n",
        b"\xff\n" + dump_lines(VERDICT),
    ],
    ids=[
        "verdict",
        "join",
        "forged",
        "empty",
        "none",
        "numbers",
        "surrogates",
        "list",
        "endless",
        "deep",
        "bytes",
    ],
)
def test_messages_without_a_valid_proof_are_ignored(s3: Store, attack: bytes) -> None:
    async def scene() -> None:
        async with serve_coordinator() as (coordinator, address):
            reader, writer = await asyncio.open_connection(*address)
            assert b"nonce" in await reader.readline()
            writer.write(attack)

            with suppress(ConnectionResetError):
                # the connection is closed without an answer
                assert await asyncio.wait_for(reader.read(), 10) == b""

            membership = coordinator.membership
            assert not membership.alive_workers
            assert not membership.verdict
            assert not membership.events
            assert not coordinator.exit_code.done()

            assert not coordinator.unverified_connections

    asyncio.run(scene())


def test_a_proof_cannot_be_replayed_on_another_connection(s3: Store) -> None:
    async def scene() -> None:
        async with serve_coordinator() as (coordinator, address):
            reader, writer = await asyncio.open_connection(*address)
            nonce = json.loads(await reader.readline())["nonce"]
            proof = dump_lines(
                {
                    "nonce": "n",
                    "proof": handshake.compute_proof(SECRET.encode(), "worker", nonce, "n"),
                }
            )
            writer.write(proof + dump_lines(JOIN))
            answer = json.loads(await reader.readline())
            assert answer == {
                "proof": handshake.compute_proof(SECRET.encode(), "coordinator", nonce, "n")
            }
            assert b"open" in await reader.readline()
            assert list(coordinator.membership.alive_workers) == ["1"]
            reader, writer = await asyncio.open_connection(*address)
            writer.write(proof + dump_lines(VERDICT))
            await asyncio.wait_for(reader.read(), 10)
            assert not coordinator.membership.verdict

    asyncio.run(scene())


def test_a_silent_connection_is_closed(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "PROOF_TIMEOUT_S", 0.1)

    async def scene() -> None:
        async with serve_coordinator() as (coordinator, address):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b'{"nonce": ')
            await asyncio.wait_for(reader.read(), 10)
            assert not coordinator.unverified_connections

    asyncio.run(scene())


def test_many_unverified_connections_do_not_fill_memory_or_block_workers(
    crew: Crew, s3: Store
) -> None:
    coordinator = crew.start_coordinator(make_flags("crowd", workers=1))
    address = crew.meeting["MASTER_ADDR"], int(crew.meeting["MASTER_PORT"])
    crew.until(lambda: is_listening(address[1], address[0]))
    # the coordinator opens the object store some time after its start, which takes memory, too
    crew.until(lambda: s3.head("crowd/checkpoints/coordinator") is not None)
    process = psutil.Process(coordinator.process.pid)
    sizes = list[int]()

    for _ in range(6):
        strangers = [
            socket.create_connection(address) for _ in range(3 * MAX_UNVERIFIED_CONNECTIONS)
        ]
        for stranger in strangers:
            # closed by the coordinator
            with suppress(OSError):
                stranger.sendall(b"x" * 400)

        with client.connect_to_coordinator(address) as worker:
            worker.sendall(dump_lines(JOIN))
            assert b"open" in worker.recv(1000)

        assert process.num_fds() < MAX_UNVERIFIED_CONNECTIONS + 100
        for stranger in strangers:
            stranger.close()

        sizes.append(process.memory_info().rss)

    assert sizes[-1] - sizes[1] < 5 << 20, "the first rounds belong to its start"
    assert coordinator.process.exitcode is None
    assert coordinator.read_log().count("without this run's secret") == 1, (
        "strangers can fill the log"
    )


def test_a_worker_sends_nothing_to_a_false_coordinator() -> None:
    received = list[bytes]()

    def pretend(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(dump_lines({"nonce": "n"}))
            received.append(connection.recv(4096))
            # the message reflects the worker's own proof
            connection.sendall(dump_lines({"proof": json.loads(received[0])["proof"]}))
            received.append(connection.recv(4096))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=pretend, args=(server,))
        thread.start()
        with pytest.raises(ConnectionError, match="cannot prove that it is this run's coordinator"):
            client.connect_to_coordinator(server.getsockname())

        thread.join(10)

    assert received[1] == b""
    assert SECRET.encode() not in received[0]


@pytest.mark.parametrize("invalid", ["", "short"])
def test_processes_refuse_to_start_without_a_valid_secret(crew: Crew, invalid: str) -> None:
    argv = make_flags("none")
    environment = {handshake.REKINDLE_SECRET: invalid}
    for member in (
        crew.start_coordinator(argv, **environment),
        crew.start_light_launcher("a", argv, **environment),
    ):
        assert member.wait_for_exit_code() == 78
        assert (
            f"{handshake.REKINDLE_SECRET} is {'too short' if invalid else 'not set'}"
            in member.read_log()
        )
