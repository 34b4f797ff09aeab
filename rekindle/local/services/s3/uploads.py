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
from rekindle.documents import Document, parse_and_validate
from rekindle.local.services.s3.format import (
    ClientMetadata,
    ObjectMetadata,
    S3Error,
    StoredHeaders,
    UnixSeconds,
    list_folder,
    read_file_blocks,
    read_file_metadata,
    read_metadata,
)

MIN_PART_BYTES = 5 << 20
# seconds after its start at which an upload ends if it was neither completed nor aborted
UPLOAD_LIFETIME_S = 7 * 86400.0
RECORD_FILE = "upload.json"
WriteFunction = Callable[[Iterator[Any], Callable[[int], ClientMetadata]], Path]


class UploadRecord(Document):
    """The content of the file RECORD_FILE of an upload."""

    bucket: str
    key: str
    headers: StoredHeaders
    started: UnixSeconds | None = None
    checksum: str = ""


@dataclass(frozen=True)
class Upload:
    """A started multipart upload. `checksum`: algorithm of the checksum that each part must have,
    such as sha256; "" if a part may have any checksum or none."""

    id: str
    bucket: str
    key: str
    headers: dict[str, str]
    started: float
    checksum: str = ""

    def position(self) -> tuple[bytes, str]:
        """Return the position of the upload in a listing of uploads."""
        return self.key.encode(), self.id


@dataclass(frozen=True)
class ListedPart:
    """A part, as a client lists it to complete an upload. `checksums`: value by checksum header."""

    number: int
    etag: str
    checksums: dict[str, str]


