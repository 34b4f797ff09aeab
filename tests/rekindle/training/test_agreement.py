"""A new group continues with the newest state that one of its workers has. Each worker keeps its
own state until it has received the complete newest state."""

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from rekindle.storage import Store
from rekindle.training.checkpoint.manager import WorkerCheckpoints
from rekindle.training.group.process_group import GroupView, create_process_group, dist
from rekindle.training.group.static import StaticGroup
from rekindle.training.group.training_group import TrainingGroup
from rekindle.training.local_dataset import LoaderState
from rekindle.training.spec import TrainConfig
from rekindle.training.training_state import TrainingState

CPU = torch.device("cpu")


def make_group(
    name: str, step: int, live: bool, s3: Store, patch: pytest.MonkeyPatch
) -> TrainingGroup:
    """Return the group of a process that has made `step` steps; all values of the state are
    `step`."""
    patch.setenv("POD_NAME", name)
    state = TrainingState(nn.Linear(3, 2), TrainConfig.model_validate({"workers": 2}), CPU)
    leaving = threading.Event()
    loader = LoaderState(object())
    checkpoints = WorkerCheckpoints(
        s3, "agreement", "0" * 64, {}, state, loader, lambda event, **fields: None, leaving
    )
    state.memory.fill_(step)
    state.step = step
    group = TrainingGroup(StaticGroup(CPU, ledger=None), state, loader, checkpoints, leaving)
    group._is_from_group = live

    return group


def run_agreement(*groups: TrainingGroup) -> list[str]:
    """Let all processes of a group agree on a state. Return the errors of these processes."""
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    errors = [""] * len(groups)

    def join(rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", meeting.port, is_master=False, wait_for_workers=False)
        try:
            pg = create_process_group(store, rank, len(groups), CPU, "127.0.0.1")
            groups[rank]._adopt_newest_state(GroupView(rank, len(groups), pg))
        except RuntimeError as error:
            errors[rank] = str(error)
            groups[rank]._leave_group()

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(len(groups))]
    for thread in threads:
        thread.start()

    for thread in threads:
        thread.join()

    return errors


@pytest.fixture
def shared_patch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.setenv("REKINDLE_SHM", str(tmp_path))
    return monkeypatch


@pytest.mark.parametrize(
    ("state_of_a", "state_of_b"),
    [
        ((5, True), (9, False)),
        ((9, False), (5, True)),
        ((9, True), (5, False)),
        ((-1, False), (5, True)),
    ],
    ids=["older in a group", "rank 0 returns", "older in a joining worker", "none in rank 0"],
)
def test_the_newest_state_is_never_replaced_by_an_older_one(
    s3: Store,
    shared_patch: pytest.MonkeyPatch,
    state_of_a: tuple[int, bool],
    state_of_b: tuple[int, bool],
) -> None:
    groups = [
        make_group(name, *state, s3, shared_patch)
        for name, state in (("a", state_of_a), ("b", state_of_b))
    ]
    assert run_agreement(*groups) == ["", ""]
    newest = max(state_of_a[0], state_of_b[0])
    for group in groups:
        assert group.state.step == newest
        assert bool((group.state.memory == newest).all())
        group.checkpoints.close(remove_snapshots=True)


def test_a_sender_that_dies_leaves_the_receivers_state_intact(
    s3: Store, shared_patch: pytest.MonkeyPatch
) -> None:
    receiver = make_group("a", 5, True, s3, shared_patch)
    sender = make_group("b", 9, False, s3, shared_patch)
    sent_state = sender.state.memory
    # the broadcast fails, as if the sender died in the middle of it
    sender.state.memory = torch.empty(0, device="meta")
    errors = run_agreement(receiver, sender)
    assert all(errors)
    assert receiver.state.step == 5
    assert bool((receiver.state.memory == 5).all())
    sender.state.memory = sent_state
    for group in (receiver, sender):
        group.checkpoints.close(remove_snapshots=True)
