"""The local copy of the dataset, which each node downloads once; all workers of the node share it,
also after a restart."""

import fcntl
import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from argolocal.common.files import check_space, write_atomically
from argolocal.common.json_text import to_json
from rekindle.cache.folder import cache_folder, own_folder
from rekindle.content import hashes
from rekindle.content.dataset import FILE_LIST, list_dataset_files, verify_dataset
from rekindle.content.dataset_record import DATASET
from rekindle.errors import ConfigError, DataError, RekindleError, say
from rekindle.kubernetes_names import REKINDLE_CACHE
from rekindle.names import Digest
from rekindle.storage import NotFound, Store
from rekindle.training.checkpoint.snapshot_file import MAX_LOADER_STATE_BYTES


def fetch_dataset(store: Store, prefix: str, digest: str) -> Path:
    """Return the local copy of the dataset below `prefix`.

    Each node verifies the files once, and again if their modification times change. A damaged copy
    is downloaded again. Raises DataError if the dataset is missing or does not have this digest.
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
        # the kernel releases the lock even if this process is killed
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists() and not _is_intact(target, digest):
            # the damaged files are deleted instead of overwritten, because other processes may have
            # them open
            damaged = Path(tempfile.mkdtemp(prefix=f"{digest}.damaged-", dir=root))
            target.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)

        if not target.exists():
            unfinished = root / f"{digest}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            _download(store, prefix, unfinished)
            verify_dataset(unfinished, digest, store.uri(prefix))
            unfinished.rename(target)
            _record_verified(target, digest)

    return target


def _is_intact(folder: Path, digest: str) -> bool:
    """Return True if the copy passes a verification now, or has passed one on this node and is
    unchanged since."""
    with suppress(OSError, RekindleError):
        if _verified_stamp_file(digest).read_text() == _compute_stamp(folder):
            return True

    try:
        verify_dataset(folder, digest)
    except (DataError, OSError) as error:
        say(f"the local copy of the dataset is downloaded again: {error}")
        return False

    _record_verified(folder, digest)
    return True


def _record_verified(folder: Path, digest: str) -> None:
    with suppress(OSError, RekindleError):
        note = _verified_stamp_file(digest)
        note.parent.mkdir(exist_ok=True)
        write_atomically(note, _compute_stamp(folder))


def _verified_stamp_file(digest: str) -> Path:
    """Return the file that stores a hash of the sizes and times of the copy's files at its last
    verification (`_compute_stamp`). The file is stored on this node only: if several nodes share
    the copy, each of them must verify it."""
    return own_folder() / "verified" / digest


def _compute_stamp(folder: Path) -> str:
    return hashes.compute_stamp([folder / FILE_LIST, *list_dataset_files(folder).values()])


def _download(store: Store, prefix: str, target: Path) -> None:
    size = sum(entry.size for entry in store.list(prefix.rstrip("/") + "/"))
    check_space(
        "the dataset", size, target.parent, f"free space, or set {REKINDLE_CACHE} to a larger disk."
    )

    try:
        store.download(prefix.rstrip("/") + "/", target)
    except NotFound as error:
        raise DataError(f"{error} First run the step prepare, which writes the dataset.") from error
    except OSError as error:
        raise RekindleError(
            f"cannot store the dataset in {target.parent} ({error}): free some space, or set"
            f" {REKINDLE_CACHE} to a larger disk."
        ) from error

    if not (target / DATASET).exists():
        raise DataError(
            f"{store.uri(prefix)} is not a dataset: dataset.json is missing. Run the step prepare"
            " again."
        )


class LoaderState:
    """The state of the workload's dataset, if the dataset defines `state_dict`; the state is JSON,
    and is equal in all workers between two steps."""

    def __init__(self, data: Any) -> None:
        self.data, self.stateful = data, hasattr(data, "state_dict")
        self.advance: Callable[[int], None] = getattr(data, "advance", lambda step: None)

    def dump(self) -> bytes:
        """Return the current state as JSON; empty for a dataset without state. Raises
        ConfigError."""
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
