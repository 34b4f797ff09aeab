"""Checks by the structure of its content whether a file of a checkpoint is complete.

A zip archive (`torch.save`, Lightning, NumPy) ends with a list of its entries, and records their
checksums. A safetensors file begins with its own length, and JSON must parse. The content of other
files does not show whether the file is complete.
"""

import json
import lzma
import os
import stat
import struct
import zipfile
import zlib
from enum import Enum
from pathlib import Path
from typing import BinaryIO, NamedTuple

from argolocal.common.json_text import loads

ZIP_START = b"PK\x03\x04"
ZIP_END = b"PK\x05\x06"
ZIP_END_BYTES = 22  # size of the end record of a zip archive without a comment
MAX_HEADER_BYTES = 100 << 20  # maximum size of a safetensors header, as the library has it
MAX_JSON_BYTES = 64 << 20
READ_BYTES = 1 << 20
# the entries of an archive are read up to this multiple of the archive's size plus MIN_READ_BYTES
READ_FACTOR = 4
MIN_READ_BYTES = 64 << 20
# files that have more than a few bytes once they are complete
NEVER_SHORT = {".bin", ".ckpt", ".distcp", ".npz", ".pkl", ".pt", ".pth", ".safetensors"}


class Structure(Enum):
    """The kinds of content that show whether a file is complete."""

    ZIP = "zip"
    SAFETENSORS = "safetensors"
    JSON = "json"
    NONE = "none"


class FileCheck(NamedTuple):
    """`structure`: NONE if the content does not show whether the file is complete; `problem`: "" or
    the reason why the file is not complete."""

    structure: Structure
    problem: str = ""


def check_file(path: Path) -> FileCheck:
    """Read a file and check its structure. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return FileCheck(Structure.NONE, "it is not a regular file")

        if status.st_size < len(ZIP_START):
            if path.suffix in NEVER_SHORT:
                return FileCheck(Structure.NONE, f"it has only {status.st_size} bytes")
            return FileCheck(Structure.NONE)

        if path.suffix == ".distcp":
            # several archives in one file, whose size `.metadata` records
            return FileCheck(Structure.NONE)

        start = file.read(len(ZIP_START))
        file.seek(0)
        if start == ZIP_START:
            return FileCheck(Structure.ZIP, _find_zip_problem(file, status.st_size))
        if path.suffix == ".safetensors":
            return FileCheck(Structure.SAFETENSORS, _find_safetensors_problem(file, status.st_size))
        if path.suffix == ".json":
            return FileCheck(Structure.JSON, _find_json_problem(file, status.st_size))

    return FileCheck(Structure.NONE)


def _find_zip_problem(file: BinaryIO, size: int) -> str:
    file.seek(max(size - ZIP_END_BYTES, 0))
    if not file.read().startswith(ZIP_END):
        return "the end of the zip archive is missing"

    try:
        with zipfile.ZipFile(file) as archive:
            budget = READ_FACTOR * size + MIN_READ_BYTES
            for entry in archive.infolist():
                budget -= _read_entry(archive, entry, budget)
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        EOFError,
        OSError,
        NotImplementedError,
        RuntimeError,
        ValueError,
        OverflowError,
        lzma.LZMAError,
    ) as error:
        return f"the zip archive is damaged ({error})"

    return ""


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, budget: int) -> int:
    """Read at most `budget` bytes of an entry, and return the number of bytes read. The limit is
    needed because a small archive can have huge entries. Raises BadZipFile for a wrong checksum or
    header."""
    with archive.open(entry) as content:
        if entry.CRC == 0:
            # torch writes 0 if the program has turned checksums off
            content._expected_crc = None  # type: ignore[attr-defined]

        count = 0
        while count < budget and (data := content.read(READ_BYTES)):
            count += len(data)

    if count >= budget:
        return count

    if count != entry.file_size:
        raise zipfile.BadZipFile(f"an entry has {count} bytes instead of {entry.file_size}")
    return count


def _find_safetensors_problem(file: BinaryIO, size: int) -> str:
    if size < 8:
        return "the header of the safetensors file is missing"

    header_size = int.from_bytes(file.read(8), "little")
    if header_size > min(size - 8, MAX_HEADER_BYTES):
        return f"the safetensors header has {header_size} bytes, and the file {size}"

    try:
        header = json.loads(file.read(header_size))
        ends = [
            int(tensor["data_offsets"][1])
            for name, tensor in header.items()
            if name != "__metadata__"
        ]
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        RecursionError,
        OverflowError,
    ):
        return "the safetensors header is malformed"

    expected_size = 8 + header_size + max(ends, default=0)
    if size != expected_size:
        return f"the file has {size} bytes, and its safetensors header says {expected_size}"
    return ""


def _find_json_problem(file: BinaryIO, size: int) -> str:
    if size > MAX_JSON_BYTES:
        return ""
    try:
        loads(file.read())
    except (ValueError, RecursionError) as error:
        return f"it is not valid JSON ({error})"
    return ""
