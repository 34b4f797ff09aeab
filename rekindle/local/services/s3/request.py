"""One request to the embedded S3 endpoint: signature, body, checksums and answer."""

import hashlib
import io
import re
import socket
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape  # nosec B406  # only writes XML

from rekindle.local.services.s3.checksums import DECODED_LENGTH, Checksums, Hash
from rekindle.local.services.s3.format import (
    BLOCK_BYTES,
    DISK_FULL_ERRORS,
    MAX_METADATA_BYTES,
    S3Error,
)
from rekindle.local.services.s3.object_files import Files
from rekindle.local.services.s3.signatures import Signature, verify
from rekindle.local.services.s3.values import parse_target

MAX_BODY_BYTES = 5 << 30
# values of x-amz-content-sha256 for a body whose chunks are signed
SIGNED_STREAMS = (
    "STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
    "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER",
)
INVALID_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
CHUNK = re.compile(rb"([0-9a-fA-F]{1,12})(?:;chunk-signature=([0-9a-f]{1,64}))?\r\n")


def xml(tag: str, *inner: str, **fields: object) -> str:
    """Return an element with one child per field; `inner`: more children, as XML.

    As in the answers of S3, a character that XML 1.0 does not allow is a reference such as &#x1;.
    """
    children = "".join(
        f"<{name}>{_xml_text(str(value))}</{name}>" for name, value in fields.items()
    )
    return f"<{tag}>{children}{''.join(inner)}</{tag}>"


def printable(text: str) -> str:
    """Replace the characters that XML 1.0 does not allow, for texts that the client need not read
    back."""
    return INVALID_IN_XML.sub("\ufffd", text)


def _xml_text(text: str) -> str:
    escaped = escape(text, {"\r": "&#13;"})
    return INVALID_IN_XML.sub(lambda match: f"&#x{ord(match[0]):x};", escaped)


class Body(io.RawIOBase):
    """The body of a request: the next `size` bytes of a connection."""

    def __init__(self, connection: socket.socket, size: int) -> None:
        self.connection = connection
        self.remaining = size

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        if not self.remaining:
            return 0
        count = self.connection.recv_into(into, min(len(into), self.remaining))
        if not count:
            raise ConnectionError("the client disconnected within a body")
        self.remaining -= count
        return count


