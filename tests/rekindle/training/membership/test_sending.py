"""The coordinator sends what has arrived together in few writes, and only as fast as a worker
reads."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from rekindle.training.membership import handshake, server
from rekindle.training.membership.protocol import encode_message
from rekindle.training.membership.server import (
    MAX_UNREAD_BYTES,
    MAX_WRITE_BYTES,
    Connection,
    Coordinator,
)
from tests.rekindle.training.crew import SECRET
from tests.rekindle.training.membership.members import make_join_message, make_spec

WORKER_COUNT = 8


class Transport(asyncio.Transport):
    """The coordinator's end of a connection. With `pauses`, each write fills its buffer."""

    def __init__(self, connection: Connection, *, pauses: bool = False) -> None:
        super().__init__()
        self.connection = connection
        self.pauses = pauses
        self.writes: list[bytes] = []
        self.end = ""

    def write(self, data: Any) -> None:
        assert not self.end
        self.writes.append(bytes(data))
        if self.pauses:
            self.connection.pause_writing()

    def close(self) -> None:
        self.end = "closed"

    def abort(self) -> None:
        self.end = "aborted"


def make_coordinator() -> Coordinator:
    coordinator = Coordinator(
        make_spec(workers=WORKER_COUNT, max_workers=WORKER_COUNT), SECRET.encode()
    )
    coordinator.ledger.close(0)  # write nothing
    return coordinator


def connect(coordinator: Coordinator, *, pauses: bool = False) -> tuple[Connection, Transport]:
    connection = Connection(coordinator)
    transport = Transport(connection, pauses=pauses)
    connection.connection_made(transport)
    nonce = json.loads(transport.writes[0])["nonce"]
    proof = handshake.compute_proof(SECRET.encode(), "worker", nonce, "n")
    connection.data_received(encode_message({"nonce": "n", "proof": proof}))
    connection.resume_writing()
    transport.writes.clear()
    return connection, transport


async def run_scheduled_calls() -> None:
    turn = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(turn.set_result, None)
    await turn


def run_scene(scene: Callable[[Coordinator], Any]) -> None:
    async def run() -> None:
        await scene(make_coordinator())

    asyncio.run(run())


def test_values_that_arrive_together_are_sent_to_a_worker_in_one_write() -> None:
    async def scene(coordinator: Coordinator) -> None:
        members = [connect(coordinator) for _ in range(WORKER_COUNT)]
        for number, (connection, _) in enumerate(members):
            connection.data_received(encode_message({"join": make_join_message(str(number))}))
        for connection, _ in members:
            connection.data_received(encode_message({"ack": 1, "step": 0}))
        await run_scheduled_calls()
        assert coordinator.membership.is_published
        for _, transport in members:
            transport.writes.clear()

        for number, (connection, _) in enumerate(members):
            value = {"put": 1, "key": f"0/{number}", "value": "AAAA"}
            connection.data_received(encode_message(value))
        await run_scheduled_calls()

        for number, (_, transport) in enumerate(members):
            assert len(transport.writes) == 1
            values = [json.loads(line) for line in transport.writes[0].splitlines()]
            assert [value["key"] for value in values] == [
                f"0/{other}" for other in range(WORKER_COUNT) if other != number
            ]

    run_scene(scene)


def test_a_slow_worker_gets_all_lines_in_order_and_few_bytes_at_once() -> None:
    async def scene(coordinator: Coordinator) -> None:
        connection, transport = connect(coordinator, pauses=True)
        lines = [b"%d" % number + bytes(1000) + b"\n" for number in range(500)]
        for line in lines:
            connection.queue(line)
        connection.write_queue()
        assert len(transport.writes) == 1

        while connection.queued_lines:
            connection.resume_writing()
        assert b"".join(transport.writes) == b"".join(lines)
        assert max(map(len, transport.writes)) <= MAX_WRITE_BYTES
        assert connection.queued_bytes == 0

    run_scene(scene)


def test_a_connection_is_closed_after_its_last_line() -> None:
    async def scene(coordinator: Coordinator) -> None:
        connection, transport = connect(coordinator, pauses=True)
        for number in range(3):
            connection.queue(b"%d" % number + bytes(MAX_WRITE_BYTES) + b"\n")
        connection.close()
        assert [write[:1] for write in transport.writes] == [b"0", b"1", b"2"]
        assert transport.end == "closed"

    run_scene(scene)


def test_a_worker_that_does_not_read_loses_its_connection() -> None:
    async def scene(coordinator: Coordinator) -> None:
        connection, transport = connect(coordinator, pauses=True)
        line = bytes(1 << 20)
        for _ in range(MAX_UNREAD_BYTES // len(line) + 2):
            connection.queue(line)
        assert transport.end == "aborted"
        assert connection.queued_bytes <= MAX_UNREAD_BYTES + len(line)

    run_scene(scene)


def test_the_object_store_is_used_after_the_workers_of_an_earlier_coordinator_have_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing_workers = list[set[str]]()

    async def record(coordinator: Coordinator) -> None:
        missing_workers.append(set(coordinator.membership.unregistered_ids))

    monkeypatch.setattr(server, "RECONNECT_S", 0)
    monkeypatch.setattr(server, "MAX_RECONNECT_S", 60)
    monkeypatch.setattr(server, "TICK_INTERVAL_S", 0)
    monkeypatch.setattr(Coordinator, "_check_completion", record)
    monkeypatch.setattr(Coordinator, "_renew_lease", record)

    async def scene(coordinator: Coordinator) -> None:
        def reconnect(worker: str) -> None:
            hello = make_join_message(worker, generation=5, group=5, peers=["1", "2"])
            connect(coordinator)[0].data_received(encode_message({"join": hello}))

        reconnect("1")
        opening = asyncio.create_task(coordinator._open_store_after_reconnect())
        for _ in range(10):
            await run_scheduled_calls()
        assert not missing_workers

        reconnect("2")
        await opening
        await run_scheduled_calls()
        assert missing_workers == [set(), set()]

    run_scene(scene)
