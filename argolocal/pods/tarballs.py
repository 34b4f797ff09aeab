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
# maximum number of small gzip members
MAX_SMALL_MEMBERS = 10_000
# a gzip member is small if its packed and unpacked sizes add up to less than this number of bytes
SMALL_MEMBER_BYTES = 1024
# number of bytes per read of the file
CHUNK_BYTES = 128 << 10

# positions of the fields in a header of 512 bytes
SIZE_FIELD = slice(124, 136)
CHECKSUM_FIELD = slice(148, 156)
TYPE_FIELD = slice(156, 157)
# the checksum counts the checksum field as eight spaces
CHECKSUM_OF_SPACES = 8 * ord(" ")
ORDINARY_TYPES = (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE)


class TarEntry(tarfile.TarInfo):
    """An entry of a tar. A negative size of an entry is an error."""

    def _block(self, count: int) -> int:
        if count < 0:  # a negative size would make tarfile read the same headers forever
            raise tarfile.ReadError(f"it has an entry of {count} bytes")
        return super()._block(count)  # type: ignore[misc]


class CountedTarEntry(TarEntry):
    """An entry of a tar that is counted, but not unpacked. Such an entry is parsed fast, because
    only its type and size are read."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        if len(buf) != tarfile.BLOCKSIZE or buf[TYPE_FIELD] not in ORDINARY_TYPES:
            return super().frombuf(buf, encoding, errors)

        stored_checksum = tarfile.nti(buf[CHECKSUM_FIELD])  # type: ignore[attr-defined]
        actual_checksum = sum(buf) - sum(buf[CHECKSUM_FIELD]) + CHECKSUM_OF_SPACES
        if stored_checksum != actual_checksum:
            return super().frombuf(buf, encoding, errors)

        tar_entry = cls()
        tar_entry.type = bytes(buf[TYPE_FIELD])
        tar_entry.size = tarfile.nti(buf[SIZE_FIELD])  # type: ignore[attr-defined]
        return tar_entry


class GzipMembers(io.RawIOBase):
    """The decompressed content of a gzip file, which may consist of several members. The number of
    small members is limited, because decompressing many small members is slow.

    `input`: compressed bytes that were read from the file but not decompressed yet.
    `small_members`: number of small members that may still follow.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("rb")
        self.decoder: Any = None
        self.input = b""
        self.small_members = MAX_SMALL_MEMBERS

    def copy(self) -> "GzipMembers":
        """Return another reader at the same position."""
        copied_reader = GzipMembers(self.path)
        copied_reader.file.seek(self.file.tell())
        copied_reader.decoder = self.decoder and self.decoder.copy()
        copied_reader.input = self.input
        copied_reader.small_members = self.small_members
        return copied_reader

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            compressed_bytes = self.input or self.file.read(CHUNK_BYTES)
            if not self.decoder:
                # remove the zero bytes that may pad the space between two members
                self.input = compressed_bytes.lstrip(b"\0")
                if not compressed_bytes:
                    return 0

                if self.input:
                    self.small_members -= 1
                    if self.small_members < 0:
                        raise tarfile.ReadError(
                            f"its gzip members have fewer than {SMALL_MEMBER_BYTES} bytes each"
                        )

                    self.decoder = zlib.decompressobj(16 + zlib.MAX_WBITS)

                continue

            decompressed_bytes = self.decoder.decompress(compressed_bytes, len(buffer))
            is_member_at_end = self.decoder.eof
            self.input = (
                self.decoder.unused_data if is_member_at_end else self.decoder.unconsumed_tail
            )
            self.small_members += (
                len(compressed_bytes) - len(self.input) + len(decompressed_bytes)
            ) / SMALL_MEMBER_BYTES

            if is_member_at_end:
                self.decoder = None
            elif not (compressed_bytes or decompressed_bytes):
                raise EOFError("its last gzip member is incomplete")

            if decompressed_bytes:
                buffer[: len(decompressed_bytes)] = decompressed_bytes
                return len(decompressed_bytes)

    def close(self) -> None:
        self.file.close()
        super().close()


class TarStream:
    """A stream of a gzipped tar that is read from start to end. `budget`: number of bytes that
    `read` may still return. `position`: number of bytes that `read` has returned."""

    def __init__(self, path: Path) -> None:
        self.members = GzipMembers(path)
        # only in a copy: bytes to return before the bytes of `file`
        self.buffered = b""
        self.file = io.BufferedReader(self.members, CHUNK_BYTES)
        self.budget = MAX_HEADER_BYTES
        self.position = 0

    def copy(self) -> "TarStream":
        """Return another reader at the same position."""
        copied_stream = copy(self)
        copied_stream.buffered = self.file.peek()
        copied_stream.members = self.members.copy()
        copied_stream.file = io.BufferedReader(copied_stream.members, CHUNK_BYTES)
        return copied_stream

    def close(self) -> None:
        self.file.close()

    def _read_next(self, max_bytes: int) -> bytes:
        next_bytes = self.buffered[:max_bytes]
        self.buffered = self.buffered[max_bytes:]
        if len(next_bytes) < max_bytes:
            next_bytes += self.file.read(max_bytes - len(next_bytes))
        return next_bytes

    def tell(self) -> int:
        return self.position

    def seek(self, position: int) -> None:
        # seeking back is rejected, because it would decompress the file again from its start
        if position < self.position:
            raise tarfile.ReadError("its parts are not in the order of their offsets")

        while self.position < position:
            skipped_bytes = len(self._read_next(min(position - self.position, CHUNK_BYTES)))
            if not skipped_bytes:  # no more data: the end of the file is reached
                break
            self.position += skipped_bytes

    def read(self, size: int | None = -1) -> bytes:
        size = sys.maxsize if size is None or size < 0 else size
        if size > self.budget:
            raise tarfile.ReadError(f"it has a header of more than {MAX_HEADER_BYTES} bytes")

        self.budget -= size
        read_bytes = self._read_next(size)
        self.position += len(read_bytes)
        return read_bytes


def open_tar(tar_stream: TarStream, entry_class: type[TarEntry] = TarEntry) -> tarfile.TarFile:
    """Open a tar to read it entry by entry."""
    file_object: Any = tar_stream
    return tarfile.open(fileobj=file_object, mode="r:", tarinfo=entry_class)
