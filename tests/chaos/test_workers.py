"""Nothing is lost: workers killed, stopped, told to go and joined by others, while the object store misbehaves."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.schedule import DEFAULT, RECIPES, Schedule, everything, seeds
from tests.chaos.watch import Watch


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", seeds(launcher=False))
def test_the_weights_are_those_of_the_undisturbed_run(survives: Callable[[int], None], seed: int) -> None:
    survives(seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("recipe", RECIPES)
def test_twenty_schedules_of_each_recipe_give_the_model_of_its_undisturbed_run(
    survives: Callable[..., None], recipe: str
) -> None:
    for seed in range(2, 62, 3):  # those without launchers
        survives(seed, recipe)


def test_no_kind_of_death_or_fault_is_left_out_of_the_default_suite() -> None:
    schedules = [Schedule.of(seed) for seed in DEFAULT]
    assert everything() <= set[str]().union(*(schedule.covered() for schedule in schedules))
    assert {schedule.launcher for schedule in schedules} == {"", "light", "real"}
    assert {schedule.settings["workers"] for schedule in schedules} >= {2, 3, 4}


def test_a_worker_that_is_set_back_while_it_lives_is_a_loss(journal: Path) -> None:
    watch = Watch(journal)
    journal.write_text("1.0 7 a 4\n1.1 8 b 4\n1.2 7 a 5\n1.3 7 a 5\n1.4 8 b 6\n")
    watch.poll()
    assert not watch.losses() and not watch.redone()
    with journal.open("a") as file:
        file.write("1.5 9 c 2\n1.6 8 b 3\n")
    watch.poll()
    watch.close()
    assert watch.losses() == ["b (8) had begun step 6 and was set back to 3"]
    assert watch.redone() == 4


def test_a_worker_that_begins_before_what_its_shared_memory_had_is_a_loss(journal: Path) -> None:
    watch = Watch(journal)
    watch.keep("a", 6)
    watch.keep("b", 6)
    journal.write_text("1.0 7 a 6\n1.1 8 b 5\n")
    watch.poll()
    watch.close()
    assert watch.losses() == ["b (8) begins with step 5, its shared memory had 6"]