class Request(BaseHTTPRequestHandler):
    """A request; its signature is verified before anything else. `answer` writes the response."""

    protocol_version = "HTTP/1.1"
    rbufsize = 0

    def __init__(
        self,
        connection: socket.socket,
        head: bytes,
        keys: tuple[str, str],
        buffer: memoryview,
        files: Files,
    ) -> None:
        """`keys`: access key and secret key. `buffer`: memory for the blocks of the body."""
        self.head = head
        self.keys = keys
        self.buffer = buffer
        self.files = files
        super().__init__(connection, ("", 0), None)  # type: ignore[arg-type]

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BytesIO(self.head)

    def handle(self) -> None:
        self.close_connection = True
        self.handle_one_request()

    def handle_expect_100(self) -> bool:
        # only `receive` sends 100 Continue, so an invalid write is refused before the client sends
        # its body
        return True

    def log_message(self, format: str, *args: object) -> None:
        return  # requests are not logged; `route` prints the server's own errors

    def route(self) -> None:
        self.unread_bytes, self.expects_continue = (
            0,
            self.headers.get("expect", "").lower() == "100-continue",
        )
        self.bucket = self.key = ""

        try:
            self.unread_bytes = self.parse_length()
            self.body = (
                io.BufferedReader(Body(self.connection, self.unread_bytes))
                if self.unread_bytes
                else io.BytesIO()
            )
            target = parse_target(self.path)
            self.signature = verify(self.command, target, self.headers, self.keys, time.time())
        except (S3Error, ValueError) as error:
            self.close_connection = True  # the body of an unauthenticated request is not read
            self.unread_bytes = 0
            return self.fail(
                error if isinstance(error, S3Error) else S3Error(400, "InvalidArgument", str(error))
            )

        self.query = target.query
        self.bucket = target.bucket
        self.key = target.key

        try:
            self.act()
        except S3Error as error:
            self.fail(error)
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except ValueError as error:
            self.fail(S3Error(400, "InvalidArgument", str(error)))
        except OSError as error:
            # without the query, which may contain a signature
            print(f"{self.command} {target.path}: {error}", file=sys.stderr, flush=True)
            if error.errno in DISK_FULL_ERRORS:
                message = f"{self.files.root} is full ({error.strerror}): free some disk space."
                self.fail(S3Error(507, "InsufficientStorage", message))
            else:
                self.fail(S3Error(500, "InternalError", str(error)))

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = route

    def act(self) -> None:
        """Perform the request."""
        raise NotImplementedError

    def parse_length(self) -> int:
        # rejected even if the first of several such headers is empty
        if "transfer-encoding" in self.headers:
            raise S3Error(
                411,
                "MissingContentLength",
                "Transfer-Encoding is not supported: send Content-Length.",
            )

        lengths = self.headers.get_all("content-length", ["0"])
        if len(lengths) > 1 or not re.fullmatch(r"[0-9]{1,16}", lengths[0]):
            raise S3Error(
                400,
                "InvalidArgument",
                f"Content-Length is {', '.join(lengths)[:80]}: it must be one number.",
            )

        if int(lengths[0]) > MAX_BODY_BYTES:
            raise S3Error(
                400, "EntityTooLarge", "an object or part has at most 5 GiB: upload it in parts."
            )

        return int(lengths[0])

    def receive(self, checksums: Checksums) -> Iterator[memoryview]:
        """Yield the decoded body in blocks; update the hashes, and add trailing headers to
        `checksums.headers`."""
        hashes = checksums.hashes
        if self.expects_continue:
            self.expects_continue = False
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")

        payload = self.headers.get("x-amz-content-sha256", "")
        if not payload.startswith("STREAMING-"):
            all_hashes = hashes | (
                {"x-amz-content-sha256": hashlib.sha256()} if len(payload) == 64 else {}
            )
            yield from self.read_blocks(self.unread_bytes, all_hashes)
            if len(payload) == 64 and all_hashes["x-amz-content-sha256"].digest().hex() != payload:
                raise S3Error(
                    400,
                    "XAmzContentSHA256Mismatch",
                    f"the received body's sha256 is not {payload}.",
                )

            return

        if payload in SIGNED_STREAMS:
            signature = self.signature
        else:
            signature = None

        if not signature and payload != "STREAMING-UNSIGNED-PAYLOAD-TRAILER":
            raise S3Error(
                501, "NotImplemented", f"x-amz-content-sha256 {payload} is not supported here."
            )

        if DECODED_LENGTH not in checksums.headers:
            raise S3Error(411, "MissingContentLength", f"{DECODED_LENGTH} is missing: send it.")

        size = -1
        while size:
            line = self.read_line()
            digest = hashlib.sha256()

            match = CHUNK.match(line)
            if not match or (size := int(match[1], 16)) > self.unread_bytes:
                raise S3Error(
                    400, "IncompleteBody", f"a chunk of the body starts with {line[:80]!r}."
                )

            yield from self.read_blocks(
                size, {**hashes, **({"chunk": digest} if signature else {})}
            )
            if signature and signature.chunk(digest.hexdigest()) != (match[2] or b"").decode():
                raise S3Error(
                    403, "SignatureDoesNotMatch", "the signature of a chunk of the body is wrong."
                )

            if size and self.read_line() != b"\r\n":
                raise S3Error(
                    400, "IncompleteBody", "a chunk of the body is longer than it declares."
                )

        self.read_trailers(signature, checksums.headers)
        if self.unread_bytes:
            raise S3Error(
                400,
                "IncompleteBody",
                f"{self.unread_bytes} bytes follow the last chunk of the body.",
            )

    def read_trailers(self, signature: Signature | None, headers: dict[str, str]) -> None:
        lines = b""
        declared_name = headers.get("x-amz-trailer", "").lower()

        while self.unread_bytes and (line := self.read_line().strip()):
            name, _, value = line.decode("latin-1").partition(":")
            if name == "x-amz-trailer-signature":
                if signature and signature.trailer(lines) != value:
                    raise S3Error(
                        403,
                        "SignatureDoesNotMatch",
                        "the signature of the trailing headers is wrong.",
                    )

                signature = None
            else:
                lines += line + b"\n"
                # an undeclared trailer could replace any header of the request
                if name.strip().lower() != declared_name or declared_name in headers:
                    message = (
                        f"the trailing header {name[:80]!r} is not declared by x-amz-trailer, or"
                        " repeated."
                    )
                    raise S3Error(400, "MalformedTrailerError", message)

                headers[declared_name] = value.strip()

        if lines and signature:
            raise S3Error(403, "SignatureDoesNotMatch", "the trailing headers are not signed.")

    def read_line(self) -> bytes:
        line = self.body.readline(min(self.unread_bytes, MAX_METADATA_BYTES))
        self.unread_bytes -= len(line)
        return line

    def read_blocks(self, size: int, hashes: dict[str, Hash]) -> Iterator[memoryview]:
        while size:
            count = self.body.readinto(self.buffer[: min(size, BLOCK_BYTES)])
            size -= count
            self.unread_bytes -= count
            block = self.buffer[:count]
            for value in hashes.values():
                value.update(block)
            yield block

    def answer(
        self, status: int, headers: dict[str, Any] | None = None, body: str = "", length: int = -1
    ) -> None:
        # read the rest of the body, which would otherwise be parsed as the next request
        while self.unread_bytes and not self.expects_continue:
            self.unread_bytes -= self.body.readinto(
                self.buffer[: min(self.unread_bytes, BLOCK_BYTES)]
            )

        self.close_connection |= self.expects_continue
        if body:
            data = f'<?xml version="1.0" encoding="UTF-8"?>\n{body}'.encode()
        else:
            data = b""

        self.send_response(status)
        fields = {**(headers or {}), **({"Content-Type": "application/xml"} if body else {})}
        if status != 204:
            fields["Content-Length"] = len(data) if length < 0 else length
        if self.close_connection:
            fields["Connection"] = "close"

        for name, value in fields.items():
            self.send_header(name, str(value))

        self.end_headers()
        if data and self.command != "HEAD" and status != 304:
            self.wfile.write(data)

    def fail(self, error: S3Error) -> None:
        resource = quote(f"/{self.bucket}/{self.key}")
        body = xml("Error", Code=error.code, Message=printable(str(error)), Resource=resource)
        self.answer(error.status, error.headers, body=body)
