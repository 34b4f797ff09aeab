"""The checksums of the body of an S3 request."""

import base64
import hashlib
import zlib
from collections.abc import Callable
from typing import Any, Protocol

from rekindle.local.services.s3.format import S3Error
from rekindle.local.services.s3.values import parse_base64, parse_integer

PREFIX = "x-amz-checksum-"
ALGORITHM = "x-amz-sdk-checksum-algorithm"
NOT_CHECKSUMS = (PREFIX + "mode", PREFIX + "type", PREFIX + "algorithm")  # headers about checksums
DECODED_LENGTH = "x-amz-decoded-content-length"


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


CHECKSUMS: dict[str, Callable[[], Hash]] = {
    "crc32": Crc32,
    "sha256": hashlib.sha256,
    "sha1": hashlib.sha1,
}


class Checksums:
    """The hashes of a request's body, and the checksums that its headers state."""

    def __init__(self, headers: dict[str, str]) -> None:
        """`headers`: of the request, by lower-case name; trailing headers are added while the body
        is read."""
        self.headers = headers

        self.names = checksum_names(headers)
        if len(set(self.names)) > 1:
            message = (
                "Expecting a single x-amz-checksum- header. Multiple checksum Types are not"
                " allowed."
            )
            raise S3Error(400, "InvalidRequest", message)

        if ALGORITHM in headers and not self.names:
            message = (
                f"{ALGORITHM} specified, but no corresponding x-amz-checksum-* or x-amz-trailer"
                " headers were found."
            )
            raise S3Error(400, "InvalidRequest", message)

        self._md5 = hashlib.md5(usedforsecurity=False)
        self.hashes: dict[str, Hash] = {
            name: CHECKSUMS[name.removeprefix(PREFIX)]() for name in self.names
        }

        self.hashes["content-md5"] = self._md5

        for name, value in self.hashes.items():
            if name in headers and parse_base64(headers[name], len(value.digest())) is None:
                if name == "content-md5":
                    code = "InvalidDigest"
                else:
                    code = "InvalidRequest"

                raise S3Error(
                    400,
                    code,
                    f"Value for {name} header is invalid: it must be the checksum in base64.",
                )

    @property
    def is_claimed(self) -> bool:
        """True if the request has a checksum of its body."""
        return bool(self.names) or "content-md5" in self.headers

    @property
    def etag(self) -> str:
        return self._md5.hexdigest()

    def verify(self, size: int) -> None:
        """Raise S3Error if the body (of `size` bytes) does not have the checksums that the headers
        state."""
        for name, value in self.hashes.items():
            if name == "content-md5" and name not in self.headers:
                continue

            digest = base64.b64encode(value.digest()).decode()
            claim = self.headers.get(name, "")
            if claim != digest:
                message = f"{name} of the received body is {digest}, not {claim or 'declared'}."
                raise S3Error(400, "BadDigest", message)

        length = self.headers.get(DECODED_LENGTH)
        if length is not None and parse_integer(DECODED_LENGTH, length, 10**18) != size:
            raise S3Error(
                400, "IncompleteBody", f"received {size} bytes, but {DECODED_LENGTH} is {length}."
            )

    def stored_headers(self) -> dict[str, str]:
        """Return the headers that are stored with the object."""
        return {name: self.headers[name] for name in self.names}


def hash_of_algorithm(name: str) -> tuple[str, Hash]:
    """Return the header and the hash function of a checksum, such as SHA256, that a request asks
    for."""
    if name.lower() not in CHECKSUMS:
        raise S3Error(
            501,
            "NotImplemented",
            f"the checksum {name[:40]!r} is not supported: use {', '.join(CHECKSUMS)}.",
        )
    return PREFIX + name.lower(), CHECKSUMS[name.lower()]()


def checksum_names(headers: dict[str, str]) -> list[str]:
    """Return the names of the checksum headers, including the checksum header in the trailer."""
    all_names = [*headers, headers.get("x-amz-trailer", "").lower()]
    names = [name for name in all_names if name.startswith(PREFIX) and name not in NOT_CHECKSUMS]
    for name in names:
        if name.removeprefix(PREFIX) not in CHECKSUMS:
            raise S3Error(
                501, "NotImplemented", f"{name} is not supported: use {', '.join(CHECKSUMS)}."
            )
    return names
