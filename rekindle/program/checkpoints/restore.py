"""Restores the files of a checkpoint on a node. Intact files in the checkpoint folder are reused,
all other files are downloaded from the object store.

The files of a checkpoint are written to a hidden folder, which is then renamed, so a crash cannot
leave an incomplete checkpoint.
"""

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from argolocal.common.files import sync_folder
from argolocal.errors import InvalidDocument
from rekindle.content.hashes import file_sha256
from rekindle.errors import NotFound, RekindleError, write_stderr
from rekindle.program.checkpoints.held_files import choose_hidden_folder
from rekindle.program.checkpoints.paths import make_family_path
from rekindle.program.checkpoints.records import CheckpointRecord, FileRecord
from rekindle.program.checkpoints.store import ProgramStore
from rekindle.program.checkpoints.watch import LocalCheckpoint
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


class RestoredCheckpoint(NamedTuple):
    """The checkpoint from which the program continues. `path`: path of the checkpoint, None if no
    checkpoint exists; `kept_bytes`: bytes that the checkpoint folder already had; `fetched_bytes`:
    bytes downloaded from the object store."""

    path: Path | None
    step: int | None = None
    kept_bytes: int = 0
    fetched_bytes: int = 0


def restore_newest_checkpoints(
    store: ProgramStore, folder: Path, node: int, restore_counts: RestoreCounts
) -> list[CheckpointRecord]:
    """Restore the newest intact checkpoint of each family; return their records, newest first.

    If a checkpoint is damaged, log it, and restore the previous checkpoint in its place. Raises
    UnwritableDisk, StorageError.
    """
    damaged_keys: set[str] = set()
    while True:
        try:
            return restore_checkpoints(
                store, folder, node, store.list_newest_keys(damaged_keys), restore_counts
            )
        except UnusableCheckpoint as error:
            damaged_keys.add(error.key)
            write_stderr(f"a checkpoint cannot be used: {error} Trying the previous one.")


def restore_checkpoints(
    store: ProgramStore,
    folder: Path,
    node: int,
    checkpoint_keys: Iterable[str],
    restore_counts: RestoreCounts,
) -> list[CheckpointRecord]:
    """Restore the checkpoints of the given records. Raises UnusableCheckpoint, UnwritableDisk,
    StorageError."""
    restored_records: list[CheckpointRecord] = []
    with store.lease("readers"):
        for checkpoint_key in checkpoint_keys:
            try:
                checkpoint_record = store.read_record(checkpoint_key)
                restore_checkpoint(store, folder, node, checkpoint_record, restore_counts)
            except (NotFound, InvalidDocument, DamagedCheckpoint) as error:
                raise UnusableCheckpoint(
                    checkpoint_key, f"{store.store.uri(checkpoint_key)}: {error}"
                ) from error
            restored_records.append(checkpoint_record)
    return restored_records


def restore_checkpoint(
    store: ProgramStore,
    folder: Path,
    node: int,
    checkpoint_record: CheckpointRecord,
    restore_counts: RestoreCounts,
) -> None:
    """Write the files of a checkpoint below `folder`. Raises DamagedCheckpoint, UnwritableDisk,
    StorageError."""
    unit_path = folder / checkpoint_record.path
    _check_parent_folders(folder, checkpoint_record.path)
    file_records = checkpoint_record.select_node_files(node)
    intact_paths = {
        path
        for path, file_record in file_records.items()
        if _is_file_intact(_join_unit_path(unit_path, path), file_record)
    }
    restore_counts.kept_bytes += sum(file_records[path].size for path in intact_paths)
    if len(intact_paths) == len(file_records):
        return

    draft_path = choose_hidden_folder(folder) / "drafts" / uuid.uuid4().hex
    try:
        for path, file_record in file_records.items():
            _write_file(
                store,
                _join_unit_path(unit_path, path),
                _join_unit_path(draft_path, path),
                file_record,
                path in intact_paths,
            )
            if path not in intact_paths:
                restore_counts.fetched_bytes += file_record.size

        _sync_folders(draft_path)
        unit_path.parent.mkdir(parents=True, exist_ok=True)
        _replace_unit(draft_path, unit_path, choose_hidden_folder(folder))
    except OSError as error:
        raise UnwritableDisk(describe_disk_error(unit_path, error)) from error
    finally:
        _remove_unit(draft_path)


