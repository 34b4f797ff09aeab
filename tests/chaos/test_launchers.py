"""No work is lost when worker pods, their launchers and their forkservers are killed."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.chaos.execution import classify_children
from tests.chaos.schedule import choose_seeds
from tests.chaos.stage import Stage
from tests.rekindle.training.crew import Crew, make_flags


@pytest.mark.fast_cases(1)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", choose_seeds(launcher=True))
def test_faults_do_not_change_the_weights(survives: Callable[[int], None], seed: int) -> None:
    survives(seed)


@pytest.fixture
def crew(stage: Stage, tmp_path: Path) -> Iterator[Crew]:
    crew = Crew(
        stage.environment
        | {"TOY_HOLD": "3", "PET_NPROC_PER_NODE": "2", "REKINDLE_SHM": str(tmp_path)},
        tmp_path,
    )
    yield crew
    crew.close()


def test_a_forkserver_and_its_workers_survive_the_death_of_each_other(crew: Crew) -> None:
    argv = make_flags("victims", min_workers=2, max_workers=2, workers=2)
    crew.start_coordinator(argv)
    launcher = crew.start_light_launcher("w0", argv)
    children: Callable[[], list[psutil.Process]] = psutil.Process(launcher.process.pid).children

    def find() -> tuple[list[int], list[int]]:
        return classify_children(
            [child.pid for child in sorted(children(), key=psutil.Process.create_time)]
        )

    def new_forkserver_and(as_expected: Callable[[list[int]], bool]) -> bool:
        # read both from one list of processes, because a child that has just started cannot be
        # classified yet
        new, running = find()
        return new not in ([], [forkserver]) and as_expected(running)

    crew.until(lambda: "held at 3" in launcher.read_log())
    (forkserver,), workers = find()
    assert len(workers) == 2
    assert {forkserver, *workers} == {child.pid for child in children()}
    os.kill(forkserver, signal.SIGKILL)
    # the death of the forkserver does not affect the workers
    crew.until(lambda: new_forkserver_and(lambda running: running == workers))
    killed_worker, other_worker = workers
    os.kill(killed_worker, signal.SIGKILL)
    crew.until(
        lambda: new_forkserver_and(
            lambda running: len(running) == 2 and killed_worker not in running
        )
    )
    assert other_worker in find()[1]
