"""The local copy of the dataset: downloaded once, shared by all workers of the node, reused after a restart."""

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from argolocal.common.disk import check_space
from argolocal.common.json_text import to_json
from rekindle.cache.folder import CACHE, cache_folder
from rekindle.errors import ConfigError, DataError, RekindleError
from rekindle.names import show
from rekindle.storage import NotFound, Store
from rekindle.training.checkpoint.snapshot_file import MAX_LOADER_STATE_BYTES
from rekindle.workload import digest_of


def local_dataset(store: Store, prefix: str, digest: str) -> Path:
    """Return the local copy of the dataset below `prefix`.

    Raises DataError if the dataset is missing or has another digest.
    """
    root = cache_folder() / "datasets"
    root.mkdir(parents=True, exist_ok=True)
    target = root / digest
    with open(root / f"{digest}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases the lock, however this process ends
        if not target.exists():
            unfinished = root / f"{digest}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            _download(store, prefix, unfinished)
            actual = digest_of(unfinished)
            if actual != digest:
                raise DataError(
                    f"{store.uri(prefix)} has the digest {show(actual[:12])}, but this run expects {digest[:12]}. "
                    "Run the step prepare again, or pass the digest that it returned."
                )
            unfinished.rename(target)
    return target


def _download(store: Store, prefix: str, target: Path) -> None:
    size = sum(entry.size for entry in store.list(prefix.rstrip("/") + "/"))
    check_space("the dataset", size, target.parent, f"free space, or set {CACHE} to a larger disk.")
    try:
        store.download(prefix.rstrip("/") + "/", target)
    except NotFound as error:
        raise DataError(f"{error} First run the step prepare, which writes the dataset.") from error
    except OSError as error:
        raise RekindleError(
            f"cannot store the dataset in {target.parent} ({error}): free some space, or set {CACHE} to a larger disk."
        ) from error
    if not (target / "dataset.json").exists():
        raise DataError(f"{store.uri(prefix)} is not a dataset: dataset.json is missing. Run the step prepare again.")


class LoaderState:
    """State of the workload's own data loader, if it has one: JSON, equal in all workers between steps."""

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
                f"the dataset's state_dict() is not JSON ({error}): return only numbers, strings, lists and dicts."
            ) from error
        if len(dumped) > MAX_LOADER_STATE_BYTES:
            raise ConfigError(
                f"the dataset's state_dict() has {len(dumped)} bytes: the limit is {MAX_LOADER_STATE_BYTES}, since "
                "every snapshot includes it. Leave out values that can be recomputed."
            )
        return dumped

    def load(self, dumped: bytes) -> None:
        if self.stateful and dumped:
            self.data.load_state_dict(json.loads(dumped))
