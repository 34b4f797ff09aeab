"""A training on GPUs ends with the same weights, also if one of its processes is killed.

make test-gpu
"""

import json
import signal
from typing import Any

import pytest

from rekindle.storage import Store
from tests.rekindle.training.crew import Crew, Member, make_flags

pytestmark = pytest.mark.gpu
# the timeout is long, because the first CUDA context of a process takes seconds
TIMEOUT_S = 240


def read_weights_hash(s3: Store, prefix: str) -> str:
    """Return the sha256 of the weights that a training has stored."""
    card: dict[str, Any] = json.loads(s3.get(f"{prefix}/model/model.json"))
    return card["sha256"]


def await_success(*members: Member) -> None:
    """Wait until all processes of a training have ended successfully."""
    for member in members:
        assert member.wait_for_exit_code(TIMEOUT_S) == 0, member.read_log()


@pytest.fixture(params=["float32", "bf16"])
def settings(request: pytest.FixtureRequest, device: str) -> dict[str, str]:
    """The settings of a training on the device, with precision fp32 and with bf16."""
    return {"device": device, "precision": request.param}


def test_the_same_training_gives_the_same_weights_twice(
    crew: Crew, s3: Store, settings: dict[str, str]
) -> None:
    prefixes = [f"gpu-twice-{settings['precision']}-{number}" for number in range(2)]
    for prefix in prefixes:
        await_success(crew.start_lone_worker(make_flags(prefix, **settings)))
    first_hash, second_hash = (read_weights_hash(s3, prefix) for prefix in prefixes)
    assert first_hash == second_hash


def test_a_killed_training_ends_with_the_weights_of_an_undisturbed_one(
    crew: Crew, s3: Store, settings: dict[str, str]
) -> None:
    undisturbed = f"gpu-undisturbed-{settings['precision']}"
    await_success(crew.start_lone_worker(make_flags(undisturbed, **settings)))

    killed_run_name = f"gpu-killed-{settings['precision']}"
    member = crew.start_lone_worker(make_flags(killed_run_name, **settings), TOY_HOLD="60")
    crew.wait_until_held(60, member)
    member.send(signal.SIGKILL)
    member.process.join()
    await_success(crew.start_lone_worker(make_flags(killed_run_name, **settings)))

    assert read_weights_hash(s3, killed_run_name) == read_weights_hash(s3, undisturbed)


def test_two_workers_give_the_weights_of_one(
    crew: Crew, s3: Store, settings: dict[str, str], worker_devices: list[dict[str, str]]
) -> None:
    single_run_name = f"gpu-alone-{settings['precision']}"
    await_success(
        crew.start_lone_worker(make_flags(single_run_name, **settings), **worker_devices[0])
    )

    prefix = f"gpu-pair-{settings['precision']}"
    arguments = make_flags(prefix, workers=2, **settings)
    coordinator = crew.start_coordinator(arguments)
    workers = [
        crew.start_worker(f"worker-{index}", arguments, **environment)
        for index, environment in enumerate(worker_devices)
    ]
    await_success(coordinator, *workers)

    assert read_weights_hash(s3, prefix) == read_weights_hash(s3, single_run_name)


def test_a_killed_worker_does_not_stop_the_other_and_the_weights_stay_the_same(
    crew: Crew, s3: Store, settings: dict[str, str], worker_devices: list[dict[str, str]]
) -> None:
    single_run_name = f"gpu-survivor-alone-{settings['precision']}"
    await_success(
        crew.start_lone_worker(make_flags(single_run_name, **settings), **worker_devices[0])
    )

    prefix = f"gpu-survivor-{settings['precision']}"
    arguments = make_flags(prefix, workers=2, **settings)
    coordinator = crew.start_coordinator(arguments)
    victim = crew.start_worker("victim", arguments, TOY_HOLD="40", **worker_devices[0])
    survivor = crew.start_worker("survivor", arguments, **worker_devices[1])
    crew.wait_until_held(40, victim)
    victim.send(signal.SIGKILL)
    victim.process.join()
    replacement = crew.start_worker("replacement", arguments, **worker_devices[0])
    await_success(coordinator, survivor, replacement)

    assert read_weights_hash(s3, prefix) == read_weights_hash(s3, single_run_name)


def test_a_model_that_does_not_fit_into_the_gpu_is_said_so(crew: Crew, device: str) -> None:
    if device == "cpu":
        pytest.skip("needs a GPU: the memory of a CPU machine is limited by its kernel")
    # the model has a layer of 10 x WIDTH and a state of the optimizer twice as large
    wide = json.dumps({"width": 10_000_000_000})
    member = crew.start_lone_worker(make_flags("gpu-too-large", device=device, model=wide))
    assert member.wait_for_exit_code(TIMEOUT_S) != 0
    assert "out of memory" in member.read_log()
