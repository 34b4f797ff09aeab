"""Durable checkpoints of a state that is equal on all ranks: files `step-N.pt` in the checkpoint
folder.

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
from rekindle.errors import ConfigError, say

NAME = re.compile(r"step-(\d+)(\.pt)?")
TEMPORARY_PREFIX = ".tmp-"
RUN_FILE = ".attach-run"


def checkpoint_name(step: int, *, is_sharded: bool) -> str:
    return f"step-{step:08d}" if is_sharded else f"step-{step:08d}.pt"


def list_checkpoints(folder: Path, *, sharded: bool) -> dict[int, Path]:
    """Return the paths of the checkpoints by step: files, or with `sharded` directories of
    torch.distributed.checkpoint."""
    checkpoints = {}
    for path in folder.glob("step-*"):
        match = NAME.fullmatch(path.name)
        if match and bool(match[2]) != sharded and path.is_dir() == sharded:
            checkpoints[int(match[1])] = path
    return checkpoints


def remove_old(folder: Path, keep: int, *, sharded: bool) -> None:
    """Remove all files (or with `sharded` directories) of checkpoints except the newest `keep`."""
    checkpoints = list_checkpoints(folder, sharded=sharded)
    for step in sorted(checkpoints)[:-keep]:
        path = checkpoints[step]
        if sharded:
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def remove_temporary(folder: Path) -> None:
    """Remove the files of saves that were interrupted."""
    for path in folder.glob(f"{TEMPORARY_PREFIX}step-*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def read_run(folder: Path) -> str | None:
    """Return the id of the run that writes into a folder, None for a new folder."""
    with suppress(OSError):
        text = (folder / RUN_FILE).read_text().strip()
        if re.fullmatch(r"[0-9a-f]{12}", text):
            return text
    return None


def write_run(folder: Path, run: str) -> None:
    draft = folder / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
    draft.write_text(run)
    draft.replace(folder / RUN_FILE)


def write_checkpoint(folder: Path, step: int, tree: dict[str, Any]) -> None:
    """Write a state to the folder. Raises OSError, ConfigError."""
    name = checkpoint_name(step, is_sharded=False)
    draft = folder / f"{TEMPORARY_PREFIX}{name}"
    try:
        with open(draft, "wb") as file:
            torch.save(tree, file)
            file.flush()
            os.fsync(file.fileno())
        verify_loadable(draft)
        draft.replace(folder / name)
        sync_folder(folder)
    except RuntimeError as error:
        # torch raises RuntimeError for disk errors
        raise OSError(str(error).splitlines()[0]) from error
    finally:
        draft.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state in a file. If the file is damaged, an exception of torch.load is raised."""
    return torch.load(path, map_location="cpu", weights_only=True)


def verify_loadable(source: Path | io.BytesIO) -> None:
    """Raise ConfigError if `torch.load` would reject the saved state with `weights_only=True`."""
    is_file = isinstance(source, Path)
    try:
        torch.load(source, map_location="cpu", weights_only=True, mmap=is_file)
    except Exception as error:
        reason = str(error).replace("\n", " ")[:300]
        raise ConfigError(
            f"the state of the program cannot be loaded again: {reason}. A state_dict may contain"
            " tensors and plain values; allow other classes with"
            " torch.serialization.add_safe_globals."
        ) from None


class Writer:
    """Writes one checkpoint at a time, in a thread."""

    def __init__(self) -> None:
        self.duration_s = 0.0  # of the last checkpoint
        self.cpu_s = 0.0  # CPU seconds to write the last checkpoint
        self.error: ConfigError | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, write: Callable[[], None]) -> None:
        """Call `write` in a thread. Call only while the writer is not busy."""
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint is written. Raises ConfigError if the state can never be
        saved."""
        if self._thread:
            self._thread.join()
        self.raise_error()

    def raise_error(self) -> None:
        if self.error:
            raise self.error

    def _run(self, write: Callable[[], None]) -> None:
        start = time.monotonic()
        try:
            write()
        except ConfigError as error:
            self.error = error
        except OSError as error:
            say(
                f"a checkpoint could not be written ({error}): the training continues, and tries"
                " again at the next checkpoint. Free the disk of the checkpoint folder."
            )
        self.duration_s = time.monotonic() - start
        self.cpu_s = time.thread_time()
