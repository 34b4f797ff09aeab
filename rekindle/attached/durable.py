"""Durable checkpoints of a training state that is equal on all ranks: files `step-N.pt` in the
checkpoint folder.

A file is written under a temporary name and renamed, so an incomplete file never has the final
name.
"""

import io
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from argolocal.common.files import sync_folder
from rekindle.errors import ConfigError, write_stderr

CHECKPOINT_NAME_PATTERN = re.compile(r"step-(\d+)(\.pt)?")
TEMPORARY_PREFIX = ".tmp-"
RUN_ID_FILE = ".attach-run"


def format_checkpoint_name(step: int, *, is_sharded: bool) -> str:
    return f"step-{step:08d}" if is_sharded else f"step-{step:08d}.pt"


def list_checkpoints(folder: Path, *, is_sharded: bool) -> dict[int, Path]:
    """Return the paths of the checkpoints by step: files, or with `is_sharded` directories of
    torch.distributed.checkpoint."""
    paths_by_step = {}
    for path in folder.glob("step-*"):
        name_match = CHECKPOINT_NAME_PATTERN.fullmatch(path.name)
        if name_match and bool(name_match[2]) != is_sharded and path.is_dir() == is_sharded:
            paths_by_step[int(name_match[1])] = path
    return paths_by_step


def remove_old_checkpoints(folder: Path, keep_count: int, *, is_sharded: bool) -> None:
    """Remove all files (or with `is_sharded` directories) of checkpoints except the newest
    `keep_count`."""
    paths_by_step = list_checkpoints(folder, is_sharded=is_sharded)
    for step in sorted(paths_by_step)[:-keep_count]:
        path = paths_by_step[step]
        if is_sharded:
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def remove_temporary_files(folder: Path) -> None:
    """Remove the files of saves that were interrupted."""
    for path in folder.glob(f"{TEMPORARY_PREFIX}step-*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def read_run_id(folder: Path) -> str | None:
    """Return the id of the training that writes checkpoints into a folder; None for a new
    folder."""
    with suppress(OSError):
        run_id_text = (folder / RUN_ID_FILE).read_text().strip()
        if re.fullmatch(r"[0-9a-f]{12}", run_id_text):
            return run_id_text
    return None


def write_run_id(folder: Path, run_id: str) -> None:
    temporary_path = folder / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
    temporary_path.write_text(run_id)
    temporary_path.replace(folder / RUN_ID_FILE)


def write_checkpoint(folder: Path, step: int, state_tree: dict[str, Any]) -> None:
    """Write a training state to the checkpoint folder. Raises OSError if the disk fails, and
    ConfigError if `torch.load` would reject the written state."""
    file_name = format_checkpoint_name(step, is_sharded=False)
    temporary_path = folder / f"{TEMPORARY_PREFIX}{file_name}"
    try:
        with open(temporary_path, "wb") as file:
            torch.save(state_tree, file)
            file.flush()
            os.fsync(file.fileno())
        verify_loadable(temporary_path)
        temporary_path.replace(folder / file_name)
        sync_folder(folder)
    except RuntimeError as error:
        # torch reports disk errors as RuntimeError
        raise OSError(str(error).splitlines()[0]) from error
    finally:
        temporary_path.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return the training state in a checkpoint file. Raises an exception of torch.load if the file
    is damaged."""
    return torch.load(path, map_location="cpu", weights_only=True)


def verify_loadable(checkpoint_source: Path | io.BytesIO) -> None:
    """Raise ConfigError if `torch.load` would reject the saved state with `weights_only=True`."""
    is_file = isinstance(checkpoint_source, Path)
    try:
        torch.load(checkpoint_source, map_location="cpu", weights_only=True, mmap=is_file)
    except Exception as error:
        reason = str(error).replace("\n", " ")[:300]
        raise ConfigError(
            f"the state of the program cannot be loaded again: {reason}. A state_dict may contain"
            " tensors and plain values; allow other classes with"
            " torch.serialization.add_safe_globals."
        ) from None


class CheckpointWriter:
    """Writes one checkpoint at a time, in a thread."""

    def __init__(self) -> None:
        # wall-clock time and CPU time of writing the last checkpoint, in seconds
        self.duration_s = 0.0
        self.cpu_s = 0.0
        self.error: ConfigError | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, write_function: Callable[[], None]) -> None:
        """Call `write_function` in a thread. `start` may be called only while the writer is not
        busy."""
        self._thread = threading.Thread(target=self._run, args=(write_function,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint is written. Raises ConfigError if the training state can never
        be saved."""
        if self._thread:
            self._thread.join()
        self.raise_write_error()

    def raise_write_error(self) -> None:
        if self.error:
            raise self.error

    def _run(self, write_function: Callable[[], None]) -> None:
        start_s = time.monotonic()
        try:
            write_function()
        except ConfigError as error:
            self.error = error
        except OSError as error:
            write_stderr(
                f"a checkpoint could not be written ({error}): the training continues, and tries"
                " again at the next checkpoint. Free the disk of the checkpoint folder."
            )
        self.duration_s = time.monotonic() - start_s
        self.cpu_s = time.thread_time()
