"""No work is lost when workers are killed, stopped, terminated or added, and the object store
fails."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.schedule import DEFAULT_SEEDS, RECIPES, Schedule, choose_seeds, required_coverage
from tests.chaos.watch import Watch


@pytest.mark.fast_cases(1)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", choose_seeds(launcher=False))
def test_faults_do_not_change_the_weights(survives: Callable[[int], None], seed: int) -> None:
    survives(seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("recipe", RECIPES)
def test_twenty_fault_schedules_of_each_recipe_do_not_change_the_model(
    survives: Callable[..., None], recipe: str
) -> None:
    for seed in range(2, 62, 3):  # run the seeds without launchers
        survives(seed, recipe)


def test_the_default_fault_schedules_cover_all_kinds_of_faults() -> None:
    schedules = [Schedule.of(seed) for seed in DEFAULT_SEEDS]
    assert required_coverage() <= set[str]().union(*(schedule.coverage() for schedule in schedules))
    assert {schedule.launcher for schedule in schedules} == {"", "light", "real"}
    assert {schedule.settings["workers"] for schedule in schedules} >= {2, 3, 4}


def test_the_watch_reports_a_running_worker_that_repeats_steps(journal: Path) -> None:
    watch = Watch(journal)
    journal.write_text("1.0 7 a 4\n1.1 8 b 4\n1.2 7 a 5\n1.3 7 a 5\n1.4 8 b 6\n")
    watch.poll()
    assert not watch.losses()
    assert not watch.repeated_steps()
    with journal.open("a") as file:
        file.write("1.5 9 c 2\n1.6 8 b 3\n")
    watch.poll()
    watch.close()
    assert watch.losses() == ["b (8) was set back from step 6 to step 3"]
    assert watch.repeated_steps() == 4


def test_the_watch_reports_a_worker_that_starts_before_the_step_of_its_snapshot(
    journal: Path,
) -> None:
    watch = Watch(journal)
    watch.record_snapshot("a", 6)
    watch.record_snapshot("b", 6)
    journal.write_text("1.0 7 a 6\n1.1 8 b 5\n")
    watch.poll()
    watch.close()
    assert watch.losses() == ["b (8) starts with step 5, its shared memory had 6"]
