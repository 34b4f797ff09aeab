"""Checkpoints against a real endpoint: what is written is whole, what is read is checked, training never waits."""

import errno
import json
import math
import mmap
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steps.errors import ConfigError, RekindleError
from steps.storage import Entry, Store
from steps.training import durable, hot
from steps.training.checkpoints import Checkpoints
from steps.training.config import TrainConfig
from steps.training.data import Cursor
from steps.training.retention import Retention
from steps.training.state import State
from tests.chaos.faults import Proxy

numbers = count()
US = "ab" * 32
Open = Callable[..., Checkpoints]
Events = list[tuple[str, dict[str, Any]]]


def soon() -> float:
    return 30.0


class Stream:
    """A user's data loader that counts."""

    def __init__(self) -> None:
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, found: dict[str, int]) -> None:
        self.place = found["place"]

    def advance(self, step: int) -> None:
        self.place += step


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(durable, "CHUNK", 1024)
    monkeypatch.setenv("REKINDLE_SHM", str(tmp_path))


@pytest.fixture
def events() -> Events:
    return []


@pytest.fixture
def open_(s3: Store, events: Events, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens the checkpoints of one prefix, each time as a new process on a new node would (or on `node`)."""
    prefix, made = f"checkpoints-{next(numbers)}", list[Checkpoints]()

    def make(
        *,
        node: str = "",
        identity: str = US,
        width: int = 40,
        store: Store = s3,
        data: Any = None,
        **config: Any,
    ) -> Checkpoints:
        monkeypatch.setenv("POD_NAME", node or f"node-{next(numbers)}")
        torch.manual_seed(1)
        state = State(torch.nn.Linear(width, 20), TrainConfig.model_validate(config), torch.device("cpu"))
        found = Checkpoints(
            store.hasty(),
            prefix,
            identity,
            {"torch": "2"},
            state,
            Cursor(data),
            lambda event, **fields: events.append((event, fields)),
            threading.Event(),
        )
        assert found.snapshots.ready.wait(10)
        made.append(found)
        return found

    yield make
    for each in made:
        each.close(remove=True)


@pytest.fixture
def proxy(s3: Store) -> Iterator[Proxy]:
    with Proxy(s3.endpoint or "") as proxy:
        yield proxy


def behind(proxy: Proxy, s3: Store) -> Store:
    return Store(s3.bucket, proxy.url)


def begin(checkpoints: Checkpoints) -> int:
    """As a process that finds nobody training."""
    checkpoints.restore(checkpoints.state.step)
    return checkpoints.state.step


def update(checkpoints: Checkpoints, step: int) -> None:
    """As if `step` updates had been made; the first quarter of the state never changes."""
    checkpoints.state.step = step
    changing = checkpoints.state.memory[len(checkpoints.state.memory) // 4 :]
    changing.copy_(torch.randn(len(changing), generator=torch.Generator().manual_seed(step)))


def train(checkpoints: Checkpoints, step: int) -> None:
    update(checkpoints, step)
    assert checkpoints.flush((0, 1), soon)


def finished(checkpoints: Checkpoints) -> bool:
    """Wait for a checkpoint that is under way."""
    assert checkpoints._thread and checkpoints._draft
    checkpoints._thread.join(60)
    return not checkpoints._draft.problem


def keys(checkpoints: Checkpoints, kind: str = "") -> list[str]:
    return [entry.key for entry in checkpoints.durable.store.list(f"{checkpoints.durable.prefix}/{kind}")]


def same(one: Checkpoints, other: Checkpoints) -> bool:
    return one.state.step == other.state.step and torch.equal(one.state.memory, other.state.memory)


# -- the durable tier -----------------------------------------------------------------------------------------------


def test_a_new_process_goes_on_from_exactly_what_was_saved(open_: Open, events: Events) -> None:
    first, second = open_(data=Stream()), open_(data=Stream())
    assert begin(first) == 0
    first.cursor.data.place = 42
    train(first, 5)
    assert begin(second) == 5 and same(first, second)
    assert second.cursor.data.place == 42
    assert [(name, fields.get("tier"), fields["step"]) for name, fields in events] == [
        ("restored", "none", 0),
        ("checkpoint", None, 5),
        ("restored", "durable", 5),
    ]


def test_what_did_not_change_is_not_uploaded_again(open_: Open, events: Events) -> None:
    first = open_()
    train(first, 1)
    before = set(keys(first, "chunks"))
    again = open_()
    begin(again)
    train(again, 2)
    uploaded = [fields["uploaded"] for name, fields in events if name == "checkpoint"]
    assert uploaded[0] == 4 * first.state.memory.numel()
    assert 0 < uploaded[1] <= 1024 * len(set(keys(again, "chunks")) - before) < uploaded[0]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=st.sampled_from(["flip", "tear", "remove"]), place=st.floats(0, 1, exclude_max=True))
def test_any_damage_is_found_and_named_and_the_checkpoint_before_is_used(
    open_: Open, events: Events, capsys: pytest.CaptureFixture[str], damage: str, place: float
) -> None:
    first = open_()
    begin(first)
    train(first, first.state.step + 1)
    older, whole, store = first.state.step, first.state.memory.clone(), first.durable.store
    before = set(keys(first))
    train(first, older + 1)
    new = sorted({*(key for key in keys(first) if key not in before), f"{first.durable.prefix}/latest"})
    key = new[int(place * len(new))]
    data = bytearray(store.get(key))
    if damage == "remove":
        store.delete([key])
    else:
        at = int(place * len(data))
        data[at] ^= 1
        store.put(key, data if damage == "flip" else data[:at])

    again = open_()
    capsys.readouterr()
    events.clear()
    begin(again)
    said = capsys.readouterr().err
    if again.state.step == older:
        assert torch.equal(again.state.memory, whole)
        assert key.rsplit("/", 1)[1] in said
        assert any(name == "torn" for name, _ in events)
    else:
        assert key.endswith("/latest") and same(again, first)
    train(again, older + 1)  # the same step again, whole this time
    last = open_()
    begin(last)
    assert same(last, again)


def test_a_damaged_checkpoint_that_another_process_found_is_not_relied_on(open_: Open) -> None:
    first = open_()
    train(first, 5)
    before = set(keys(first, "chunks/"))
    train(first, 6)
    key = next(key for key in keys(first, "chunks/") if key not in before)
    first.durable.store.put(key, b"damaged")
    finder, heir = open_(), open_()
    assert begin(finder) == 5
    train(heir, 6)  # it has got the state from the finder, which is killed now
    last = open_()
    assert begin(last) == 6 and same(last, heir)


def test_all_members_of_a_group_upload_their_share(
    open_: Open, events: Events, capfd: pytest.CaptureFixture[str]
) -> None:
    members = [open_() for _ in range(3)]
    for rank in (2, 1, 0):
        update(members[rank], 7)
        members[rank].keep((rank, 3), durable=True)
        if rank:
            assert finished(members[rank])
            assert len(keys(members[0], "chunks/")) == [0, 7, 4][rank]  # of 10
    assert finished(members[0])
    last = open_()
    assert begin(last) == 7 and same(last, members[0])
    assert [name for name, _ in events].count("checkpoint") == 1


def test_the_share_of_a_member_that_died_is_uploaded_by_rank_0(open_: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "STALL", 0.3)
    members = [open_() for _ in range(3)]
    for rank in (0, 2):
        update(members[rank], 7)
        members[rank].keep((rank, 3), durable=True)
    assert finished(members[0])
    last = open_()
    assert begin(last) == 7 and same(last, members[0])


def test_the_next_rank_0_completes_what_the_former_one_did_not(open_: Open) -> None:
    members = [open_() for _ in range(2)]
    for rank in (0, 1):
        assert not members[rank].due()
        update(members[rank], 7)
    members[1].keep((1, 2), durable=True)  # rank 0 is killed here
    assert finished(members[1]) and not keys(members[1], "manifests/")
    assert members[1].due()
    update(members[1], 8)
    members[1].keep((0, 1), durable=True)
    assert finished(members[1]) and not members[1].due()
    last = open_()
    assert begin(last) == 8


def test_another_runs_checkpoints_are_refused_and_untouched(open_: Open, capsys: pytest.CaptureFixture[str]) -> None:
    first = open_()
    train(first, 3)
    before = {entry.key: entry.etag for entry in first.durable.store.list(first.durable.prefix)}
    for other in (open_(identity="cd" * 32), open_(width=41)):
        with pytest.raises(ConfigError, match="belongs to another run"):
            begin(other)
        update(other, 9)  # a process that lost its way cannot either
        assert not other.flush((0, 1), soon)
        assert "belongs to another run" in capsys.readouterr().err
    assert before == {entry.key: entry.etag for entry in first.durable.store.list(first.durable.prefix)}


def test_a_process_of_the_past_does_not_move_latest_back(open_: Open) -> None:
    past, present = open_(), open_()
    for process in (past, present):
        begin(process)
    train(past, 1)
    train(present, 5)
    train(past, 2)
    last = open_()
    assert begin(last) == 5


@pytest.mark.parametrize("fault", ["refuse", "reset", "throttle", "hang", "slow", "deaf"])
def test_a_store_in_trouble_delays_nothing_and_loses_nothing(open_: Open, s3: Store, proxy: Proxy, fault: str) -> None:
    checkpoints = open_(store=behind(proxy, s3))
    begin(checkpoints)
    proxy.fault(fault, 1.0)
    update(checkpoints, 1)
    checkpoints.keep((0, 1), durable=True)
    update(checkpoints, 2)  # training goes on at once
    assert not checkpoints.due()  # and does not ask for a second one meanwhile
    assert finished(checkpoints)
    last = open_()
    assert begin(last) == 1


def test_a_follower_is_not_delayed_by_its_own_slow_upload(open_: Open, s3: Store, proxy: Proxy) -> None:
    member = open_(store=behind(proxy, s3))
    proxy.fault("hang", 2.0)
    for step in (1, 2, 3):
        update(member, step)
        member.keep((1, 2), durable=True)
    assert member._busy and member._draft and member._draft.step == 1


def test_workers_wait_for_a_store_that_is_away_when_they_begin(
    open_: Open, s3: Store, proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    train(open_(), 4)
    late = open_(store=behind(proxy, s3))
    proxy.fault("refuse", 1.0)
    assert begin(late) == 4
    assert "waiting for the object store, for the newest checkpoint" in capsys.readouterr().err
    proxy.fault("refuse", 60.0)
    told = open_(store=behind(proxy, s3))
    told.leaving.set()
    with pytest.raises(SystemExit) as ended:
        begin(told)
    assert ended.value.code == 143


# -- retention ------------------------------------------------------------------------------------------------------


def test_old_checkpoints_go_and_the_kept_ones_stay_whole(open_: Open) -> None:
    first = open_(keep_checkpoints=2)
    for step in range(1, 6):
        train(first, step)
    store, manifests = first.durable.store, keys(first, "manifests/")
    assert [json.loads(store.get(key))["step"] for key in manifests] == [4, 5]
    needed = {chunk for key in manifests for chunk in json.loads(store.get(key))["chunks"]}
    assert {key.rsplit("/", 1)[1] for key in keys(first, "chunks/")} == needed


def test_nothing_is_deleted_while_somebody_reads(open_: Open, s3: Store) -> None:
    first = open_(keep_checkpoints=2)
    lease = f"{first.durable.prefix}/readers/somebody"
    s3.put(lease, b"")
    for step in range(1, 5):
        train(first, step)
    assert len(keys(first, "manifests/")) == 4
    s3.delete([lease])
    train(first, 5)
    assert len(keys(first, "manifests/")) == 2
    assert begin(open_()) == 5 and not keys(first, "readers/")


NOW = 10**6


@given(
    ages=st.dictionaries(st.integers(1, 30), st.integers(0, 20000), min_size=1),
    number=st.integers(2, 5),
    hours=st.sampled_from([0, 0.5, 2]),
    data=st.data(),
)
def test_retention_keeps_latest_and_the_newest_before_it(
    ages: dict[int, int], number: int, hours: float, data: st.DataObject
) -> None:
    manifests = [Entry(f"{step:04d}", 1, "", NOW - age) for step, age in sorted(ages.items())]
    latest = data.draw(st.sampled_from(manifests)).key
    old = Retention(None, "", number, hours)._old(latest, manifests, NOW)  # type: ignore[arg-type]
    kept = [entry for entry in manifests if entry.key not in old]
    before = [entry for entry in manifests if entry.key < latest][-(number - 1) :]
    young = [entry.key for entry in before if not hours or entry.modified >= NOW - 3600 * hours]
    assert [entry.key for entry in kept if entry.key <= latest] == [*young, latest]
    assert all(entry.modified >= NOW - 3600 for entry in kept if entry.key > latest)


# -- both tiers -----------------------------------------------------------------------------------------------------


def test_a_snapshot_in_shared_memory_outlives_its_process(open_: Open, events: Events) -> None:
    first = open_(node="n", data=Stream(), hot_seconds=1e-9)
    begin(first)
    for step in range(1, 9):
        update(first, step)
        first.keep((0, 1), durable=False)
    first.close(remove=False)
    second = open_(node="n", data=Stream())
    assert 1 <= second.state.step <= 8 and second.cursor.data.place == sum(range(second.state.step + 1))
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
    path = hot.path(hot.run_name(US, first.durable.prefix), hot.node_name())
    data = bytearray(path.read_bytes())
    data[hot.PAGE + 100] ^= 1
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
    with pytest.raises(RekindleError, match=r"no memory for a copy of the state, .* Cannot allocate memory"):
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
