"""Programs of the real libraries are killed at random moments: a checkpoint that counts as complete
can be loaded, and all its values are of one step."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rekindle.program.checkpoints.folder import list_folder
from rekindle.program.checkpoints.watch import FolderWatch, WatchSettings
from tests.rekindle.program.checkpoints.saving_programs import find_error
from tests.waiting import until

KILLS = 25
CASES = [
    ("huggingface", 1),
    ("huggingface", 2),
    ("lightning", 1),
    ("accelerate", 1),
    ("shards", 2),
    ("overwritten_shards", 1),
    ("file", 1),
    ("renamed_pickle", 1),
    ("pickle", 1),
    ("safetensors", 1),
    ("directory", 1),
]


class Processes:
    """The processes of one program."""

    def __init__(self, kind: str, folder: Path, world_size: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
        command = [sys.executable, "-m", "tests.rekindle.program.checkpoints.saving_programs", kind]
        self.processes = [
            subprocess.Popen(
                [*command, str(folder), str(rank), str(world_size), str(port)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for rank in range(world_size)
        ]

    def are_alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def kill(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "world_size"), CASES)
def test_a_checkpoint_of_a_killed_program_is_complete_or_not_used(
    kind: str, world_size: int, tmp_path: Path
) -> None:
    draw = random.Random(world_size)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    settings = WatchSettings(processes=world_size)
    complete_count = 0

    for _ in range(KILLS):
        watch = FolderWatch(folder, settings, lambda: False)
        watch.begin()
        existing = {path: unit.files for path, unit in list_folder(folder).units.items()}
        program = Processes(kind, folder, world_size)
        watch.is_alive = program.are_alive

        def has_saved(
            watch: FolderWatch = watch, existing: Mapping[str, object] = existing
        ) -> bool:
            watch.look()
            units = list_folder(folder).units
            return any(existing.get(path) != unit.files for path, unit in units.items())

        until("the first save", has_saved, seconds=90)
        listings = iter(range(draw.randrange(1, 60)))
        until("a random moment", lambda left=listings, watch=watch: is_last_listing(left, watch))
        program.kill()

        watch.settle(has_succeeded=False)
        errors = {path: find_error(kind, folder / path) for path in watch.complete}
        assert not any(errors.values()), errors
        complete_count += len(watch.complete)
        remove_oldest(folder)

    assert complete_count > 0


def is_last_listing(remaining_listings: Iterator[int], watch: FolderWatch) -> bool:
    """List the checkpoint folder once more, and return True if this was the last listing."""
    watch.look()
    return next(remaining_listings, None) is None


def remove_oldest(folder: Path) -> None:
    units = sorted(list_folder(folder).units.values(), key=lambda unit: unit.newest_ns)
    for unit in units[:-4]:
        path = folder / unit.path
        if unit.is_file:
            os.unlink(path)
        else:
            shutil.rmtree(path)
