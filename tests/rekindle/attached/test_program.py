"""Tests of a program that attaches its state, with real processes that are killed."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rekindle.attached.data import order_samples
from tests.rekindle.attached.crew import Crew
from tests.rekindle.attached.programs import BATCH_SIZE, EPOCHS, SAMPLES

StartCrew = Callable[..., Crew]
SAMPLES_IN_ORDER = [
    sample for epoch in range(EPOCHS) for sample in order_samples(SAMPLES, 0, epoch, shuffle=True)
]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartCrew]:
    """Start the processes of a program, and kill them at the end of the test."""
    crews: list[Crew] = []

    def create(world: int, folder: str = "run", **settings: Any) -> Crew:
        crews.append(Crew(tmp_path / folder, world, **settings))
        return crews[-1]

    yield create
    for crew in crews:
        crew.kill()


@pytest.mark.slow
def test_an_undisturbed_run_uses_each_sample_once_per_epoch(start: StartCrew) -> None:
    crew = start(2)
    result = crew.result()
    assert result["samples"] == SAMPLES_IN_ORDER
    assert result["position"] == EPOCHS * SAMPLES
    assert list((crew.folder / "shm").iterdir()) == []


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("seed", range(10))
def test_killed_runs_use_the_same_samples_for_any_number_of_workers(
    start: StartCrew, seed: int
) -> None:
    chance = random.Random(seed)
    steps = sorted(chance.sample(range(2, 24), 2))
    for number, (world, step) in enumerate(zip([3, 2], steps, strict=True)):
        crew = start(world)
        crew.wait_for_step(step, starts=number + 1)
        crew.kill()

    crew = start(3)
    assert crew.result()["samples"] == SAMPLES_IN_ORDER
    assert [tier for _, tier in crew.starts()] == ["new", "memory", "memory"]


def test_a_kill_does_not_change_the_weights(start: StartCrew) -> None:
    undisturbed = start(2, "undisturbed").result()
    killed_process = start(2)
    killed_process.wait_for_step(11)
    killed_process.kill()
    assert start(2).result()["weights"] == undisturbed["weights"]


def test_a_lost_pod_gets_the_state_from_the_memory_of_another_pod(start: StartCrew) -> None:
    crew = start(2, pods=["a", "b"])
    crew.wait_for_step(7)
    crew.kill()
    shutil.rmtree(crew.rank_folder(0))

    crew = start(2, pods=["c", "b"])
    assert crew.result()["samples"] == SAMPLES_IN_ORDER
    step, tier = crew.starts()[0]
    assert (step > 0, tier) == (True, "memory")
    assert crew.starts(1)[-1] == (step, tier)


def test_after_sigterm_to_one_worker_all_save_the_same_step(start: StartCrew) -> None:
    crew = start(3, snapshot_seconds=0)
    crew.wait_for_step(5)
    crew.terminate(1)
    assert crew.wait() == [143, 143, 143], crew.log
    (checkpoint,) = (crew.folder / "checkpoints").glob("step-*")
    last_step = int(checkpoint.stem.removeprefix("step-"))
    # the call of the last step saves and exits, so it does not return
    assert {crew.newest_step(rank) for rank in range(3)} == {last_step - 1}

    crew = start(2)
    assert crew.result()["samples"] == SAMPLES_IN_ORDER
    assert crew.starts()[-1] == (last_step, "durable")


@pytest.mark.slow
def test_the_newest_durable_checkpoint_is_used_after_the_loss_of_all_memory(
    start: StartCrew,
) -> None:
    crew = start(2, checkpoint_steps=4)
    crew.wait_for_step(12)
    crew.kill()
    shutil.rmtree(crew.folder / "shm")

    crew = start(2)
    assert crew.result()["samples"] == SAMPLES_IN_ORDER
    step, tier = crew.starts()[-1]
    assert (step >= 5, tier) == (True, "durable")


def test_a_damaged_snapshot_and_a_damaged_checkpoint_are_passed_over(start: StartCrew) -> None:
    crew = start(2, checkpoint_steps=4)
    crew.wait_for_step(16)
    crew.kill()
    for path in (crew.folder / "shm").iterdir():
        flip_byte(path)
    first_checkpoint, second_checkpoint = sorted((crew.folder / "checkpoints").glob("step-*.pt"))
    second_checkpoint.write_bytes(second_checkpoint.read_bytes()[:-100])

    crew = start(2)
    assert crew.result()["samples"] == SAMPLES_IN_ORDER
    assert crew.starts()[-1] == (int(first_checkpoint.stem.removeprefix("step-")), "durable")
    assert f"{second_checkpoint} cannot be used" in crew.log


@pytest.mark.slow
def test_a_deleted_checkpoint_folder_starts_a_new_run(start: StartCrew) -> None:
    crew = start(2)
    crew.wait_for_step(3)
    crew.kill()
    shutil.rmtree(crew.folder / "checkpoints")
    crew = start(2)
    assert crew.result()["samples"] == SAMPLES_IN_ORDER
    assert crew.starts()[-1] == (0, "new")


@pytest.mark.slow
def test_shards_in_memory_are_used_by_the_same_number_of_workers(start: StartCrew) -> None:
    undisturbed = start(2, "undisturbed", sharded=True).result()
    crew = start(2, sharded=True)
    crew.wait_for_step(9)
    crew.kill()

    crew = start(2, sharded=True)
    assert crew.result() == undisturbed
    assert crew.starts()[-1][1] == "memory"


@pytest.mark.slow
def test_shards_follow_their_ranks_when_the_pods_have_another_order(start: StartCrew) -> None:
    undisturbed = start(2, "undisturbed", sharded=True).result()
    crew = start(2, sharded=True, pods=["a", "b"])
    crew.wait_for_step(9)
    crew.kill()

    crew = start(2, sharded=True, pods=["b", "a"])
    assert crew.result()["weights"] == undisturbed["weights"]
    assert crew.starts()[-1][1] == "memory"


@pytest.mark.slow
def test_shards_of_a_lost_pod_come_from_the_durable_checkpoint(start: StartCrew) -> None:
    undisturbed = start(2, "undisturbed", sharded=True).result()
    crew = start(2, sharded=True, checkpoint_steps=4)
    crew.wait_for_step(12)
    crew.kill()
    lost_files = sorted((crew.folder / "shm").iterdir())[:3]
    for path in lost_files:
        path.unlink()

    crew = start(2, sharded=True)
    assert crew.result() == undisturbed
    assert crew.starts()[-1][1] == "durable"


def test_shards_are_split_again_for_another_number_of_workers(start: StartCrew) -> None:
    # the number of samples is chosen so that all workers have equally large shares of each batch
    samples = 8 * BATCH_SIZE
    expected = start(3, "undisturbed", sharded=True, samples=samples).result()
    for number, (world, step) in enumerate([(3, 9), (2, 15)]):
        crew = start(world, sharded=True, samples=samples, checkpoint_steps=3)
        crew.wait_for_step(step, starts=number + 1)
        # saving does not delay the steps, so the checkpoint may be written later
        crew.wait_for_checkpoint()
        crew.kill()

    crew = start(3, sharded=True, samples=samples)
    result = crew.result()
    assert [tier for _, tier in crew.starts()] == ["new", "durable", "durable"]
    assert result["samples"] == expected["samples"]
    for row, expected_row in zip(result["weights"], expected["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(row), torch.tensor(expected_row))


@pytest.mark.slow
def test_after_sigterm_shards_are_saved(start: StartCrew) -> None:
    crew = start(2, sharded=True)
    crew.wait_for_step(5)
    crew.terminate(0)
    assert crew.wait() == [143, 143], crew.log
    (checkpoint,) = (crew.folder / "checkpoints").glob("step-*")
    assert (checkpoint / ".metadata").exists()


def flip_byte(path: Path) -> None:
    """Change one byte of the data of a snapshot."""
    with path.open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))
