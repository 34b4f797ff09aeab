"""One request to the embedded S3 endpoint: signature, body, checksums and answer."""

import hashlib
import io
import re
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape  # nosec B406  # only writes XML

from rekindle.local.services.s3.checksums import DECODED_LENGTH_HEADER, BodyChecksums, Hash
from rekindle.local.services.s3.format import (
    BLOCK_BYTES,
    DISK_FULL_ERRORS,
    MAX_METADATA_BYTES,
    S3Error,
)
from rekindle.local.services.s3.object_files import ObjectFiles
from rekindle.local.services.s3.signatures import Signature, verify
from rekindle.local.services.s3.values import RequestTarget, parse_target

MAX_BODY_BYTES = 5 << 30
# values of x-amz-content-sha256 for a body whose chunks are signed
SIGNED_STREAM_TYPES = (
    "STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
    "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER",
)
INVALID_XML_CHARACTERS = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
CHUNK_HEADER = re.compile(rb"([0-9a-fA-F]{1,12})(?:;chunk-signature=([0-9a-f]{1,64}))?\r\n")


def make_xml_element(element_tag: str, *inner_xml: str, **fields: object) -> str:
    """Return an XML element with one child for each field. `inner_xml`: more children, as XML.

    As in the answers of S3, a character that XML 1.0 does not allow becomes a reference such as
    &#x1;.
    """
    child_elements = "".join(
        f"<{field_name}>{_escape_xml_text(str(field_value))}</{field_name}>"
        for field_name, field_value in fields.items()
    )
    return f"<{element_tag}>{child_elements}{''.join(inner_xml)}</{element_tag}>"


def replace_unprintable(text: str) -> str:
    """Replace the characters that XML 1.0 does not allow by U+FFFD, for texts whose exact value the
    client does not need."""
    return INVALID_XML_CHARACTERS.sub("\ufffd", text)


def _escape_xml_text(text: str) -> str:
    escaped_text = escape(text, {"\r": "&#13;"})
    return INVALID_XML_CHARACTERS.sub(lambda match: f"&#x{ord(match[0]):x};", escaped_text)


class RequestBody(io.RawIOBase):
    """The body of a request: the next `size` bytes of a connection."""

    def __init__(self, connection: socket.socket, size_bytes: int) -> None:
        self.connection = connection
        self.remaining = size_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self.remaining:
            return 0
        received_bytes = self.connection.recv_into(buffer, min(len(buffer), self.remaining))
        if not received_bytes:
            raise ConnectionError("the client disconnected within a body")
        self.remaining -= received_bytes
        return received_bytes


