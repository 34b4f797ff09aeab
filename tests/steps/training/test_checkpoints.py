"""Durable checkpoints against a real endpoint: what is written is whole, what is read is checked."""

import json
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steps.errors import ConfigError
from steps.storage import Store
from steps.training import checkpoints as module
from steps.training.checkpoints import Checkpoints
from steps.training.config import TrainConfig
from steps.training.state import State

numbers = count()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 1024)


@pytest.fixture
def open_(s3: Store) -> Callable[..., Checkpoints]:
    """Opens the checkpoints of one prefix, each time as a new process would."""
    prefix = f"checkpoints-{next(numbers)}"

    def make(*, identity: str = "us", width: int = 40, store: Any = s3, **config: Any) -> Checkpoints:
        torch.manual_seed(1)
        state = State(torch.nn.Linear(width, 20), TrainConfig.model_validate(config), torch.device("cpu"))
        return Checkpoints(store, prefix, identity, {"torch": "2"}, state)

    return make


def train(checkpoints: Checkpoints, step: int) -> None:
    """As if `step` updates had been made; the first quarter of the state never changes."""
    checkpoints.state.step = step
    changing = checkpoints.state.memory[len(checkpoints.state.memory) // 4 :]
    changing.copy_(torch.randn(len(changing), generator=torch.Generator().manual_seed(step)))
    checkpoints.save(now=True)


def keys(checkpoints: Checkpoints, kind: str = "") -> list[str]:
    return [entry.key for entry in checkpoints.store.list(f"{checkpoints.prefix}/{kind}")]


def test_a_new_process_goes_on_from_exactly_what_was_saved(open_: Callable[..., Checkpoints]) -> None:
    first, second = open_(), open_()
    first.restore()
    assert first.state.step == 0
    train(first, 5)
    second.restore()
    assert second.state.step == 5
    assert torch.equal(second.state.memory, first.state.memory)


def test_what_did_not_change_is_not_uploaded_again(open_: Callable[..., Checkpoints]) -> None:
    first = open_()
    train(first, 1)
    before = len(keys(first, "chunks"))
    again = open_()
    again.restore()
    uploaded: list[str] = []
    put = again.store.put
    again.store.put = lambda key, *args, **kwargs: (uploaded.append(key), put(key, *args, **kwargs))[1]
    train(again, 2)
    chunks = [key for key in uploaded if "/chunks/" in key]
    assert 0 < len(chunks) < before


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=st.sampled_from(["flip", "tear", "remove"]), place=st.floats(0, 1, exclude_max=True))
def test_any_damage_is_found_and_named_and_the_checkpoint_before_is_used(
    open_: Callable[..., Checkpoints], capsys: pytest.CaptureFixture[str], damage: str, place: float
) -> None:
    first = open_()
    first.restore()
    train(first, first.state.step + 1)
    older, whole = first.state.step, first.state.memory.clone()
    before = set(keys(first))
    train(first, older + 1)
    new = sorted({*(key for key in keys(first) if key not in before), f"{first.prefix}/latest"})
    key = new[int(place * len(new))]
    data = bytearray(first.store.get(key))
    if damage == "remove":
        first.store.delete([key])
    else:
        at = int(place * len(data))
        data[at] ^= 1
        first.store.put(key, data if damage == "flip" else data[:at])

    again = open_()
    capsys.readouterr()
    again.restore()
    said = capsys.readouterr().err
    if again.state.step == older:
        assert torch.equal(again.state.memory, whole)
        assert key.rsplit("/", 1)[1] in said
    else:
        assert again.state.step == older + 1 and torch.equal(again.state.memory, first.state.memory)
        assert key.endswith("/latest")
    train(again, older + 2)
    last = open_()
    last.restore()
    assert last.state.step == older + 2 and torch.equal(last.state.memory, again.state.memory)


def test_old_checkpoints_go_and_the_kept_ones_stay_whole(open_: Callable[..., Checkpoints]) -> None:
    first = open_(keep_checkpoints=2)
    for step in range(1, 6):
        train(first, step)
    manifests = keys(first, "manifests/")
    assert [json.loads(first.store.get(key))["step"] for key in manifests] == [4, 5]
    needed = {chunk for key in manifests for chunk in json.loads(first.store.get(key))["chunks"]}
    assert {key.rsplit("/", 1)[1] for key in keys(first, "chunks/")} == needed


def test_another_runs_checkpoints_are_refused_and_untouched(open_: Callable[..., Checkpoints]) -> None:
    first = open_()
    train(first, 3)
    before = {entry.key: entry.etag for entry in first.store.list(first.prefix)}
    for other in (open_(identity="them"), open_(width=41)):
        with pytest.raises(ConfigError, match="belongs to another run"):
            other.restore()
        train(other, 9)  # a process that lost its way cannot either
    assert before == {entry.key: entry.etag for entry in first.store.list(first.prefix)}


def test_a_process_of_the_past_does_not_move_latest_back(open_: Callable[..., Checkpoints]) -> None:
    past, present = open_(), open_()
    for process in (past, present):
        process.restore()
    train(past, 1)
    train(present, 5)
    train(past, 2)
    last = open_()
    last.restore()
    assert last.state.step == 5


def test_a_store_that_is_away_delays_nothing_and_loses_nothing(
    open_: Callable[..., Checkpoints], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    checkpoints = open_(checkpoint_steps=1)
    real, away = checkpoints.store, Store("rekindle", "http://127.0.0.1:9")
    checkpoints.store = away
    checkpoints.state.step = 1
    checkpoints.save()
    checkpoints.state.step = 2
    checkpoints.save()
    assert checkpoints._thread and checkpoints._thread.is_alive()
    checkpoints.store = real
    checkpoints._thread.join(60)
    last = open_()
    last.restore()
    assert last.state.step == 1