class Uploads:
    """The multipart uploads under one directory. Thread-safe."""

    def __init__(self, uploads_folder: Path, write_file: WriteFunction) -> None:
        self.folder = uploads_folder
        self._write = write_file
        uploads_folder.mkdir(parents=True, exist_ok=True)
        self.remove_expired_uploads()

    def start(
        self,
        bucket_name: str,
        object_key: str,
        stored_headers: dict[str, str],
        checksum_algorithm: str = "",
    ) -> Upload:
        """Start an upload."""
        self.remove_expired_uploads()
        now_seconds = time.time()
        # an id starts with the upload's start time, because S3 lists the uploads of a key in the
        # order of their start
        upload_id = f"{int(now_seconds * 1e6):016x}{secrets.token_hex(8)}"
        upload = Upload(
            upload_id, bucket_name, object_key, stored_headers, now_seconds, checksum_algorithm
        )
        upload_record = UploadRecord(
            bucket=bucket_name,
            key=object_key,
            headers=stored_headers,
            started=now_seconds,
            checksum=checksum_algorithm,
        )

        upload_folder = self._make_upload_folder(upload)
        upload_folder.mkdir()
        (upload_folder / "new").write_text(to_json(upload_record.model_dump()))
        os.replace(upload_folder / "new", upload_folder / RECORD_FILE)

        return upload

    def find(self, bucket_name: str, object_key: str, upload_id: str) -> Upload:
        """Return the multipart upload `upload_id` to the object `object_key`. Raises S3Error if the
        upload does not exist."""
        if re.fullmatch(r"[0-9a-f]{32}", upload_id):
            upload = self._read(self.folder / upload_id)
        else:
            upload = None
        if not upload or (upload.bucket, upload.key) != (bucket_name, object_key):
            raise _make_missing_upload_error()
        return upload

    def list_bucket_uploads(self, bucket_name: str) -> list[Upload]:
        """Return the uploads to a bucket, ordered by key and start."""
        all_uploads = (self._read(upload_folder) for upload_folder in list_folder(self.folder))
        bucket_uploads = [
            upload for upload in all_uploads if upload and upload.bucket == bucket_name
        ]
        return sorted(bucket_uploads, key=Upload.position)

    def add(self, upload: Upload, part_number: int, part_file: Path) -> None:
        """Add a part to an upload, by renaming a temporary file."""
        try:
            os.replace(part_file, self._part_path(upload, part_number))
        except FileNotFoundError:
            raise _make_missing_upload_error() from None

    def parts(self, upload: Upload) -> Iterator[tuple[int, ObjectMetadata]]:
        """Yield number and metadata of the parts of an upload, by number."""
        for part_path in sorted(self._make_upload_folder(upload).glob("[0-9]" * 5)):
            metadata = read_metadata(part_path)
            if metadata:
                yield int(part_path.name), metadata

    def assemble(self, upload: Upload, listed_parts: list[ListedPart], size: int | None) -> Path:
        """Write a temporary file with the object that consists of the given parts, and return the
        path of the file. `size`: expected size of the object; None if the size is unknown."""
        part_numbers = [listed_part.number for listed_part in listed_parts]
        if part_numbers != sorted(set(part_numbers)):
            raise S3Error(
                400, "InvalidPartOrder", "parts must be listed once each, in ascending order."
            )

        with ExitStack() as exit_stack:
            part_files = []
            for listed_part in listed_parts:
                part_file, metadata = self._open(upload, listed_part)
                exit_stack.enter_context(part_file)
                if metadata["size"] < MIN_PART_BYTES and listed_part is not listed_parts[-1]:
                    raise S3Error(
                        400,
                        "EntityTooSmall",
                        "every part except the last must have at least 5 MiB.",
                    )

                part_files.append((part_file, metadata["size"]))

            total_bytes = sum(part_bytes for _, part_bytes in part_files)
            if size not in (None, total_bytes):
                error_message = (
                    f"x-amz-mp-object-size is {size}, but the parts have {total_bytes} bytes."
                )
                raise S3Error(400, "InvalidRequest", error_message)

            etag_bytes = b"".join(bytes.fromhex(listed_part.etag) for listed_part in listed_parts)
            etag = (
                f"{hashlib.md5(etag_bytes, usedforsecurity=False).hexdigest()}-{len(listed_parts)}"
            )
            object_content: ClientMetadata = {
                "key": upload.key,
                "etag": etag,
                "headers": upload.headers,
            }

            return self._write(read_file_blocks(part_files), lambda _: object_content)

    def remove(self, upload: Upload) -> None:
        """End a multipart upload, and delete its files."""
        # remove the record first, because an upload without a record does not exist, even if
        # another request is adding a part
        (self._make_upload_folder(upload) / RECORD_FILE).unlink(missing_ok=True)
        shutil.rmtree(self._make_upload_folder(upload), ignore_errors=True)

    def remove_expired_uploads(self) -> None:
        """Remove the uploads that were started more than a week ago."""
        oldest_start_seconds = time.time() - UPLOAD_LIFETIME_S
        for upload_folder in list_folder(self.folder):
            upload = self._read(upload_folder)
            start_seconds = upload.started if upload else _read_change_time(upload_folder)
            if start_seconds < oldest_start_seconds:
                shutil.rmtree(upload_folder, ignore_errors=True)

    def _open(self, upload: Upload, listed_part: ListedPart) -> tuple[BinaryIO, ObjectMetadata]:
        """Open the file of a listed part. Raises S3Error if the part was not uploaded, or if its
        ETag or checksums differ from the listed values."""
        try:
            part_file = open(self._part_path(upload, listed_part.number), "rb", buffering=0)  # noqa: SIM115 - the caller closes it
            metadata = read_file_metadata(part_file, upload.key)
        except (FileNotFoundError, ValueError):
            raise S3Error(
                400, "InvalidPart", f"part {listed_part.number} was not uploaded."
            ) from None

        stored_values = {"ETag": metadata["etag"], **metadata["headers"]}
        for part_name, declared_value in {
            "ETag": listed_part.etag,
            **listed_part.checksums,
        }.items():
            if stored_values.get(part_name) != declared_value:
                part_file.close()
                raise S3Error(
                    400,
                    "InvalidPart",
                    f"the {part_name} of part {listed_part.number} is"
                    f" {stored_values.get(part_name)}, not {declared_value}.",
                )

        return part_file, metadata

    def _read(self, upload_folder: Path) -> Upload | None:
        try:
            upload_record = parse_and_validate(
                UploadRecord, (upload_folder / RECORD_FILE).read_bytes()
            )
        except (OSError, ValueError):
            return None

        # earlier versions of Rekindle did not record the start time
        if upload_record.started is None:
            start_seconds = _read_change_time(upload_folder)
        else:
            start_seconds = upload_record.started

        return Upload(
            upload_folder.name,
            upload_record.bucket,
            upload_record.key,
            upload_record.headers,
            start_seconds,
            upload_record.checksum,
        )

    def _make_upload_folder(self, upload: Upload) -> Path:
        return self.folder / upload.id

    def _part_path(self, upload: Upload, part_number: int) -> Path:
        return self._make_upload_folder(upload) / f"{part_number:05d}"


def _read_change_time(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return time.time()


def _make_missing_upload_error() -> S3Error:
    return S3Error(
        404,
        "NoSuchUpload",
        "no such multipart upload: it was completed, aborted, or is a week old.",
    )
