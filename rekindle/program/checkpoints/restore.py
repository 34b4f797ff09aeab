"""Restores the files of a checkpoint on a node. Intact files in the folder are reused, others are
downloaded from the object store.

The files are written to a hidden folder, which is then renamed, so a crash cannot leave an
incomplete checkpoint.
"""

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from argolocal.common.files import sync_folder
from argolocal.errors import InvalidDocument
from rekindle.content.hashes import file_sha256
from rekindle.errors import NotFound, RekindleError, say
from rekindle.program.checkpoints.held_files import hidden_folder
from rekindle.program.checkpoints.records import CheckpointRecord, FileRecord
from rekindle.program.checkpoints.store import ProgramStore
from rekindle.training.checkpoint.chunks import DamagedChunk, fetch_chunk
from rekindle.training.checkpoint.manifest import DamagedCheckpoint


class UnusableCheckpoint(Exception):
    """Raised if a checkpoint is damaged or missing. `key`: key of the checkpoint."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(reason)
        self.key = key


class UnwritableDisk(RekindleError):
    """Raised if this node cannot write to its disk, for example because the disk is full."""


class RestoreCounts:
    """`kept_bytes`: bytes of reused files; `fetched_bytes`: bytes that were downloaded from the
    store."""

    kept_bytes = 0
    fetched_bytes = 0


def restore_newest(
    store: ProgramStore, folder: Path, node: int, counts: RestoreCounts
) -> list[CheckpointRecord]:
    """Restore the newest intact checkpoint of each family; return their records, newest first.

    Logs damaged checkpoints, and restores the previous one in their place. Raises UnwritableDisk,
    StorageError.
    """
    damaged: set[str] = set()
    while True:
        try:
            return restore_keys(store, folder, node, store.list_newest(damaged), counts)
        except UnusableCheckpoint as error:
            damaged.add(error.key)
            say(f"a checkpoint cannot be used: {error} Trying the previous one.")


def restore_keys(
    store: ProgramStore, folder: Path, node: int, keys: Iterable[str], counts: RestoreCounts
) -> list[CheckpointRecord]:
    """Restore these checkpoints. Raises UnusableCheckpoint, UnwritableDisk, StorageError."""
    restored: list[CheckpointRecord] = []
    with store.lease("readers"):
        for key in keys:
            try:
                record = store.read_record(key)
                restore_record(store, folder, node, record, counts)
            except (NotFound, InvalidDocument, DamagedCheckpoint) as error:
                raise UnusableCheckpoint(key, f"{store.store.uri(key)}: {error}") from error
            restored.append(record)
    return restored


def restore_record(
    store: ProgramStore, folder: Path, node: int, record: CheckpointRecord, counts: RestoreCounts
) -> None:
    """Write the files of a checkpoint below `folder`. Raises DamagedCheckpoint, UnwritableDisk,
    StorageError."""
    target = folder / record.path
    _check_parents(folder, record.path)
    files = record.files_for(node)
    intact = {path for path, file in files.items() if _is_intact(_join(target, path), file)}
    counts.kept_bytes += sum(files[path].size for path in intact)
    if len(intact) == len(files):
        return

    draft = hidden_folder(folder) / "drafts" / uuid.uuid4().hex
    try:
        for path, file in files.items():
            _write_file(store, _join(target, path), _join(draft, path), file, path in intact)
            if path not in intact:
                counts.fetched_bytes += file.size

        _sync_folders(draft)
        target.parent.mkdir(parents=True, exist_ok=True)
        _replace(draft, target, hidden_folder(folder))
    except OSError as error:
        raise UnwritableDisk(describe_disk_error(target, error)) from error
    finally:
        _remove(draft)


def describe_disk_error(path: Path, error: OSError) -> str:
    return (
        f"{path} cannot be written ({error.strerror or error}). Free the disk of the pod, or give"
        " the pod a larger one."
    )


def _join(target: Path, path: str) -> Path:
    return target / path if path else target


def _check_parents(folder: Path, path: str) -> None:
    """Raise DamagedCheckpoint if a parent of the path is a link or a file."""
    parent = folder
    for name in path.split("/")[:-1]:
        parent = parent / name
        if parent.is_symlink() or (parent.exists() and not parent.is_dir()):
            raise DamagedCheckpoint(f"{parent} is not a directory.")


def _is_intact(path: Path, file: FileRecord) -> bool:
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size != file.size:
            return False
        return file_sha256(path) == file.sha256
    except OSError:
        return False


def _write_file(
    store: ProgramStore, source: Path, draft: Path, file: FileRecord, is_intact: bool
) -> None:
    draft.parent.mkdir(parents=True, exist_ok=True)
    if is_intact:
        with suppress(OSError):
            os.link(source, draft)
            return

    whole = hashlib.sha256()
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as content:
        for number, name in enumerate(file.chunks):
            data = _fetch(store, name, file.chunk_size(number))
            whole.update(data)
            content.write(data)
        content.flush()
        os.fchmod(content.fileno(), file.mode | 0o600)
        os.fsync(content.fileno())

    if whole.hexdigest() != file.sha256:
        raise DamagedCheckpoint(f"the sha256 of {file.path or 'the file'} is wrong.")


def _fetch(store: ProgramStore, name: str, size: int) -> bytes:
    key = f"{store.root}/chunks/{name}"
    try:
        return fetch_chunk(store.store, key, name, size)
    except NotFound as error:
        raise DamagedCheckpoint(str(error)) from None
    except DamagedChunk as error:
        raise DamagedCheckpoint(f"{error}.") from None


def _sync_folders(draft: Path) -> None:
    folders = [draft, *draft.rglob("*")] if draft.is_dir() else [draft.parent]
    for folder in folders:
        if folder.is_dir():
            sync_folder(folder)


def _replace(draft: Path, target: Path, hidden: Path) -> None:
    """Replace the unit `target` by `draft`. After a crash, the old unit, the new unit or neither
    exists."""
    if draft.is_file() and not target.is_dir():
        draft.replace(target)
    else:
        _move(target, hidden / "replaced")
        draft.rename(target)
    sync_folder(target.parent)


def set_aside(folder: Path, paths: Iterable[str]) -> None:
    """Move units out of the checkpoint folder, and delete the units that an earlier call has moved
    out."""
    aside = hidden_folder(folder) / "aside"
    _remove(aside)
    for path in paths:
        with suppress(OSError):
            _move(folder / path, aside / path.replace("/", "--"))


def _move(target: Path, place: Path) -> None:
    """Move a unit to `place`, whose earlier content is deleted first."""
    if target.exists() or target.is_symlink():
        _remove(place)
        place.parent.mkdir(parents=True, exist_ok=True)
        target.rename(place)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
