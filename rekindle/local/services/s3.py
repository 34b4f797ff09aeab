"""An S3 endpoint for one machine: objects as files, with correct conditional writes.

    python -m rekindle.local.services.s3 --root .rekindle/s3 --port 9000 --bucket rekindle

No installable server both honours conditions and keeps files: moto holds everything in memory, rclone, s3rver and
localbucket accept a conditional write that must fail, ministack answers 200 after a failed disk write. This server
supports the requests of boto3, polars and MLflow (path style): objects, ranges, conditions, checksums, aws-chunked
bodies, multipart, ListObjectsV2; it answers all other requests with 501. s3_files.py has the format on disk. Clients
sign (signatures.py) with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of the server's environment.
"""

import argparse
import base64
import hashlib
import json
import mmap
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote
from xml.etree import ElementTree  # nosec B405  # see `parse_xml`

from argolocal.common.processes import end_unless_recorded
from rekindle.keys import FREE_BYTES
from rekindle.local.services.connections import Connections
from rekindle.local.services.s3_files import BLOCK_BYTES, CHECKSUMS, Files, Hash, S3Error, blocks, read_meta
from rekindle.local.services.s3_request import Request, xml

MAX_XML_BYTES = 8 << 20  # maximum size of an XML request body
STORED_HEADERS = ("content-type", "cache-control", "content-disposition", "content-language", "expires")
SUBRESOURCES = ("list-type", "location", "delete", "uploads", "uploadId")
PARAMETERS = {"prefix", "delimiter", "max-keys", "continuation-token", "start-after", "encoding-type", "fetch-owner"}
PARAMETERS |= {*SUBRESOURCES, "partNumber", "x-id", "AWSAccessKeyId", "Signature", "Expires"}
PREFIXES = ("X-Amz-", "response-")  # prefixes of further parameters of a presigned URL


def iso_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))


