"""Tests of durable checkpoints in a real object store: each written checkpoint is complete, each
read checkpoint is verified, and training never waits for them."""

import hashlib
import json
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rekindle.errors import ConfigError
from rekindle.storage import Store
from rekindle.training.checkpoint import durable
from rekindle.training.checkpoint.durable import RankAndGroupSize
from tests.chaos.faults import Proxy
from tests.rekindle.training.saving import (
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


def test_a_new_process_restores_exactly_the_saved_state(
    open_checkpoints: OpenCheckpoints, events: LedgerEvents
) -> None:
    first_checkpoints = open_checkpoints(data=StatefulData())
    second_checkpoints = open_checkpoints(data=StatefulData())
    assert restore_alone(first_checkpoints) == 0
    first_checkpoints.loader.data.position = 42
    train_and_upload(first_checkpoints, 5)
    assert restore_alone(second_checkpoints) == 5
    assert have_equal_states(first_checkpoints, second_checkpoints)
    assert second_checkpoints.loader.data.position == 42
    assert [(name, fields.get("tier"), fields["step"]) for name, fields in events] == [
        ("restored", "none", 0),
        ("checkpoint", None, 5),
        ("restored", "durable", 5),
    ]


def test_unchanged_chunks_are_not_uploaded_again(
    open_checkpoints: OpenCheckpoints, events: LedgerEvents
) -> None:
    first_checkpoints = open_checkpoints()
    train_and_upload(first_checkpoints, 1)
    existing = set(list_keys(first_checkpoints, "chunks"))
    reopened_checkpoints = open_checkpoints()
    restore_alone(reopened_checkpoints)
    train_and_upload(reopened_checkpoints, 2)
    uploaded = [fields["uploaded"] for name, fields in events if name == "checkpoint"]
    assert uploaded[0] == 4 * first_checkpoints.state.memory.numel()
    assert (
        0
        < uploaded[1]
        <= 1024 * len(set(list_keys(reopened_checkpoints, "chunks")) - existing)
        < uploaded[0]
    )


@pytest.mark.slow
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    damage=st.sampled_from(["flip", "tear", "remove"]), position=st.floats(0, 1, exclude_max=True)
)
def test_any_damaged_checkpoint_is_reported_and_the_previous_one_used(
    open_checkpoints: OpenCheckpoints,
    events: LedgerEvents,
    capsys: pytest.CaptureFixture[str],
    damage: str,
    position: float,
) -> None:
    first_checkpoints = open_checkpoints()
    restore_alone(first_checkpoints)
    train_and_upload(first_checkpoints, first_checkpoints.state.step + 1)
    older_step = first_checkpoints.state.step
    intact_state = first_checkpoints.state.memory.clone()
    store = first_checkpoints.remote.store
    existing = set(list_keys(first_checkpoints))
    train_and_upload(first_checkpoints, older_step + 1)
    new = sorted(
        {
            *(key for key in list_keys(first_checkpoints) if key not in existing),
            f"{first_checkpoints.remote.prefix}/latest",
        }
    )
    key = new[int(position * len(new))]
    data = bytearray(store.get(key))

    if damage == "remove":
        store.delete([key])
    else:
        offset = int(position * len(data))
        data[offset] ^= 1
        store.put(key, data if damage == "flip" else data[:offset])

    reopened_checkpoints = open_checkpoints()
    capsys.readouterr()
    events.clear()
    restore_alone(reopened_checkpoints)
    log = capsys.readouterr().err

    if reopened_checkpoints.state.step == older_step:
        assert torch.equal(reopened_checkpoints.state.memory, intact_state)
        assert key.rsplit("/", 1)[1] in log
        assert any(name == "torn" for name, _ in events)
    else:
        assert key.endswith("/latest")
        assert have_equal_states(reopened_checkpoints, first_checkpoints)

    # the training makes the same step again, without damage
    train_and_upload(reopened_checkpoints, older_step + 1)
    last_checkpoints = open_checkpoints()
    restore_alone(last_checkpoints)
    assert have_equal_states(last_checkpoints, reopened_checkpoints)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"chunks": []}, "it has 0 chunks for"),
        ({"chunks": [{}]}, "chunks.0: Input should be a valid string"),
        ({"chunks": ["../../latest"]}, "chunks.0: it has the wrong form"),
        ({"chunk": 0}, "chunk: Input should be greater than 0"),
        ({"step": 10**30}, "step: Input should be less than"),
        ({"step": 7}, "its name says step 1, but its manifest says step 7"),
        ({"loader": "x"}, "its loader state cannot be read"),
        ({"facts": {}}, "facts.trained_seconds: Field required"),
    ],
)
def test_an_invalid_manifest_is_reported_and_the_previous_checkpoint_used(
    open_checkpoints: OpenCheckpoints,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    reason: str,
) -> None:
    first_checkpoints = open_checkpoints()
    restore_alone(first_checkpoints)
    train_and_upload(first_checkpoints, 1)
    store, (key,) = first_checkpoints.remote.store, list_keys(first_checkpoints, "manifests/")
    forged_manifest = json.dumps(json.loads(store.get(key)) | change).encode()
    prefix, digest = first_checkpoints.remote.prefix, hashlib.sha256(forged_manifest).hexdigest()
    forged_key = f"{prefix}/manifests/{1:010d}-{digest[:12]}.json"
    store.put(forged_key, forged_manifest)
    store.put(f"{prefix}/latest", json.dumps({"manifest": forged_key}).encode())
    reopened_checkpoints = open_checkpoints()
    assert restore_alone(reopened_checkpoints) == 1
    assert have_equal_states(reopened_checkpoints, first_checkpoints), (
        "the intact manifest is used instead"
    )
    assert reason in capsys.readouterr().err
    train_and_upload(reopened_checkpoints, 2)
    last_checkpoints = open_checkpoints()
    assert restore_alone(last_checkpoints) == 2
    assert have_equal_states(last_checkpoints, reopened_checkpoints)


