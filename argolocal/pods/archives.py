"""Unpacks archives that a stranger may have made: whatever they say, nothing outside of one new directory is touched.

Tarballs are read by `tarfile` and written here. Its own data filter is not enough: Pythons before 3.11.4 have none,
later ones can be led out by a chain of links that is too long to resolve (CVE-2025-4517), and neither bounds anything.
Here files and directories come first, so that no link is there to write through; links come last, and only if every
step of their target stays inside. Bounds: disk space, entries, and the size of one header.

Sources: Argo's executor.go (untar), for what is dropped and refused; CVE-2025-8194, for the negative sizes.
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
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

MOST_ENTRIES = 1_000_000  # files, directories and links
SHARE = 0.9  # of the free disk space: the most that an archive may take
HEADER = 32 << 10  # bytes: the most that precedes one entry (a path has at most 4096)
RECORDS = 100  # global header records
DEPTH = 200  # directories in one another
SPARE_MEMBERS, MEMBER = 10_000, 1024  # members of a gzip file that may be small, and bytes that each other has or holds
DIRECTORY = 256 << 20  # bytes of a zip's directory
CHUNK = 128 << 10  # bytes read at once
BLOCK = 4096  # bytes that an empty file or a directory takes
# what tarfile and zipfile raise for bytes that are no archive; RuntimeError: an encrypted one, or one nested too deep
UNREADABLE = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error),
    *(OSError, EOFError, ValueError, OverflowError, RuntimeError, LookupError, struct.error),
)


class ArchiveError(Exception):
    """An archive that is refused for what it holds."""


class _Entry(tarfile.TarInfo):
    def _block(self, count: int) -> int:
        if count < 0:  # or tarfile reads the same headers for ever
            raise tarfile.ReadError(f"an entry of {count} bytes")
        return super()._block(count)  # type: ignore[misc]


class _Members(io.RawIOBase):
    """What the members of a gzip file hold, in time that grows with its bytes: most members must hold some."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb")
        self.decoder: Any = None
        self.input, self.spare_members = b"", SPARE_MEMBERS

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            data = self.input or self.file.read(CHUNK)
            if not self.decoder:
                self.input = data.lstrip(b"\0")  # padding
                if not data:
                    return 0
                if self.input:
                    self.spare_members -= 1
                    if self.spare_members < 0:
                        raise tarfile.ReadError(f"its gzip members have fewer than {MEMBER} bytes each")
                    self.decoder = zlib.decompressobj(16 + zlib.MAX_WBITS)
                continue
            out = self.decoder.decompress(data, len(buffer))
            ended = self.decoder.eof
            self.input = self.decoder.unused_data if ended else self.decoder.unconsumed_tail
            self.spare_members += (len(data) - len(self.input) + len(out)) / MEMBER
            if ended:
                self.decoder = None
            elif not (data or out):
                raise EOFError("it ends before its last gzip member does")
            if out:
                buffer[: len(out)] = out
                return len(out)

    def close(self) -> None:
        self.file.close()
        super().close()


class _Headers:
    """A gzipped file that is read forwards only, and of which `read` gives no more than `left` bytes."""

    def __init__(self, path: Path) -> None:
        self.file = io.BufferedReader(_Members(path), CHUNK)
        self.left, self.position = HEADER, 0

    def close(self) -> None:
        self.file.close()

    def tell(self) -> int:
        return self.position

    def seek(self, position: int) -> None:
        if position < self.position:  # which would decompress all before it again
            raise tarfile.ReadError("its parts are not in the order of their bytes")
        while self.position < position and (skipped := len(self.file.read(min(position - self.position, CHUNK)))):
            self.position += skipped

    def read(self, size: int | None = -1) -> bytes:
        size = sys.maxsize if size is None or size < 0 else size
        if size > self.left:
            raise tarfile.ReadError(f"a header of more than {HEADER} bytes")
        self.left -= size
        data = self.file.read(size)
        self.position += len(data)
        return data