class Handler(Request):
    """Handles one request; ROUTES maps requests to methods."""

    def act(self) -> None:
        kind = "object" if self.key else "bucket" if self.bucket else "service"
        unknown_parameters = [name for name in self.query if name not in PARAMETERS and not name.startswith(PREFIXES)]
        parameter = next(iter([*unknown_parameters, *(name for name in SUBRESOURCES if name in self.query)]), "")
        action = ROUTES.get((self.command, kind, parameter))
        if not action:
            raise S3Error(501, "NotImplemented", f"{self.command} {kind} {parameter} is not supported here.")
        action(self)

    def attributes(self) -> dict[str, str]:
        """Return the request's headers that are stored with an object."""
        values = {name.lower(): value for name, value in self.headers.items()}
        coding = values.get("content-encoding", "").replace("aws-chunked", "").strip(", ")
        headers = {k: v for k, v in values.items() if k in STORED_HEADERS or k.startswith("x-amz-meta-")}
        return headers | ({"content-encoding": coding} if coding else {})

    def save(self) -> Path:
        """Write the request's body to a temporary file, and verify its length and all checksums."""
        names = {name.lower(): value for name, value in self.headers.items()}
        checksum_names = [
            name for name in [*names, names.get("x-amz-trailer", "").lower()] if name.startswith("x-amz-checksum-")
        ]
        if unknown_checksums := [name for name in checksum_names if name.rpartition("-")[2] not in CHECKSUMS]:
            raise S3Error(
                501, "NotImplemented", f"{unknown_checksums[0]} is not supported: use {', '.join(CHECKSUMS)}."
            )
        hashes: dict[str, Hash] = {name: CHECKSUMS[name.rpartition("-")[2]]() for name in checksum_names}
        hashes["content-md5"] = hashlib.md5(usedforsecurity=False)

        def finish(size: int) -> dict:
            for name in checksum_names if "content-md5" not in names else [*checksum_names, "content-md5"]:
                digest, claim = base64.b64encode(hashes[name].digest()).decode(), names.get(name, "")
                if claim != digest:
                    message = f"{name} of the received body is {digest}, not {claim or 'declared'}."
                    raise S3Error(400, "BadDigest", message)
            if size != int(names.get("x-amz-decoded-content-length", size)):
                raise S3Error(400, "IncompleteBody", f"received {size} bytes, not x-amz-decoded-content-length.")
            headers = {**self.attributes(), **{name: names[name] for name in checksum_names}}
            return {"key": self.key, "etag": hashes["content-md5"].digest().hex(), "headers": headers}

        return self.files.write(self.receive(hashes, names), finish)

    def parse_xml(self) -> ElementTree.Element:
        """Parse the request's body as XML; remove the XML namespace from its tags."""
        if self.unread_bytes > MAX_XML_BYTES:
            raise S3Error(400, "MalformedXML", f"a body of {self.unread_bytes} bytes is too large.")
        text = b"".join(bytes(block) for block in self.receive({}, {}))
        if b"<!" in text:
            raise S3Error(400, "MalformedXML", "the body declares a document type: remove it.")
        try:
            root = ElementTree.fromstring(text)  # nosec B314  # without a DTD
        except ElementTree.ParseError as error:
            raise S3Error(400, "MalformedXML", f"the body is not XML: {error}.") from error
        for element in root.iter():
            element.tag = element.tag.rpartition("}")[2]
        return root

    def check_conditions(self, current: dict | None) -> None:
        """Raise S3Error if the current object does not satisfy the request's conditions."""
        match, none_match = self.headers.get("if-match"), self.headers.get("if-none-match")
        if match and not current:
            raise S3Error(404, "NoSuchKey", f"If-Match is {match}, but the object does not exist.")
        if match and current and match != "*" and match.strip('"') != current["etag"]:
            raise S3Error(412, "PreconditionFailed", f'If-Match is {match}, the ETag is "{current["etag"]}".')
        if none_match and current and (none_match == "*" or none_match.strip('"') == current["etag"]):
            status = 304 if self.command in ("GET", "HEAD") else 412
            raise S3Error(status, "PreconditionFailed", f"If-None-Match is {none_match}, but the object exists.")

    def response_headers(self, meta: dict) -> dict[str, Any]:
        fields = {"ETag": f'"{meta["etag"]}"', "Last-Modified": formatdate(meta["modified"], usegmt=True)}
        with_checksums = self.headers.get("x-amz-checksum-mode", "").upper() == "ENABLED" and not self.headers.get(
            "range"
        )
        stored_headers = {
            k: v for k, v in meta["headers"].items() if with_checksums or not k.startswith("x-amz-checksum-")
        }
        requested_headers = {k.removeprefix("response-"): v for k, v in self.query.items() if k.startswith("response-")}
        return {
            "content-type": "binary/octet-stream",
            **stored_headers,
            **requested_headers,
            **fields,
            "Accept-Ranges": "bytes",
        }

    # -- routes -------------------------------------------------------------------------------------------------------

    def create_bucket(self) -> None:
        self.files.create(self.bucket)
        self.answer(200, {"Location": f"/{self.bucket}"})

    def head_bucket(self) -> None:
        self.files.find(self.bucket, "")
        free = shutil.disk_usage(self.files.root).free
        self.answer(200, {"x-amz-bucket-region": "us-east-1", FREE_BYTES: free})

    def locate_bucket(self) -> None:
        self.files.find(self.bucket, "")
        self.answer(200, body=xml("LocationConstraint"))  # an empty location means us-east-1

    def list_objects(self) -> None:
        query = self.query
        encode = quote if query.get("encoding-type") == "url" else str
        prefix, delimiter, limit = query.get("prefix", ""), query.get("delimiter", ""), query.get("max-keys", "1000")
        token = base64.urlsafe_b64decode(query.get("continuation-token", "")).decode() or query.get("start-after", "")
        page = self.files.page(self.bucket, prefix, delimiter, token, min(1000, int(limit)))
        next_token = base64.urlsafe_b64encode(page.next_after.encode()).decode()
        optional_fields = {"NextContinuationToken": next_token} if next_token else {}
        items = [
            xml("Contents", Key=encode(meta["key"]), LastModified=iso_time(meta["modified"]),
                ETag=f'"{meta["etag"]}"', Size=meta["size"], StorageClass="STANDARD") for meta in page.entries
        ]  # fmt: skip
        items += [xml("CommonPrefixes", Prefix=encode(name)) for name in page.common_prefixes]
        optional_fields |= {"EncodingType": "url"} if encode is quote else {}
        body = xml("ListBucketResult", *items, Name=self.bucket, Prefix=encode(prefix), Delimiter=encode(delimiter),
                   MaxKeys=limit, KeyCount=len(items), IsTruncated=str(bool(next_token)).lower(),
                   **optional_fields)  # fmt: skip
        self.answer(200, body=body)

    def delete_objects(self) -> None:
        request = self.parse_xml()
        keys = [element.findtext("Key") or "" for element in request.iter("Object")]
        for key in keys:
            self.files.delete(self.bucket, key)
        is_quiet = (request.findtext("Quiet") or "").lower() == "true"
        self.answer(200, body=xml("DeleteResult", *([] if is_quiet else [xml("Deleted", Key=key) for key in keys])))

    def put_object(self) -> None:
        if self.headers.get("x-amz-copy-source"):
            return self.copy_object()
        if len(self.key.encode()) > 1024:
            raise S3Error(400, "KeyTooLongError", "a key has at most 1024 bytes.")
        self.check_conditions(self.files.find(self.bucket, self.key))
        meta = self.files.commit(self.bucket, self.key, self.save(), self.check_conditions)
        self.answer(200, {"ETag": f'"{meta["etag"]}"'})

    def copy_object(self) -> None:
        source, _, version = self.headers["x-amz-copy-source"].partition("?")
        bucket, _, key = unquote(source).lstrip("/").partition("/")
        if version or "uploadId" in self.query:
            raise S3Error(501, "NotImplemented", "copying a version or into a multipart upload is not supported.")
        file, meta = self.files.open(bucket, key)
        replace = self.headers.get("x-amz-metadata-directive", "").upper() == "REPLACE"
        headers = self.attributes() if replace else meta["headers"]
        copied_meta = {"key": self.key, "etag": meta["etag"], "headers": headers}
        with file:
            path = self.files.write(blocks([(file, meta["size"])]), lambda _: copied_meta)
        meta = self.files.commit(self.bucket, self.key, path, self.check_conditions)
        self.answer(
            200, body=xml("CopyObjectResult", ETag=f'"{meta["etag"]}"', LastModified=iso_time(meta["modified"]))
        )

    def get_object(self) -> None:
        file, meta = self.files.open(self.bucket, self.key)
        with file:
            self.check_conditions(meta)
            size, headers = meta["size"], self.response_headers(meta)
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
        self.files.delete(self.bucket, self.key)
        self.answer(204)

    def create_upload(self) -> None:
        self.files.find(self.bucket, self.key)
        name = uuid.uuid4().hex
        (self.files.uploads / name).mkdir()
        upload = {"bucket": self.bucket, "key": self.key, "headers": self.attributes()}
        (self.files.uploads / name / "upload.json").write_text(json.dumps(upload))
        self.answer(200, body=xml("InitiateMultipartUploadResult", Bucket=self.bucket, Key=self.key, UploadId=name))

    def find_upload(self) -> tuple[Path, dict]:
        folder = self.files.uploads / re.sub(r"[^0-9a-f]", "", self.query["uploadId"])
        upload = json.loads((folder / "upload.json").read_text()) if (folder / "upload.json").exists() else {}
        if (upload.get("bucket"), upload.get("key")) != (self.bucket, self.key):
            raise S3Error(404, "NoSuchUpload", "no such multipart upload: it was completed or aborted.")
        return folder, upload

    def upload_part(self) -> None:
        if self.headers.get("x-amz-copy-source"):
            return self.copy_object()
        folder, _ = self.find_upload()
        if not re.fullmatch(r"[0-9]{1,5}", number := self.query.get("partNumber", "")):
            raise S3Error(400, "InvalidArgument", f"partNumber is {number!r}: it must be a number from 1 to 10000.")
        path = self.save()
        etag = (read_meta(path) or {})["etag"]
        os.replace(path, folder / f"{int(number):05d}")
        self.answer(200, {"ETag": f'"{etag}"'})

    def complete_upload(self) -> None:
        folder, upload = self.find_upload()
        elements = self.parse_xml().iter("Part")
        parts = [(int(element.findtext("PartNumber") or 0), element.findtext("ETag") or "") for element in elements]
        path = self.files.assemble(folder, parts, {"key": self.key, "headers": upload["headers"]})
        etag = self.files.commit(self.bucket, self.key, path, self.check_conditions)["etag"]
        shutil.rmtree(folder, ignore_errors=True)
        self.answer(200, body=xml("CompleteMultipartUploadResult", Bucket=self.bucket, Key=self.key, ETag=f'"{etag}"'))

    def abort_upload(self) -> None:
        shutil.rmtree(self.find_upload()[0], ignore_errors=True)
        self.answer(204)


