"""Unpack untrusted archives safely: nothing is written outside of one new directory.

The data filter of `tarfile` is not enough: it does not exist before Python 3.11.4, long chains of
links bypass it in later versions (CVE-2025-4517), and it does not limit sizes. To be safe,
`tarfile` only reads the tarball, and the module `archives` writes the files. Files and directories
are written first, while no link exists that a write could follow. The links of an archive are
created last, and their targets must be inside the directory. The disk space of an unpacked archive,
its number of entries and the size of a header are limited.

As in Argo's executor.go (untar), some entries of an archive are dropped or rejected. Entries of a
tarball with a negative size are rejected because of CVE-2025-8194.
"""

import io
import os
import shutil
import stat
import struct
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from argolocal.pods.tarballs import (
    CHUNK_BYTES,
    MAX_HEADER_BYTES,
    CountedTarEntry,
    TarStream,
    open_tar,
)

# maximum number of files, directories and links in an archive
MAX_ENTRIES = 100_000
# size in bytes of the part of an unpacked tarball whose entries are counted at once
COUNTED_BYTES = 128 << 20
# number of entries to write between two counts
UNCOUNTED_ENTRIES = 1000
# maximum share of the free disk space that an unpacked archive may occupy
MAX_DISK_SHARE = 0.9
# maximum number of records in the global headers of a tarball
MAX_RECORDS = 100
# maximum depth of nested directories
MAX_DEPTH = 200
# maximum size in bytes of a zip's central directory
MAX_DIRECTORY_BYTES = 256 << 20
# bytes of disk space to assume for an empty file or a directory
BLOCK_BYTES = 4096
# exceptions that tarfile and zipfile raise for invalid archives (RuntimeError: the archive is
# encrypted or nested too deep)
INVALID_ARCHIVE_ERRORS = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error),
    *(OSError, EOFError, ValueError, OverflowError, RuntimeError, LookupError, struct.error),
)


class ArchiveError(Exception):
    """An archive is rejected because of its contents."""


class _CountingZipFile(io.BufferedReader):
    """A zip file that counts its entries before zipfile creates an object for each entry."""

    def __init__(self, path: Path, max_entries: int) -> None:
        super().__init__(io.FileIO(path))
        self.max_entries = max_entries

    def read(self, size: int | None = -1) -> bytes:
        # zipfile reads more than MAX_DIRECTORY_BYTES at once only for the central directory
        if size and size > MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(
                f"its central directory has more than {MAX_DIRECTORY_BYTES >> 20} MB"
            )

        chunk = super().read(size)
        search_offset = 0
        entry_count = 0

        while chunk.startswith(b"PK\1\2", search_offset) and len(chunk) >= search_offset + 46:
            search_offset += 46 + sum(struct.unpack_from("<3H", chunk, search_offset + 28))
            entry_count += 1
            if entry_count > self.max_entries:
                raise zipfile.BadZipFile(
                    f"it has more than {self.max_entries} entries: pack fewer, larger files"
                )

        return chunk


class _UnpackBudget:
    """The number of bytes and entries that may still be unpacked from the archive `name` into a
    directory."""

    def __init__(
        self, archive_name: str, directory: Path, max_entries: int, max_disk_share: float
    ) -> None:
        self.name = archive_name
        self.share = max_disk_share
        self.max_entries = max_entries
        self.entries = max_entries
        self.max_bytes = int(max_disk_share * shutil.disk_usage(directory).free)
        self.bytes = self.max_bytes

    def take(self, size_bytes: int) -> None:
        """Subtract another entry of `size_bytes` bytes from the budget. Raises ArchiveError."""
        self.entries -= 1
        self.bytes -= max(size_bytes, BLOCK_BYTES)
        if self.entries < 0:
            raise ArchiveError(
                f"{self.name} has more than {self.max_entries} entries: pack fewer, larger files."
            )
        if self.bytes < 0:
            raise ArchiveError(
                f"{self.name} unpacks to more than {self.max_bytes / 1e9:.1f} GB, {self.share:.0%}"
                " of the free disk space: free some space, or pack less."
            )


