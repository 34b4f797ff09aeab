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

    crew.until(lambda: "held at 3" in launcher.said())
    (nursery,), workers = found()
    assert len(workers) == 2 and {nursery, *workers} == {child.pid for child in children()}
    os.kill(nursery, signal.SIGKILL)
    crew.until(lambda: bool(found()[0]) and found()[0] != [nursery])
    assert found()[1] == workers  # whom the death of their nursery does not touch
    os.kill(workers[0], signal.SIGKILL)
    crew.until(lambda: len(found()[1]) == 2 and workers[0] not in found()[1])
    again, successors = found()
    assert again not in ([], [nursery]) and workers[1] in successors
