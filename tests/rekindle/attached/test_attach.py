"""Tests of `rekindle.attach` in a single process."""

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rekindle
from rekindle import AttachedProgram, ConfigError
from rekindle.attached.random_states import read_random_states, restore_random_states
from rekindle.program.checkpoints.watch import FolderWatch, WatchSettings


class Counter:
    """An object with a state, which is a number."""

    def __init__(self, state: Any = 0) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict["state"]


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use a directory of this test for snapshots, and restore the handler of SIGTERM."""
    directory = tmp_path / "shm"
    directory.mkdir()
    monkeypatch.setenv("REKINDLE_SHM", str(directory))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    handler = signal.getsignal(signal.SIGTERM)
    yield directory
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def close(run: AttachedProgram) -> None:
    """End the threads and locks of a program without its last checkpoint, as if the process was
    killed."""
    assert run._saver._memory
    run._saver._memory.close(remove=False)


def test_the_state_continues_from_a_snapshot(folder: Path) -> None:
    counter = Counter()
    run = rekindle.attach(counter=counter, folder=folder, snapshot_seconds=1e-9)
    for number in range(1, 4):
        counter.state = number
        run.step()
    close(run)

    restored = Counter()
    run = rekindle.attach(counter=restored, folder=folder)
    assert run.current_step > 0
    assert (restored.state, run.restored.tier) == (run.current_step, "memory")


@pytest.mark.parametrize("kind", ["python", "numpy", "torch"])
def test_random_numbers_continue_as_if_nothing_had_happened(folder: Path, kind: str) -> None:
    draw = {
        "python": random.random,
        "numpy": np.random.random,
        "torch": lambda: torch.rand(1).item(),
    }[kind]
    run = rekindle.attach(counter=Counter(), folder=folder)
    run.save()
    expected = [draw(), draw()]
    rekindle.attach(counter=Counter(), folder=folder)
    assert [draw(), draw()] == expected


def test_workers_that_are_added_draw_different_random_numbers() -> None:
    states = [read_random_states()]
    numbers = []
    for rank in range(3):
        restore_random_states(states, rank, 7)
        numbers.append((random.random(), np.random.random(), torch.rand(1).item()))
    assert len(set(numbers)) == 3


def test_a_durable_checkpoint_is_recognized_as_complete_at_once(folder: Path) -> None:
    run = rekindle.attach(counter=Counter(), folder=folder)
    watch = FolderWatch(folder, WatchSettings(processes=1), lambda: True)
    watch.begin()
    run.step()
    run.save()
    watch.look()
    assert list(watch.complete) == ["step-00000001.pt"]
    assert watch.complete["step-00000001.pt"].step == 1


def test_only_the_newest_checkpoints_are_kept(folder: Path) -> None:
    run = rekindle.attach(counter=Counter(), folder=folder, keep=2)
    for _ in range(4):
        run.step()
        run.save()
    assert sorted(path.name for path in folder.glob("step-*")) == [
        "step-00000003.pt",
        "step-00000004.pt",
    ]


def test_the_folder_of_the_environment_has_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REKINDLE_CHECKPOINTS", str(tmp_path / "pod"))
    run = rekindle.attach(counter=Counter(), folder=tmp_path / "other")
    run.save()
    assert (tmp_path / "pod/step-00000000.pt").exists()


def test_a_handler_of_sigterm_that_exists_is_called_too(folder: Path) -> None:
    calls: list[int] = []
    signal.signal(signal.SIGTERM, lambda signal_number, frame: calls.append(signal_number))
    run = rekindle.attach(counter=Counter(), folder=folder)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit) as exit_error:
        run.step()
        run.step()
    assert (calls, exit_error.value.code) == ([signal.SIGTERM], 143)
    assert (folder / "step-00000001.pt").exists()


def test_without_memory_a_program_trains_and_saves(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REKINDLE_SHM", "/does/not/exist")
    run = rekindle.attach(counter=Counter(), folder=folder, checkpoint_steps=1)
    run.step()
    run.step()
    run.finish()
    assert "no snapshots in shared memory" in capsys.readouterr().err
    assert (folder / "step-00000002.pt").exists()


def test_a_checkpoint_that_cannot_be_written_does_not_stop_the_training(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = rekindle.attach(counter=Counter(), folder=folder)
    # create a directory with the name of the checkpoint's file, because a directory cannot be
    # replaced by the file
    (folder / "step-00000001.pt/content").mkdir(parents=True)
    run.step()
    run.save()
    assert "a checkpoint could not be written" in capsys.readouterr().err


def test_a_state_that_cannot_be_loaded_again_is_refused_when_it_is_saved(folder: Path) -> None:
    run = rekindle.attach(counter=Counter(Counter()), folder=folder)
    with pytest.raises(ConfigError, match="cannot be loaded again"):
        run.save()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "got nothing to save"),
        ({"loss": 3.0}, "loss is a float: rekindle.attach saves objects that have"),
        ({"counter": Counter(), "keep": 0}, "keep is 0"),
        ({"counter": Counter(), "snapshot_seconds": -1.0}, "snapshot_seconds is -1.0"),
        ({"counter": Counter(), "folder": "/proc/none"}, "/proc/none cannot be created"),
    ],
)
def test_wrong_arguments_are_refused(folder: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rekindle.attach(**{"folder": folder, **arguments})


def test_several_processes_without_a_group_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="init_process_group"):
        rekindle.attach(counter=Counter(), folder=folder)


def test_a_checkpoint_of_other_objects_is_refused(folder: Path) -> None:
    rekindle.attach(counter=Counter(), folder=folder).save()
    with pytest.raises(
        ConfigError, match="has the state of counter, and the program attaches model"
    ):
        rekindle.attach(model=torch.nn.Linear(2, 2), folder=folder)


def test_a_checkpoint_of_another_model_is_refused(folder: Path) -> None:
    rekindle.attach(model=torch.nn.Linear(2, 2), folder=folder).save()
    with pytest.raises(ConfigError, match="the checkpoint does not fit model"):
        rekindle.attach(model=torch.nn.Linear(2, 3), folder=folder)


def test_importing_rekindle_does_not_import_torch() -> None:
    code = "import rekindle, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