class _Directory(io.BufferedReader):
    """A zip whose entries are counted before zipfile makes an object of each."""

    def __init__(self, path: Path, most_entries: int) -> None:
        super().__init__(io.FileIO(path))
        self.most_entries = most_entries

    def read(self, size: int | None = -1) -> bytes:
        if size and size > DIRECTORY:  # zipfile reads the directory at once, and nothing else of that size
            raise zipfile.BadZipFile(f"its directory has more than {DIRECTORY >> 20} MB")
        data, at, count = super().read(size), 0, 0
        while data.startswith(b"PK\1\2", at) and len(data) >= at + 46:
            at += 46 + sum(struct.unpack_from("<3H", data, at + 28))
            count += 1
            if count > self.most_entries:
                raise zipfile.BadZipFile(f"it has more than {self.most_entries} entries: pack fewer, larger files")
        return data


class _Budget:
    """How much the archive `name` may still write below a directory."""

    def __init__(self, name: str, directory: Path, entries: int, share: float) -> None:
        self.name, self.share, self.most_entries, self.entries = name, share, entries, entries
        self.most_bytes = self.bytes = int(share * shutil.disk_usage(directory).free)

    def take(self, size: int) -> None:
        """One entry more, of `size` bytes. Raises ArchiveError."""
        self.entries -= 1
        self.bytes -= max(size, BLOCK)
        if self.entries < 0:
            raise ArchiveError(f"{self.name} has more than {self.most_entries} entries: pack fewer, larger files.")
        if self.bytes < 0:
            raise ArchiveError(
                f"{self.name} unpacks to more than {self.most_bytes / 1e9:.1f} GB, {self.share:.0%} of the free disk "
                "space: free some space, or pack less."
            )


def is_tarball(path: Path) -> bool:
    """Whether it is a gzipped tar with at least one entry."""
    try:
        with closing(_Headers(path)) as file, _opened(file) as archive:
            return archive.next() is not None
    except UNREADABLE:
        return False


def unpack_tar(archive: Path, path: Path, most_entries: int = MOST_ENTRIES, share: float = SHARE) -> None:
    """Replaces a gzipped tar by what it holds, at `path`: a single entry takes that name, several are below it.

    Owners, setuid bits, devices and hard links are dropped, as Argo does. Raises ArchiveError.
    """
    with _unpacked(archive, path) as into:
        tree = _Tree(into, _Budget(path.name, into, most_entries, share))
        with closing(_Headers(archive)) as file, _opened(file) as tar:
            while True:
                file.left = HEADER
                member = tar.next()
                if not member:
                    break
                tar.members.clear()  # type: ignore[attr-defined]  # or it keeps a million of them
                if len(tar.pax_headers) > RECORDS:
                    raise ArchiveError(f"{path.name} has more than {RECORDS} global header records.")
                tree.budget.take(member.size)
                file.left = sys.maxsize
                tree.add(tar, member)
        tree.add_links(path.name)


def unpack_zip(archive: Path, path: Path, most_entries: int = MOST_ENTRIES, share: float = SHARE) -> None:
    """As unpack_tar; links in a zip become files."""
    with _unpacked(archive, path) as into, _Directory(archive, most_entries) as file, zipfile.ZipFile(file) as opened:
        tree = _Tree(into, _Budget(path.name, into, most_entries, share))
        _check_zip(file, opened.infolist(), tree.budget)
        for entry in opened.infolist():
            parts = tuple(part for part in entry.filename.split("/") if part not in ("", ".", ".."))
            if entry.is_dir():
                tree.make_directory(parts)
            elif parts:
                with opened.open(entry) as content, tree.open(parts, 0o666) as written:
                    shutil.copyfileobj(content, written, CHUNK)
            else:
                raise ArchiveError(f"{path.name} cannot be unpacked: it has a file without a name.")


def _check_zip(file: _Directory, entries: list[zipfile.ZipInfo], budget: "_Budget") -> None:
    """Raise ArchiveError for more than the budget, and for entries that share bytes."""
    end = 0
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        budget.take(entry.file_size)
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # as Go; others have no bound
            raise ArchiveError(f"{entry.filename} is neither stored nor deflated: pack it so.")
        if entry.header_offset < end:
            raise ArchiveError(f"{entry.filename} begins within the entry before it: pack it again.")
        file.seek(entry.header_offset + 26)
        end = file.tell() + 4 + sum(struct.unpack("<2H", file.read(4))) + entry.compress_size


def _opened(file: _Headers) -> tarfile.TarFile:
    content: Any = file
    return tarfile.open(fileobj=content, mode="r:", tarinfo=_Entry)


