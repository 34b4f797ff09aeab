"""Fuzz the input that processes of a training read: lines to a coordinator, checkpoints and
snapshots."""

import asyncio
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rekindle.errors import ConfigError, Conflict
from rekindle.storage import NotFound, Store, StoredObject
from rekindle.training.checkpoint import manifest, snapshot_file
from rekindle.training.checkpoint.checkpoint_retention import CheckpointRetention
from rekindle.training.checkpoint.durable import (
    CheckpointUpload,
    RankAndGroupSize,
    RemoteCheckpoints,
)
from rekindle.training.checkpoint.snapshot_file import (
    FIRST_RECORD_OFFSET,
    FLAG_STRUCT,
    HEADER_STRUCT,
    PAGE_BYTES,
    RECORD_DISTANCE_BYTES,
    RECORD_STRUCT,
    SnapshotFile,
)
from rekindle.training.membership import handshake
from rekindle.training.membership.protocol import MAX_LINE_BYTES, PROTOCOL_VERSION, encode_message
from rekindle.training.membership.server import Connection, Coordinator
from rekindle.training.spec import TrainingSpec
from tests.fuzz.mutation import change, mutate_bytes

Case = Callable[[random.Random], None]
SECRET = b"0123456789abcdef" * 2
WORKER = {
    "protocol": PROTOCOL_VERSION,
    "name": "a",
    "address": "127.0.0.1",
    "fingerprint": {"torch": "2"},
    "step": -1,
}
SESSION: list[dict[str, Any]] = [
    {"join": WORKER | {"id": "1", "generation": 0, "group": 0, "peers": []}},
    {"join": WORKER | {"id": "2", "generation": 7, "group": 7, "peers": ["1", "2"]}},
    {"ack": 1, "step": 3},
    {"beat": 4, "busy": False},
    {"fault": 1},
    {"put": 1, "key": "0/1", "value": "AAAA"},
    {"event": "step", "name": "a", "step": 3},
    {"failed": "it broke", "code": 1, "name": "a", "temporary": False},
    {"leave": "SIGTERM"},
    {"done": "0" * 64},
]


