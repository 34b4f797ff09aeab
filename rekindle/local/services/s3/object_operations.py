"""The operations of the embedded S3 endpoint on buckets and objects."""

import base64
import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote
from xml.etree import ElementTree  # nosec B405  # see `parse_xml`

from rekindle.keys import FREE_BYTES
from rekindle.local.services.s3.checksums import (
    PREFIX,
    Checksums,
    Hash,
    checksum_names,
    hash_of_algorithm,
)
from rekindle.local.services.s3.conditions import (
    applies_to_range,
    check_copy_source,
    check_read,
    check_write,
    validators,
)
from rekindle.local.services.s3.format import Content, Meta, S3Error, blocks
from rekindle.local.services.s3.object_files import Position
from rekindle.local.services.s3.request import MAX_BODY_BYTES, Request, printable, xml
from rekindle.local.services.s3.values import (
    OVERRIDES,
    check_key,
    children,
    format_token,
    parse_copy_source,
    parse_header_value,
    parse_integer,
    parse_range,
    parse_token,
    parse_xml,
)

MAX_XML_BYTES = 8 << 20  # maximum size of an XML request body
MAX_ENTRIES = 1000  # maximum number of entries in a page of a listing, and in DeleteObjects
MAX_USER_METADATA_BYTES = 2 << 10
METADATA_PREFIX = "x-amz-meta-"
STORED_HEADERS = (
    "content-type",
    "cache-control",
    "content-disposition",
    "content-language",
    "expires",
)


def iso_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))


def format_boolean(value: object) -> str:
    if value:
        return "true"
    return "false"


def checksum_headers(meta: Content) -> dict[str, str]:
    """Return the headers with the checksums of an object or a part."""
    return {name: value for name, value in meta["headers"].items() if name.startswith(PREFIX)}


