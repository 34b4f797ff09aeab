"""The checksums of the body of an S3 request."""

import base64
import hashlib
import zlib
from collections.abc import Callable
from typing import Any, Protocol

from rekindle.local.services.s3.format import S3Error
from rekindle.local.services.s3.values import parse_base64, parse_integer

CHECKSUM_PREFIX = "x-amz-checksum-"
ALGORITHM_HEADER = "x-amz-sdk-checksum-algorithm"
# headers with this prefix that do not contain a checksum
NON_CHECKSUM_HEADERS = (
    CHECKSUM_PREFIX + "mode",
    CHECKSUM_PREFIX + "type",
    CHECKSUM_PREFIX + "algorithm",
)
DECODED_LENGTH_HEADER = "x-amz-decoded-content-length"


class Hash(Protocol):
    """The interface of hash objects (as in hashlib) that the S3 endpoint uses."""

    def update(self, data: Any, /) -> None: ...
    def digest(self) -> bytes: ...


class Crc32:
    """zlib's CRC-32 as a hash."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, data: Any, /) -> None:
        self.value = zlib.crc32(data, self.value)

    def digest(self) -> bytes:
        return self.value.to_bytes(4, "big")


HASH_TYPES: dict[str, Callable[[], Hash]] = {
    "crc32": Crc32,
    "sha256": hashlib.sha256,
    "sha1": hashlib.sha1,
}


class BodyChecksums:
    """The hashes of a request's body, and the checksums that the request's headers state."""

    def __init__(self, headers: dict[str, str]) -> None:
        """`headers`: headers of the request, by lower-case name. Trailing headers of the request
        are added to `headers` while the body is read."""
        self.headers = headers

        self.names = list_checksum_headers(headers)
        if len(set(self.names)) > 1:
            message = (
                "Expecting a single x-amz-checksum- header. Multiple checksum Types are not"
                " allowed."
            )
            raise S3Error(400, "InvalidRequest", message)

        if ALGORITHM_HEADER in headers and not self.names:
            message = (
                f"{ALGORITHM_HEADER} specified, but no corresponding x-amz-checksum-* or"
                " x-amz-trailer headers were found."
            )
            raise S3Error(400, "InvalidRequest", message)

        self._md5 = hashlib.md5(usedforsecurity=False)
        self.hashes: dict[str, Hash] = {
            checksum_header: HASH_TYPES[checksum_header.removeprefix(CHECKSUM_PREFIX)]()
            for checksum_header in self.names
        }

        self.hashes["content-md5"] = self._md5

        for checksum_header, body_hash in self.hashes.items():
            if (
                checksum_header in headers
                and parse_base64(headers[checksum_header], len(body_hash.digest())) is None
            ):
                if checksum_header == "content-md5":
                    error_code = "InvalidDigest"
                else:
                    error_code = "InvalidRequest"

                raise S3Error(
                    400,
                    error_code,
                    f"Value for {checksum_header} header is invalid: it must be the checksum in"
                    " base64.",
                )

    @property
    def has_claimed_checksum(self) -> bool:
        """True if the request has a checksum of its body."""
        return bool(self.names) or "content-md5" in self.headers

    @property
    def etag(self) -> str:
        return self._md5.hexdigest()

    def verify(self, body_bytes: int) -> None:
        """Raise S3Error if the body (of `body_bytes` bytes) does not have the checksums that the
        headers state."""
        for checksum_header, body_hash in self.hashes.items():
            if checksum_header == "content-md5" and checksum_header not in self.headers:
                continue

            computed_digest = base64.b64encode(body_hash.digest()).decode()
            claimed_digest = self.headers.get(checksum_header, "")
            if claimed_digest != computed_digest:
                message = (
                    f"{checksum_header} of the received body is {computed_digest}, not"
                    f" {claimed_digest or 'declared'}."
                )
                raise S3Error(400, "BadDigest", message)

        declared_length = self.headers.get(DECODED_LENGTH_HEADER)
        if (
            declared_length is not None
            and parse_integer(DECODED_LENGTH_HEADER, declared_length, 10**18) != body_bytes
        ):
            raise S3Error(
                400,
                "IncompleteBody",
                f"received {body_bytes} bytes, but {DECODED_LENGTH_HEADER} is {declared_length}.",
            )

    def stored_headers(self) -> dict[str, str]:
        """Return the checksum headers that are stored with the object."""
        return {checksum_header: self.headers[checksum_header] for checksum_header in self.names}


def create_hash(algorithm_name: str) -> tuple[str, Hash]:
    """Return the header for a checksum such as SHA256, and a new hash object that computes it.
    Raises S3Error for an unknown algorithm."""
    if algorithm_name.lower() not in HASH_TYPES:
        raise S3Error(
            501,
            "NotImplemented",
            f"the checksum {algorithm_name[:40]!r} is not supported: use {', '.join(HASH_TYPES)}.",
        )
    return CHECKSUM_PREFIX + algorithm_name.lower(), HASH_TYPES[algorithm_name.lower()]()


def list_checksum_headers(headers: dict[str, str]) -> list[str]:
    """Return the names of the checksum headers, including the checksum header in the trailer."""
    header_names = [*headers, headers.get("x-amz-trailer", "").lower()]
    checksum_headers = [
        name
        for name in header_names
        if name.startswith(CHECKSUM_PREFIX) and name not in NON_CHECKSUM_HEADERS
    ]
    for name in checksum_headers:
        if name.removeprefix(CHECKSUM_PREFIX) not in HASH_TYPES:
            raise S3Error(
                501, "NotImplemented", f"{name} is not supported: use {', '.join(HASH_TYPES)}."
            )
    return checksum_headers
