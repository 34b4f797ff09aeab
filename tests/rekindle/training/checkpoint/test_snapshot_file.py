"""Snapshots in shared memory are intact or reported as damaged. The tests of snapshots use real
files, processes and SIGKILLs."""

import hashlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rekindle.errors import ConfigError
from rekindle.training.checkpoint import snapshot_file
from tests.waiting import until

SIZE = 3000
IDENTITY = hashlib.sha256(b"this").hexdigest()
OTHER_IDENTITY = hashlib.sha256(b"other").hexdigest()
WRITER = """
import sys, time
from pathlib import Path
from rekindle.training.checkpoint import snapshot_file as hot
file = hot.SnapshotFile(Path(sys.argv[1]), *[sys.argv[2]] * 3, int(sys.argv[3]))
step = max((found.step for found, _ in file.read()), default=0)
file.reserve()
print("ready", file.is_locked, flush=True)
while True:
    step += 1
    file.clear_slot(step % 3)
    file.slots[step % 3][:file.size] = bytes([step % 251]) * file.size
    file.commit_slot(step % 3, step, b"%d" % step)
    print(step, flush=True)
"""


@pytest.fixture(autouse=True)
def shared_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REKINDLE_SHM", str(tmp_path))
    return tmp_path


def make_content(step: int) -> bytes:
    return bytes((step * 7 + offset) % 256 for offset in range(SIZE))


def open_file(path: Path, layout: str = IDENTITY) -> snapshot_file.SnapshotFile:
    return snapshot_file.SnapshotFile(path, IDENTITY, layout, IDENTITY, SIZE)


def write_steps(file: snapshot_file.SnapshotFile, *steps: int) -> None:
    for step in steps:
        slot = step % snapshot_file.SLOT_COUNT
        file.clear_slot(slot)
        file.slots[slot][:SIZE] = make_content(step)
        file.commit_slot(slot, step, f"loader {step}".encode())


def read_newest(path: Path) -> tuple[int, list[str]]:
    """Return the step that a new process would restore, and its messages about damage. The function
    checks all bytes of the state."""
    file = open_file(path)
    target = bytearray(SIZE)

    try:
        saved = next(file.read(), None)
        if not saved:
            return -1, file.damage

        snapshot, loader = saved
        file.load(snapshot, memoryview(target))
        assert bytes(target) == make_content(snapshot.step)
        assert loader == f"loader {snapshot.step}".encode()

        return snapshot.step, file.damage
    finally:
        file.close()


def write_new_file(path: Path, *steps: int) -> Path:
    path.unlink(missing_ok=True)
    file = open_file(path)
    file.reserve()
    write_steps(file, *steps)
    file.close()
    return path


def start_writer(path: Path, slot_bytes: int = SIZE, **options: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WRITER, str(path), IDENTITY, str(slot_bytes)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **options)


