"""Unpack untrusted archives safely: nothing is written outside of one new directory.

`tarfile` only reads the tarball; this module writes the files. The data filter of tarfile is not
enough: it does not exist before Python 3.11.4, long chains of links bypass it in later versions
(CVE-2025-4517), and it does not limit sizes. This module first writes files and directories, while
no link exists that a write could follow. Then it creates the links, whose targets must be inside
the directory. This module also limits the disk space, the number of entries and the size of a
header.

Sources: Argo's executor.go (untar), for the entries that are dropped or rejected; CVE-2025-8194,
for entries with a negative size.
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
    CountedEntry,
    TarStream,
    open_tar,
)

MAX_ENTRIES = 100_000  # maximum number of files, directories and links in an archive
# the entries of a tarball are counted part by part; unpacked size of a part in bytes
COUNTED_BYTES = 128 << 20
# after each count, this many entries are written before the next count
UNCOUNTED_ENTRIES = 1000
MAX_DISK_SHARE = 0.9  # maximum share of the free disk space that an unpacked archive may occupy
MAX_RECORDS = 100  # maximum number of records in the global headers of a tarball
MAX_DEPTH = 200  # maximum depth of nested directories
MAX_DIRECTORY_BYTES = 256 << 20  # maximum size in bytes of a zip's central directory
BLOCK_BYTES = 4096  # bytes of disk space to assume for an empty file or a directory
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
        # zipfile reads this much at once only for the central directory
        if size and size > MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(
                f"its central directory has more than {MAX_DIRECTORY_BYTES >> 20} MB"
            )

        data = super().read(size)
        offset = 0
        count = 0

        while data.startswith(b"PK\1\2", offset) and len(data) >= offset + 46:
            offset += 46 + sum(struct.unpack_from("<3H", data, offset + 28))
            count += 1
            if count > self.max_entries:
                raise zipfile.BadZipFile(
                    f"it has more than {self.max_entries} entries: pack fewer, larger files"
                )

        return data


class _Budget:
    """The number of bytes and entries that may still be unpacked from the archive `name` into a
    directory."""

    def __init__(self, name: str, directory: Path, entries: int, share: float) -> None:
        self.name = name
        self.share = share
        self.max_entries = entries
        self.entries = entries
        self.max_bytes = int(share * shutil.disk_usage(directory).free)
        self.bytes = self.max_bytes

    def take(self, size: int) -> None:
        """Subtract another entry of `size` bytes from the budget. Raises ArchiveError."""
        self.entries -= 1
        self.bytes -= max(size, BLOCK_BYTES)
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
        with closing(TarStream(path)) as file, open_tar(file) as archive:
            return archive.next() is not None
    except INVALID_ARCHIVE_ERRORS:
        return False


def unpack_tar(
    archive: Path,
    path: Path,
    max_entries: int = MAX_ENTRIES,
    max_disk_share: float = MAX_DISK_SHARE,
) -> None:
    """Replace a gzipped tar by its contents. A single entry is moved to `path`. Several entries are
    moved into the folder `path`.

    As in Argo, owners, setuid bits, devices and hard links are dropped. Raises ArchiveError.
    """
    with _unpack_directory(archive, path) as directory:
        tree = _Tree(directory, _Budget(path.name, directory, max_entries, max_disk_share))
        with closing(TarStream(archive)) as file, open_tar(file) as tar:
            counter = _EntryCounter(path.name, max_entries)
            while True:
                counter.check(file, tar.offset, tree.budget.entries)
                file.budget = MAX_HEADER_BYTES

                member = tar.next()
                if not member:
                    break

                tar.members.clear()  # type: ignore[attr-defined]  # without this, tarfile keeps all members
                if len(tar.pax_headers) > MAX_RECORDS:
                    raise ArchiveError(
                        f"{path.name} has more than {MAX_RECORDS} global header records."
                    )

                tree.budget.take(member.size)
                file.budget = sys.maxsize
                tree.add(tar, member)

        tree.add_links(path.name)


def unpack_zip(
    archive: Path,
    path: Path,
    max_entries: int = MAX_ENTRIES,
    max_disk_share: float = MAX_DISK_SHARE,
) -> None:
    """Unpack a zip as `unpack_tar` does; links in the zip become files."""
    with (
        _unpack_directory(archive, path) as directory,
        _CountingZipFile(archive, max_entries) as file,
        zipfile.ZipFile(file) as zip_file,
    ):
        tree = _Tree(directory, _Budget(path.name, directory, max_entries, max_disk_share))
        _check_zip(file, zip_file.infolist(), tree.budget)

        for entry in zip_file.infolist():
            parts = tuple(name for name in entry.filename.split("/") if name not in ("", ".", ".."))
            if entry.is_dir():
                tree.make_directory(parts)
            elif parts:
                with zip_file.open(entry) as content, tree.open(parts, 0o666) as target:
                    shutil.copyfileobj(content, target, CHUNK_BYTES)
            else:
                raise ArchiveError(f"{path.name} cannot be unpacked: it has a file without a name.")


def _check_zip(file: _CountingZipFile, entries: list[zipfile.ZipInfo], budget: "_Budget") -> None:
    """Raise ArchiveError for entries that exceed the budget, share bytes or are neither stored nor
    deflated."""
    end = 0

    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        budget.take(entry.file_size)
        # Go supports only these compression methods; unpacking other methods could use unlimited
        # memory
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ArchiveError(
                f"{entry.filename} is neither stored nor deflated: pack it with one of these"
                " methods."
            )

        if entry.header_offset < end:
            raise ArchiveError(
                f"{entry.filename} overlaps the entry before it: pack the archive again."
            )

        file.seek(entry.header_offset + 26)
        end = file.tell() + 4 + sum(struct.unpack("<2H", file.read(4))) + entry.compress_size


class _EntryCounter:
    """Counts the entries of a tarball's next part before they are written, so that a tarball with
    too many entries fails early. Writing many files is slow.

    Parts that consist of large files are not counted, because counting decompresses them a second
    time.
    """

    def __init__(self, name: str, max_entries: int) -> None:
        self.name = name
        self.max_entries = max_entries
        # end position of the last counted part
        self.end = -1
        self.uncounted_entries = UNCOUNTED_ENTRIES

    def check(self, file: TarStream, offset: int, entries: int) -> None:
        """Raise ArchiveError if the part at `offset` has more than `entries` entries."""
        if offset < self.end:
            return
        self.uncounted_entries += 1
        if self.uncounted_entries < UNCOUNTED_ENTRIES:
            return
        self.uncounted_entries = 0
        self.end = offset + COUNTED_BYTES
        with closing(file.copy()) as next_part, suppress(*INVALID_ARCHIVE_ERRORS):
            next_part.seek(offset)
            self._count(next_part, entries)

    def _count(self, file: TarStream, entries: int) -> None:
        with open_tar(file, CountedEntry) as tar:
            for _ in range(entries + 1):
                file.budget = MAX_HEADER_BYTES
                member = tar.next()
                if (
                    not member
                    or member.offset_data + member.size > self.end
                    or len(tar.pax_headers) > MAX_RECORDS
                ):
                    return

                tar.members.clear()  # type: ignore[attr-defined]  # without this, tarfile keeps all members

        raise ArchiveError(
            f"{self.name} has more than {self.max_entries} entries: pack fewer, larger files."
        )


def _check_sparse(member: Any, stored_bytes: int) -> None:
    """Raise ArchiveError for a sparse file whose parts overlap, are unordered, or exceed
    `stored_bytes`."""
    end = 0
    total = 0

    for offset, size in member.sparse or ():
        if size < 0 or offset < end or offset + size > member.size:
            raise ArchiveError(
                f"{member.name} has parts that overlap or are not in order: pack the file without"
                " --sparse."
            )

        end = offset + size
        total += size

    if total > stored_bytes:
        raise ArchiveError(
            f"{member.name} has parts of {total} bytes, but only {stored_bytes} are stored: pack"
            " the file again."
        )


@contextmanager
def _unpack_directory(archive: Path, path: Path) -> Iterator[Path]:
    """Yield an empty directory. At the end of the `with` block, move the directory to `path`. If it
    has a single entry, move only this entry.

    After a failure, the directory is deleted.
    """
    directory = path.with_name(path.name + ".tmpdir")
    directory.mkdir()

    try:
        yield directory
        entries = list(directory.iterdir())
        (entries[0] if len(entries) == 1 else directory).rename(path)
        archive.unlink()
    except INVALID_ARCHIVE_ERRORS as error:
        raise ArchiveError(f"{path.name} cannot be unpacked: {error}") from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class _Tree:
    """The unpacked tree below a directory."""

    def __init__(self, root: Path, budget: _Budget) -> None:
        self.root = root
        self.budget = budget
        # path of a link → (its name in the archive, its target)
        self.links: dict[tuple[str, ...], tuple[str, str]] = {}

    def add(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        path = os.path.normpath(member.name)
        if path.startswith(("/", "../")) or path in (".", ".."):
            raise ArchiveError(f"illegal file path: {member.name}")

        parts = tuple(path.split("/"))
        if member.issym():
            self.links[parts] = member.name, member.linkname
        elif member.isdir():
            self.make_directory(parts)
        elif member.isreg():
            _check_sparse(member, tar.offset - member.offset_data)
            content: Any = tar.fileobj
            content.seek(member.offset_data)
            sparse: Any = member.sparse  # type: ignore[attr-defined]

            with self.open(parts, 0o600) as file:
                for offset, size in ((0, member.size),) if sparse is None else sparse:
                    # seek over the holes of a sparse file, which saves time and disk space
                    file.seek(offset)
                    while size > 0:
                        data = content.read(min(size, CHUNK_BYTES))
                        if not data:
                            raise tarfile.ReadError("unexpected end of data")

                        size -= file.write(data)

                file.truncate(member.size)
                os.utime(file.fileno(), (member.mtime, member.mtime))
                os.fchmod(file.fileno(), member.mode & 0o777)

    def open(self, parts: tuple[str, ...], mode: int) -> BinaryIO:
        """Create or empty a file of this tree, and open it for writing."""
        self.make_directory(parts[:-1])
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        return os.fdopen(os.open(self.root.joinpath(*parts), flags, mode), "wb")

    def make_directory(self, parts: tuple[str, ...]) -> None:
        if len(parts) > MAX_DEPTH:
            raise ArchiveError(
                f"{parts[0]}/... has more than {MAX_DEPTH} nested directories: use fewer levels."
            )
        path = self.root.joinpath(*parts)
        # lstat does not follow links, unlike `is_dir`
        if not (os.path.lexists(path) and stat.S_ISDIR(path.lstat().st_mode)):
            self.make_directory(parts[:-1])
            self.budget.take(0)
            path.mkdir()
            path.chmod(0o755)  # set the mode again, because the umask applied to mkdir

    def add_links(self, name: str) -> None:
        """Create the links. Raises ArchiveError if a link's target, or the path to it, is outside
        of the directory `name`."""
        top_names = {*os.listdir(self.root), *(path[0] for path in self.links)}
        final_path = lambda path: (name, *path[len(top_names) == 1 :])  # noqa: E731
        links = {final_path(path): target for path, (_, target) in self.links.items()}
        for path, (link, target) in self.links.items():
            if not _stays_inside(final_path(path), links):
                raise ArchiveError(f"illegal symlink target: {link} -> {target}")
        for path, (_, target) in self.links.items():
            self.make_directory(path[:-1])
            os.symlink(target, self.root.joinpath(*path))


def _stays_inside(path: tuple[str, ...], links: dict[tuple[str, ...], str]) -> bool:
    """Return True if the link at `path` never leads outside of the directory `path[0]` when the
    kernel resolves it."""
    directory = list(path[:-1])
    remaining_names = links[path].split("/")[::-1]

    if links[path].startswith("/") or len(path) == 1:
        return False

    for _ in range(40):  # the kernel follows at most 40 links
        while remaining_names:
            name = remaining_names.pop()
            if name == "..":
                if not directory:
                    return False

                directory.pop()
            elif name not in ("", "."):
                directory.append(name)
                if directory[0] != path[0]:
                    return False

                target = links.get(tuple(directory))
                if target:
                    if target.startswith("/"):
                        return False

                    directory.pop()
                    remaining_names += target.split("/")[::-1]
                    break
        else:
            return bool(directory)

    # The links form a loop: the kernel reports an error, but a program that resolves paths itself
    # may leave the directory.
    return False
