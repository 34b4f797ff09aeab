"""Read an untrusted gzipped tar from start to end, with limits on the size of a header and on the
number of gzip members."""

import io
import sys
import tarfile
import zlib
from copy import copy
from pathlib import Path
from typing import Any, Self

# maximum size in bytes of all headers of one entry; for comparison, a path has at most 4096 bytes
MAX_HEADER_BYTES = 32 << 10
MAX_SMALL_MEMBERS = 10_000  # maximum number of small gzip members
# a gzip member is small if its packed and unpacked sizes add up to less than this number of bytes
SMALL_MEMBER_BYTES = 1024
CHUNK_BYTES = 128 << 10  # number of bytes per read of the file

# positions of the fields in a header of 512 bytes
SIZE = slice(124, 136)
CHECKSUM = slice(148, 156)
TYPE = slice(156, 157)
CHECKSUM_OF_SPACES = 8 * ord(" ")  # the checksum counts the checksum field as eight spaces
ORDINARY_TYPES = (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE)


class Entry(tarfile.TarInfo):
    """An entry of a tar. A negative size is an error."""

    def _block(self, count: int) -> int:
        if count < 0:  # a negative size would make tarfile read the same headers forever
            raise tarfile.ReadError(f"it has an entry of {count} bytes")
        return super()._block(count)  # type: ignore[misc]


class CountedEntry(Entry):
    """An entry of a tar that is counted, but not unpacked. For an ordinary entry, only type and
    size are parsed."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        if len(buf) != tarfile.BLOCKSIZE or buf[TYPE] not in ORDINARY_TYPES:
            return super().frombuf(buf, encoding, errors)

        stored_sum = tarfile.nti(buf[CHECKSUM])  # type: ignore[attr-defined]
        actual_sum = sum(buf) - sum(buf[CHECKSUM]) + CHECKSUM_OF_SPACES
        if stored_sum != actual_sum:
            return super().frombuf(buf, encoding, errors)

        entry = cls()
        entry.type = bytes(buf[TYPE])
        entry.size = tarfile.nti(buf[SIZE])  # type: ignore[attr-defined]
        return entry


class GzipMembers(io.RawIOBase):
    """The decompressed members of a gzip file. The number of small members is limited, because
    decompressing many small members is slow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("rb")
        self.decoder: Any = None
        self.input = b""
        self.small_members = MAX_SMALL_MEMBERS

    def copy(self) -> "GzipMembers":
        """Return another reader at the same position."""
        other = GzipMembers(self.path)
        other.file.seek(self.file.tell())
        other.decoder = self.decoder and self.decoder.copy()
        other.input = self.input
        other.small_members = self.small_members
        return other

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            data = self.input or self.file.read(CHUNK_BYTES)
            if not self.decoder:
                # remove the zero bytes that pad the space between members
                self.input = data.lstrip(b"\0")
                if not data:
                    return 0

                if self.input:
                    self.small_members -= 1
                    if self.small_members < 0:
                        raise tarfile.ReadError(
                            f"its gzip members have fewer than {SMALL_MEMBER_BYTES} bytes each"
                        )

                    self.decoder = zlib.decompressobj(16 + zlib.MAX_WBITS)

                continue

            out = self.decoder.decompress(data, len(buffer))
            is_at_end = self.decoder.eof
            self.input = self.decoder.unused_data if is_at_end else self.decoder.unconsumed_tail
            self.small_members += (len(data) - len(self.input) + len(out)) / SMALL_MEMBER_BYTES

            if is_at_end:
                self.decoder = None
            elif not (data or out):
                raise EOFError("its last gzip member is incomplete")

            if out:
                buffer[: len(out)] = out
                return len(out)

    def close(self) -> None:
        self.file.close()
        super().close()


class TarStream:
    """A gzipped tar that is read from start to end. `budget` is the number of bytes that `read` may
    still return."""

    def __init__(self, path: Path) -> None:
        self.members = GzipMembers(path)
        self.buffered = b""  # only in a copy: bytes to return before the bytes of `file`
        self.file = io.BufferedReader(self.members, CHUNK_BYTES)
        self.budget = MAX_HEADER_BYTES
        self.position = 0

    def copy(self) -> "TarStream":
        """Return another reader at the same position."""
        other = copy(self)
        other.buffered = self.file.peek()
        other.members = self.members.copy()
        other.file = io.BufferedReader(other.members, CHUNK_BYTES)
        return other

    def close(self) -> None:
        self.file.close()

    def _take(self, size: int) -> bytes:
        data = self.buffered[:size]
        self.buffered = self.buffered[size:]
        if len(data) < size:
            data += self.file.read(size - len(data))
        return data

    def tell(self) -> int:
        return self.position

    def seek(self, position: int) -> None:
        # reject seeking back, because the file would be decompressed again
        if position < self.position:
            raise tarfile.ReadError("its parts are not in the order of their offsets")

        while self.position < position:
            skipped = len(self._take(min(position - self.position, CHUNK_BYTES)))
            if not skipped:  # no more data: the end of the file is reached
                break
            self.position += skipped

    def read(self, size: int | None = -1) -> bytes:
        size = sys.maxsize if size is None or size < 0 else size
        if size > self.budget:
            raise tarfile.ReadError(f"it has a header of more than {MAX_HEADER_BYTES} bytes")

        self.budget -= size
        data = self._take(size)
        self.position += len(data)
        return data


def open_tar(file: TarStream, kind: type[Entry] = Entry) -> tarfile.TarFile:
    """Open a tar to read it entry by entry."""
    content: Any = file
    return tarfile.open(fileobj=content, mode="r:", tarinfo=kind)
