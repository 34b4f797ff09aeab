"""Nothing is lost: whole worker pods, their launchers and nurseries among what is killed."""

from collections.abc import Callable

import pytest

from tests.chaos.schedule import DOZEN, Schedule


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [seed for seed in DOZEN if Schedule.of(seed).launcher])
def test_the_weights_are_those_of_the_undisturbed_run(survives: Callable[[int], None], seed: int) -> None:
    survives(seed)