def is_tarball(path: Path) -> bool:
    """Return True if the file is a gzipped tar with at least one entry."""
    try:
        with closing(TarStream(path)) as tar_stream, open_tar(tar_stream) as tar_file:
            return tar_file.next() is not None
    except INVALID_ARCHIVE_ERRORS:
        return False


def unpack_tar(
    archive: Path,
    path: Path,
    max_entries: int = MAX_ENTRIES,
    max_disk_share: float = MAX_DISK_SHARE,
) -> None:
    """Unpack a gzipped tar, and delete it. If the tar has a single entry, this entry becomes
    `path`. If the tar has several entries, `path` becomes a folder with the entries.

    As in Argo, owners, setuid bits, devices and hard links are dropped. Raises ArchiveError.
    """
    with _unpack_directory(archive, path) as directory:
        unpacked_tree = _UnpackedTree(
            directory, _UnpackBudget(path.name, directory, max_entries, max_disk_share)
        )
        with closing(TarStream(archive)) as tar_stream, open_tar(tar_stream) as tar_file:
            entry_counter = _EntryCounter(path.name, max_entries)
            while True:
                entry_counter.check(tar_stream, tar_file.offset, unpacked_tree.budget.entries)
                tar_stream.budget = MAX_HEADER_BYTES

                tar_entry = tar_file.next()
                if not tar_entry:
                    break

                tar_file.members.clear()  # type: ignore[attr-defined]  # without this, tarfile keeps all members
                if len(tar_file.pax_headers) > MAX_RECORDS:
                    raise ArchiveError(
                        f"{path.name} has more than {MAX_RECORDS} global header records."
                    )

                unpacked_tree.budget.take(tar_entry.size)
                tar_stream.budget = sys.maxsize
                unpacked_tree.add(tar_file, tar_entry)

        unpacked_tree.add_links(path.name)


def unpack_zip(
    archive: Path,
    path: Path,
    max_entries: int = MAX_ENTRIES,
    max_disk_share: float = MAX_DISK_SHARE,
) -> None:
    """Unpack a zip in the same way as `unpack_tar`. A link in the zip becomes a file that contains
    the link's target. Raises ArchiveError."""
    with (
        _unpack_directory(archive, path) as directory,
        _CountingZipFile(archive, max_entries) as counted_file,
        zipfile.ZipFile(counted_file) as zip_file,
    ):
        unpacked_tree = _UnpackedTree(
            directory, _UnpackBudget(path.name, directory, max_entries, max_disk_share)
        )
        _check_zip(counted_file, zip_file.infolist(), unpacked_tree.budget)

        for zip_entry in zip_file.infolist():
            path_parts = tuple(
                path_part
                for path_part in zip_entry.filename.split("/")
                if path_part not in ("", ".", "..")
            )
            if zip_entry.is_dir():
                unpacked_tree.make_directory(path_parts)
            elif path_parts:
                with (
                    zip_file.open(zip_entry) as entry_reader,
                    unpacked_tree.open(path_parts, 0o666) as output_file,
                ):
                    shutil.copyfileobj(entry_reader, output_file, CHUNK_BYTES)
            else:
                raise ArchiveError(f"{path.name} cannot be unpacked: it has a file without a name.")


def _check_zip(
    counted_file: _CountingZipFile, zip_entries: list[zipfile.ZipInfo], budget: "_UnpackBudget"
) -> None:
    """Raise ArchiveError for entries that exceed the budget, overlap each other, or have another
    compression method than "stored" or "deflated"."""
    previous_end = 0

    for zip_entry in sorted(zip_entries, key=lambda zip_entry: zip_entry.header_offset):
        budget.take(zip_entry.file_size)
        # Go supports only these compression methods; unpacking other methods could use unlimited
        # memory
        if zip_entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ArchiveError(
                f"{zip_entry.filename} is neither stored nor deflated: pack it with one of these"
                " methods."
            )

        if zip_entry.header_offset < previous_end:
            raise ArchiveError(
                f"{zip_entry.filename} overlaps the entry before it: pack the archive again."
            )

        counted_file.seek(zip_entry.header_offset + 26)
        previous_end = (
            counted_file.tell()
            + 4
            + sum(struct.unpack("<2H", counted_file.read(4)))
            + zip_entry.compress_size
        )


