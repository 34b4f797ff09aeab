"""Nothing is lost: whole worker pods, their launchers and nurseries among what is killed."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.chaos.execution import tell_apart
from tests.chaos.schedule import seeds
from tests.chaos.stage import Stage
from tests.rekindle.training.crew import Crew, flags


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", seeds(launcher=True))
def test_the_weights_are_those_of_the_undisturbed_run(survives: Callable[[int], None], seed: int) -> None:
    survives(seed)


@pytest.fixture
def crew(stage: Stage, tmp_path: Path) -> Iterator[Crew]:
    crew = Crew(
        stage.environment | {"TOY_HOLD": "3", "PET_NPROC_PER_NODE": "2", "REKINDLE_SHM": str(tmp_path)}, tmp_path
    )
    yield crew
    crew.close()


def test_whoever_kills_a_nursery_kills_no_worker_and_the_other_way_round(crew: Crew) -> None:
    argv = flags("victims", min_workers=2, max_workers=2, workers=2)
    crew.coordinator(argv)
    launcher = crew.light_launcher("w0", argv)
    children: Callable[[], list[psutil.Process]] = psutil.Process(launcher.process.pid).children

    def found() -> tuple[list[int], list[int]]:
        return tell_apart([child.pid for child in sorted(children(), key=psutil.Process.create_time)])

    def another_nursery_and(as_expected: Callable[[list[int]], bool]) -> bool:
        again, running = found()  # one look: a child that has just begun is neither yet
        return again not in ([], [nursery]) and as_expected(running)

    crew.until(lambda: "held at 3" in launcher.said())
    (nursery,), workers = found()
    assert len(workers) == 2 and {nursery, *workers} == {child.pid for child in children()}
    os.kill(nursery, signal.SIGKILL)
    crew.until(lambda: another_nursery_and(lambda running: running == workers))  # its death does not touch them
    killed, other = workers
    os.kill(killed, signal.SIGKILL)
    crew.until(lambda: another_nursery_and(lambda running: len(running) == 2 and killed not in running))
    assert other in found()[1]
