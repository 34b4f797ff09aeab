"""Fixtures that execute schedules of faults."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.__main__ import format_failure
from tests.chaos.schedule import Schedule
from tests.chaos.stage import Stage


@pytest.fixture(scope="module")
def stage(
    s3_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    with Stage(s3_environment, tmp_path_factory.mktemp("chaos")) as stage:
        yield stage


@pytest.fixture
def survives(stage: Stage) -> Callable[..., None]:
    """Return a function that executes the schedule of a seed, and fails with all its events if work
    was lost."""

    def check(seed: int, recipe: str = "") -> None:
        outcome = stage.play(Schedule.of(seed, recipe))
        assert not outcome.problems, format_failure(outcome)

    return check


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"