def test_a_state_of_another_user_is_rejected(
    shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted_file = shared_folder / "planted"
    user = os.geteuid()
    planted_file.write_bytes(bytes(snapshot_file.PAGE_BYTES))
    planted_file.chmod(0o666)
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(PermissionError, match=f"belongs to another user \\({user}\\)"):
        open_file(planted_file)


def slot_offset(slot: int, slot_bytes: int = SIZE) -> int:
    """Return the offset of a slot's state in the file."""
    stride = (
        -(-(slot_bytes + snapshot_file.MAX_LOADER_STATE_BYTES) // snapshot_file.PAGE_BYTES)
        * snapshot_file.PAGE_BYTES
    )
    return snapshot_file.PAGE_BYTES + slot * stride


def expect_after_cut(end: int) -> tuple[int, int]:
    """Return the newest intact step and the number of damaged steps after a cut of a file that
    contains the steps 6, 4 and 5 in this order."""
    if end < snapshot_file.PAGE_BYTES:
        # an empty file counts as a missing file
        return -1, int(end > 0)
    ends = {
        6: slot_offset(0) + SIZE + 8,
        4: slot_offset(1) + SIZE + 8,
        5: slot_offset(2) + SIZE + 8,
    }
    intact = max((step for step, needed in ends.items() if end >= needed), default=-1)
    return intact, len([step for step in ends if step > intact])


def expect_after_flip(offset: int) -> tuple[int, bool]:
    """Return the newest intact step after damage of one byte, and True if damage is reported."""
    header = snapshot_file.HEADER_STRUCT.size + 4
    record = snapshot_file.RECORD_STRUCT.size + 4

    if offset < header:
        return -1, True

    newest = (
        snapshot_file.FIRST_RECORD_OFFSET <= offset < snapshot_file.FIRST_RECORD_OFFSET + record
    )
    newest = newest or slot_offset(0) <= offset < slot_offset(0) + SIZE + 8
    other_slots = [
        snapshot_file.FIRST_RECORD_OFFSET + slot * snapshot_file.RECORD_DISTANCE_BYTES
        for slot in (1, 2)
    ]

    return 5 if newest else 6, newest or any(
        start <= offset < start + record for start in other_slots
    )


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damaged_byte_is_reported_and_the_previous_snapshot_used(
    shared_folder: Path, data: st.DataObject
) -> None:
    path = write_new_file(shared_folder / "file", 4, 5, 6)
    offsets = st.integers(0, SIZE + 10)

    anywhere = st.one_of(
        st.integers(0, snapshot_file.HEADER_STRUCT.size + 4),
        st.integers(
            snapshot_file.FIRST_RECORD_OFFSET,
            snapshot_file.FIRST_RECORD_OFFSET
            + snapshot_file.SLOT_COUNT * snapshot_file.RECORD_DISTANCE_BYTES,
        ),
        st.builds(
            lambda slot, n: slot_offset(slot) + n,
            st.integers(0, snapshot_file.SLOT_COUNT - 1),
            offsets,
        ),
    )

    offset = data.draw(anywhere)

    cut = data.draw(st.booleans(), "truncate")
    if cut:
        os.truncate(path, offset)
    else:
        with open(path, "r+b") as file:
            byte = os.pread(file.fileno(), 1, offset)[0]
            os.pwrite(file.fileno(), bytes([byte ^ data.draw(st.integers(1, 255))]), offset)

    step, damage = read_newest(path)
    # this comparison holds because `read` has compared the bytes
    assert (
        (step, len(damage)) == expect_after_cut(offset)
        if cut
        else (step, bool(damage)) == expect_after_flip(offset)
    )

    assert all(str(path) in text for text in damage)
    reopened_file = open_file(path)
    list(reopened_file.read())
    # the next process uses the intact slot
    reopened_file.reserve()
    write_steps(reopened_file, 7)
    reopened_file.close()
    assert read_newest(path)[0] == 7


def read_bytes_at(path: Path, offsets: list[int]) -> list[bytes]:
    with path.open("rb") as file:
        return [os.pread(file.fileno(), 1, offset) for offset in offsets]


def test_a_worker_killed_at_any_moment_leaves_an_intact_snapshot(shared_folder: Path) -> None:
    path = shared_folder / "file"
    slot_bytes = 2_000_000
    newest = 0

    for attempt in range(12):
        process = start_writer(path, slot_bytes)
        assert process.stdout
        assert process.stdout.readline() == "ready True\n"
        for _ in range(attempt % 4):  # steps that are complete before the worker is killed
            newest = max(newest, int(process.stdout.readline()))

        offsets = [
            slot_offset(slot, slot_bytes) + slot_bytes * attempt // 12
            for slot in range(snapshot_file.SLOT_COUNT)
        ]
        initial = read_bytes_at(path, offsets)

        until(
            "a copy",
            lambda initial=initial, offsets=offsets: read_bytes_at(path, offsets) != initial,
            pause=0,
        )

        process.kill()
        output = process.stdout.read().split("\n")[:-1]
        process.communicate()
        newest = max([newest, *map(int, output)])
        file = snapshot_file.SnapshotFile(path, IDENTITY, IDENTITY, IDENTITY, slot_bytes)
        target = bytearray(slot_bytes)
        saved = next(file.read(), None)
        assert not file.damage

        if saved:
            # the worker may have died before it printed the newest step
            assert newest <= saved[0].step <= newest + 1
            newest = saved[0].step
            file.load(saved[0], memoryview(target))
            assert target == bytes([newest % 251]) * slot_bytes
            assert saved[1] == b"%d" % newest
        else:
            assert newest == 0

        file.close()
        assert snapshot_file.read_newest_step(path) == (newest or -1)

    assert newest > 0


def test_a_frozen_worker_and_its_successor_do_not_write_to_the_same_memory(
    shared_folder: Path,
) -> None:
    path = shared_folder / "file"
    frozen = start_writer(path)
    assert frozen.stdout
    assert frozen.stdout.readline()
    assert frozen.stdout.readline() == "1\n"
    frozen.send_signal(signal.SIGSTOP)
    successor = snapshot_file.SnapshotFile(path, IDENTITY, IDENTITY, IDENTITY, SIZE)
    assert not successor.is_locked
    assert next(successor.read())[0].step >= 1
    successor.close(deletes_file=True)
    assert path.exists()
    frozen.kill()
    frozen.communicate()
    after = snapshot_file.SnapshotFile(path, IDENTITY, IDENTITY, IDENTITY, SIZE)
    assert after.is_locked
    after.close()


def test_only_unneeded_files_are_removed(shared_folder: Path) -> None:
    run = snapshot_file.hash_run_name("identity", "prefix")
    other = snapshot_file.hash_run_name("identity", "elsewhere")
    held = snapshot_file.make_snapshot_path(run, "held")
    dead = snapshot_file.make_snapshot_path(run, "dead")
    old_path = snapshot_file.make_snapshot_path(other, "old")
    foreign_file = shared_folder / "mine"
    process = start_writer(held)
    assert process.stdout
    assert process.stdout.readline()

    for path in (write_new_file(dead, 1), write_new_file(old_path, 1), foreign_file):
        path.touch()

    for path in (held, old_path):
        os.utime(path, (0, 0))

    process.send_signal(signal.SIGSTOP)
    os.utime(held, (0, 0))
    # the run may be resumed after any time
    assert snapshot_file.remove_stale_files(other) == []
    assert snapshot_file.remove_stale_files(run) == [old_path]
    assert snapshot_file.remove_run_files(run) == [dead]
    process.kill()
    process.communicate()
    assert snapshot_file.remove_run_files(run) == [held]
    assert foreign_file.exists()


def test_another_models_state_is_neither_used_nor_overwritten(shared_folder: Path) -> None:
    path = write_new_file(shared_folder / "file", 3)
    data = path.read_bytes()
    with pytest.raises(
        ConfigError, match=r"holds the state of another run or model .* nothing was changed"
    ):
        open_file(path, OTHER_IDENTITY)
    assert path.read_bytes() == data


def test_full_memory_raises_an_error_and_does_not_kill_the_process(shared_folder: Path) -> None:
    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    process = start_writer(shared_folder / "file", preexec_fn=limited)
    assert "OSError" in process.communicate()[1]
    assert process.returncode == 1


def test_the_last_step_survives_a_process_that_dies_while_it_records_the_next(
    shared_folder: Path,
) -> None:
    path = shared_folder / "file"
    file = open_file(path)
    file.reserve()
    assert file.last_step is None

    for step in (7, 8):
        file.record_step(step)

    file.close()
    earlier_step = open_file(path).last_step
    data = bytearray(path.read_bytes())
    assert earlier_step
    assert earlier_step[0] == 8

    for position in range(snapshot_file.LAST_STEP_OFFSET, snapshot_file.LAST_STEP_OFFSET + 16):
        damaged_bytes = bytearray(data)
        # damage the record of step 8, which is even
        damaged_bytes[position] ^= 1
        path.write_bytes(damaged_bytes)
        last_step = open_file(path).last_step
        assert last_step
        assert last_step[0] == 7

    path.write_bytes(bytes(len(data)))
    assert open_file(path).last_step is None
