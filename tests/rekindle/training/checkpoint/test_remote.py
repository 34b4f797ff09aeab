"""The durable tier against a real endpoint: what is written is whole, what is read is checked, training never waits."""

import hashlib
import json
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rekindle.errors import ConfigError
from rekindle.storage import Store
from rekindle.training.checkpoint import remote
from tests.chaos.faults import Proxy
from tests.rekindle.training.saving import (
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


def test_a_new_process_goes_on_from_exactly_what_was_saved(open_: Open, events: Events) -> None:
    first, second = open_(data=Stream()), open_(data=Stream())
    assert begin(first) == 0
    first.loader.data.place = 42
    train(first, 5)
    assert begin(second) == 5 and same(first, second)
    assert second.loader.data.place == 42
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
    older, whole, store = first.state.step, first.state.memory.clone(), first.remote.store
    before = set(keys(first))
    train(first, older + 1)
    new = sorted({*(key for key in keys(first) if key not in before), f"{first.remote.prefix}/latest"})
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


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ({"chunks": []}, "it has 0 chunks for"),
        ({"chunks": [{}]}, "chunks.0: Input should be a valid string"),
        ({"chunks": ["../../latest"]}, "chunks.0: String should match"),
        ({"chunk": 0}, "chunk: Input should be greater than 0"),
        ({"step": 10**30}, "step: Input should be less than"),
        ({"step": 7}, "its name says step 1, but its manifest step 7"),
        ({"loader": "x"}, "its loader state cannot be read"),
        ({"facts": {}}, "facts.trained_seconds: Field required"),
    ],
)
def test_a_manifest_that_no_run_has_written_gives_nobody_half_a_state(
    open_: Open, capsys: pytest.CaptureFixture[str], lie: dict[str, Any], why: str
) -> None:
    first = open_()
    begin(first)
    train(first, 1)
    store, (key,) = first.remote.store, keys(first, "manifests/")
    forged = json.dumps(json.loads(store.get(key)) | lie).encode()
    place = f"{first.remote.prefix}/manifests/{1:010d}-{hashlib.sha256(forged).hexdigest()[:12]}.json"
    store.put(place, forged)
    store.put(f"{first.remote.prefix}/latest", json.dumps({"manifest": place}).encode())
    again = open_()
    assert begin(again) == 1 and same(again, first), "the intact one is read instead"
    assert why in capsys.readouterr().err
    train(again, 2)
    last = open_()
    assert begin(last) == 2 and same(last, again)


def test_a_damaged_checkpoint_that_another_process_found_is_not_relied_on(open_: Open) -> None:
    first = open_()
    train(first, 5)
    before = set(keys(first, "chunks/"))
    train(first, 6)
    key = next(key for key in keys(first, "chunks/") if key not in before)
    first.remote.store.put(key, b"damaged")
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
    monkeypatch.setattr(remote, "STALL_TIMEOUT_S", 0.3)
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
    before = {entry.key: entry.etag for entry in first.remote.store.list(first.remote.prefix)}
    for other in (open_(identity="cd" * 32), open_(width=41)):
        with pytest.raises(ConfigError, match="belongs to another run"):
            begin(other)
        update(other, 9)  # a process that lost its way cannot either
        assert not other.flush((0, 1), soon)
        assert "belongs to another run" in capsys.readouterr().err
    assert before == {entry.key: entry.etag for entry in first.remote.store.list(first.remote.prefix)}


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
    assert member._busy and member._upload and member._upload.step == 1


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
