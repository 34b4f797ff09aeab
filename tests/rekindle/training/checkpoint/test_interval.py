"""Tests of the checkpoint interval: a wrong interval would waste time on too many checkpoints, or
on repeated work."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.training.checkpoint import interval
from rekindle.training.checkpoint.interval import MAX_INTERVAL_S, MIN_INTERVAL_S, CheckpointInterval


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [1000.0]
    monkeypatch.setattr(interval.time, "monotonic", lambda: clock[0])
    return clock


@given(
    cost=st.floats(0, 1e4),
    duration=st.floats(0, 1e4),
    losses=st.integers(0, 1000),
    seconds=st.floats(0, 1e7),
)
def test_an_automatic_interval_follows_youngs_formula_within_bounds(
    cost: float, duration: float, losses: int, seconds: float
) -> None:
    interval = CheckpointInterval(0, 0)
    interval.resume(5, {"trained_seconds": seconds, "losses": losses})
    interval.cost = cost
    interval.duration = duration
    assert MIN_INTERVAL_S <= interval.seconds() <= MAX_INTERVAL_S
    young = math.sqrt(2 * cost * (3600 + seconds) / (2 + losses))
    if MIN_INTERVAL_S < young < MAX_INTERVAL_S and 2 * duration < young:
        assert interval.seconds() == pytest.approx(young, rel=1e-3)


def test_more_losses_cause_more_checkpoints_also_in_the_next_process(now: list[float]) -> None:
    interval = CheckpointInterval(0, 0)
    interval.cost = 1.0
    initial_seconds = interval.seconds()
    now[0] += 3600
    assert interval.seconds() > initial_seconds
    for _ in range(20):
        interval.record_loss()
    assert interval.seconds() < initial_seconds / 3
    later = CheckpointInterval(0, 0)
    later.cost = 1.0
    later.resume(7, interval.facts())
    assert later.seconds() == pytest.approx(interval.seconds(), rel=0.05)


def test_the_config_may_fix_the_interval_in_seconds_and_in_steps(now: list[float]) -> None:
    by_time = CheckpointInterval(5.0, 0)
    by_steps = CheckpointInterval(0, 10)
    assert not by_time.is_due(10**6)
    assert not by_steps.is_due(9)
    assert by_steps.is_due(10)
    by_steps.record_start(10)
    assert not by_steps.is_due(19)
    assert by_steps.is_due(20)
    now[0] += 5
    assert by_time.is_due(1)
    by_time.record_start(1)
    assert not by_time.is_due(2)


def test_the_interval_depends_on_cost_losses_and_upload_duration(now: list[float]) -> None:
    interval = CheckpointInterval(0, 0)
    assert interval.seconds() == 10.0, "the cost is not measured yet"
    interval.cost = 2.0
    assert interval.seconds() == math.sqrt(2 * 2.0 * 3600)
    now[0] += 3600
    assert interval.seconds() == math.sqrt(2 * 2.0 * 7200)
    interval.record_loss()
    assert interval.seconds() == math.sqrt(2 * 2.0 * 7200 / 2)
    interval.duration = 100.0
    assert interval.seconds() == 200.0
    interval.cost = 1e6
    assert interval.seconds() == 1800.0
    assert interval.facts() == {"trained_seconds": 3600.0, "losses": 1}
    later = CheckpointInterval(0, 0)
    later.resume(5, interval.facts())
    now[0] += 60
    assert later.facts() == {"trained_seconds": 3660.0, "losses": 2}


def test_time_and_steps_count_from_the_start_of_the_last_checkpoint(now: list[float]) -> None:
    interval = CheckpointInterval(5.0, 10)
    interval.resume(100, {"trained_seconds": 0.0, "losses": 0})
    assert not interval.is_due(109)
    assert interval.is_due(110)
    now[0] += 4.9
    assert not interval.is_due(101)
    interval.record_start(101)
    now[0] += 4.9
    assert not interval.is_due(102)
    now[0] += 0.2
    assert interval.is_due(102)
