"""An S3 endpoint for one machine: objects as files, conditional writes that really work.

    AWS_ACCESS_KEY_ID=key python -m rekindle.local.services.s3 --root .rekindle/s3 --port 9000 --bucket rekindle

Our own, because no server that installs by name both honours conditions and keeps files: moto holds everything in
memory, rclone, s3rver and localbucket accept a conditional write that must fail, ministack answers 200 when its disk
write failed. It speaks what boto3, polars and MLflow use (path style): objects, ranges, conditions, checksums,
aws-chunked bodies, multipart, ListObjectsV2; anything else is answered 501, never quietly ignored. How objects lie on
disk: s3_files.py. The access key must match; signatures are not verified, so it binds to 127.0.0.1 only.
"""

import argparse
import base64
import hashlib
import hmac
import json
import os
import re
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from rekindle.local.processes import end_unless_recorded
from rekindle.local.services.s3_files import BLOCK, CHECKSUMS, FULL, TRAILER, Files, Hash, S3Error, blocks, read_meta

SMALL = 8 << 20  # the most that an XML request body may have
KEPT = ("content-type", "cache-control", "content-disposition", "content-language", "expires")
SUBRESOURCES = ("list-type", "delete", "uploads", "uploadId")
PARAMETERS = {"prefix", "delimiter", "max-keys", "continuation-token", "start-after", "encoding-type", "fetch-owner"}
PARAMETERS |= {*SUBRESOURCES, "partNumber", "x-id", "AWSAccessKeyId", "Signature", "Expires"}
PREFIXES = ("X-Amz-", "response-")  # of the parameters of a presigned URL


def xml(tag: str, *inner: str, **fields: Any) -> str:
    """An element with one child per field; `inner` is XML already."""
    children = "".join(f"<{name}>{escape(str(value))}</{name}>" for name, value in fields.items())
    return f"<{tag}>{children}{''.join(inner)}</{tag}>"


def iso(seconds: float) -> str:
    """Unix seconds as S3 writes them in XML."""
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))


