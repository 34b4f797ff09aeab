"""Any training recipe gives the same model for any number of workers, and after any kills."""

import json
import signal
from typing import Any

import pytest

from rekindle.storage import Store
from tests.chaos.schedule import RECIPES
from tests.rekindle.training.crew import Crew, make_flags

# the states of these optimizers contain tensors of all types
DEFAULT = ("BatchNorm", "early stopping", "Adafactor")


def make_recipe_flags(name: str, run: str, **settings: Any) -> list[str]:
    settings = {"steps": 24, "validation": 0.2} | RECIPES[name] | settings
    return make_flags(
        f"{name}/{run}", **settings | {"model": json.dumps(settings.get("model", {}))}
    )


def read_digest_and_step(s3: Store, name: str, run: str) -> tuple[str, int]:
    model = json.loads(s3.get(f"{name}/{run}/model/model.json"))
    return model["sha256"], model["step"]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "name",
    [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES],
)
def test_killing_four_workers_one_after_the_other_does_not_change_the_model(
    crew: Crew, s3: Store, name: str
) -> None:
    undisturbed = crew.start_lone_worker(make_recipe_flags(name, "alone"))
    settings = make_recipe_flags(name, "killed", workers=4, hot_seconds=1e-9)
    coordinator = crew.start_coordinator(settings)
    members = [crew.start_worker(f"w{i}", settings, TOY_HOLD="6 10 14 30") for i in range(4)]

    for number in (6, 10, 14, 30):
        crew.wait_until_held(number, *members)
        victim = members.pop()
        victim.send(signal.SIGKILL)
        victim.process.join()
        crew.release(number)

    successors = [crew.start_worker(f"w{i}", settings) for i in (0, 1)]
    assert coordinator.wait_for_exit_code() == 0, "".join(
        member.read_log() for member in successors
    )
    # one of the workers may start too late to find its snapshot
    assert any("was found in shared memory" in member.read_log() for member in successors)
    assert undisturbed.wait_for_exit_code() == 0, undisturbed.read_log()
    sha256, steps = read_digest_and_step(s3, name, "alone")
    assert read_digest_and_step(s3, name, "killed") == (sha256, steps)
    best = json.loads(s3.get(f"{name}/killed/model/model.json"))["best"]
    assert (best["step"] + 2 == steps < 24) if name == "early stopping" else steps == 24
    assert best["released"] == (name == "early stopping")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RECIPES)
def test_any_number_of_workers_gives_the_same_model(crew: Crew, s3: Store, name: str) -> None:
    for workers in (1, 2, 3, 4):
        settings = make_recipe_flags(name, f"with {workers}", workers=workers)
        coordinator = crew.start_coordinator(settings)
        members = [crew.start_worker(f"{workers}-{i}", settings) for i in range(workers)]
        assert coordinator.wait_for_exit_code() == 0, members[0].read_log()
    assert len({read_digest_and_step(s3, name, f"with {workers}") for workers in (1, 2, 3, 4)}) == 1