class Transport(asyncio.Transport):
    """The coordinator's end of a connection; the other end is a fuzz case."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.open = True

    def write(self, data: Any) -> None:
        self.sent += data

    def get_write_buffer_size(self) -> int:
        return len(self.sent)

    def abort(self) -> None:
        self.open = False

    close = abort


def coordinator_lines(folder: Path) -> Case:
    """Send lines to a coordinator, from workers and from clients that do not know the secret."""
    spec = TrainingSpec.model_validate(
        {
            "workload": "w",
            "dataset": "d",
            "digest": "d" * 64,
            "out": "o",
            "checkpoints": "c",
            "workers": 2,
        }
    )

    loop = asyncio.new_event_loop()
    lines = [encode_message(message) for message in SESSION]

    def case(rng: random.Random) -> None:
        loop.run_until_complete(run_coordinator(rng))

    async def run_coordinator(rng: random.Random) -> None:
        coordinator = Coordinator(spec, SECRET)
        coordinator.ledger.close(0)  # write nothing
        for _ in range(rng.randrange(1, 4)):
            send_lines(coordinator, rng)
        coordinator.membership.tick(loop.time())
        coordinator.send_outbox()
        for task in coordinator.tasks:
            task.cancel()
        if coordinator.exit_code.done():
            assert 0 < coordinator.exit_code.result() < 256

    def send_lines(coordinator: Coordinator, rng: random.Random) -> None:
        transport = Transport()
        connection = Connection(coordinator)
        has_secret = rng.random() < 0.8
        connection.connection_made(transport)
        nonce = json.loads(transport.sent)["nonce"]
        secret = SECRET if has_secret else b"?" * 32
        hello = encode_message(
            {"nonce": "n", "proof": handshake.compute_proof(secret, "worker", nonce, "n")}
        )
        sent_lines = [
            hello if rng.random() < 0.9 else mutate_bytes(hello, rng, lines),
            lines[rng.randrange(2)],
        ]

        for _ in range(rng.randrange(8)):
            if rng.random() < 0.5:
                sent_lines.append(mutate_bytes(rng.choice(lines), rng, lines))
            else:
                sent_lines.append(json.dumps(change(rng.choice(SESSION), rng)).encode() + b"\n")

        membership_before = repr(coordinator.membership)
        sent_bytes = b"".join(sent_lines)

        start = 0
        while start < len(sent_bytes) and transport.open:
            size = 1 + int(rng.expovariate(0.002))
            connection.data_received(sent_bytes[start : start + size])
            start += size

        is_unchanged = connection.nonce and repr(coordinator.membership) == membership_before
        assert has_secret or is_unchanged, "a client without the secret changed the membership"
        assert len(connection.pending_data) <= MAX_LINE_BYTES
        assert len(transport.sent) < 100_000

        if rng.random() < 0.5:
            connection.connection_lost(None)

    return case


class MemoryStore(Store):
    """An object store in memory."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.bucket = "b"
        self.objects = objects

    def get_with_etag(self, key: str, max_bytes: int | None = 0) -> tuple[bytes, str]:
        if key not in self.objects:
            raise NotFound(f"{key} does not exist.")
        return self.objects[key], hashlib.md5(self.objects[key], usedforsecurity=False).hexdigest()

    def put(
        self, key: str, data: Any, *, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        if (if_absent and key in self.objects) or (
            if_match and self.get_with_etag(key)[1] != if_match
        ):
            raise Conflict(f"{key} was written by somebody else.")
        self.objects[key] = bytes(data)
        return self.get_with_etag(key)[1]

    def delete(self, keys: Any) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        for key in sorted(self.objects):
            if key.startswith(prefix):
                yield StoredObject(key, len(self.objects[key]), "", 0.0)


def checkpoints(folder: Path) -> Case:
    """Read damaged durable checkpoints, and write the next checkpoint."""
    state_bytes = 2500
    chunk_bytes = 1000
    valid_objects = dict[str, bytes]()
    manifests = list[tuple[str, dict[str, Any]]]()

    for step in (3, 8):
        state = random.Random(step).randbytes(state_bytes)
        pieces = [
            state[start : start + chunk_bytes] for start in range(0, state_bytes, chunk_bytes)
        ]
        names = [hashlib.sha256(piece).hexdigest() for piece in pieces]
        valid_objects.update(
            {f"c/chunks/{name}": piece for name, piece in zip(names, pieces, strict=True)}
        )

        record: Any = {
            "identity": "us",
            "layout": "l",
            "step": step,
            "bytes": state_bytes,
            "chunk": chunk_bytes,
            "chunks": names,
            "loader": "e30=",
            "facts": {"trained_seconds": 1.5, "losses": 0},
            "fingerprint": {"torch": "2"},
        }

        name, data = manifest.encode_manifest(record)
        valid_objects[f"c/manifests/{name}"] = data
        manifests.append((f"c/manifests/{name}", record))

    valid_objects["c/latest"] = json.dumps({"manifest": manifests[-1][0]}).encode()
    object_bytes = list(valid_objects.values())
    newer_state = memoryview(random.Random(9).randbytes(state_bytes))

    def case(rng: random.Random) -> None:
        objects = dict(valid_objects)
        for _ in range(rng.randrange(1, 4)):
            damage_objects(objects, rng)

        store = MemoryStore(objects)
        remote = RemoteCheckpoints(
            store, "c", "us", "l", {"torch": "2"}, CheckpointRetention(store, "c", 2, 1.0)
        )
        target = memoryview(bytearray(state_bytes))

        with suppress(ConfigError):
            restored = remote.restore(target, -1)
            if restored:
                pieces = [
                    target[start : start + restored["chunk"]]
                    for start in range(0, state_bytes, restored["chunk"])
                ]
                assert [hashlib.sha256(piece).hexdigest() for piece in pieces] == restored["chunks"]

            assert remote.write(CheckpointUpload(9, newer_state), RankAndGroupSize(0, 1))
            assert remote.newest_step() >= 9

    def damage_objects(objects: dict[str, bytes], rng: random.Random) -> None:
        key, (name, record) = rng.choice(list(objects)), rng.choice(manifests)
        match rng.randrange(5):
            case 0:
                objects[key] = mutate_bytes(objects[key], rng, object_bytes)
            case 1:
                objects.pop(key)
            case 2:
                objects["c/latest"] = json.dumps(change({"manifest": name}, rng)).encode()
            case _:
                if rng.random() < 0.7:
                    data = json.dumps(change(change(record, rng), rng)).encode()
                else:
                    data = mutate_bytes(json.dumps(record).encode(), rng, object_bytes)

                number = f"{rng.choice([record['step'], 9, 10**15]):010d}"
                short = hashlib.sha256(data).hexdigest()[:12]
                key = f"c/manifests/{number}-{short}.json"

                if rng.random() < 0.1:
                    key = mutate_bytes(key.encode(), rng, object_bytes).decode(errors="replace")

                objects[key] = data
                if rng.random() < 0.5:
                    objects["c/latest"] = json.dumps({"manifest": key}).encode()

    return case


def snapshots(folder: Path) -> Case:
    """Read damaged snapshot files in shared memory, and write snapshots to these files."""
    state_bytes = 500
    path = folder / "snapshot"
    digest = hashlib.sha256(b"").hexdigest()

    def open_file() -> SnapshotFile:
        return SnapshotFile(path, digest, digest, digest, state_bytes)

    original = open_file()
    original.reserve()
    for slot in range(2):
        original.slots[slot][:state_bytes] = random.Random(slot).randbytes(state_bytes)
        original.commit_slot(slot, slot, b"{}")

    original.close()
    valid_bytes = path.read_bytes()
    path.unlink()

    def case(rng: random.Random) -> None:
        page = bytearray(valid_bytes[:PAGE_BYTES])
        for _ in range(rng.randrange(1, 4)):
            start = rng.choice(
                [
                    rng.randrange(HEADER_STRUCT.size),
                    FIRST_RECORD_OFFSET + rng.randrange(3 * RECORD_DISTANCE_BYTES),
                ]
            )
            page[start : start + rng.randrange(1, 9)] = rng.randbytes(rng.randrange(1, 9))

        page = page[:PAGE_BYTES]
        if rng.random() < 0.9:  # most pages get valid checksums
            FLAG_STRUCT.pack_into(
                page,
                HEADER_STRUCT.size,
                snapshot_file._compute_flag(bytes(page[: HEADER_STRUCT.size])),
            )
            for start in range(
                FIRST_RECORD_OFFSET,
                FIRST_RECORD_OFFSET + 3 * RECORD_DISTANCE_BYTES,
                RECORD_DISTANCE_BYTES,
            ):
                FLAG_STRUCT.pack_into(
                    page,
                    start + RECORD_STRUCT.size,
                    snapshot_file._compute_flag(bytes(page[start : start + RECORD_STRUCT.size])),
                )

        path.write_bytes(
            (page + valid_bytes[PAGE_BYTES:])[
                : len(valid_bytes) if rng.random() < 0.7 else rng.randrange(len(valid_bytes))
            ]
        )
        with suppress(ConfigError):
            file = open_file()
            target = memoryview(bytearray(state_bytes))

            try:
                for snapshot, _ in file.read():
                    file.load(snapshot, target)
                    assert bytes(target) in valid_bytes

                file.reserve()
                file.clear_slot(2)
                assert file.commit_slot(2, 10, b"{}").step == 10
            finally:
                file.close()

        snapshot_file.read_newest_step(path)
        path.unlink()

    return case
