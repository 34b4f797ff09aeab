"""Tests of snapshots in shared memory together with checkpoints in the object store: they determine
the state from which a restarted worker continues."""

import errno
import math
import mmap
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rekindle.errors import RekindleError
from rekindle.storage import Store
from rekindle.training.checkpoint import manager, snapshot_file
from rekindle.training.checkpoint.durable import RankAndGroupSize
from rekindle.training.checkpoint.manager import WorkerCheckpoints
from rekindle.training.group.interruptible import GroupBrokenError
from tests.chaos.faults import Proxy
from tests.rekindle.training.saving import (
    IDENTITY,
    LedgerEvents,
    OpenCheckpoints,
    StatefulData,
    finish_upload,
    get_remaining_seconds,
    have_equal_states,
    list_keys,
    open_store_behind,
    restore_alone,
    set_state,
    train_and_upload,
)
from tests.waiting import until


def test_a_snapshot_in_shared_memory_survives_its_process(
    open_checkpoints: OpenCheckpoints, events: LedgerEvents
) -> None:
    first_checkpoints = open_checkpoints(node="n", data=StatefulData(), hot_seconds=1e-9)
    restore_alone(first_checkpoints)
    for step in range(1, 9):
        set_state(first_checkpoints, step)
        first_checkpoints.save_if_due(RankAndGroupSize(0, 1), is_durable=False)

    first_checkpoints.close(remove_snapshots=False)
    second_checkpoints = open_checkpoints(node="n", data=StatefulData())
    assert 1 <= second_checkpoints.state.step <= 8
    assert second_checkpoints.loader.data.position == sum(range(second_checkpoints.state.step + 1))
    set_state(first_checkpoints, second_checkpoints.state.step)
    assert have_equal_states(first_checkpoints, second_checkpoints)
    restore_alone(second_checkpoints)
    assert events[-1] == (
        "restored",
        {"step": second_checkpoints.state.step, "tier": "hot", "name": "n"},
    )