ROUTES: dict[tuple[str, str, str], Callable[[Handler], None]] = {
    ("PUT", "bucket", ""): Handler.create_bucket,
    ("HEAD", "bucket", ""): Handler.head_bucket,
    ("GET", "bucket", "location"): Handler.locate_bucket,
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rekindle.local.services.s3", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="directory of the objects")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: a free port)")
    parser.add_argument("--fd", type=int, help="descriptor of a listening socket to use instead of --port")
    parser.add_argument("--bucket", action="append", default=[], help="bucket to create if it does not exist")
    parser.add_argument("--record", type=Path, help="exit when this JSON file is missing or has another pid")
    args = parser.parse_args()
    access_key, secret_key = (os.environ.get(f"AWS_{name}") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
    if not (access_key and secret_key):
        raise SystemExit(
            "AWS_ACCESS_KEY_ID or AWS_SECRET_ACCESS_KEY is not set: clients must sign with them. Set both."
        )
    listening_socket = (
        socket.socket(fileno=args.fd) if args.fd is not None else socket.create_server(("127.0.0.1", args.port))
    )
    listening_socket.listen(4096)
    if args.record:
        end_unless_recorded(args.record)
    files = Files(args.root.resolve())
    for bucket in args.bucket:
        files.create(bucket)
    print(f"http://127.0.0.1:{listening_socket.getsockname()[1]}", flush=True)
    thread_data = threading.local()

    def answer(connection: socket.socket, head: bytes) -> bool:
        if not hasattr(thread_data, "buffer"):
            thread_data.buffer = memoryview(
                mmap.mmap(-1, BLOCK_BYTES)
            )  # memory is allocated only when it is written to
        return not Handler(connection, head, (access_key, secret_key), thread_data.buffer, files).close_connection

    Connections(listening_socket, answer).serve_forever()


if __name__ == "__main__":
    main()