class Handler(BaseHTTPRequestHandler):
    """One connection. The routes are methods; `answer` is the only one that writes a response."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 300  # of an idle or stuck connection, in seconds
    server: "Server"  # pyright: ignore[reportIncompatibleVariableOverride]

    def setup(self) -> None:
        super().setup()
        self.buffer = memoryview(bytearray(BLOCK))

    def handle_expect_100(self) -> bool:
        return True  # `receive` sends the 100: a write that must fail is refused before its body is sent

    def log_message(self, format: str, *args: Any) -> None:
        return  # requests are not logged; `route` prints what went wrong on our side

    def route(self) -> None:
        self.unread = int(self.headers.get("content-length") or 0)
        self.expected = self.headers.get("expect", "").lower() == "100-continue"
        url = urlsplit(self.path)
        self.query = dict(parse_qsl(url.query, keep_blank_values=True))
        self.bucket, _, self.key = unquote(url.path)[1:].partition("/")
        try:
            self.authorize()
            kind = "object" if self.key else "bucket" if self.bucket else "service"
            unknown = [name for name in self.query if name not in PARAMETERS and not name.startswith(PREFIXES)]
            what = next(iter([*unknown, *(name for name in SUBRESOURCES if name in self.query)]), "")
            action = ROUTES.get((self.command, kind, what))
            if not action:
                raise S3Error(501, "NotImplemented", f"{self.command} {kind} {what} is not supported here.")
            action(self)
        except S3Error as error:
            self.fail(error)
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except ValueError as error:
            self.fail(S3Error(400, "InvalidArgument", str(error)))
        except OSError as error:
            print(f"{self.command} {self.path}: {error}", file=sys.stderr, flush=True)
            if error.errno in FULL:
                why = f"{self.server.files.root} takes no more data ({error.strerror}): free some disk space."
                self.fail(S3Error(507, "InsufficientStorage", why))
            else:
                self.fail(S3Error(500, "InternalError", str(error)))

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = route

    def authorize(self) -> None:
        presented = re.search(r"Credential=([^/,]+)/", self.headers.get("authorization", ""))
        signed_url = self.query.get("X-Amz-Credential", "").partition("/")[0] or self.query.get("AWSAccessKeyId", "")
        access_key = presented[1] if presented else signed_url
        if not hmac.compare_digest(access_key.encode(), self.server.access_key.encode()):
            raise S3Error(403, "InvalidAccessKeyId", "The access key is not this endpoint's: set AWS_ACCESS_KEY_ID.")

    def receive(self, hashes: dict[str, Hash], announced: dict[str, str]) -> Iterator[memoryview]:
        """The decoded body in blocks, through every hash; trailing checksums are added to `announced`."""
        if self.headers.get("transfer-encoding"):
            self.close_connection = True
            raise S3Error(411, "MissingContentLength", "Transfer-Encoding is not supported: send Content-Length.")
        if self.expected:
            self.expected = False
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self.headers.get("x-amz-content-sha256", "").startswith("STREAMING-"):
            yield from self.exactly(self.unread, hashes)
            return
        while size := int(self.line().split(b";")[0], 16):
            yield from self.exactly(size, hashes)
            self.line()
        while self.unread and (line := self.line().strip()):
            name, _, value = line.decode().partition(":")
            announced[name.strip().lower()] = value.strip()

    def line(self) -> bytes:
        line = self.rfile.readline(min(self.unread, TRAILER))
        self.unread -= len(line)
        return line

    def exactly(self, size: int, hashes: dict[str, Hash]) -> Iterator[memoryview]:
        while size:
            got = self.rfile.readinto(self.buffer[: min(size, BLOCK)])  # type: ignore[attr-defined]
            if not got:
                raise ConnectionError("the client went away in the middle of a body")
            size -= got
            self.unread -= got
            block = self.buffer[:got]
            for value in hashes.values():
                value.update(block)
            yield block

    def attributes(self) -> dict[str, str]:
        """The request's headers that are kept with an object."""
        lower = {name.lower(): value for name, value in self.headers.items()}
        coding = lower.get("content-encoding", "").replace("aws-chunked", "").strip(", ")
        kept = {name: value for name, value in lower.items() if name in KEPT or name.startswith("x-amz-meta-")}
        return kept | ({"content-encoding": coding} if coding else {})

    def save(self) -> Path:
        """The request's body as a temporary file, once its length and every checksum are verified."""
        names = {name.lower(): value for name, value in self.headers.items()}
        sums = [name for name in [*names, names.get("x-amz-trailer", "").lower()] if name.startswith("x-amz-checksum-")]
        if unknown := [name for name in sums if name.rpartition("-")[2] not in CHECKSUMS]:
            raise S3Error(501, "NotImplemented", f"{unknown[0]} is not supported: use {', '.join(CHECKSUMS)}.")
        hashes: dict[str, Hash] = {name: CHECKSUMS[name.rpartition("-")[2]]() for name in sums}
        hashes["content-md5"] = hashlib.md5(usedforsecurity=False)
        payload = names.get("x-amz-content-sha256", "")
        if signed := len(payload) == 64:
            hashes["x-amz-content-sha256"] = hashlib.sha256()

        def finish(size: int) -> dict:
            for name in sums if "content-md5" not in names else [*sums, "content-md5"]:
                digest, claim = base64.b64encode(hashes[name].digest()).decode(), names.get(name, "")
                if claim != digest:
                    raise S3Error(400, "BadDigest", f"{name} of what arrived is {digest}, not {claim or 'given'}.")
            if signed and hashes["x-amz-content-sha256"].digest().hex() != payload:
                raise S3Error(400, "XAmzContentSHA256Mismatch", f"what arrived does not have the sha256 {payload}.")
            if size != int(names.get("x-amz-decoded-content-length", size)):
                raise S3Error(400, "IncompleteBody", f"{size} bytes arrived, not x-amz-decoded-content-length.")
            kept = {**self.attributes(), **{name: names[name] for name in sums}}
            return {"key": self.key, "etag": hashes["content-md5"].digest().hex(), "headers": kept}

        return self.server.files.write(self.receive(hashes, names), finish)

    def parsed(self) -> ElementTree.Element:
        """The request's body as XML, with the namespace taken off its tags."""
        if self.unread > SMALL:
            raise S3Error(400, "MalformedXML", f"a body of {self.unread} bytes is too large.")
        try:
            root = ElementTree.fromstring(b"".join(bytes(block) for block in self.receive({}, {})))
        except ElementTree.ParseError as error:
            raise S3Error(400, "MalformedXML", f"the body is not XML: {error}.") from error
        for element in root.iter():
            element.tag = element.tag.rpartition("}")[2]
        return root

    def answer(self, status: int, headers: dict[str, Any] | None = None, body: str = "", length: int = -1) -> None:
        while self.unread and not self.expected:  # an unread body would be taken for the next request
            got = self.rfile.read(min(self.unread, BLOCK))
            self.unread = self.unread - len(got) if got else 0
        self.close_connection |= self.expected
        data = f'<?xml version="1.0" encoding="UTF-8"?>\n{body}'.encode() if body else b""
        self.send_response(status)
        fields = {**(headers or {}), **({"Content-Type": "application/xml"} if body else {})}
        if status != 204:
            fields["Content-Length"] = len(data) if length < 0 else length
        for name, value in (fields | ({"Connection": "close"} if self.close_connection else {})).items():
            self.send_header(name, str(value))
        self.end_headers()
        if data and self.command != "HEAD" and status != 304:
            self.wfile.write(data)

    def fail(self, error: S3Error) -> None:
        where = quote(f"/{self.bucket}/{self.key}")
        self.answer(error.status, body=xml("Error", Code=error.code, Message=error, Resource=where))

    def allowed(self, current: dict | None) -> None:
        """Raise unless the request's conditions hold for the object as it is now."""
        match, none_match = self.headers.get("if-match"), self.headers.get("if-none-match")
        if match and not current:
            raise S3Error(404, "NoSuchKey", f"If-Match is {match}, but there is no such object.")
        if match and current and match != "*" and match.strip('"') != current["etag"]:
            raise S3Error(412, "PreconditionFailed", f'If-Match is {match}, the object is "{current["etag"]}".')
        if none_match and current and (none_match == "*" or none_match.strip('"') == current["etag"]):
            status = 304 if self.command in ("GET", "HEAD") else 412
            raise S3Error(status, "PreconditionFailed", f"If-None-Match is {none_match}: the object is there.")

    def described(self, meta: dict) -> dict[str, Any]:
        fields = {"ETag": f'"{meta["etag"]}"', "Last-Modified": formatdate(meta["modified"], usegmt=True)}
        sums = self.headers.get("x-amz-checksum-mode", "").upper() == "ENABLED" and not self.headers.get("range")
        kept = {k: v for k, v in meta["headers"].items() if sums or not k.startswith("x-amz-checksum-")}
        asked = {k.removeprefix("response-"): v for k, v in self.query.items() if k.startswith("response-")}
        return {"content-type": "binary/octet-stream", **kept, **asked, **fields, "Accept-Ranges": "bytes"}

    # -- routes -------------------------------------------------------------------------------------------------------

    def create_bucket(self) -> None:
        self.server.files.create(self.bucket)
        self.answer(200, {"Location": f"/{self.bucket}"})

    def head_bucket(self) -> None:
        self.server.files.find(self.bucket, "")
        self.answer(200, {"x-amz-bucket-region": "us-east-1"})

    def list_objects(self) -> None:
        query = self.query
        encode = quote if query.get("encoding-type") == "url" else str
        prefix, delimiter, most = query.get("prefix", ""), query.get("delimiter", ""), query.get("max-keys", "1000")
        token = base64.urlsafe_b64decode(query.get("continuation-token", "")).decode() or query.get("start-after", "")
        page = self.server.files.page(self.bucket, prefix, delimiter, token, min(1000, int(most)))
        more = {"NextContinuationToken": base64.urlsafe_b64encode(page.more.encode()).decode()} if page.more else {}
        items = [
            xml("Contents", Key=encode(meta["key"]), LastModified=iso(meta["modified"]), ETag=f'"{meta["etag"]}"',
                Size=meta["size"], StorageClass="STANDARD") for meta in page.entries
        ]  # fmt: skip
        items += [xml("CommonPrefixes", Prefix=encode(name)) for name in page.common]
        more |= {"EncodingType": "url"} if encode is quote else {}
        body = xml("ListBucketResult", *items, Name=self.bucket, Prefix=encode(prefix), Delimiter=encode(delimiter),
                   MaxKeys=most, KeyCount=len(items), IsTruncated=str(bool(page.more)).lower(), **more)  # fmt: skip
        self.answer(200, body=body)

    def delete_objects(self) -> None:
        wanted = self.parsed()
        keys = [element.findtext("Key") or "" for element in wanted.iter("Object")]
        for key in keys:
            self.server.files.delete(self.bucket, key)
        quiet = (wanted.findtext("Quiet") or "").lower() == "true"
        self.answer(200, body=xml("DeleteResult", *([] if quiet else [xml("Deleted", Key=key) for key in keys])))

    def put_object(self) -> None:
        if self.headers.get("x-amz-copy-source"):
            return self.copy_object()
        if len(self.key.encode()) > 1024:
            raise S3Error(400, "KeyTooLongError", "a key has at most 1024 bytes.")
        self.allowed(self.server.files.find(self.bucket, self.key))
        meta = self.server.files.commit(self.bucket, self.key, self.save(), self.allowed)
        self.answer(200, {"ETag": f'"{meta["etag"]}"'})

    def copy_object(self) -> None:
        source, _, version = self.headers["x-amz-copy-source"].partition("?")
        bucket, _, key = unquote(source).lstrip("/").partition("/")
        if version or "uploadId" in self.query:
            raise S3Error(501, "NotImplemented", "copying a version or into a multipart upload is not supported.")
        file, meta = self.server.files.open(bucket, key)
        replace = self.headers.get("x-amz-metadata-directive", "").upper() == "REPLACE"
        new = {"key": self.key, "etag": meta["etag"], "headers": self.attributes() if replace else meta["headers"]}
        with file:
            path = self.server.files.write(blocks([(file, meta["size"])]), lambda _: new)
        meta = self.server.files.commit(self.bucket, self.key, path, self.allowed)
        self.answer(200, body=xml("CopyObjectResult", ETag=f'"{meta["etag"]}"', LastModified=iso(meta["modified"])))

    def get_object(self) -> None:
        file, meta = self.server.files.open(self.bucket, self.key)
        with file:
            self.allowed(meta)
            size, headers = meta["size"], self.described(meta)
            start, end, status = 0, size, 200
            if span := re.fullmatch(r"bytes=(\d+)-(\d*)|bytes=-(\d+)", self.headers.get("range", "")):
                first, last, suffix = span.groups()
                start = max(0, size - int(suffix)) if suffix else int(first)
                end = min(size, int(last) + 1) if last else size
                if start >= end:
                    raise S3Error(416, "InvalidRange", f"{span[0]}, but the object has {size} bytes.")
                status, headers["Content-Range"] = 206, f"bytes {start}-{end - 1}/{size}"
            self.answer(status, headers, length=end - start)
            if self.command == "GET" and end > start:
                self.connection.sendfile(file, start, end - start)

    def delete_object(self) -> None:
        self.server.files.delete(self.bucket, self.key)
        self.answer(204)

    def create_upload(self) -> None:
        self.server.files.find(self.bucket, self.key)
        name = uuid.uuid4().hex
        (self.server.files.uploads / name).mkdir()
        about = {"bucket": self.bucket, "key": self.key, "headers": self.attributes()}
        (self.server.files.uploads / name / "upload.json").write_text(json.dumps(about))
        self.answer(200, body=xml("InitiateMultipartUploadResult", Bucket=self.bucket, Key=self.key, UploadId=name))

    def upload(self) -> tuple[Path, dict]:
        folder = self.server.files.uploads / re.sub(r"[^0-9a-f]", "", self.query["uploadId"])
        about = json.loads((folder / "upload.json").read_text()) if (folder / "upload.json").exists() else {}
        if (about.get("bucket"), about.get("key")) != (self.bucket, self.key):
            raise S3Error(404, "NoSuchUpload", "no such multipart upload: it was completed or aborted.")
        return folder, about

    def upload_part(self) -> None:
        if self.headers.get("x-amz-copy-source"):
            return self.copy_object()
        folder, _ = self.upload()
        number = int(self.query["partNumber"])
        path = self.save()
        etag = (read_meta(path) or {})["etag"]
        os.replace(path, folder / f"{number:05d}")
        self.answer(200, {"ETag": f'"{etag}"'})

    def complete_upload(self) -> None:
        folder, about = self.upload()
        wanted = [(int(p.findtext("PartNumber") or 0), p.findtext("ETag") or "") for p in self.parsed().iter("Part")]
        path = self.server.files.assemble(folder, wanted, {"key": self.key, "headers": about["headers"]})
        etag = self.server.files.commit(self.bucket, self.key, path, self.allowed)["etag"]
        shutil.rmtree(folder, ignore_errors=True)
        self.answer(200, body=xml("CompleteMultipartUploadResult", Bucket=self.bucket, Key=self.key, ETag=f'"{etag}"'))

    def abort_upload(self) -> None:
        shutil.rmtree(self.upload()[0], ignore_errors=True)
        self.answer(204)