class _EntryCounter:
    """Counts the entries of the next part of a tarball before they are written. The early count
    makes a tarball with too many entries fail before many files are written, which is slow.

    The next part of a tarball is counted only after UNCOUNTED_ENTRIES entries, so that parts with
    large files are not counted: counting decompresses a part a second time.
    """

    def __init__(self, archive_name: str, max_entries: int) -> None:
        self.name = archive_name
        self.max_entries = max_entries
        # position in the tarball at which the last counted part ends
        self.end = -1
        self.uncounted_entries = UNCOUNTED_ENTRIES

    def check(self, tar_stream: TarStream, offset: int, max_entries: int) -> None:
        """Raise ArchiveError if the part at `offset` has more than `max_entries` entries. Call the
        method `check` before each entry is written; most calls do nothing."""
        if offset < self.end:
            return
        self.uncounted_entries += 1
        if self.uncounted_entries < UNCOUNTED_ENTRIES:
            return
        self.uncounted_entries = 0
        self.end = offset + COUNTED_BYTES
        with closing(tar_stream.copy()) as next_part, suppress(*INVALID_ARCHIVE_ERRORS):
            next_part.seek(offset)
            self._count(next_part, max_entries)

    def _count(self, tar_stream: TarStream, max_entries: int) -> None:
        with open_tar(tar_stream, CountedTarEntry) as tar_file:
            for _ in range(max_entries + 1):
                tar_stream.budget = MAX_HEADER_BYTES
                tar_entry = tar_file.next()
                if (
                    not tar_entry
                    or tar_entry.offset_data + tar_entry.size > self.end
                    or len(tar_file.pax_headers) > MAX_RECORDS
                ):
                    return

                tar_file.members.clear()  # type: ignore[attr-defined]  # without this, tarfile keeps all members

        raise ArchiveError(
            f"{self.name} has more than {self.max_entries} entries: pack fewer, larger files."
        )


def _check_sparse(tar_entry: Any, stored_bytes: int) -> None:
    """Raise ArchiveError for a sparse file whose parts overlap, are unordered, or exceed
    `stored_bytes`."""
    previous_end = 0
    total_bytes = 0

    for offset, size_bytes in tar_entry.sparse or ():
        if size_bytes < 0 or offset < previous_end or offset + size_bytes > tar_entry.size:
            raise ArchiveError(
                f"{tar_entry.name} has parts that overlap or are not in order: pack the file"
                " without --sparse."
            )

        previous_end = offset + size_bytes
        total_bytes += size_bytes

    if total_bytes > stored_bytes:
        raise ArchiveError(
            f"{tar_entry.name} has parts of {total_bytes} bytes, but only {stored_bytes} are"
            " stored: pack the file again."
        )


