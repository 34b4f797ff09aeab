"""Whose state a new group goes on with: the newest that anybody has, and nobody loses his before another is whole."""

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from rekindle.storage import Store
from rekindle.training.checkpoint.manager import Checkpoints
from rekindle.training.data import LoaderState
from rekindle.training.group.process_group import GroupView, create, dist
from rekindle.training.group.static import StaticGroup
from rekindle.training.group.training_group import TrainingGroup
from rekindle.training.spec import TrainConfig
from rekindle.training.state import State

CPU = torch.device("cpu")


class Met(StaticGroup):
    """Peers that have found each other, and keep no ledger."""

    def __init__(self) -> None:
        self.device = CPU


def member(name: str, step: int, live: bool, s3: Store, patch: pytest.MonkeyPatch) -> TrainingGroup:
    """A process's part that has made `step` steps; its state is full of that number."""
    patch.setenv("POD_NAME", name)
    state = State(nn.Linear(3, 2), TrainConfig.model_validate({"workers": 2}), CPU)
    leaving = threading.Event()
    checkpoints = Checkpoints(
        s3, "agreement", "0" * 64, {}, state, LoaderState(object()), lambda event, **fields: None, leaving
    )
    state.memory.fill_(step)
    state.step = step
    group = TrainingGroup(Met(), state, checkpoints, leaving)
    group._has_group_state = live
    return group


def agree(*groups: TrainingGroup) -> list[str]:
    """All of them in one group; gives each one's error."""
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    errors = [""] * len(groups)

    def take_part(rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", meeting.port, is_master=False, wait_for_workers=False)
        try:
            pg = create(store, rank, len(groups), CPU, "127.0.0.1")
            groups[rank]._agree(GroupView(rank, len(groups), pg))
        except RuntimeError as error:
            errors[rank] = str(error)
            groups[rank]._reset()

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.setenv("REKINDLE_SHM", str(tmp_path))
    return monkeypatch


@pytest.mark.parametrize(
    ("known_to_a", "known_to_b"),
    [((5, True), (9, False)), ((9, False), (5, True)), ((9, True), (5, False)), ((-1, False), (5, True))],
    ids=["alone with an older one", "rank 0 comes back", "a joiner's is older", "rank 0 knows nothing"],
)
def test_the_newest_state_is_never_given_up_for_an_older_one(
    s3: Store, shared: pytest.MonkeyPatch, known_to_a: tuple[int, bool], known_to_b: tuple[int, bool]
) -> None:
    groups = [member(name, *known, s3, shared) for name, known in (("a", known_to_a), ("b", known_to_b))]
    assert agree(*groups) == ["", ""]
    newest = max(known_to_a[0], known_to_b[0])
    for group in groups:
        assert group.state.step == newest and bool((group.state.memory == newest).all())
        group.checkpoints.close(remove=True)


def test_a_giver_that_dies_takes_nobodys_state_along(s3: Store, shared: pytest.MonkeyPatch) -> None:
    receiver, giver = member("a", 5, True, s3, shared), member("b", 9, False, s3, shared)
    whole = giver.state.memory
    giver.state.memory = torch.empty(0, device="meta")  # its part of the broadcast fails, as if it died in the middle
    errors = agree(receiver, giver)
    assert all(errors)
    assert receiver.state.step == 5 and bool((receiver.state.memory == 5).all())
    giver.state.memory = whole
    for group in (receiver, giver):
        group.checkpoints.close(remove=True)
