"""Multipart uploads: a folder for each upload, with a file for each part in the format of an
object.

An upload that is neither completed nor aborted ends a week after its start, as in a bucket of AWS
that has the lifecycle rule AbortIncompleteMultipartUpload. The parts of such an upload are removed
when the next upload or the server starts.
"""

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from argolocal.common.json_text import to_json
from rekindle.documents import Document, validate
from rekindle.local.services.s3.format import (
    Content,
    Meta,
    S3Error,
    blocks,
    entries,
    meta_of,
    read_meta,
)

MIN_PART_BYTES = 5 << 20
UPLOAD_LIFE_S = 7 * 86400.0  # an upload ends this long after its start
RECORD = "upload.json"
Write = Callable[[Iterator[Any], Callable[[int], Content]], Path]


class UploadRecord(Document):
    """The content of the file RECORD of an upload."""

    bucket: str
    key: str
    headers: dict[str, str]
    started: float | None = None
    checksum: str = ""


@dataclass(frozen=True)
class Upload:
    """A multipart upload that was started. `checksum`: algorithm of the checksum that each part
    must have, such as sha256; "" if a part may have any checksum or none."""

    id: str
    bucket: str
    key: str
    headers: dict[str, str]
    started: float
    checksum: str = ""

    def position(self) -> tuple[bytes, str]:
        """Return the position of the upload in a listing."""
        return self.key.encode(), self.id


@dataclass(frozen=True)
class Part:
    """A part as its client lists it to complete an upload; `checksums`: checksum header → value."""

    number: int
    etag: str
    checksums: dict[str, str]


class Uploads:
    """The multipart uploads under one directory. Thread-safe."""

    def __init__(self, folder: Path, write: Write) -> None:
        self.folder = folder
        self._write = write
        folder.mkdir(parents=True, exist_ok=True)
        self.remove_expired()

    def start(self, bucket: str, key: str, headers: dict[str, str], checksum: str = "") -> Upload:
        """Start an upload."""
        self.remove_expired()
        now = time.time()
        # an id starts with the upload's start time, because S3 lists the uploads of a key in the
        # order of their start
        name = f"{int(now * 1e6):016x}{secrets.token_hex(8)}"
        upload = Upload(name, bucket, key, headers, now, checksum)
        record = UploadRecord(
            bucket=bucket, key=key, headers=headers, started=now, checksum=checksum
        )

        folder = self._folder(upload)
        folder.mkdir()
        (folder / "new").write_text(to_json(record.model_dump()))
        os.replace(folder / "new", folder / RECORD)

        return upload

    def find(self, bucket: str, key: str, name: str) -> Upload:
        """Return the upload `name` to the object `key`. Raises S3Error if the upload does not
        exist."""
        if re.fullmatch(r"[0-9a-f]{32}", name):
            upload = self._read(self.folder / name)
        else:
            upload = None
        if not upload or (upload.bucket, upload.key) != (bucket, key):
            raise _missing_upload_error()
        return upload

    def of_bucket(self, bucket: str) -> list[Upload]:
        """Return the uploads to a bucket, ordered by key and start."""
        uploads = (self._read(folder) for folder in entries(self.folder))
        in_bucket = [upload for upload in uploads if upload and upload.bucket == bucket]
        return sorted(in_bucket, key=Upload.position)

    def add(self, upload: Upload, number: int, file: Path) -> None:
        """Rename a temporary file to a part of an upload."""
        try:
            os.replace(file, self._part_path(upload, number))
        except FileNotFoundError:
            raise _missing_upload_error() from None

    def parts(self, upload: Upload) -> Iterator[tuple[int, Meta]]:
        """Yield number and metadata of the parts of an upload, by number."""
        for path in sorted(self._folder(upload).glob("[0-9]" * 5)):
            meta = read_meta(path)
            if meta:
                yield int(path.name), meta

    def assemble(self, upload: Upload, parts: list[Part], size: int | None) -> Path:
        """Write a temporary file with the object of these parts; `size`: its expected size, if
        known."""
        numbers = [part.number for part in parts]
        if numbers != sorted(set(numbers)):
            raise S3Error(
                400, "InvalidPartOrder", "parts must be listed once each, in ascending order."
            )

        with ExitStack() as stack:
            files = []
            for part in parts:
                file, meta = self._open(upload, part)
                stack.enter_context(file)
                if meta["size"] < MIN_PART_BYTES and part is not parts[-1]:
                    raise S3Error(
                        400,
                        "EntityTooSmall",
                        "every part except the last must have at least 5 MiB.",
                    )

                files.append((file, meta["size"]))

            total = sum(size for _, size in files)
            if size not in (None, total):
                message = f"x-amz-mp-object-size is {size}, but the parts have {total} bytes."
                raise S3Error(400, "InvalidRequest", message)

            tags = b"".join(bytes.fromhex(part.etag) for part in parts)
            etag = f"{hashlib.md5(tags, usedforsecurity=False).hexdigest()}-{len(parts)}"
            content: Content = {"key": upload.key, "etag": etag, "headers": upload.headers}

            return self._write(blocks(files), lambda _: content)

    def remove(self, upload: Upload) -> None:
        """End an upload."""
        # remove the record first: without it the upload does not exist, even if another request is
        # adding a part
        (self._folder(upload) / RECORD).unlink(missing_ok=True)
        shutil.rmtree(self._folder(upload), ignore_errors=True)

    def remove_expired(self) -> None:
        """Remove the uploads that were started more than a week ago."""
        oldest = time.time() - UPLOAD_LIFE_S
        for folder in entries(self.folder):
            upload = self._read(folder)
            started = upload.started if upload else _change_time(folder)
            if started < oldest:
                shutil.rmtree(folder, ignore_errors=True)

    def _open(self, upload: Upload, part: Part) -> tuple[BinaryIO, Meta]:
        """Open an uploaded part that must have this ETag and these checksums."""
        try:
            file = open(self._part_path(upload, part.number), "rb", buffering=0)  # noqa: SIM115 - the caller closes it
            meta = meta_of(file)
        except (FileNotFoundError, ValueError):
            raise S3Error(400, "InvalidPart", f"part {part.number} was not uploaded.") from None

        stored = {"ETag": meta["etag"], **meta["headers"]}
        for name, value in {"ETag": part.etag, **part.checksums}.items():
            if stored.get(name) != value:
                file.close()
                raise S3Error(
                    400,
                    "InvalidPart",
                    f"the {name} of part {part.number} is {stored.get(name)}, not {value}.",
                )

        return file, meta

    def _read(self, folder: Path) -> Upload | None:
        try:
            record = validate(UploadRecord, (folder / RECORD).read_bytes())
        except (OSError, ValueError):
            return None

        # an earlier version did not record the time
        if record.started is None:
            started = _change_time(folder)
        else:
            started = record.started

        return Upload(
            folder.name, record.bucket, record.key, record.headers, started, record.checksum
        )

    def _folder(self, upload: Upload) -> Path:
        return self.folder / upload.id

    def _part_path(self, upload: Upload, number: int) -> Path:
        return self._folder(upload) / f"{number:05d}"


def _change_time(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return time.time()


def _missing_upload_error() -> S3Error:
    return S3Error(
        404,
        "NoSuchUpload",
        "no such multipart upload: it was completed, aborted, or is a week old.",
    )
