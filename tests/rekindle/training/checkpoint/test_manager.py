"""Both tiers together: where a worker begins, and what is kept when it goes."""

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
from rekindle.training.checkpoint.manager import Checkpoints
from rekindle.training.group.interruptible import GroupBroken
from tests.chaos.faults import Proxy
from tests.rekindle.training.saving import (
    US,
    Events,
    Open,
    Stream,
    begin,
    behind,
    finished,
    keys,
    same,
    soon,
    train,
    update,
)
from tests.waiting import until


def test_a_snapshot_in_shared_memory_outlives_its_process(open_: Open, events: Events) -> None:
    first = open_(node="n", data=Stream(), hot_seconds=1e-9)
    begin(first)
    for step in range(1, 9):
        update(first, step)
        first.keep((0, 1), durable=False)
    first.close(remove=False)
    second = open_(node="n", data=Stream())
    assert 1 <= second.state.step <= 8 and second.loader.data.place == sum(range(second.state.step + 1))
    update(first, second.state.step)
    assert same(first, second)
    begin(second)
    assert events[-1] == ("restored", {"step": second.state.step, "tier": "hot", "name": "n"})


def test_the_newer_of_the_two_tiers_is_used(open_: Open, s3: Store, proxy: Proxy) -> None:
    for newer, step in ((4, 4), (2, 3)):
        first = open_(node=f"n{newer}")
        update(first, 3)
        first.keep((0, 1), durable=False)
        first.close(remove=False)
        update(other := open_(), newer)
        if newer == 2:
            s3.delete(keys(first))
        assert other.flush((0, 1), soon)
        second = open_(node=f"n{newer}")
        assert second.state.step == 3
        assert begin(second) == step
    third = open_(node="n2", store=behind(proxy, s3))
    proxy.fault("hang", 60.0)
    assert begin(third) == 3  # though the store says nothing


def test_a_damaged_snapshot_is_named_and_the_checkpoint_used(
    open_: Open, events: Events, capsys: pytest.CaptureFixture[str]
) -> None:
    first = open_(node="n")
    train(first, 3)
    first.close(remove=False)
    path = snapshot_file.path(snapshot_file.run_name(US, first.remote.prefix), snapshot_file.node_name())
    data = bytearray(path.read_bytes())
    data[snapshot_file.PAGE + 100] ^= 1
    path.write_bytes(data)
    second = open_(node="n")
    assert second.state.step == -1 and begin(second) == 3
    assert "the snapshot of step 3 in" in capsys.readouterr().err
    assert [name for name, _ in events] == ["checkpoint", "torn", "restored"]