def test_a_damaged_chunk_is_uploaded_again_by_another_process(
    open_checkpoints: OpenCheckpoints,
) -> None:
    first_checkpoints = open_checkpoints()
    train_and_upload(first_checkpoints, 5)
    existing = set(list_keys(first_checkpoints, "chunks/"))
    train_and_upload(first_checkpoints, 6)
    key = next(key for key in list_keys(first_checkpoints, "chunks/") if key not in existing)
    first_checkpoints.remote.store.put(key, b"damaged")
    finder = open_checkpoints()
    heir = open_checkpoints()
    assert restore_alone(finder) == 5
    # the worker `heir` has received the state from the worker `finder`, which is killed now
    train_and_upload(heir, 6)
    last_checkpoints = open_checkpoints()
    assert restore_alone(last_checkpoints) == 6
    assert have_equal_states(last_checkpoints, heir)


def test_all_members_of_a_group_upload_their_share(
    open_checkpoints: OpenCheckpoints, events: LedgerEvents, capfd: pytest.CaptureFixture[str]
) -> None:
    members = [open_checkpoints() for _ in range(3)]
    for rank in (2, 1, 0):
        set_state(members[rank], 7)
        members[rank].save_if_due(RankAndGroupSize(rank, 3), is_durable=True)
        if rank:
            assert finish_upload(members[rank])
            # number of uploaded chunks of each rank, of 10 chunks
            assert len(list_keys(members[0], "chunks/")) == [0, 7, 4][rank]
    assert finish_upload(members[0])
    last_checkpoints = open_checkpoints()
    assert restore_alone(last_checkpoints) == 7
    assert have_equal_states(last_checkpoints, members[0])
    assert [name for name, _ in events].count("checkpoint") == 1


def test_the_share_of_a_member_that_died_is_uploaded_by_rank_0(
    open_checkpoints: OpenCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "STALL_TIMEOUT_S", 0.3)
    members = [open_checkpoints() for _ in range(3)]
    for rank in (0, 2):
        set_state(members[rank], 7)
        members[rank].save_if_due(RankAndGroupSize(rank, 3), is_durable=True)
    assert finish_upload(members[0])
    last_checkpoints = open_checkpoints()
    assert restore_alone(last_checkpoints) == 7
    assert have_equal_states(last_checkpoints, members[0])


