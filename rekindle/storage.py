"""The object store: one bucket of an S3 endpoint, with conditional writes.

The object store is configured by environment variables, which pods get from a ConfigMap and a
Secret. The variables are `S3_BUCKET`, `S3_ENDPOINT_URL` (if not set, AWS is used), and the
credentials of boto3 (`AWS_ACCESS_KEY_ID`, an IAM role, ...).
"""

import io
import math
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.loaders import create_loader
from botocore.parsers import ResponseParserError
from botocore.session import get_session
from urllib3.exceptions import HTTPError

from argolocal.common import exit_codes
from argolocal.common.json_text import MAX_BYTES
from argolocal.errors import InvalidDocument
from rekindle.content.hashes import file_sha256 as file_sha256
from rekindle.errors import (
    ConfigError,
    Conflict,
    NotFound,
    StorageError,
    describe_cause,
    format_address,
    write_stderr,
)
from rekindle.keys import FREE_BYTES_HEADER
from rekindle.kubernetes_names import S3_BUCKET, S3_ENDPOINT_URL

# S3's limit for a copy in one request; `TransferConfig` copies larger objects in parts
MAX_COPY_BYTES = (5 << 30) + 1
# size of the parts in which a large object is written
PART_BYTES = 256 << 20
# number of parallel transfers; more threads are not faster
THREADS = 8
# key of the object with the random id of this object store
STORE_ID_KEY = "store-id"
# the loader is shared by all Stores, since parsing boto's model of S3 takes 0.1 s
BOTO_LOADER = create_loader()
# S3 error codes for invalid credentials, and for credentials without the needed permission
REFUSED_CODES = {
    "403",
    "AccessDenied",
    "AllAccessDisabled",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
}
# characters that XML cannot represent; keys with them are deleted one by one, because a request to
# delete several objects is XML
NON_XML_CHARACTERS = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
T = TypeVar("T")


@dataclass(frozen=True)
class StoredObject:
    """An object in a listing."""

    key: str
    size: int
    etag: str
    # time of the last change, in Unix seconds by the store's clock
    modified: float


