"""Decides which objects of a program's checkpoints in the object store may be deleted."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rekindle.program.checkpoints.paths import make_family_path
from rekindle.program.checkpoints.records import CheckpointRecord, ShareRecord, UnitFiles
from rekindle.program.checkpoints.saves import choose_versions

# sha256 of a file, and the names of its chunks
FileContent = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class StoredObjects:
    """The objects of a program's checkpoints when a deletion starts.

    `records_by_key`: checkpoints in the order of their commits; `shares_by_key`: shares (lists of
    the files that one node has of a checkpoint) of all generations. In `records_by_key` and
    `shares_by_key`, None stands for an object that cannot be read. `old_keys`: keys of the shares
    and chunks that are too old to belong to a running upload.
    """

    root: str
    records_by_key: Mapping[str, CheckpointRecord | None]
    shares_by_key: Mapping[str, ShareRecord | None]
    chunk_keys: list[str]
    old_keys: set[str]

    def find_expired_checkpoints(self, keep_count: int) -> set[str]:
        """Return the keys of the checkpoints to delete: all except the newest `keep_count` of each
        family, and except the versions that a program would continue from."""
        newest_first = list(self.records_by_key.items())[::-1]
        readable_records = [record for _, record in newest_first if record]
        needed_keys = {record.key(self.root) for record in choose_versions(readable_records)}

        counts_by_family: dict[str, int] = {}
        expired_keys: set[str] = set()
        for key, record in newest_first:
            family = make_family_path(record.path) if record else ""
            counts_by_family[family] = counts_by_family.get(family, 0) + 1
            if counts_by_family[family] > keep_count and key not in needed_keys:
                expired_keys.add(key)
        return expired_keys

    def find_unneeded_objects(self, expired_keys: set[str]) -> list[str]:
        """Return the keys of the shares and chunks that no checkpoint needs once the checkpoints
        `expired_keys` are deleted."""
        kept_contents = _list_contents(
            record for key, record in self.records_by_key.items() if key not in expired_keys
        )
        unneeded_shares: list[str] = []
        for share_key, share_record in self.shares_by_key.items():
            is_old = share_key in self.old_keys
            if share_record is None or is_old or self._is_committed(share_record):
                unneeded_shares.append(share_key)
            else:
                kept_contents |= _list_contents([share_record])

        kept_chunks = _list_chunk_names(kept_contents)
        committed_chunks = _list_chunk_names(_list_contents(self.records_by_key.values()))
        unneeded_chunks: list[str] = []
        for chunk_key in self.chunk_keys:
            chunk_name = chunk_key.rpartition("/")[2]
            # the chunk may belong to an upload that has not written its share yet
            is_upload = chunk_name not in committed_chunks and chunk_key not in self.old_keys
            if not is_upload and chunk_name not in kept_chunks:
                unneeded_chunks.append(chunk_key)
        return [*unneeded_shares, *unneeded_chunks]

    def _is_committed(self, share_record: ShareRecord) -> bool:
        """Return True if all files of a share are in committed checkpoints, so that the share is no
        longer needed. Return False for a share without files."""
        # also compare paths, because a copy with another path, such as `latest.pt`, is a separate
        # checkpoint
        committed_contents = _list_contents(
            record
            for record in self.records_by_key.values()
            if record and record.path == share_record.path
        )
        return bool(share_record.files) and _list_contents([share_record]) <= committed_contents


def _list_contents(unit_records: Iterable[UnitFiles | None]) -> set[FileContent]:
    return {
        (file_record.sha256, tuple(file_record.chunks))
        for unit_record in unit_records
        if unit_record
        for file_record in unit_record.files
    }


def _list_chunk_names(file_contents: Iterable[FileContent]) -> set[str]:
    return {chunk_name for _, chunk_names in file_contents for chunk_name in chunk_names}