def test_the_next_rank_0_makes_the_checkpoint_that_the_previous_one_left_incomplete(
    open_checkpoints: OpenCheckpoints,
) -> None:
    members = [open_checkpoints() for _ in range(2)]
    for rank in (0, 1):
        assert not members[rank].is_due()
        set_state(members[rank], 7)
    # rank 0 is killed at this time
    members[1].save_if_due(RankAndGroupSize(1, 2), is_durable=True)
    assert finish_upload(members[1])
    assert not list_keys(members[1], "manifests/")
    assert members[1].is_due()
    set_state(members[1], 8)
    members[1].save_if_due(RankAndGroupSize(0, 1), is_durable=True)
    assert finish_upload(members[1])
    assert not members[1].is_due()
    last_checkpoints = open_checkpoints()
    assert restore_alone(last_checkpoints) == 8


def test_another_runs_checkpoints_are_rejected_and_unchanged(
    open_checkpoints: OpenCheckpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    first_checkpoints = open_checkpoints()
    train_and_upload(first_checkpoints, 3)
    objects = {
        entry.key: entry.etag
        for entry in first_checkpoints.remote.store.list(first_checkpoints.remote.prefix)
    }
    for other in (open_checkpoints(identity="cd" * 32), open_checkpoints(width=41)):
        with pytest.raises(ConfigError, match="belongs to another run"):
            restore_alone(other)
        # another run must not write to the same prefix, either
        set_state(other, 9)
        assert not other.upload_current_state(RankAndGroupSize(0, 1), get_remaining_seconds)
        assert "belongs to another run" in capsys.readouterr().err
    assert objects == {
        entry.key: entry.etag
        for entry in first_checkpoints.remote.store.list(first_checkpoints.remote.prefix)
    }


def test_an_outdated_process_does_not_move_latest_back(open_checkpoints: OpenCheckpoints) -> None:
    outdated = open_checkpoints()
    current = open_checkpoints()
    for process in (outdated, current):
        restore_alone(process)
    train_and_upload(outdated, 1)
    train_and_upload(current, 5)
    train_and_upload(outdated, 2)
    last_checkpoints = open_checkpoints()
    assert restore_alone(last_checkpoints) == 5


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("fault", ["refuse", "reset", "throttle", "hang", "slow", "deaf"])
def test_a_failing_store_neither_delays_training_nor_loses_state(
    open_checkpoints: OpenCheckpoints, s3: Store, proxy: Proxy, fault: str
) -> None:
    checkpoints = open_checkpoints(store=open_store_behind(proxy, s3))
    restore_alone(checkpoints)
    proxy.fault(fault, 1.0)
    set_state(checkpoints, 1)
    checkpoints.save_if_due(RankAndGroupSize(0, 1), is_durable=True)
    # the training continues immediately
    set_state(checkpoints, 2)
    # the training does not request a second checkpoint
    assert not checkpoints.is_due()
    assert finish_upload(checkpoints)
    last_checkpoints = open_checkpoints()
    assert restore_alone(last_checkpoints) == 1


def test_a_worker_other_than_rank_0_is_not_delayed_by_its_own_slow_upload(
    open_checkpoints: OpenCheckpoints, s3: Store, proxy: Proxy
) -> None:
    member = open_checkpoints(store=open_store_behind(proxy, s3))
    proxy.fault("hang", 2.0)
    for step in (1, 2, 3):
        set_state(member, step)
        member.save_if_due(RankAndGroupSize(1, 2), is_durable=True)
    assert member._is_uploading
    assert member._upload
    assert member._upload.step == 1


@pytest.mark.slow
def test_starting_workers_wait_for_an_unavailable_store(
    open_checkpoints: OpenCheckpoints, s3: Store, proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    train_and_upload(open_checkpoints(), 4)
    waiting_checkpoints = open_checkpoints(store=open_store_behind(proxy, s3))
    proxy.fault("refuse", 1.0)
    assert restore_alone(waiting_checkpoints) == 4
    assert "waiting for the object store, for the newest checkpoint" in capsys.readouterr().err
    proxy.fault("refuse", 60.0)
    leaving = open_checkpoints(store=open_store_behind(proxy, s3))
    leaving.leaving.set()
    with pytest.raises(SystemExit) as ended:
        restore_alone(leaving)
    assert ended.value.code == 143