def describe_disk_error(path: Path, error: OSError) -> str:
    return (
        f"{path} cannot be written ({error.strerror or error}). Free the disk of the pod, or give"
        " the pod a larger one."
    )


def _join_unit_path(unit_path: Path, relative_path: str) -> Path:
    return unit_path / relative_path if relative_path else unit_path


def _check_parent_folders(folder: Path, relative_path: str) -> None:
    """Raise DamagedCheckpoint if a parent folder of the path is a link or a file."""
    parent_folder = folder
    for path_part in relative_path.split("/")[:-1]:
        parent_folder = parent_folder / path_part
        if parent_folder.is_symlink() or (parent_folder.exists() and not parent_folder.is_dir()):
            raise DamagedCheckpoint(f"{parent_folder} is not a directory.")


def _is_file_intact(path: Path, file_record: FileRecord) -> bool:
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size != file_record.size:
            return False
        return file_sha256(path) == file_record.sha256
    except OSError:
        return False


def _write_file(
    store: ProgramStore,
    source_path: Path,
    draft_path: Path,
    file_record: FileRecord,
    is_intact: bool,
) -> None:
    draft_path.parent.mkdir(parents=True, exist_ok=True)
    if is_intact:
        with suppress(OSError):
            os.link(source_path, draft_path)
            return

    file_hash = hashlib.sha256()
    with open(
        os.open(draft_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
    ) as draft_stream:
        for chunk_number, chunk_name in enumerate(file_record.chunks):
            chunk = _fetch_chunk(store, chunk_name, file_record.chunk_size(chunk_number))
            file_hash.update(chunk)
            draft_stream.write(chunk)
        draft_stream.flush()
        os.fchmod(draft_stream.fileno(), file_record.mode | 0o600)
        os.fsync(draft_stream.fileno())

    if file_hash.hexdigest() != file_record.sha256:
        raise DamagedCheckpoint(f"the sha256 of {file_record.path or 'the file'} is wrong.")


def _fetch_chunk(store: ProgramStore, chunk_name: str, chunk_bytes: int) -> bytes:
    chunk_key = f"{store.root}/chunks/{chunk_name}"
    try:
        return fetch_chunk(store.store, chunk_key, chunk_name, chunk_bytes)
    except NotFound as error:
        raise DamagedCheckpoint(str(error)) from None
    except DamagedChunk as error:
        raise DamagedCheckpoint(f"{error}.") from None


def _sync_folders(draft_path: Path) -> None:
    folders = [draft_path, *draft_path.rglob("*")] if draft_path.is_dir() else [draft_path.parent]
    for folder in folders:
        if folder.is_dir():
            sync_folder(folder)


def _replace_unit(draft_path: Path, unit_path: Path, hidden_path: Path) -> None:
    """Replace the unit `unit_path` by `draft_path`. If the process crashes, the old unit, the new
    unit or no unit exists afterwards."""
    if draft_path.is_file() and not unit_path.is_dir():
        draft_path.replace(unit_path)
    else:
        _move_unit(unit_path, hidden_path / "replaced")
        draft_path.rename(unit_path)
    sync_folder(unit_path.parent)


def is_newer_than_records(
    checkpoint: LocalCheckpoint, restored_records: list[CheckpointRecord]
) -> bool:
    """Return True if a local checkpoint is newer than all records of its family."""
    return all(
        record.step is None or checkpoint.step is None or checkpoint.step > record.step
        for record in restored_records
        if make_family_path(record.path) == checkpoint.family
    )


def move_units_aside(folder: Path, unit_paths: Iterable[str]) -> None:
    """Move units out of the checkpoint folder, and delete the units that an earlier call has moved
    out."""
    aside_folder = choose_hidden_folder(folder) / "aside"
    _remove_unit(aside_folder)
    for unit_path in unit_paths:
        with suppress(OSError):
            _move_unit(folder / unit_path, aside_folder / unit_path.replace("/", "--"))


def _move_unit(unit_path: Path, destination_path: Path) -> None:
    """Move a unit to `destination_path`, whose earlier content is deleted first."""
    if unit_path.exists() or unit_path.is_symlink():
        _remove_unit(destination_path)
        destination_path.parent.mkdir(parents=True, exist_ok=True)
        unit_path.rename(destination_path)


def _remove_unit(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
