"""The local copy of the dataset. Each node downloads the dataset once, and all workers of the node
share the copy, also after a restart."""

import fcntl
import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from argolocal.common.files import require_disk_space, write_atomically
from argolocal.common.json_text import to_json
from rekindle.cache.folder import cache_folder, user_temporary_folder
from rekindle.content import hashes
from rekindle.content.dataset import FILE_LIST, list_dataset_files, verify_dataset
from rekindle.content.dataset_record import DATASET
from rekindle.errors import ConfigError, DataError, RekindleError, write_stderr
from rekindle.kubernetes_names import REKINDLE_CACHE
from rekindle.names import Digest
from rekindle.storage import NotFound, Store
from rekindle.training.checkpoint.snapshot_file import MAX_LOADER_STATE_BYTES


def fetch_dataset(store: Store, key_prefix: str, dataset_sha256: str) -> Path:
    """Return the local copy of the dataset below `key_prefix`.

    Each node verifies the files of its copy once, and again if their modification times change. A
    damaged copy is downloaded again. Raises DataError if the dataset is missing or does not have
    the expected digest.
    """
    if not Digest.matches(dataset_sha256):
        raise ConfigError(
            f'--digest is "{dataset_sha256}": it must be the digest of the dataset, which `prepare`'
            " returns."
        )

    datasets_folder = cache_folder() / "datasets"
    datasets_folder.mkdir(parents=True, exist_ok=True)
    dataset_folder = datasets_folder / dataset_sha256

    with open(datasets_folder / f"{dataset_sha256}.lock", "w") as lock_file:
        # the kernel releases the lock even if this process is killed
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        if dataset_folder.exists() and not _is_copy_intact(dataset_folder, dataset_sha256):
            # delete the damaged files instead of overwriting them, because other processes may have
            # them open
            damaged_folder = Path(
                tempfile.mkdtemp(prefix=f"{dataset_sha256}.damaged-", dir=datasets_folder)
            )
            dataset_folder.rename(damaged_folder)
            shutil.rmtree(damaged_folder, ignore_errors=True)

        if not dataset_folder.exists():
            unfinished_folder = datasets_folder / f"{dataset_sha256}.unfinished"
            shutil.rmtree(unfinished_folder, ignore_errors=True)
            _download_dataset(store, key_prefix, unfinished_folder)
            verify_dataset(unfinished_folder, dataset_sha256, store.uri(key_prefix))
            unfinished_folder.rename(dataset_folder)
            _record_verified(dataset_folder, dataset_sha256)

    return dataset_folder


def _is_copy_intact(folder: Path, dataset_sha256: str) -> bool:
    """Return True if the copy passes a verification now, or has passed a verification on this node
    and is unchanged since."""
    with suppress(OSError, RekindleError):
        if _locate_verified_stamp(dataset_sha256).read_text() == _compute_stamp(folder):
            return True

    try:
        verify_dataset(folder, dataset_sha256)
    except (DataError, OSError) as error:
        write_stderr(f"the local copy of the dataset is downloaded again: {error}")
        return False

    _record_verified(folder, dataset_sha256)
    return True


def _record_verified(folder: Path, dataset_sha256: str) -> None:
    with suppress(OSError, RekindleError):
        stamp_file = _locate_verified_stamp(dataset_sha256)
        stamp_file.parent.mkdir(exist_ok=True)
        write_atomically(stamp_file, _compute_stamp(folder))


def _locate_verified_stamp(dataset_sha256: str) -> Path:
    """Return the file that stores a hash of the sizes and times of the copy's files at its last
    verification (`_compute_stamp`). The file with the hash is stored on this node only, because
    each node must verify a copy that several nodes share."""
    return user_temporary_folder() / "verified" / dataset_sha256


def _compute_stamp(folder: Path) -> str:
    return hashes.compute_stamp([folder / FILE_LIST, *list_dataset_files(folder).values()])


def _download_dataset(store: Store, key_prefix: str, target_folder: Path) -> None:
    dataset_bytes = sum(
        object_entry.size for object_entry in store.list(key_prefix.rstrip("/") + "/")
    )
    require_disk_space(
        "the dataset",
        dataset_bytes,
        target_folder.parent,
        f"free space, or set {REKINDLE_CACHE} to a larger disk.",
    )

    try:
        store.download(key_prefix.rstrip("/") + "/", target_folder)
    except NotFound as error:
        raise DataError(f"{error} First run the step prepare, which writes the dataset.") from error
    except OSError as error:
        raise RekindleError(
            f"cannot store the dataset in {target_folder.parent} ({error}): free some space, or set"
            f" {REKINDLE_CACHE} to a larger disk."
        ) from error

    if not (target_folder / DATASET).exists():
        raise DataError(
            f"{store.uri(key_prefix)} is not a dataset: dataset.json is missing. Run the step"
            " prepare again."
        )


class LoaderState:
    """Reads and restores the state of the workload's dataset, if the dataset defines `state_dict`.
    The state of the workload's dataset is JSON, and is equal in all workers between two steps."""

    def __init__(self, dataset: Any) -> None:
        self.data = dataset
        self.stateful = hasattr(dataset, "state_dict")
        self.advance: Callable[[int], None] = getattr(dataset, "advance", lambda step: None)

    def dump(self) -> bytes:
        """Return the current state as JSON; empty for a dataset without state. Raises
        ConfigError."""
        if not self.stateful:
            return b""

        try:
            state_json = to_json(self.data.state_dict(), sort_keys=True).encode()
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the dataset's state_dict() is not JSON ({error}): return only numbers, strings,"
                " lists and dicts."
            ) from error

        if len(state_json) > MAX_LOADER_STATE_BYTES:
            raise ConfigError(
                f"the dataset's state_dict() has {len(state_json)} bytes: the limit is"
                f" {MAX_LOADER_STATE_BYTES}, since every snapshot includes it. Leave out values"
                " that can be recomputed."
            )

        return state_json

    def load(self, state_json: bytes) -> None:
        if self.stateful and state_json:
            self.data.load_state_dict(json.loads(state_json))
