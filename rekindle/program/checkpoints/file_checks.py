"""Checks whether a file of a checkpoint is complete, by the structure of its content.

A zip archive (`torch.save`, Lightning, NumPy) ends with a list of its entries, and records their
checksums. A safetensors file begins with a header from which the size of the file follows, and a
JSON file must parse. The content of a file in another format does not show whether the file is
complete.
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
# size of the end record of a zip archive without a comment
ZIP_END_BYTES = 22
# maximum size of a header that the safetensors library accepts
MAX_HEADER_BYTES = 100 << 20
MAX_JSON_BYTES = 64 << 20
READ_BYTES = 1 << 20
# at most READ_FACTOR times the archive's size plus MIN_READ_BYTES are decompressed for the check
READ_FACTOR = 4
MIN_READ_BYTES = 64 << 20
# suffixes of files that have more than a few bytes once they are complete
NEVER_SHORT_SUFFIXES = {".bin", ".ckpt", ".distcp", ".npz", ".pkl", ".pt", ".pth", ".safetensors"}


class FileStructure(Enum):
    """The kinds of content that show whether a file is complete."""

    ZIP = "zip"
    SAFETENSORS = "safetensors"
    JSON = "json"
    NONE = "none"


class FileCheck(NamedTuple):
    """`structure` is NONE if the content does not show whether the file is complete; `problem`: ""
    or the reason why the file is not complete."""

    structure: FileStructure
    problem: str = ""


def check_file(path: Path) -> FileCheck:
    """Read a file and check its structure. Raises OSError."""
    file_descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(file_descriptor, "rb") as file:
        file_status = os.fstat(file_descriptor)
        if not stat.S_ISREG(file_status.st_mode):
            return FileCheck(FileStructure.NONE, "it is not a regular file")

        if file_status.st_size < len(ZIP_START):
            if path.suffix in NEVER_SHORT_SUFFIXES:
                return FileCheck(FileStructure.NONE, f"it has only {file_status.st_size} bytes")
            return FileCheck(FileStructure.NONE)

        if path.suffix == ".distcp":
            # the file consists of several archives, and `.metadata` records the size of the file
            return FileCheck(FileStructure.NONE)

        first_bytes = file.read(len(ZIP_START))
        file.seek(0)
        if first_bytes == ZIP_START:
            return FileCheck(FileStructure.ZIP, _find_zip_problem(file, file_status.st_size))
        if path.suffix == ".safetensors":
            return FileCheck(
                FileStructure.SAFETENSORS, _find_safetensors_problem(file, file_status.st_size)
            )
        if path.suffix == ".json":
            return FileCheck(FileStructure.JSON, _find_json_problem(file, file_status.st_size))

    return FileCheck(FileStructure.NONE)


def _find_zip_problem(file: BinaryIO, file_bytes: int) -> str:
    file.seek(max(file_bytes - ZIP_END_BYTES, 0))
    if not file.read().startswith(ZIP_END):
        return "the end of the zip archive is missing"

    try:
        with zipfile.ZipFile(file) as archive:
            budget_bytes = READ_FACTOR * file_bytes + MIN_READ_BYTES
            for zip_entry in archive.infolist():
                budget_bytes -= _read_zip_entry(archive, zip_entry, budget_bytes)
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


def _read_zip_entry(archive: zipfile.ZipFile, zip_entry: zipfile.ZipInfo, budget_bytes: int) -> int:
    """Read at most `budget_bytes` bytes of an entry of a zip archive, and return the number of
    bytes read. The limit is needed because a small archive can have huge entries. Raises BadZipFile
    for a wrong checksum or header."""
    with archive.open(zip_entry) as entry_stream:
        if zip_entry.CRC == 0:
            # torch writes the checksum 0 if the program has turned checksums off
            entry_stream._expected_crc = None  # type: ignore[attr-defined]

        entry_bytes = 0
        while entry_bytes < budget_bytes and (chunk := entry_stream.read(READ_BYTES)):
            entry_bytes += len(chunk)

    if entry_bytes >= budget_bytes:
        return entry_bytes

    if entry_bytes != zip_entry.file_size:
        raise zipfile.BadZipFile(
            f"an entry has {entry_bytes} bytes instead of {zip_entry.file_size}"
        )
    return entry_bytes


def _find_safetensors_problem(file: BinaryIO, file_bytes: int) -> str:
    if file_bytes < 8:
        return "the header of the safetensors file is missing"

    header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > min(file_bytes - 8, MAX_HEADER_BYTES):
        return f"the safetensors header has {header_bytes} bytes, and the file {file_bytes}"

    try:
        header = json.loads(file.read(header_bytes))
        end_offsets = [
            int(tensor_info["data_offsets"][1])
            for tensor_name, tensor_info in header.items()
            if tensor_name != "__metadata__"
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

    expected_bytes = 8 + header_bytes + max(end_offsets, default=0)
    if file_bytes != expected_bytes:
        return f"the file has {file_bytes} bytes, and its safetensors header says {expected_bytes}"
    return ""


def _find_json_problem(file: BinaryIO, file_bytes: int) -> str:
    if file_bytes > MAX_JSON_BYTES:
        return ""
    try:
        loads(file.read())
    except (ValueError, RecursionError) as error:
        return f"it is not valid JSON ({error})"
    return ""