@contextmanager
def _unpack_directory(archive: Path, path: Path) -> Iterator[Path]:
    """Yield an empty directory. At the end of the `with` block, the directory is moved to `path`.
    If the directory has a single entry, only this entry is moved to `path`.

    After a failure, the directory is deleted.
    """
    directory = archive.with_name(f"{archive.name}.unpacked")
    directory.mkdir()

    try:
        yield directory
        directory_entries = list(directory.iterdir())
        (directory_entries[0] if len(directory_entries) == 1 else directory).rename(path)
        archive.unlink()
    except INVALID_ARCHIVE_ERRORS as error:
        raise ArchiveError(f"{path.name} cannot be unpacked: {error}") from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class _UnpackedTree:
    """The unpacked files below the directory `root`."""

    def __init__(self, root: Path, budget: _UnpackBudget) -> None:
        self.root = root
        self.budget = budget
        # path of a link → (its name in the archive, its target)
        self.links: dict[tuple[str, ...], tuple[str, str]] = {}

    def add(self, tar_file: tarfile.TarFile, tar_entry: tarfile.TarInfo) -> None:
        """Write a file or directory of a tarball, or remember a link for `add_links`. Raises
        ArchiveError."""
        entry_path = os.path.normpath(tar_entry.name)
        if entry_path.startswith(("/", "../")) or entry_path in (".", ".."):
            raise ArchiveError(f"illegal file path: {tar_entry.name}")

        path_parts = tuple(entry_path.split("/"))
        if tar_entry.issym():
            self.links[path_parts] = tar_entry.name, tar_entry.linkname
        elif tar_entry.isdir():
            self.make_directory(path_parts)
        elif tar_entry.isreg():
            _check_sparse(tar_entry, tar_file.offset - tar_entry.offset_data)
            archive_file: Any = tar_file.fileobj
            archive_file.seek(tar_entry.offset_data)
            sparse_parts: Any = tar_entry.sparse  # type: ignore[attr-defined]

            with self.open(path_parts, 0o600) as output_file:
                for offset, size_bytes in (
                    ((0, tar_entry.size),) if sparse_parts is None else sparse_parts
                ):
                    # seek over the holes of a sparse file, which saves time and disk space
                    output_file.seek(offset)
                    while size_bytes > 0:
                        chunk = archive_file.read(min(size_bytes, CHUNK_BYTES))
                        if not chunk:
                            raise tarfile.ReadError("unexpected end of data")

                        size_bytes -= output_file.write(chunk)

                output_file.truncate(tar_entry.size)
                os.utime(output_file.fileno(), (tar_entry.mtime, tar_entry.mtime))
                os.fchmod(output_file.fileno(), tar_entry.mode & 0o777)

    def open(self, path_parts: tuple[str, ...], mode: int) -> BinaryIO:
        """Create or empty a file of this tree, and open it for writing."""
        self.make_directory(path_parts[:-1])
        open_flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        return os.fdopen(os.open(self.root.joinpath(*path_parts), open_flags, mode), "wb")

    def make_directory(self, path_parts: tuple[str, ...]) -> None:
        if len(path_parts) > MAX_DEPTH:
            raise ArchiveError(
                f"{path_parts[0]}/... has more than {MAX_DEPTH} nested directories: use fewer"
                " levels."
            )
        path = self.root.joinpath(*path_parts)
        # lstat does not follow links, unlike `is_dir`
        if not (os.path.lexists(path) and stat.S_ISDIR(path.lstat().st_mode)):
            self.make_directory(path_parts[:-1])
            self.budget.take(0)
            path.mkdir()
            # mkdir has applied the umask to its mode
            path.chmod(0o755)

    def add_links(self, directory_name: str) -> None:
        """Create the links. Raises ArchiveError if a link leads out of the directory, which will
        have the name `directory_name`."""
        top_names = {*os.listdir(self.root), *(link_path[0] for link_path in self.links)}
        final_path = lambda link_path: (directory_name, *link_path[len(top_names) == 1 :])  # noqa: E731
        link_targets = {
            final_path(link_path): target for link_path, (_, target) in self.links.items()
        }
        for link_path, (link, target) in self.links.items():
            if not _stays_inside(final_path(link_path), link_targets):
                raise ArchiveError(f"illegal symlink target: {link} -> {target}")
        for link_path, (_, target) in self.links.items():
            self.make_directory(link_path[:-1])
            os.symlink(target, self.root.joinpath(*link_path))


def _stays_inside(link_path: tuple[str, ...], link_targets: dict[tuple[str, ...], str]) -> bool:
    """Return True if the link at `link_path` never leads out of the directory `link_path[0]` when
    the kernel resolves it."""
    current_directory = list(link_path[:-1])
    remaining_names = link_targets[link_path].split("/")[::-1]

    if link_targets[link_path].startswith("/") or len(link_path) == 1:
        return False

    for _ in range(40):  # the kernel follows at most 40 links
        while remaining_names:
            path_part = remaining_names.pop()
            if path_part == "..":
                if not current_directory:
                    return False

                current_directory.pop()
            elif path_part not in ("", "."):
                current_directory.append(path_part)
                if current_directory[0] != link_path[0]:
                    return False

                link_target = link_targets.get(tuple(current_directory))
                if link_target:
                    if link_target.startswith("/"):
                        return False

                    current_directory.pop()
                    remaining_names += link_target.split("/")[::-1]
                    break
        else:
            return bool(current_directory)

    # If the links form a loop, the kernel reports an error to `open`, but a program that resolves
    # paths itself may leave the directory.
    return False
