"""Gives a node the files of a checkpoint: verified files that the folder has, and others from the
object store.

The files are written in a hidden folder and renamed, so that a crash leaves the checkpoint complete
or not at all.
"""

import hashlib
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from argolocal.errors import InvalidDocument
from rekindle.content.hashes import file_sha256
from rekindle.errors import NotFound, StorageError, say
from rekindle.program.held_files import hidden_folder
from rekindle.program.paths import without_numbers
from rekindle.program.records import CheckpointRecord, FileRecord
from rekindle.program.store import ProgramStore
from rekindle.training.checkpoint.chunks import DamagedChunk, fetch_chunk
from rekindle.training.checkpoint.manifest import DamagedCheckpoint


class RestoreCounts:
    """`kept_bytes`: bytes of files that the folder had; `fetched_bytes`: bytes from the store."""

    kept_bytes = 0
    fetched_bytes = 0


def restore_records(
    store: ProgramStore, folder: Path, node: int, counts: RestoreCounts
) -> list[CheckpointRecord]:
    """Restore the newest intact checkpoint of each family, newest first.

    Logs damaged checkpoints, and restores the previous one in their place. Raises StorageError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    restored: dict[str, CheckpointRecord] = {}
    with store.lease("readers"):
        for key in reversed(store.list_keys()):
            try:
                record = store.read_record(key)
                family = without_numbers(record.path)
                if family in restored:
                    continue
                restore_record(store, folder, node, record, counts)
                restored[family] = record
            except (NotFound, InvalidDocument, DamagedCheckpoint) as error:
                say(
                    f"the checkpoint {store.store.uri(key)} cannot be used: {error} Trying the"
                    " previous checkpoint."
                )
    return list(restored.values())


def restore_record(
    store: ProgramStore, folder: Path, node: int, record: CheckpointRecord, counts: RestoreCounts
) -> None:
    """Write the files of a checkpoint below `folder`. Raises DamagedCheckpoint, StorageError."""
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
        reason = f"{target} cannot be written ({error.strerror or error}). Free the disk."
        raise StorageError(reason) from error
    finally:
        _remove(draft)


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
            _sync(folder)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(draft: Path, target: Path, hidden: Path) -> None:
    """Replace a unit. A crash leaves the old one, none, or the new one."""
    if draft.is_file() and not target.is_dir():
        draft.replace(target)
    else:
        set_aside(target, hidden)
        draft.rename(target)
    _sync(target.parent)


def set_aside(target: Path, hidden: Path) -> None:
    """Move a unit out of the checkpoint folder; the unit that was moved before is removed."""
    if not (target.exists() or target.is_symlink()):
        return
    place = hidden / "aside"
    _remove(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    target.rename(place)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