ROUTES: dict[tuple[str, str, str], Callable[[Handler], None]] = {
    ("PUT", "bucket", ""): Handler.create_bucket,
    ("HEAD", "bucket", ""): Handler.head_bucket,
    ("GET", "bucket", "list-type"): Handler.list_objects,
    ("POST", "bucket", "delete"): Handler.delete_objects,
    ("PUT", "object", ""): Handler.put_object,
    ("GET", "object", ""): Handler.get_object,
    ("HEAD", "object", ""): Handler.get_object,
    ("DELETE", "object", ""): Handler.delete_object,
    ("POST", "object", "uploads"): Handler.create_upload,
    ("PUT", "object", "uploadId"): Handler.upload_part,
    ("POST", "object", "uploadId"): Handler.complete_upload,
    ("DELETE", "object", "uploadId"): Handler.abort_upload,
}


class Server(ThreadingHTTPServer):
    """The endpoint on a listening socket."""

    daemon_threads = True

    def __init__(self, listening: socket.socket, files: Files, access_key: str) -> None:
        super().__init__(listening.getsockname()[:2], Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.files, self.access_key = listening, files, access_key

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rekindle.local.services.s3", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="where the objects are kept")
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; 0 takes a free one")
    parser.add_argument("--fd", type=int, help="a listening socket to take over instead of --port")
    parser.add_argument("--bucket", action="append", default=[], help="a bucket to create if it is not there")
    parser.add_argument("--record", type=Path, help="a JSON file with this process' pid: it ends when that is gone")
    args = parser.parse_args()
    access_key = os.environ.get("AWS_ACCESS_KEY_ID")
    if not access_key:
        raise SystemExit("AWS_ACCESS_KEY_ID is not set: it is the key that clients must present. Set it.")
    listening = socket.socket(fileno=args.fd) if args.fd is not None else socket.create_server(("127.0.0.1", args.port))
    listening.listen(128)
    if args.record:
        end_unless_recorded(args.record)
    files = Files(args.root.resolve())
    for bucket in args.bucket:
        files.create(bucket)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    Server(listening, files, access_key).serve_forever(poll_interval=3600)


if __name__ == "__main__":
    main()