def test_without_room_in_shared_memory_training_goes_on(
    open_: Open, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REKINDLE_SHM", "/sys" if sys.platform == "linux" else "/nowhere")
    first = open_()
    assert "no snapshots in shared memory" in capsys.readouterr().err
    first.keep((0, 1), durable=False)
    train(first, 2)
    assert begin(open_()) == 2


def test_a_run_that_could_never_make_a_checkpoint_ends_and_says_why(
    open_: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setenv("REKINDLE_SHM", str(tmp_path / "nowhere"))
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", full)
        first = open_()
    update(first, 2)
    with pytest.raises(RekindleError, match=r"cannot reserve .* for a copy of the state .*Cannot allocate memory"):
        first.keep((0, 1), durable=True)


def test_who_leaves_last_says_what_is_not_saved_and_where_it_is(
    open_: Open, s3: Store, proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    last = open_(node="n", store=behind(proxy, s3))
    proxy.fault("refuse", 60.0)
    update(last, 6)
    left = iter([1.0, 0.0, 0.0, 0.0, -math.inf])
    assert not last.flush((0, 1), lambda: next(left))
    said = capsys.readouterr().err
    assert "the state of step 6 is not in the object store: " in said and "It remains in" in said
    last.close(remove=False)
    assert open_(node="n").state.step == 6


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The manager's clock, which stands still."""
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with monkeypatch.context() as patch:
        patch.setattr(manager, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
        yield now


def snapshot(checkpoints: Checkpoints, step: int, durable: bool = False, lasts: float = 0.0) -> bool:
    """Make a step; whether a snapshot of it was taken, which the copy delays by so many seconds of the clock."""
    update(checkpoints, step)
    slots: list[int | None] = []
    take = checkpoints.snapshots.take

    def slow(*arguments: Any, **options: Any) -> int | None:
        manager.time.sleep(lasts)
        slots.append(take(*arguments, **options))
        return slots[-1]

    until("the former snapshot is committed", lambda: checkpoints.snapshots.idle)
    checkpoints.snapshots.take = slow  # type: ignore[method-assign]
    checkpoints.keep((0, 1), durable=durable)
    checkpoints.snapshots.take = take  # type: ignore[method-assign]
    return bool(slots)


def test_snapshots_come_as_often_as_is_set(open_: Open, clock: list[float]) -> None:
    first = open_(node="n", hot_seconds=5)
    taken = []
    for step, now in enumerate((100.0, 104.9, 105.0, 109.9, 110.0), 1):
        clock[0] = now
        taken.append(snapshot(first, step))
    assert taken == [True, False, True, False, True]


def test_without_a_setting_snapshots_take_a_hundredth_of_the_time_and_come_four_times_a_second_at_most(
    open_: Open, clock: list[float]
) -> None:
    first = open_(node="n")
    assert snapshot(first, 1)
    for wait, due in ((0.24, False), (0.25, True)):
        clock[0] = 100.0 + wait
        assert snapshot(first, 2, lasts=0.5) == due
    for wait, due in ((49.9, False), (50.0, True)):
        clock[0] = 100.75 + wait
        assert snapshot(first, 3) == due


def test_what_a_checkpoint_costs_is_measured_for_the_next_interval(open_: Open, events: Events) -> None:
    first = open_(node="n")
    began = time.monotonic()
    assert snapshot(first, 1, durable=True) and finished(first)
    until("it is noted", lambda: [name for name, _ in events] == ["checkpoint"])
    most = time.monotonic() - began
    assert 0 < first.interval.duration <= most and 0 < first.interval.cost <= 2 * most
    (_, fields) = events[0]
    size = first.state.memory.numel() * 4
    assert (fields["step"], fields["bytes"], fields["uploaded"], fields["name"]) == (1, size, size, "n")
    assert 0 <= fields["seconds"] <= most + 0.001
    assert first.interval.facts()["losses"] == 0


def test_rank_0_asks_for_a_checkpoint_when_the_next_step_is_due(open_: Open) -> None:
    first = open_(checkpoint_steps=10)
    begin(first)
    update(first, 8)
    assert not first.due()
    update(first, 9)
    assert first.due()
    first.snapshots.ready.clear()
    assert not first.due(), "there is no memory for it yet"
    first.snapshots.ready.set()
    update(first, 10)
    first.keep((0, 1), durable=True)
    assert finished(first)
    update(first, 18)
    assert not first.due()
    update(first, 19)
    assert first.due()


def test_where_a_process_begins_is_in_the_ledger(
    open_: Open, events: Events, capsys: pytest.CaptureFixture[str]
) -> None:
    first = open_(node="n")
    assert begin(first) == 0 and first.crc == 0
    train(first, 4)
    first.keep((0, 1), durable=False)
    until("it is committed", lambda: first.snapshots.idle)
    first.close(remove=False)
    hot, durable = open_(node="n"), open_(node="m")
    assert hot.crc != 0, "equal states are known by it"
    assert begin(hot) == begin(durable) == 4 and same(hot, durable) and durable.crc == 0
    tiers = [(fields["tier"], fields["step"], fields["name"]) for name, fields in events if name == "restored"]
    assert tiers == [("none", 0, "n"), ("hot", 4, "m"), ("durable", 4, "m")]
    said = capsys.readouterr().err
    assert said.count("resuming from step 4") == 1 and "step 4 was found in shared memory" in said
    assert [durable.interval.facts()["losses"], hot.interval.facts()["losses"]] == [1, 0]
    hot.close(remove=True)
    assert open_(node="n").state.step == -1, "its snapshots were removed"


def test_the_seconds_of_an_unavailable_store_are_not_waited_for_twice(
    open_: Open, s3: Store, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(open_(), 4)
    late = open_(store=behind(proxy, s3))
    proxy.fault("refuse", 60.0)
    with pytest.raises(GroupBroken, match="stopped waiting for the object store"):
        late.restore(-1, cancelled=lambda: True)
    assert late.state.step == -1

    def over(read: Any) -> Any:
        raise GroupBroken("a member was lost")

    with pytest.raises(GroupBroken, match="a member was lost"):
        open_().restore(-1, run=over)


def test_of_the_last_of_several_the_state_counts_as_saved_once_rank_0_has_completed_it(
    open_: Open, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    members = [open_(node=f"n{rank}") for rank in range(2)]
    for member in members:
        update(member, 7)
    end = clock[0] + 1.0
    assert not members[1].flush((1, 2), lambda: 30.0 if members[1]._busy else max(0.0, end - clock[0]))
    assert "the state of step 7 is not in the object store: rank 0 did not complete it." in capsys.readouterr().err
    assert clock[0] >= end
    members[0].keep((0, 2), durable=True)
    assert finished(members[0])
    assert members[1]._wait_for_rank_0(7, lambda: 1.0)
    assert not members[1]._wait_for_rank_0(8, lambda: end + 1.0 - clock[0])


def test_an_older_upload_is_given_up_for_the_last_state(open_: Open, s3: Store, proxy: Proxy) -> None:
    last = open_(store=behind(proxy, s3), checkpoint_steps=1)
    proxy.fault("hang", 1.0)
    update(last, 1)
    last.keep((0, 1), durable=True)
    assert not last.due(), "one after the other"
    first = last._upload
    assert last._thread and last._thread.daemon, "nor does it hold up the end of the process"
    update(last, 2)
    assert last.flush((0, 1), soon)
    assert first and first.stop.is_set() and first.step == 1
    assert begin(open_()) == 2


def test_a_call_is_waited_for_only_so_long() -> None:
    assert manager._call_with_timeout(30.0, lambda: 5) == 5
    with pytest.raises(ValueError, match="it broke"):
        manager._call_with_timeout(30.0, lambda: int("it broke"))
    never = threading.Event()
    try:
        with pytest.raises(TimeoutError, match=r"no answer within 0.01 s"):
            manager._call_with_timeout(0.01, lambda: never.wait(60))
        assert all(thread.daemon for thread in threading.enumerate() if thread.name == "patience"), "it holds up no end"
    finally:
        never.set()


def test_the_state_of_another_build_of_torch_is_used_and_it_is_said(
    open_: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    first = open_(node="n")
    train(first, 3)
    first.close(remove=False)
    capsys.readouterr()
    for node, found in (("n", True), ("m", False)):
        other = open_(node=node, torch_build="3")
        assert begin(other) == 3 and same(first, other)
        said = capsys.readouterr().err
        assert ("another torch build" in said) == found
        assert ("another kind of machine" in said) != found
    other.close(remove=True)
    assert begin(open_(node="m")) == 3
    assert "another kind" not in capsys.readouterr().err