def test_a_disk_too_small_for_the_kept_checkpoints_is_reported_with_the_remedy(
    open_checkpoints: OpenCheckpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    for kept_checkpoints, words in (
        (3, ""),
        (10**15, f"or lower train.keep_checkpoints ({10**15})."),
    ):
        checkpoints = open_checkpoints(keep_checkpoints=kept_checkpoints)
        train_and_upload(checkpoints, checkpoints.state.step + 9)
        log = capsys.readouterr().err
        assert ("each checkpoint has" in log) == bool(words)
        assert words in log


@pytest.mark.slow
def test_the_newer_of_snapshot_and_durable_checkpoint_is_used(
    open_checkpoints: OpenCheckpoints, s3: Store, proxy: Proxy
) -> None:
    for newer, step in ((4, 4), (2, 3)):
        first_checkpoints = open_checkpoints(node=f"n{newer}")
        set_state(first_checkpoints, 3)
        first_checkpoints.save_if_due(RankAndGroupSize(0, 1), is_durable=False)
        first_checkpoints.close(remove_snapshots=False)
        other = open_checkpoints()
        set_state(other, newer)

        if newer == 2:
            s3.delete(list_keys(first_checkpoints))

        assert other.upload_current_state(RankAndGroupSize(0, 1), get_remaining_seconds)
        second_checkpoints = open_checkpoints(node=f"n{newer}")
        assert second_checkpoints.state.step == 3
        assert restore_alone(second_checkpoints) == step

    third_checkpoints = open_checkpoints(node="n2", store=open_store_behind(proxy, s3))
    proxy.fault("hang", 60.0)
    # the state is restored although the object store does not answer
    assert restore_alone(third_checkpoints) == 3


def test_a_damaged_snapshot_is_reported_and_the_durable_checkpoint_used(
    open_checkpoints: OpenCheckpoints, events: LedgerEvents, capsys: pytest.CaptureFixture[str]
) -> None:
    first_checkpoints = open_checkpoints(node="n")
    train_and_upload(first_checkpoints, 3)
    first_checkpoints.close(remove_snapshots=False)
    path = snapshot_file.make_snapshot_path(
        snapshot_file.hash_run_name(IDENTITY, first_checkpoints.remote.prefix),
        snapshot_file.hash_worker_name(),
    )
    data = bytearray(path.read_bytes())
    data[snapshot_file.PAGE_BYTES + 100] ^= 1
    path.write_bytes(data)
    second_checkpoints = open_checkpoints(node="n")
    second_checkpoints.send_early_events()
    assert second_checkpoints.state.step == -1
    assert restore_alone(second_checkpoints) == 3
    assert "the snapshot of step 3 in" in capsys.readouterr().err
    assert [name for name, _ in events] == ["checkpoint", "torn", "restored"]


def test_a_restarted_worker_reports_the_last_step_of_its_previous_process(
    open_checkpoints: OpenCheckpoints, events: LedgerEvents
) -> None:
    first_checkpoints = open_checkpoints(node="n", data=StatefulData(), hot_seconds=1e9)
    restore_alone(first_checkpoints)
    for step in range(1, 9):
        set_state(first_checkpoints, step)
        first_checkpoints.save_if_due(RankAndGroupSize(0, 1), is_durable=False)

    first_checkpoints.close(remove_snapshots=False)
    second_checkpoints = open_checkpoints(node="n", data=StatefulData())
    assert second_checkpoints.state.step < 8, "the snapshot is older than the last step"
    assert events[-1][0] == "restored", "without a group, no coordinator may be connected"
    second_checkpoints.send_early_events()
    second_checkpoints.send_early_events()
    ((name, fields),) = events[1:]
    assert name == "step"
    assert fields["step"] == 8
    assert fields["last"] is True
    assert fields["age_s"] >= 0


def test_training_continues_without_shared_memory(
    open_checkpoints: OpenCheckpoints,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("REKINDLE_SHM", "/sys" if sys.platform == "linux" else "/nowhere")
    first_checkpoints = open_checkpoints()
    assert "no snapshots in shared memory" in capsys.readouterr().err
    first_checkpoints.save_if_due(RankAndGroupSize(0, 1), is_durable=False)
    train_and_upload(first_checkpoints, 2)
    assert restore_alone(open_checkpoints()) == 2


def test_a_run_without_memory_for_checkpoints_ends_with_the_reason(
    open_checkpoints: OpenCheckpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail_to_map(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setenv("REKINDLE_SHM", str(tmp_path / "nowhere"))
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", fail_to_map)
        first_checkpoints = open_checkpoints()
    set_state(first_checkpoints, 2)
    with pytest.raises(
        RekindleError, match=r"cannot reserve .* for a copy of the state .*Cannot allocate memory"
    ):
        first_checkpoints.save_if_due(RankAndGroupSize(0, 1), is_durable=True)


def test_the_last_worker_reports_an_unsaved_state_and_its_location(
    open_checkpoints: OpenCheckpoints, s3: Store, proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    last_checkpoints = open_checkpoints(node="n", store=open_store_behind(proxy, s3))
    proxy.fault("refuse", 60.0)
    set_state(last_checkpoints, 6)
    remaining_seconds = iter([1.0, 0.0, 0.0, 0.0, -math.inf])
    assert not last_checkpoints.upload_current_state(
        RankAndGroupSize(0, 1), lambda: next(remaining_seconds)
    )
    log = capsys.readouterr().err
    assert "the state of step 6 is not in the object store: " in log
    assert "A copy remains in" in log
    last_checkpoints.close(remove_snapshots=False)
    assert open_checkpoints(node="n").state.step == 6


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Replace the manager's clock by a stopped clock."""
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with monkeypatch.context() as patch:
        patch.setattr(manager, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
        yield now


def make_step(
    checkpoints: WorkerCheckpoints, step: int, is_durable: bool = False, copy_s: float = 0.0
) -> bool:
    """Make the training step number `step`. Return True if a snapshot was taken after the step.
    Copying the state takes `copy_s` seconds of the test's clock."""
    set_state(checkpoints, step)
    slots: list[int | None] = []
    copy_state = checkpoints.snapshots.copy_state

    def copy_slowly(*arguments: Any, **options: Any) -> int | None:
        manager.time.sleep(copy_s)
        slots.append(copy_state(*arguments, **options))
        return slots[-1]

    until("the previous snapshot is committed", lambda: checkpoints.snapshots.is_idle)
    checkpoints.snapshots.copy_state = copy_slowly  # type: ignore[method-assign]
    checkpoints.save_if_due(RankAndGroupSize(0, 1), is_durable=is_durable)
    checkpoints.snapshots.copy_state = copy_state  # type: ignore[method-assign]

    return bool(slots)


def test_snapshots_are_taken_every_hot_seconds(
    open_checkpoints: OpenCheckpoints, clock: list[float]
) -> None:
    first_checkpoints = open_checkpoints(node="n", hot_seconds=5)
    results = []
    for step, now in enumerate((100.0, 104.9, 105.0, 109.9, 110.0), 1):
        clock[0] = now
        results.append(make_step(first_checkpoints, step))
    assert results == [True, False, True, False, True]


def test_automatic_snapshots_take_one_percent_of_the_time_and_at_most_four_a_second(
    open_checkpoints: OpenCheckpoints, clock: list[float]
) -> None:
    first_checkpoints = open_checkpoints(node="n")
    assert make_step(first_checkpoints, 1)
    for wait, due in ((0.24, False), (0.25, True)):
        clock[0] = 100.0 + wait
        assert make_step(first_checkpoints, 2, copy_s=0.5) == due
    for wait, due in ((49.9, False), (50.0, True)):
        clock[0] = 100.75 + wait
        assert make_step(first_checkpoints, 3) == due


def test_the_cost_of_a_checkpoint_is_measured_for_the_next_interval(
    open_checkpoints: OpenCheckpoints, events: LedgerEvents
) -> None:
    first_checkpoints = open_checkpoints(node="n")
    began = time.monotonic()
    assert make_step(first_checkpoints, 1, is_durable=True)
    assert finish_upload(first_checkpoints)
    until("the event is recorded", lambda: [name for name, _ in events] == ["checkpoint"])
    elapsed = time.monotonic() - began
    assert 0 < first_checkpoints.interval.duration <= elapsed
    assert 0 < first_checkpoints.interval.cost <= 2 * elapsed
    (_, fields) = events[0]
    size = first_checkpoints.state.memory.numel() * 4

    assert fields["step"] == 1
    assert fields["bytes"] == size
    assert fields["uploaded"] == size
    assert fields["name"] == "n"

    assert 0 <= fields["seconds"] <= elapsed + 0.001
    assert first_checkpoints.interval.facts()["losses"] == 0


def test_rank_0_requests_a_checkpoint_before_the_step_that_is_due(
    open_checkpoints: OpenCheckpoints,
) -> None:
    first_checkpoints = open_checkpoints(checkpoint_steps=10)
    restore_alone(first_checkpoints)
    set_state(first_checkpoints, 8)
    assert not first_checkpoints.is_due()
    set_state(first_checkpoints, 9)
    assert first_checkpoints.is_due()
    first_checkpoints.snapshots.ready.clear()
    assert not first_checkpoints.is_due(), "its memory is not reserved yet"
    first_checkpoints.snapshots.ready.set()
    set_state(first_checkpoints, 10)
    first_checkpoints.save_if_due(RankAndGroupSize(0, 1), is_durable=True)
    assert finish_upload(first_checkpoints)
    set_state(first_checkpoints, 18)
    assert not first_checkpoints.is_due()
    set_state(first_checkpoints, 19)
    assert first_checkpoints.is_due()


def test_the_ledger_has_the_first_step_of_a_process(
    open_checkpoints: OpenCheckpoints, events: LedgerEvents, capsys: pytest.CaptureFixture[str]
) -> None:
    first_checkpoints = open_checkpoints(node="n")
    assert restore_alone(first_checkpoints) == 0
    assert first_checkpoints.snapshot_crc == 0
    train_and_upload(first_checkpoints, 4)
    first_checkpoints.save_if_due(RankAndGroupSize(0, 1), is_durable=False)
    until("the snapshot is committed", lambda: first_checkpoints.snapshots.is_idle)
    first_checkpoints.close(remove_snapshots=False)
    hot = open_checkpoints(node="n")
    durable = open_checkpoints(node="m")
    assert hot.snapshot_crc != 0, "it identifies equal states"
    assert restore_alone(hot) == restore_alone(durable) == 4
    assert have_equal_states(hot, durable)
    assert durable.snapshot_crc == 0

    tiers = [
        (fields["tier"], fields["step"], fields["name"])
        for name, fields in events
        if name == "restored"
    ]

    assert tiers == [("none", 0, "n"), ("hot", 4, "m"), ("durable", 4, "m")]
    log = capsys.readouterr().err
    assert log.count("resuming from step 4") == 1
    assert "step 4 was found in shared memory" in log
    assert [durable.interval.facts()["losses"], hot.interval.facts()["losses"]] == [1, 0]
    hot.close(remove_snapshots=True)
    assert open_checkpoints(node="n").state.step == -1, "its snapshots were removed"


def test_a_cancelled_restore_stops_waiting_for_an_unavailable_store(
    open_checkpoints: OpenCheckpoints, s3: Store, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_and_upload(open_checkpoints(), 4)
    waiting_checkpoints = open_checkpoints(store=open_store_behind(proxy, s3))
    proxy.fault("refuse", 60.0)
    with pytest.raises(GroupBrokenError, match="stopped waiting for the object store"):
        waiting_checkpoints.restore(-1, is_cancelled=lambda: True)
    assert waiting_checkpoints.state.step == -1

    def fail(read: Any) -> Any:
        raise GroupBrokenError("a member was lost")

    with pytest.raises(GroupBrokenError, match="a member was lost"):
        open_checkpoints().restore(-1, run_read=fail)


def test_a_last_state_of_several_workers_is_saved_when_rank_0_has_completed_it(
    open_checkpoints: OpenCheckpoints, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    members = [open_checkpoints(node=f"n{rank}") for rank in range(2)]
    for member in members:
        set_state(member, 7)

    end = clock[0] + 1.0
    assert not members[1].upload_current_state(
        RankAndGroupSize(1, 2),
        lambda: 30.0 if members[1]._is_uploading else max(0.0, end - clock[0]),
    )
    problem = (
        "the state of step 7 is not in the object store: rank 0 did not complete the checkpoint."
    )
    assert problem in capsys.readouterr().err
    assert clock[0] >= end
    members[0].save_if_due(RankAndGroupSize(0, 2), is_durable=True)
    assert finish_upload(members[0])
    assert members[1]._wait_for_rank_0(7, lambda: 1.0)
    assert not members[1]._wait_for_rank_0(8, lambda: end + 1.0 - clock[0])


def test_an_older_upload_is_cancelled_for_the_last_state(
    open_checkpoints: OpenCheckpoints, s3: Store, proxy: Proxy
) -> None:
    last_checkpoints = open_checkpoints(store=open_store_behind(proxy, s3), checkpoint_steps=1)
    proxy.fault("hang", 1.0)
    set_state(last_checkpoints, 1)
    last_checkpoints.save_if_due(RankAndGroupSize(0, 1), is_durable=True)
    assert not last_checkpoints.is_due(), "one upload at a time"
    first = last_checkpoints._upload
    assert last_checkpoints._thread
    assert last_checkpoints._thread.daemon, "the upload does not delay the exit of the process"
    set_state(last_checkpoints, 2)
    assert last_checkpoints.upload_current_state(RankAndGroupSize(0, 1), get_remaining_seconds)
    assert first
    assert first.stop.is_set()
    assert first.step == 1
    assert restore_alone(open_checkpoints()) == 2


def test_a_call_with_a_timeout_ends_in_time() -> None:
    assert manager._call_with_timeout(30.0, lambda: 5) == 5
    with pytest.raises(ValueError, match="it broke"):
        manager._call_with_timeout(30.0, lambda: int("it broke"))
    never = threading.Event()
    try:
        with pytest.raises(TimeoutError, match=r"no answer within 0.01 s"):
            manager._call_with_timeout(0.01, lambda: never.wait(60))
        threads = [thread for thread in threading.enumerate() if thread.name == "timeout"]
        assert all(thread.daemon for thread in threads), "they do not delay the exit"
    finally:
        never.set()


def test_the_state_of_another_build_of_torch_is_used_with_a_warning(
    open_checkpoints: OpenCheckpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    first_checkpoints = open_checkpoints(node="n")
    train_and_upload(first_checkpoints, 3)
    first_checkpoints.close(remove_snapshots=False)
    capsys.readouterr()

    for node, is_found in (("n", True), ("m", False)):
        other = open_checkpoints(node=node, torch_build="3")
        assert restore_alone(other) == 3
        assert have_equal_states(first_checkpoints, other)
        log = capsys.readouterr().err
        assert ("another torch build" in log) == is_found
        assert ("another kind of machine" in log) != is_found

    other.close(remove_snapshots=True)
    assert restore_alone(open_checkpoints(node="m")) == 3
    assert "another kind" not in capsys.readouterr().err
