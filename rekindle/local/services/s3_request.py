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
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape  # nosec B406  # only writes XML

from rekindle.local.services.s3_files import BLOCK_BYTES, DISK_FULL_ERRORS, MAX_METADATA_BYTES, Files, Hash, S3Error
from rekindle.local.services.signatures import Signature, verify

MAX_BODY_BYTES = 5 << 30
CHUNK = re.compile(rb"([0-9a-fA-F]{1,12})(?:;chunk-signature=([0-9a-f]{1,64}))?\r\n")


def xml(tag: str, *inner: str, **fields: Any) -> str:
    """Return an element with one child per field; `inner`: more children, as XML."""
    children = "".join(f"<{name}>{escape(str(value))}</{name}>" for name, value in fields.items())
    return f"<{tag}>{children}{''.join(inner)}</{tag}>"


class Body(io.RawIOBase):
    """The body of a request: the next `size` bytes of a connection."""

    def __init__(self, connection: socket.socket, size: int) -> None:
        self.connection, self.remaining = connection, size

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
        self, connection: socket.socket, head: bytes, keys: tuple[str, str], buffer: memoryview, files: Files
    ) -> None:
        """`keys`: access key and secret key. `buffer`: memory for the blocks of the body."""
        self.head, self.keys, self.buffer, self.files = head, keys, buffer, files
        super().__init__(connection, ("", 0), None)  # type: ignore[arg-type]

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BytesIO(self.head)

    def handle(self) -> None:
        self.close_connection = True
        self.handle_one_request()

    def handle_expect_100(self) -> bool:
        return True  # `receive` sends the status 100: an invalid write is refused before its body is sent

    def log_message(self, format: str, *args: Any) -> None:
        return  # requests are not logged; `route` prints the server's own errors

    def route(self) -> None:
        self.unread_bytes, self.expects_continue = 0, self.headers.get("expect", "").lower() == "100-continue"
        self.bucket = self.key = ""
        try:
            self.unread_bytes = self.parse_length()
            self.body = (
                io.BufferedReader(Body(self.connection, self.unread_bytes)) if self.unread_bytes else io.BytesIO()
            )
            self.signature = verify(self.command, self.path, self.headers, self.keys, time.time())
        except (S3Error, ValueError) as error:
            self.close_connection = True  # the body of an unauthenticated request is not read
            self.unread_bytes = 0
            return self.fail(error if isinstance(error, S3Error) else S3Error(400, "InvalidArgument", str(error)))
        url = urlsplit(self.path)
        self.query = dict(parse_qsl(url.query, keep_blank_values=True))
        self.bucket, _, self.key = unquote(url.path)[1:].partition("/")
        try:
            self.act()
        except S3Error as error:
            self.fail(error)
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except ValueError as error:
            self.fail(S3Error(400, "InvalidArgument", str(error)))
        except OSError as error:
            print(f"{self.command} {self.path}: {error}", file=sys.stderr, flush=True)
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
        if self.headers.get("transfer-encoding"):
            raise S3Error(411, "MissingContentLength", "Transfer-Encoding is not supported: send Content-Length.")
        lengths = self.headers.get_all("content-length", ["0"])
        if len(lengths) > 1 or not re.fullmatch(r"[0-9]{1,16}", lengths[0]):
            raise S3Error(
                400, "InvalidArgument", f"Content-Length is {', '.join(lengths)[:80]}: it must be one number."
            )
        if int(lengths[0]) > MAX_BODY_BYTES:
            raise S3Error(400, "EntityTooLarge", "an object or part has at most 5 GiB: upload it in parts.")
        return int(lengths[0])

    def receive(self, hashes: dict[str, Hash], checksums: dict[str, str]) -> Iterator[memoryview]:
        """Yield the decoded body in blocks and update the hashes; add trailing checksums to `checksums`."""
        if self.expects_continue:
            self.expects_continue = False
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        payload = self.headers.get("x-amz-content-sha256", "")
        if not payload.startswith("STREAMING-"):
            all_hashes = hashes | ({"x-amz-content-sha256": hashlib.sha256()} if len(payload) == 64 else {})
            yield from self.read_blocks(self.unread_bytes, all_hashes)
            if len(payload) == 64 and all_hashes["x-amz-content-sha256"].digest().hex() != payload:
                raise S3Error(400, "XAmzContentSHA256Mismatch", f"the received body's sha256 is not {payload}.")
            return
        signature = self.signature if payload.startswith("STREAMING-AWS4-HMAC-SHA256-PAYLOAD") else None
        if not signature and payload != "STREAMING-UNSIGNED-PAYLOAD-TRAILER":
            raise S3Error(501, "NotImplemented", f"x-amz-content-sha256 {payload} is not supported here.")
        size = -1
        while size:
            line, digest = self.read_line(), hashlib.sha256()
            if not (match := CHUNK.match(line)) or (size := int(match[1], 16)) > self.unread_bytes:
                raise S3Error(400, "IncompleteBody", f"a chunk of the body starts with {line[:80]!r}.")
            yield from self.read_blocks(size, {**hashes, **({"chunk": digest} if signature else {})})
            if signature and signature.chunk(digest.hexdigest()) != (match[2] or b"").decode():
                raise S3Error(403, "SignatureDoesNotMatch", "the signature of a chunk of the body is wrong.")
            if size:
                self.read_line()
        self.read_trailers(signature, checksums)

    def read_trailers(self, signature: Signature | None, checksums: dict[str, str]) -> None:
        lines = b""
        while self.unread_bytes and (line := self.read_line().strip()):
            name, _, value = line.decode("latin-1").partition(":")
            if name == "x-amz-trailer-signature":
                if signature and signature.trailer(lines) != value:
                    raise S3Error(403, "SignatureDoesNotMatch", "the signature of the trailing headers is wrong.")
                signature = None
            else:
                lines += line + b"\n"
                checksums[name.strip().lower()] = value.strip()
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

    def answer(self, status: int, headers: dict[str, Any] | None = None, body: str = "", length: int = -1) -> None:
        while self.unread_bytes and not self.expects_continue:  # an unread body would be parsed as the next request
            self.unread_bytes -= self.body.readinto(self.buffer[: min(self.unread_bytes, BLOCK_BYTES)])
        self.close_connection |= self.expects_continue
        data = f'<?xml version="1.0" encoding="UTF-8"?>\n{body}'.encode() if body else b""
        self.send_response(status)
        fields = {**(headers or {}), **({"Content-Type": "application/xml"} if body else {})}
        if status != 204:
            fields["Content-Length"] = len(data) if length < 0 else length
        for name, value in (fields | ({"Connection": "close"} if self.close_connection else {})).items():
            line = re.sub(r"[\r\n]+", " ", str(value))  # a line break in the URL must not start another header
            self.send_header(name, line.encode("latin-1", "replace").decode("latin-1"))
        self.end_headers()
        if data and self.command != "HEAD" and status != 304:
            self.wfile.write(data)

    def fail(self, error: S3Error) -> None:
        resource = quote(f"/{self.bucket}/{self.key}")
        self.answer(error.status, body=xml("Error", Code=error.code, Message=error, Resource=resource))