class Store:
    """The objects of a bucket, by key. Thread-safe. The methods of Store raise StorageError with
    the object's name if the object store fails. A missing bucket and rejected credentials raise
    ConfigError instead, because a retry cannot help.
    """

    def __init__(
        self,
        bucket: str,
        endpoint: str | None = None,
        access_key: str | None = None,
        secret_key: str | None = None,
        *,
        short_retries: bool = False,
    ) -> None:
        """`short_retries`: at most two attempts within half a minute, for callers that retry
        themselves."""
        self.bucket = bucket
        self.endpoint = endpoint
        self._credentials = access_key, secret_key

        client_config = Config(
            retries={
                "total_max_attempts": 2 if short_retries else 9,
                "mode": "standard" if short_retries else "adaptive",
            },
            connect_timeout=2 if short_retries else 5,
            read_timeout=15 if short_retries else 60,
            max_pool_connections=2 * THREADS,
            # disable trailing checksums (boto3's default), which cost more CPU time than the
            # transfer, and which older S3 servers reject
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            # do not sign bodies, because signing would hash the bodies again, although Rekindle
            # already records hashes of its files
            s3={"payload_signing_enabled": False}
            | ({"addressing_style": "path"} if endpoint else {}),
        )

        botocore_session = get_session()
        botocore_session.register_component("data_loader", BOTO_LOADER)

        try:
            self.client: Any = Session(botocore_session=botocore_session).client(
                "s3",
                endpoint_url=endpoint,
                region_name=os.environ.get("AWS_REGION") or "us-east-1",
                aws_access_key_id=access_key,
                aws_secret_access_key=secret_key,
                config=client_config,
            )
        except (BotoCoreError, ValueError) as error:
            if str(error).startswith("Invalid endpoint"):
                address_problem = f'the address of the object store is "{self.address}"'
                remedy = "it must be http(s)://HOST[:PORT]. Correct S3_ENDPOINT_URL."
            else:
                error_cause = describe_cause(error, endpoint or "")
                address_problem = f"a setting of the object store is invalid ({error_cause})"
                remedy = "correct the variables AWS_... and the files in ~/.aws."
            raise ConfigError(f"{address_problem}: {remedy}") from error

    @classmethod
    def from_env(cls) -> "Store":
        """Return the store of S3_BUCKET and S3_ENDPOINT_URL. Raises ConfigError if S3_BUCKET is not
        set."""
        bucket_name = os.environ.get(S3_BUCKET)
        if not bucket_name:
            raise ConfigError(
                "S3_BUCKET is not set: steps keep their artifacts in that bucket. Set it (and"
                " S3_ENDPOINT_URL for anything but AWS), in a cluster through the ConfigMap"
                ' "rekindle".'
            )
        return cls(bucket_name, os.environ.get(S3_ENDPOINT_URL) or None)

    def short_retries(self) -> "Store":
        """Return a Store of the same bucket that makes at most two attempts within half a
        minute."""
        return Store(self.bucket, self.endpoint, *self._credentials, short_retries=True)

    def get(self, key: str, max_bytes: int | None = MAX_BYTES) -> bytes:
        """Return the bytes of an object. Raises NotFound, and InvalidDocument if the object has
        more than `max_bytes` bytes (None: no limit)."""
        return self.get_with_etag(key, max_bytes)[0]

    def get_with_etag(self, key: str, max_bytes: int | None = MAX_BYTES) -> tuple[bytes, str]:
        """Return the bytes of an object and its etag, for a later `put(if_match=...)`. Raises
        NotFound, and InvalidDocument if the object has more than `max_bytes` bytes (None: no
        limit)."""

        def call() -> tuple[bytes, str]:
            get_answer = self.client.get_object(Bucket=self.bucket, Key=key)
            size_bytes = get_answer["ContentLength"]
            if max_bytes is not None and size_bytes > max_bytes:
                get_answer["Body"].close()
                raise InvalidDocument(
                    f"{self.uri(key)} has {size_bytes:,} bytes, and at most {max_bytes:,} bytes"
                    " are read at once. Restore it, or remove it."
                )
            return get_answer["Body"].read(), get_answer["ETag"]

        return self._request(key, call)

    def open(self, key: str) -> tuple[Any, int]:
        """Return the content of an object as a stream, and the size of the object. The caller must
        close the stream. Raises NotFound."""
        get_answer = self._request(key, lambda: self.client.get_object(Bucket=self.bucket, Key=key))
        return get_answer["Body"], get_answer["ContentLength"]

    def put(
        self,
        key: str,
        data: bytes | bytearray | memoryview,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> str:
        """Write an object and return its etag. Raises Conflict if `if_absent` is set and the object
        exists, or if the object's etag is not `if_match`."""
        if if_absent:
            write_condition = {"IfNoneMatch": "*"}
        else:
            write_condition = {"IfMatch": if_match} if if_match else {}
        return self._request(
            key,
            lambda: self.client.put_object(
                Bucket=self.bucket, Key=key, Body=_UploadBody(data), **write_condition
            )["ETag"],
        )

    def head(self, key: str) -> StoredObject | None:
        """Return the size, etag and time of an object; None if it does not exist."""
        try:
            head_answer = self._request(
                key, lambda: self.client.head_object(Bucket=self.bucket, Key=key)
            )
        except NotFound:
            return None
        return StoredObject(
            key,
            head_answer["ContentLength"],
            head_answer["ETag"],
            head_answer["LastModified"].timestamp(),
        )

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; missing objects are ignored."""
        non_xml_keys = [key for key in keys if NON_XML_CHARACTERS.search(key)]
        for key in non_xml_keys:
            with suppress(NotFound):
                self._request(
                    key, lambda key=key: self.client.delete_object(Bucket=self.bucket, Key=key)
                )

        xml_keys = [key for key in keys if not NON_XML_CHARACTERS.search(key)]
        for batch_start in range(0, len(xml_keys), 1000):
            batch_objects = [{"Key": key} for key in xml_keys[batch_start : batch_start + 1000]]
            delete_request = {"Objects": batch_objects, "Quiet": True}
            delete_answer = self._request(
                xml_keys[batch_start],
                lambda delete_request=delete_request: self.client.delete_objects(
                    Bucket=self.bucket, Delete=delete_request
                ),
            )
            for error in (
                error for error in delete_answer.get("Errors", []) if error["Code"] != "NoSuchKey"
            ):
                raise StorageError(
                    f"{self.uri(error['Key'])} was not deleted: the object store says"
                    f" {error['Code']}."
                )

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Yield all objects whose key starts with `prefix`, in key order."""
        for list_page in self._request_list_pages(Prefix=prefix):
            for listed_object in list_page.get("Contents", []):
                yield StoredObject(
                    listed_object["Key"],
                    listed_object["Size"],
                    listed_object["ETag"],
                    listed_object["LastModified"].timestamp(),
                )

    def list_folders(self, prefix: str) -> Iterator[str]:
        """Yield the beginnings, up to the first slash after `prefix`, of the keys that start with
        `prefix` and contain this slash. The objects in these folders are not listed."""
        for list_page in self._request_list_pages(Prefix=prefix, Delimiter="/"):
            for common_prefix in list_page.get("CommonPrefixes", []):
                yield common_prefix["Prefix"]

    def _request_list_pages(self, **list_options: str) -> Iterator[dict[str, Any]]:
        """Yield the pages of a listing."""
        list_pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, **list_options
        )
        page_iterator = iter(list_pages)

        while True:
            list_page = self._request(list_options["Prefix"], lambda: next(page_iterator, None))
            if list_page is None:
                return
            yield list_page

    def free_bytes(self) -> float:
        """Return the free bytes on the disk of the embedded store; infinity for other stores."""
        head_answer = self._request("", lambda: self.client.head_bucket(Bucket=self.bucket))
        return float(head_answer["ResponseMetadata"]["HTTPHeaders"].get(FREE_BYTES_HEADER, "inf"))

    def put_large(self, key: str, data: bytes, part_bytes: int = PART_BYTES) -> None:
        """Write an object of any size. S3 accepts at most 5 GiB in one request, so an object of
        more than `part_bytes` bytes is written in parts."""
        transfer_config = TransferConfig(
            multipart_threshold=part_bytes + 1, multipart_chunksize=part_bytes
        )

        def call() -> None:
            self.client.upload_fileobj(io.BytesIO(data), self.bucket, key, Config=transfer_config)

        self._request(key, call)

    def copy(self, source: str, target: str) -> None:
        """Copy an object within the bucket. An object of more than 5 GiB is copied in parts, as S3
        requires."""
        copy_source = {"Bucket": self.bucket, "Key": source}
        transfer_config = TransferConfig(multipart_threshold=MAX_COPY_BYTES)
        self._request(
            source,
            lambda: self.client.copy(copy_source, self.bucket, target, Config=transfer_config),
        )

    def upload(self, path: Path, key: str, links: bool = True) -> None:
        """Upload a file to `key`, or a directory to the prefix `key`. If `links` is False, symbolic
        links in the directory are skipped."""
        if path.is_file():
            self._request(key, lambda: self.client.upload_file(str(path), self.bucket, key))
            return

        uploaded_files = [
            file
            for file in sorted(path.rglob("*"))
            if file.is_file() and (links or not file.is_symlink())
        ]
        with ThreadPoolExecutor(THREADS) as thread_pool:
            list(
                thread_pool.map(
                    lambda file: self.upload(file, f"{key.rstrip('/')}/{file.relative_to(path)}"),
                    uploaded_files,
                )
            )

    def download(self, key: str, path: Path) -> None:
        """Download the object `key` to a file, or the prefix `key` to a directory. Raises
        NotFound."""
        if not key.endswith("/") and self.head(key):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._request(key, lambda: self.client.download_file(self.bucket, key, str(path)))
            return

        folder_prefix = key.rstrip("/") + "/"
        listed_objects = list(self.list(folder_prefix))
        if not listed_objects:
            raise NotFound(
                f"{self.uri(key)} does not exist: the bucket has neither an object nor a prefix of"
                " that name."
            )

        target_root = path.resolve()
        for listed_object in listed_objects:
            if not _is_safe_path(target_root, listed_object.key[len(folder_prefix) :]):
                raise StorageError(
                    f"{self.uri(listed_object.key)} would be written outside {path}: its key is"
                    " not a safe path."
                )

        def download_object(stored_object: StoredObject) -> None:
            object_key = stored_object.key
            file = path / object_key[len(folder_prefix) :]
            # web consoles of object stores represent a folder by an empty object
            if object_key.endswith("/"):
                file.mkdir(parents=True, exist_ok=True)
                return

            file.parent.mkdir(parents=True, exist_ok=True)
            self._request(
                object_key, lambda: self.client.download_file(self.bucket, object_key, str(file))
            )

        with ThreadPoolExecutor(THREADS) as thread_pool:
            list(thread_pool.map(download_object, listed_objects))

    @property
    def address(self) -> str:
        """The endpoint without credentials, for messages."""
        return format_address(self.endpoint or "AWS")

    def uri(self, key: str) -> str:
        """Return the address s3://BUCKET/KEY of an object."""
        return f"s3://{self.bucket}/{key}"

    def _request(self, key: str, send_request: Callable[[], T]) -> T:
        try:
            return send_request()
        except ClientError as error:
            error_code = error.response.get("Error", {}).get("Code", "")
            if error_code in ("404", "NoSuchKey", "NotFound"):
                raise NotFound(f"{self.uri(key)} does not exist.") from error

            if error_code == "NoSuchBucket":
                raise ConfigError(
                    f'the bucket "{self.bucket}" does not exist at {self.address}: correct the'
                    " name, or create it."
                ) from error

            if error_code in REFUSED_CODES:
                raise ConfigError(
                    f"{self.uri(key)}: the object store at {self.address} refuses our keys"
                    f" ({error_code}). Correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or"
                    " permit them to read, write and list the bucket "
                    f'"{self.bucket}".'
                ) from error

            if error_code in ("412", "PreconditionFailed", "409", "ConditionalRequestConflict"):
                raise Conflict(
                    f"{self.uri(key)} was changed by another process in the meantime."
                ) from error

            raise StorageError(
                f"{self.uri(key)}: the object store answered {error_code} ({error})."
            ) from error
        except (BotoCoreError, Boto3Error, ResponseParserError, HTTPError) as error:
            # urllib3 raises HTTPError for a truncated response
            error_cause = describe_cause(error, self.endpoint or "")
            raise StorageError(
                f"{self.uri(key)}: the object store at {self.address} cannot be used"
                f" ({error_cause}). Check S3_ENDPOINT_URL and the AWS_* credentials."
            ) from error