class ObjectRequest(Request):
    """A request with the operations on buckets and objects. `fields`: the request's headers, by
    lower-case name."""

    fields: dict[str, str]

    def attributes(self) -> dict[str, str]:
        """Return the request's headers that are stored with an object."""
        metadata = {
            name: value for name, value in self.fields.items() if name.startswith(METADATA_PREFIX)
        }

        size = sum(
            len(name) - len(METADATA_PREFIX) + len(value) for name, value in metadata.items()
        )
        if size > MAX_USER_METADATA_BYTES:
            message = (
                f"the metadata headers have {size} bytes: at most {MAX_USER_METADATA_BYTES} are"
                " allowed."
            )
            raise S3Error(400, "MetadataTooLarge", message)

        headers = {name: value for name, value in self.fields.items() if name in STORED_HEADERS}
        codings = [coding.strip() for coding in self.fields.get("content-encoding", "").split(",")]

        coding = ", ".join(coding for coding in codings if coding not in ("", "aws-chunked"))
        if coding:
            headers["content-encoding"] = coding

        return {**headers, **metadata}

    def save(self) -> Path:
        """Write the request's body to a temporary file, and verify its length and all checksums."""
        if "content-length" not in self.fields:
            raise S3Error(411, "MissingContentLength", "Content-Length is missing: send it.")
        checksums = Checksums({**self.fields})
        attributes = self.attributes()

        def finish(size: int) -> Content:
            checksums.verify(size)
            headers = {**attributes, **checksums.stored_headers()}
            return {"key": self.key, "etag": checksums.etag, "headers": headers}

        return self.files.write(self.receive(checksums), finish)

    def read_xml(self, tag: str, needs_checksum: bool) -> ElementTree.Element:
        """Read the request's body, an XML document with the root `tag`, and verify its
        checksums."""
        if self.unread_bytes > MAX_XML_BYTES:
            raise S3Error(400, "MalformedXML", f"a body of {self.unread_bytes} bytes is too large.")

        checksums = Checksums({**self.fields})
        if needs_checksum and not checksums.is_claimed:
            raise S3Error(
                400, "InvalidRequest", "Missing required header for this request: Content-MD5"
            )

        data = b"".join(bytes(block) for block in self.receive(checksums))
        checksums.verify(len(data))
        return parse_xml(data, tag)

    def response_headers(self, meta: Meta) -> dict[str, Any]:
        headers: dict[str, Any] = {"content-type": "binary/octet-stream", **meta["headers"]}
        with_checksums = self.fields.get("x-amz-checksum-mode", "").upper() == "ENABLED"
        if not with_checksums or "range" in self.fields:
            headers = {
                name: value
                for name, value in headers.items()
                if not name.startswith("x-amz-checksum-")
            }

        for parameter, name in OVERRIDES.items():
            if parameter in self.query:
                headers[name] = parse_header_value(parameter, self.query[parameter])

        return {**headers, **validators(meta), "Accept-Ranges": "bytes"}

    def check_write(self, current: Meta | None) -> None:
        check_write(self.fields, current)

    def encoding(self) -> Callable[[str], str]:
        """Return the function that encodes keys of a listing."""
        kind = self.query.get("encoding-type")
        if kind not in (None, "url"):
            raise S3Error(400, "InvalidArgument", "Invalid Encoding Method specified in Request")
        if kind:
            return quote
        return str

    def create_bucket(self) -> None:
        if self.unread_bytes:
            self.read_xml("CreateBucketConfiguration", needs_checksum=False)
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
        if query["list-type"] != "2":
            raise S3Error(
                400, "InvalidArgument", f"list-type is {query['list-type'][:40]!r}: it must be 2."
            )

        encode = self.encoding()
        prefix = query.get("prefix", "")
        delimiter = query.get("delimiter", "")
        limit = min(
            MAX_ENTRIES, parse_integer("max-keys", query.get("max-keys") or str(MAX_ENTRIES))
        )

        if query.get("continuation-token"):
            after = parse_token(query["continuation-token"])
        else:
            after = Position(query.get("start-after", ""))

        page = self.files.page(self.bucket, prefix, delimiter, after, limit)
        items = [
            xml(
                "Contents",
                Key=encode(meta["key"]),
                LastModified=iso_time(meta["modified"]),
                ETag=f'"{meta["etag"]}"',
                Size=meta["size"],
                StorageClass="STANDARD",
            )
            for meta in page.entries
        ]

        items += [xml("CommonPrefixes", Prefix=encode(name)) for name in page.common_prefixes]

        fields = {
            "Name": self.bucket,
            "Prefix": encode(prefix),
            "Delimiter": encode(delimiter),
            "MaxKeys": limit,
            "KeyCount": len(items),
            "IsTruncated": format_boolean(page.next_after),
        }

        if page.next_after:
            fields["NextContinuationToken"] = format_token(page.next_after)
        if "continuation-token" in query:
            fields["ContinuationToken"] = query["continuation-token"]
        if "start-after" in query:
            fields["StartAfter"] = encode(query["start-after"])
        if encode is quote:
            fields["EncodingType"] = "url"

        self.answer(200, body=xml("ListBucketResult", *items, **fields))

    def delete_objects(self) -> None:
        self.files.find(self.bucket, "")
        request = self.read_xml("Delete", needs_checksum=True)

        objects = [children(element) for element in request if element.tag == "Object"]
        if not 1 <= len(objects) <= MAX_ENTRIES or not all(item.get("Key") for item in objects):
            message = f"the body must have 1 to {MAX_ENTRIES} elements <Object>, each with a <Key>."
            raise S3Error(400, "MalformedXML", message)

        is_quiet = (request.findtext("Quiet") or "").strip().lower() == "true"
        answers = []

        for item in objects:
            try:
                self.delete_listed(item)
                if not is_quiet:
                    answers.append(xml("Deleted", Key=item["Key"]))
            except S3Error as error:
                answers.append(
                    xml("Error", Key=item["Key"], Code=error.code, Message=printable(str(error)))
                )

        self.answer(200, body=xml("DeleteResult", *answers))

    def delete_listed(self, item: Mapping[str, str]) -> None:
        """Delete an object listed in a DeleteObjects request, if the conditions of its XML element
        hold."""
        key = item["Key"]
        check_key(key)

        if item.get("VersionId", "null") != "null":
            raise S3Error(
                404, "NoSuchVersion", "the bucket does not keep versions: leave out VersionId."
            )

        unsupported_names = item.keys() - {"Key", "VersionId", "ETag"}
        if unsupported_names:
            raise S3Error(
                501,
                "NotImplemented",
                f"{min(unsupported_names)[:80]!r} of an object is not supported here.",
            )

        conditions = {"if-match": item["ETag"]} if "ETag" in item else {}
        self.files.delete(self.bucket, key, lambda current: check_write(conditions, current))

    def put_object(self) -> None:
        if "x-amz-copy-source" in self.fields:
            return self.copy_object()
        self.check_write(self.files.find(self.bucket, self.key))
        meta = self.files.commit(self.bucket, self.key, self.save(), self.check_write)
        self.answer(200, {"ETag": f'"{meta["etag"]}"', **checksum_headers(meta)})

    def copy_object(self) -> None:
        bucket, key = self.copy_source()
        directive = self.fields.get("x-amz-metadata-directive", "COPY")
        if directive not in ("COPY", "REPLACE"):
            raise S3Error(
                400, "InvalidArgument", f"Unknown metadata directive: {directive[:40]!r}."
            )

        if directive == "COPY" and (bucket, key) == (self.bucket, self.key):
            message = (
                "This copy request is illegal because it is trying to copy an object to itself"
                " without changes."
            )
            raise S3Error(400, "InvalidRequest", message)

        self.files.find(self.bucket, self.key)
        file, source = self.files.open(bucket, key)
        with file:
            check_copy_source(self.fields, source)
            if source["size"] > MAX_BODY_BYTES:
                message = (
                    "The specified copy source is larger than the maximum allowable size for a"
                    f" copy source: {MAX_BODY_BYTES}"
                )
                raise S3Error(400, "InvalidRequest", message)

            if directive == "REPLACE":
                # keep the checksums, because the copied data is the same
                headers = {**self.attributes(), **checksum_headers(source)}
            else:
                headers = source["headers"]

            path = self.files.write(*self.prepare_copy(file, source, headers))

        meta = self.files.commit(self.bucket, self.key, path, self.check_write)
        checksum_fields = {
            f"Checksum{name.removeprefix(PREFIX).upper()}": value
            for name, value in checksum_headers(meta).items()
        }

        body = xml(
            "CopyObjectResult",
            ETag=f'"{meta["etag"]}"',
            LastModified=iso_time(meta["modified"]),
            **checksum_fields,
        )
        self.answer(200, body=body)

    def copy_source(self) -> tuple[str, str]:
        """Return bucket and key of the source of a copy."""
        claims = checksum_names(self.fields)
        if claims:
            message = f"{claims[0]} of a copy is not supported: use x-amz-checksum-algorithm."
            raise S3Error(501, "NotImplemented", message)

        return parse_copy_source(self.fields["x-amz-copy-source"])

    def prepare_copy(
        self, file: BinaryIO, source: Meta, headers: dict[str, str]
    ) -> tuple[Iterator[bytes], Callable[[int], Content]]:
        """Return the data blocks of a copied object, and a function that returns its metadata with
        the checksum that the request asks for."""
        hashes: dict[str, Hash] = {}
        algorithm = self.fields.get("x-amz-checksum-algorithm")
        if algorithm:
            name, value = hash_of_algorithm(algorithm)
            hashes[name] = value
            headers = {
                header: text for header, text in headers.items() if not header.startswith(PREFIX)
            }

        # the ETag of a multipart object depends on its parts, and a copy has no parts
        md5 = hashlib.md5(usedforsecurity=False) if "-" in source["etag"] else None
        all_hashes = [*hashes.values(), *([md5] if md5 else [])]

        def hashed() -> Iterator[bytes]:
            for block in blocks([(file, source["size"])]):
                for value in all_hashes:
                    value.update(block)
                yield block

        def finish(_: int) -> Content:
            checksums = {
                name: base64.b64encode(value.digest()).decode() for name, value in hashes.items()
            }
            etag = md5.hexdigest() if md5 else source["etag"]
            return {"key": self.key, "etag": etag, "headers": {**headers, **checksums}}

        return hashed(), finish

    def get_object(self) -> None:
        file, meta = self.files.open(self.bucket, self.key)
        with file:
            check_read(self.fields, meta)
            headers = self.response_headers(meta)
            size = meta["size"]
            status = 200
            start = 0
            end = size

            if applies_to_range(self.fields, meta):
                span = parse_range(self.fields.get("range", ""), size)
            else:
                span = None

            if span:
                status = 206
                start, end = span
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"

            self.answer(status, headers, length=end - start)
            if self.command == "GET" and end > start:
                self.connection.sendfile(file, start, end - start)

    def delete_object(self) -> None:
        self.files.delete(self.bucket, self.key, self.check_write)
        self.answer(204)
