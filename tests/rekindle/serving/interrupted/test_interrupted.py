"""An interrupted rollback or release comes to the same end when it is typed again, and leaves nothing behind."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.storage import Store
from tests.rekindle.serving.interrupted import releases, rollbacks
from tests.rekindle.serving.interrupted.disturbance import Moment

SEEDS = range(20)


@pytest.fixture
def place(tmp_path: Path, s3: Store, mlflow_server: str) -> Iterator[releases.Place]:
    with releases.Place(tmp_path / "project", os.environ) as place:
        yield place


@pytest.mark.parametrize("seed", [3])
def test_an_interrupted_rollback_is_finished_by_the_same_command(
    seed: int, tmp_path: Path, s3: Store, mlflow_server: str
) -> None:
    told, problems = rollbacks.play(seed, tmp_path, os.environ)
    assert not problems, "\n".join([told, *problems])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_interrupted_rollbacks_come_to_the_same_end(tmp_path: Path, s3: Store, mlflow_server: str) -> None:
    played = [rollbacks.play(seed, tmp_path, os.environ) for seed in SEEDS]
    assert not [(told, problems) for told, problems in played if problems]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_was_killed_before_its_switch_leaves_the_traffic_to_a_newer_release(place: releases.Place) -> None:
    told, run, problems = place.release(Moment(2, before=False, kill=True, what="registered-models/alias"), newer=True)
    assert "killed" in told[0] and "newer" in told[1], told  # the first alias is that of the candidate
    problems += place.problems(run)
    assert not problems, "\n".join([*told, *problems])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_interrupted_releases_come_to_the_same_end(place: releases.Place) -> None:
    told, run, problems = place.release()
    assert not [*problems, *place.problems(run)], told
    played = [releases.play(seed, place) for seed in SEEDS]
    assert not [(told, problems) for told, problems in played if problems]