def read_or_create_store_id(object_store: Store) -> str:
    """Return the random id of the object store. Create the id if the object store does not have an
    id. Raises StorageError."""
    with suppress(NotFound):
        return object_store.get(STORE_ID_KEY).decode(errors="replace")
    with suppress(Conflict):
        object_store.put(STORE_ID_KEY, uuid.uuid4().hex.encode(), if_absent=True)
    return object_store.get(STORE_ID_KEY).decode(errors="replace")


class _UploadBody(io.RawIOBase):
    """A file object whose first read returns all its bytes, without a copy. Several reads would be
    slow, since each read waits for the interpreter lock."""

    def __init__(self, body_bytes: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(body_bytes)
        self._offset = 0

    def __len__(self) -> int:
        return len(self._data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._offset = offset + (0, self._offset, len(self._data))[whence]
        return self._offset

    def tell(self) -> int:
        return self._offset

    def read(self, size: int = -1) -> Any:
        remaining_data = self._data[self._offset :]
        self._offset = len(self._data)
        return remaining_data


def retry_until_stopped(function: Callable[[], T], stop_event: threading.Event, purpose: str) -> T:
    """Return the result of `function()`. The call is repeated while the object store is
    unavailable. Raises SystemExit(143) once `stop_event` is set. `purpose` is a phrase for the log,
    such as "to read the dataset"."""
    last_message_time = -math.inf
    pause_seconds = 0.1

    while True:
        try:
            return function()
        except (NotFound, Conflict, InvalidDocument):
            raise
        except StorageError as error:
            if time.monotonic() - last_message_time >= 10:
                write_stderr(f"waiting for the object store, {purpose}: {error}")
                last_message_time = time.monotonic()

        if stop_event.wait(pause_seconds):
            raise SystemExit(exit_codes.TERMINATED)

        pause_seconds = min(2 * pause_seconds, 2.0)


def _is_safe_path(root_folder: Path, path: str) -> bool:
    """Return True if `root_folder` joined with a relative path, such as the end of a key, stays
    below `root_folder`."""
    # such a path is unsafe; file names cannot contain NUL
    if "\0" in path or not {".", ".."}.isdisjoint(path.split("/")):
        return False
    return (root_folder / path).resolve().is_relative_to(root_folder)
