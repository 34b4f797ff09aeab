"""The local copy of the dataset: downloaded once, shared by all workers of the node, reused after a
restart."""

import fcntl
import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from argolocal.common.disk import check_space
from argolocal.common.files import write_atomically
from argolocal.common.json_text import to_json
from rekindle.cache.folder import CACHE_VARIABLE, cache_folder, own_folder
from rekindle.content import hashes
from rekindle.content.dataset import FILE_LIST, list_dataset_files, verify_dataset
from rekindle.errors import ConfigError, DataError, RekindleError, say
from rekindle.names import Digest
from rekindle.storage import NotFound, Store
from rekindle.training.checkpoint.snapshot_file import MAX_LOADER_STATE_BYTES


def local_dataset(store: Store, prefix: str, digest: str) -> Path:
    """Return the local copy of the dataset below `prefix`.

    The files are verified when a node reads them for the first time, and again after a change of
    their times. A damaged copy is downloaded again. Raises DataError if the dataset is missing, was
    changed, or has another digest.
    """
    if not Digest.matches(digest):
        raise ConfigError(
            f'--digest is "{digest}": it must be the digest of the dataset, which `prepare`'
            " returns."
        )

    root = cache_folder() / "datasets"
    root.mkdir(parents=True, exist_ok=True)
    target = root / digest

    with open(root / f"{digest}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases the lock, however this process ends
        if target.exists() and not _is_intact(target, digest):
            # other processes may have files of the copy open: they are deleted, but not overwritten
            damaged = Path(tempfile.mkdtemp(prefix=f"{digest}.damaged-", dir=root))
            target.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)

        if not target.exists():
            unfinished = root / f"{digest}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            _download(store, prefix, unfinished)
            verify_dataset(unfinished, digest, store.uri(prefix))
            unfinished.rename(target)
            _note_verified(target, digest)

    return target


def _is_intact(folder: Path, digest: str) -> bool:
    """Return True if the copy of a dataset is unchanged since this node verified it, or if it is
    correct."""
    with suppress(OSError, RekindleError):
        if _note(digest).read_text() == _stamp(folder):
            return True

    try:
        verify_dataset(folder, digest)
    except (DataError, OSError) as error:
        say(f"the local copy of the dataset is downloaded again: {error}")
        return False

    _note_verified(folder, digest)
    return True


def _note_verified(folder: Path, digest: str) -> None:
    with suppress(OSError, RekindleError):
        note = _note(digest)
        note.parent.mkdir(exist_ok=True)
        write_atomically(note, _stamp(folder))


def _note(digest: str) -> Path:
    """Return the file with the stamp of the copy that this node has verified: other nodes may share
    the copy itself."""
    return own_folder() / "verified" / digest


def _stamp(folder: Path) -> str:
    return hashes.compute_stamp([folder / FILE_LIST, *list_dataset_files(folder).values()])


def _download(store: Store, prefix: str, target: Path) -> None:
    size = sum(entry.size for entry in store.list(prefix.rstrip("/") + "/"))
    check_space(
        "the dataset", size, target.parent, f"free space, or set {CACHE_VARIABLE} to a larger disk."
    )

    try:
        store.download(prefix.rstrip("/") + "/", target)
    except NotFound as error:
        raise DataError(f"{error} First run the step prepare, which writes the dataset.") from error
    except OSError as error:
        raise RekindleError(
            f"cannot store the dataset in {target.parent} ({error}): free some space, or set"
            f" {CACHE_VARIABLE} to a larger disk."
        ) from error

    if not (target / "dataset.json").exists():
        raise DataError(
            f"{store.uri(prefix)} is not a dataset: dataset.json is missing. Run the step prepare"
            " again."
        )


class LoaderState:
    """State of the workload's own data loader, if it has one: JSON, equal in all workers between
    steps."""

    def __init__(self, data: Any) -> None:
        self.data, self.stateful = data, hasattr(data, "state_dict")
        self.advance: Callable[[int], None] = getattr(data, "advance", lambda step: None)

    def dump(self) -> bytes:
        """Return the current state; empty if the loader is stateless. Raises ConfigError."""
        if not self.stateful:
            return b""

        try:
            dumped = to_json(self.data.state_dict(), sort_keys=True).encode()
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the dataset's state_dict() is not JSON ({error}): return only numbers, strings,"
                " lists and dicts."
            ) from error

        if len(dumped) > MAX_LOADER_STATE_BYTES:
            raise ConfigError(
                f"the dataset's state_dict() has {len(dumped)} bytes: the limit is"
                f" {MAX_LOADER_STATE_BYTES}, since every snapshot includes it. Leave out values"
                " that can be recomputed."
            )

        return dumped

    def load(self, dumped: bytes) -> None:
        if self.stateful and dumped:
            self.data.load_state_dict(json.loads(dumped))