class S3Request(BaseHTTPRequestHandler):
    """A request to the embedded S3 endpoint; the signature of the request is verified before
    anything else. `answer` writes the response."""

    protocol_version = "HTTP/1.1"
    rbufsize = 0

    def __init__(
        self,
        connection: socket.socket,
        request_head: bytes,
        access_keys: tuple[str, str],
        block_buffer: memoryview,
        object_files: ObjectFiles,
    ) -> None:
        """`access_keys`: access key and secret key. `block_buffer`: memory for the blocks of the
        body."""
        self.head = request_head
        self.keys = access_keys
        self.buffer = block_buffer
        self.files = object_files
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
        # print nothing: requests are not logged, and `route` prints the server's own errors
        return

    def route(self) -> None:
        self.unread_bytes = 0
        self.expects_continue = self.headers.get("expect", "").lower() == "100-continue"
        self.bucket = ""
        self.key = ""
        self.has_answered = False

        try:
            request_target = self.authenticate()
        except (S3Error, ValueError) as error:
            # the body of an unauthenticated request is not read
            self.close_connection = True
            self.unread_bytes = 0
            return self.fail(
                error if isinstance(error, S3Error) else S3Error(400, "InvalidArgument", str(error))
            )

        self.query = request_target.query
        self.bucket = request_target.bucket
        self.key = request_target.key

        try:
            self.act()
        except S3Error as error:
            self.fail(error)
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except ValueError as error:
            self.fail(S3Error(400, "InvalidArgument", str(error)))
        except OSError as error:
            # the query is not printed, because it may contain a signature
            print(f"{self.command} {request_target.path}: {error}", file=sys.stderr, flush=True)
            if error.errno in DISK_FULL_ERRORS:
                error_message = (
                    f"{self.files.root} is full ({error.strerror}): free some disk space."
                )
                self.fail(S3Error(507, "InsufficientStorage", error_message))
            else:
                self.fail(S3Error(500, "InternalError", str(error)))
        except Exception as error:
            print(f"{self.command} {request_target.path}:", file=sys.stderr)
            traceback.print_exc(file=sys.stderr)
            self.fail(S3Error(500, "InternalError", f"{type(error).__name__}: {error}"))

    def authenticate(self) -> RequestTarget:
        """Prepare the body, and return the target of the request after verifying its signature.
        Raises S3Error, ValueError."""
        self.unread_bytes = self.parse_length()
        self.body = (
            io.BufferedReader(RequestBody(self.connection, self.unread_bytes))
            if self.unread_bytes
            else io.BytesIO()
        )
        request_target = parse_target(self.path)
        self.signature = verify(self.command, request_target, self.headers, self.keys, time.time())
        return request_target

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = route

    def act(self) -> None:
        """Perform the request."""
        raise NotImplementedError

    def parse_length(self) -> int:
        # the header Transfer-Encoding is rejected even if it is empty, because a second header of
        # this name may have a value
        if "transfer-encoding" in self.headers:
            raise S3Error(
                411,
                "MissingContentLength",
                "Transfer-Encoding is not supported: send Content-Length.",
            )

        content_lengths = self.headers.get_all("content-length", ["0"])
        if len(content_lengths) > 1 or not re.fullmatch(r"[0-9]{1,16}", content_lengths[0]):
            raise S3Error(
                400,
                "InvalidArgument",
                f"Content-Length is {', '.join(content_lengths)[:80]}: it must be one number.",
            )

        if int(content_lengths[0]) > MAX_BODY_BYTES:
            raise S3Error(
                400, "EntityTooLarge", "an object or part has at most 5 GiB: upload it in parts."
            )

        return int(content_lengths[0])

    def receive(self, body_checksums: BodyChecksums) -> Iterator[memoryview]:
        """Yield the decoded body in blocks. While the body is read, update the hashes in
        `body_checksums`, and add the trailing headers to the headers of `body_checksums`."""
        if self.expects_continue:
            self.expects_continue = False
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")

        payload_hash = self.headers.get("x-amz-content-sha256", "")
        if payload_hash.startswith("STREAMING-"):
            yield from self.receive_chunks(payload_hash, body_checksums)
        else:
            yield from self.receive_whole_body(payload_hash, body_checksums.hashes)

    def receive_whole_body(
        self, payload_hash: str, checksum_hashes: dict[str, Hash]
    ) -> Iterator[memoryview]:
        """Yield a body that is not in chunks. Raises S3Error if the body's sha256 is not
        `payload_hash`, unless `payload_hash` is a word such as UNSIGNED-PAYLOAD."""
        if len(payload_hash) != 64:
            yield from self.read_blocks(self.unread_bytes, checksum_hashes)
            return

        body_hash = hashlib.sha256()
        all_hashes = checksum_hashes | {"x-amz-content-sha256": body_hash}
        yield from self.read_blocks(self.unread_bytes, all_hashes)
        if body_hash.hexdigest() != payload_hash:
            raise S3Error(
                400,
                "XAmzContentSHA256Mismatch",
                f"the received body's sha256 is not {payload_hash}.",
            )

    def receive_chunks(
        self, payload_hash: str, body_checksums: BodyChecksums
    ) -> Iterator[memoryview]:
        """Yield the content of an aws-chunked body, and verify the signatures of the chunks if the
        body is signed. `payload_hash`: the header x-amz-content-sha256, which names the kind of
        body."""
        if payload_hash in SIGNED_STREAM_TYPES:
            chunk_signature = self.signature
        else:
            chunk_signature = None

        if not chunk_signature and payload_hash != "STREAMING-UNSIGNED-PAYLOAD-TRAILER":
            raise S3Error(
                501, "NotImplemented", f"x-amz-content-sha256 {payload_hash} is not supported here."
            )

        if DECODED_LENGTH_HEADER not in body_checksums.headers:
            raise S3Error(
                411, "MissingContentLength", f"{DECODED_LENGTH_HEADER} is missing: send it."
            )

        chunk_bytes = -1
        while chunk_bytes:
            chunk_line = self.read_line()
            chunk_hash = hashlib.sha256()

            chunk_match = CHUNK_HEADER.match(chunk_line)
            chunk_bytes = int(chunk_match[1], 16) if chunk_match else 0
            if not chunk_match or chunk_bytes > self.unread_bytes:
                raise S3Error(
                    400, "IncompleteBody", f"a chunk of the body starts with {chunk_line[:80]!r}."
                )

            all_hashes = dict(body_checksums.hashes)
            if chunk_signature:
                all_hashes["chunk"] = chunk_hash
            yield from self.read_blocks(chunk_bytes, all_hashes)
            if (
                chunk_signature
                and chunk_signature.chunk(chunk_hash.hexdigest())
                != (chunk_match[2] or b"").decode()
            ):
                raise S3Error(
                    403, "SignatureDoesNotMatch", "the signature of a chunk of the body is wrong."
                )

            if chunk_bytes and self.read_line() != b"\r\n":
                raise S3Error(
                    400, "IncompleteBody", "a chunk of the body is longer than it declares."
                )

        self.read_trailers(chunk_signature, body_checksums.headers)
        if self.unread_bytes:
            raise S3Error(
                400,
                "IncompleteBody",
                f"{self.unread_bytes} bytes follow the last chunk of the body.",
            )

    def read_trailers(self, signature: Signature | None, request_headers: dict[str, str]) -> None:
        trailer_lines = b""
        declared_name = request_headers.get("x-amz-trailer", "").lower()

        while self.unread_bytes:
            trailer_line = self.read_line().strip()
            if not trailer_line:
                break

            header_name, _, header_value = trailer_line.decode("latin-1").partition(":")
            if header_name == "x-amz-trailer-signature":
                if signature and signature.trailer(trailer_lines) != header_value:
                    raise S3Error(
                        403,
                        "SignatureDoesNotMatch",
                        "the signature of the trailing headers is wrong.",
                    )

                signature = None
            else:
                trailer_lines += trailer_line + b"\n"
                # an undeclared trailer could replace any header of the request
                if header_name.strip().lower() != declared_name or declared_name in request_headers:
                    error_message = (
                        f"the trailing header {header_name[:80]!r} is not declared by"
                        " x-amz-trailer, or repeated."
                    )
                    raise S3Error(400, "MalformedTrailerError", error_message)

                request_headers[declared_name] = header_value.strip()

        if trailer_lines and signature:
            raise S3Error(403, "SignatureDoesNotMatch", "the trailing headers are not signed.")

    def read_line(self) -> bytes:
        line = self.body.readline(min(self.unread_bytes, MAX_METADATA_BYTES))
        self.unread_bytes -= len(line)
        return line

    def read_blocks(
        self, size_bytes: int, checksum_hashes: dict[str, Hash]
    ) -> Iterator[memoryview]:
        while size_bytes:
            received_bytes = self.body.readinto(self.buffer[: min(size_bytes, BLOCK_BYTES)])
            size_bytes -= received_bytes
            self.unread_bytes -= received_bytes
            body_block = self.buffer[:received_bytes]
            for body_hash in checksum_hashes.values():
                body_hash.update(body_block)
            yield body_block

    def answer(
        self,
        http_status: int,
        headers: dict[str, Any] | None = None,
        body: str = "",
        content_length: int = -1,
    ) -> None:
        # read the rest of the body, which would otherwise be parsed as the next request
        while self.unread_bytes and not self.expects_continue:
            self.unread_bytes -= self.body.readinto(
                self.buffer[: min(self.unread_bytes, BLOCK_BYTES)]
            )

        if self.expects_continue:
            self.close_connection = True

        if body:
            body_bytes = f'<?xml version="1.0" encoding="UTF-8"?>\n{body}'.encode()
        else:
            body_bytes = b""

        self.send_response(http_status)
        response_headers = {
            **(headers or {}),
            **({"Content-Type": "application/xml"} if body else {}),
        }
        if http_status != 204:
            response_headers["Content-Length"] = (
                len(body_bytes) if content_length < 0 else content_length
            )
        if self.close_connection:
            response_headers["Connection"] = "close"

        for header_name, header_value in response_headers.items():
            self.send_header(header_name, str(header_value))

        self.has_answered = True
        self.end_headers()
        if body_bytes and self.command != "HEAD" and http_status != 304:
            self.wfile.write(body_bytes)

    def fail(self, s3_error: S3Error) -> None:
        if self.has_answered:
            # close the connection, because the client would read an error message as a part of the
            # object, but recognizes a body that is too short
            self.close_connection = True
            return

        quoted_resource = quote(f"/{self.bucket}/{self.key}")
        error_xml = make_xml_element(
            "Error",
            Code=s3_error.code,
            Message=replace_unprintable(str(s3_error)),
            Resource=quoted_resource,
        )
        self.answer(s3_error.status, s3_error.headers, body=error_xml)