def _check_sparse(member: Any, stored: int) -> None:
    """Raise ArchiveError for a sparse file whose parts overlap, are unordered, or are more than is `stored`."""
    end = total = 0
    for offset, size in member.sparse or ():
        if size < 0 or offset < end or offset + size > member.size:
            raise ArchiveError(f"{member.name} has parts that overlap or are not in order: pack it without --sparse.")
        end, total = offset + size, total + size
    if total > stored:
        raise ArchiveError(f"{member.name} has parts of {total} bytes, but {stored} are there.")


@contextmanager
def _unpacked(archive: Path, path: Path) -> Iterator[Path]:
    """An empty directory, of which the only entry, or which itself is moved to `path`; nothing is left of a failure."""
    into = path.with_name(path.name + ".tmpdir")
    into.mkdir()
    try:
        yield into
        entries = list(into.iterdir())
        (entries[0] if len(entries) == 1 else into).rename(path)
        archive.unlink()
    except UNREADABLE as error:
        raise ArchiveError(f"{path.name} cannot be unpacked: {error}") from error
    finally:
        shutil.rmtree(into, ignore_errors=True)


class _Tree:
    """What is unpacked below a directory."""

    def __init__(self, root: Path, budget: _Budget) -> None:
        self.root, self.budget = root, budget
        self.links: dict[tuple[str, ...], tuple[str, str]] = {}  # by place: name in the archive, target

    def add(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        place = os.path.normpath(member.name)
        if place.startswith(("/", "../")) or place in (".", ".."):
            raise ArchiveError(f"illegal file path: {member.name}")
        parts = tuple(place.split("/"))
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
                    file.seek(offset)  # a hole takes neither time nor space
                    while size > 0:
                        if not (data := content.read(min(size, CHUNK))):
                            raise tarfile.ReadError("unexpected end of data")
                        size -= file.write(data)
                file.truncate(member.size)
                os.utime(file.fileno(), (member.mtime, member.mtime))
                os.fchmod(file.fileno(), member.mode & 0o777)

    def open(self, parts: tuple[str, ...], mode: int) -> BinaryIO:
        """Open a new or empty file of this tree."""
        self.make_directory(parts[:-1])
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        return os.fdopen(os.open(self.root.joinpath(*parts), flags, mode), "wb")

    def make_directory(self, parts: tuple[str, ...]) -> None:
        if len(parts) > DEPTH:
            raise ArchiveError(f"{parts[0]}/... has more than {DEPTH} directories in one another.")
        path = self.root.joinpath(*parts)
        if not (os.path.lexists(path) and stat.S_ISDIR(path.lstat().st_mode)):  # a link to one is none
            self.make_directory(parts[:-1])
            self.budget.take(0)
            path.mkdir()
            path.chmod(0o755)  # whatever the umask

    def add_links(self, name: str) -> None:
        """Makes the links, each only if the path to its target never leaves `name`."""
        top = {*os.listdir(self.root), *(place[0] for place in self.links)}
        moved = lambda place: (name, *place[len(top) == 1 :])  # noqa: E731
        links = {moved(place): target for place, (_, target) in self.links.items()}
        for place, (link, target) in self.links.items():
            if not _stays(moved(place), links):
                raise ArchiveError(f"illegal symlink target: {link} -> {target}")
        for place, (_, target) in self.links.items():
            self.make_directory(place[:-1])
            os.symlink(target, self.root.joinpath(*place))


def _stays(place: tuple[str, ...], links: dict[tuple[str, ...], str]) -> bool:
    """Whether the kernel, following the link at `place`, never leaves the directory `place[0]`."""
    here, todo = list(place[:-1]), links[place].split("/")[::-1]
    if links[place].startswith("/") or len(place) == 1:
        return False
    for _ in range(40):  # links; the kernel follows no more
        while todo:
            part = todo.pop()
            if part == "..":
                if not here:
                    return False
                here.pop()
            elif part not in ("", "."):
                here.append(part)
                if here[0] != place[0]:
                    return False
                if target := links.get(tuple(here)):
                    if target.startswith("/"):
                        return False
                    here.pop()
                    todo += target.split("/")[::-1]
                    break
        else:
            return bool(here)
    return False  # a loop, which programs that resolve paths themselves follow elsewhere
