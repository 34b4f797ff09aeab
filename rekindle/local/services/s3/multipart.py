"""The operations of the embedded S3 endpoint on multipart uploads."""

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree  # nosec B405  # see `parse_xml`

from rekindle.local.services.s3.checksums import PREFIX, checksum_names, hash_of_algorithm
from rekindle.local.services.s3.conditions import check_copy_source
from rekindle.local.services.s3.format import Content, Meta, S3Error, blocks, read_meta
from rekindle.local.services.s3.object_operations import (
    MAX_ENTRIES,
    ObjectRequest,
    checksum_headers,
    format_boolean,
    iso_time,
)
from rekindle.local.services.s3.request import MAX_BODY_BYTES, printable, xml
from rekindle.local.services.s3.uploads import Part, Upload
from rekindle.local.services.s3.values import (
    children,
    parse_copy_range,
    parse_integer,
    parse_part_number,
)

COMPOSITE = "COMPOSITE"  # type of the checksum of the parts' checksums


class MultipartRequest(ObjectRequest):
    """A request with the operations on buckets, objects and multipart uploads."""

    def create_upload(self) -> None:
        self.files.find(self.bucket, self.key)
        algorithm = self.fields.get("x-amz-checksum-algorithm", "")
        headers: dict[str, str] = {}
        if algorithm:
            hash_of_algorithm(algorithm)
            headers["x-amz-checksum-algorithm"] = algorithm.upper()
            headers["x-amz-checksum-type"] = COMPOSITE

        upload = self.files.uploads.start(
            self.bucket, self.key, self.attributes(), algorithm.lower()
        )
        body = xml(
            "InitiateMultipartUploadResult",
            Bucket=self.bucket,
            Key=printable(self.key),
            UploadId=upload.id,
        )
        self.answer(200, headers, body=body)

    def find_upload(self) -> Upload:
        return self.files.uploads.find(self.bucket, self.key, self.query["uploadId"])

    def upload_part(self) -> None:
        if "x-amz-copy-source" in self.fields:
            return self.copy_part()

        number = parse_part_number(self.query.get("partNumber", ""))
        upload = self.find_upload()

        meta = self.add_part(upload, number, self.save())
        self.answer(200, {"ETag": f'"{meta["etag"]}"', **checksum_headers(meta)})

    def add_part(self, upload: Upload, number: int, path: Path) -> Meta:
        """Rename a temporary file to a part of an upload; return its metadata."""
        try:
            meta = read_meta(path)
            if not meta:
                raise S3Error(500, "InternalError", f"{path} cannot be read back.")
            if upload.checksum and PREFIX + upload.checksum not in meta["headers"]:
                message = (
                    "Checksum Type mismatch occurred, expected checksum Type:"
                    f" {upload.checksum}: send the checksum of each part."
                )
                raise S3Error(400, "InvalidRequest", message)
            self.files.uploads.add(upload, number, path)
        finally:
            path.unlink(missing_ok=True)

        return meta

    def copy_part(self) -> None:
        number = parse_part_number(self.query.get("partNumber", ""))
        upload = self.find_upload()
        bucket, key = self.copy_source()
        file, source = self.files.open(bucket, key)

        with file:
            check_copy_source(self.fields, source)
            start, end = parse_copy_range(
                self.fields.get("x-amz-copy-source-range"), source["size"]
            )
            if end - start > MAX_BODY_BYTES:
                raise S3Error(400, "InvalidRequest", "a part has at most 5 GiB: copy a range.")

            md5 = hashlib.md5(usedforsecurity=False)
            checksums = dict([hash_of_algorithm(upload.checksum)] if upload.checksum else [])

            def hashed() -> Iterator[bytes]:
                for block in blocks([(file, end)], start):
                    for value in (md5, *checksums.values()):
                        value.update(block)
                    yield block

            def finish(_: int) -> Content:
                headers = {
                    name: base64.b64encode(value.digest()).decode()
                    for name, value in checksums.items()
                }
                return {"key": self.key, "etag": md5.hexdigest(), "headers": headers}

            path = self.files.write(hashed(), finish)

        meta = self.add_part(upload, number, path)
        body = xml(
            "CopyPartResult",
            ETag=f'"{meta["etag"]}"',
            LastModified=iso_time(meta["modified"]),
        )
        self.answer(200, body=body)

    def complete_upload(self) -> None:
        upload = self.find_upload()
        if checksum_names(self.fields):
            message = (
                "a checksum of a complete multipart upload is not supported: send the checksums of"
                " its parts."
            )
            raise S3Error(501, "NotImplemented", message)

        request = self.read_xml("CompleteMultipartUpload", needs_checksum=False)
        parts = [_parse_part(element) for element in request if element.tag == "Part"]
        if not parts:
            raise S3Error(400, "MalformedXML", "the body must have at least one element <Part>.")

        declared_size = self.fields.get("x-amz-mp-object-size")
        if declared_size is None:
            size = None
        else:
            size = parse_integer("x-amz-mp-object-size", declared_size, 10**18)

        path = self.files.uploads.assemble(upload, parts, size)
        etag = self.files.commit(self.bucket, self.key, path, self.check_write)["etag"]
        self.files.uploads.remove(upload)

        body = xml(
            "CompleteMultipartUploadResult",
            Bucket=self.bucket,
            Key=printable(self.key),
            ETag=f'"{etag}"',
        )

        self.answer(200, body=body)

    def abort_upload(self) -> None:
        self.files.uploads.remove(self.find_upload())
        self.answer(204)

    def list_uploads(self) -> None:
        self.files.find(self.bucket, "")
        query = self.query
        encode = self.encoding()
        limit = min(
            MAX_ENTRIES, parse_integer("max-uploads", query.get("max-uploads") or str(MAX_ENTRIES))
        )
        prefix = query.get("prefix", "")
        marker = query.get("key-marker", "")
        # S3 ignores an upload-id-marker without a key-marker
        id_marker = query.get("upload-id-marker", "") if marker else ""

        uploads = [
            upload
            for upload in self.files.uploads.of_bucket(self.bucket)
            if upload.key.startswith(prefix) and _is_after(upload, marker, id_marker)
        ]

        page = uploads[:limit]
        is_truncated = len(uploads) > len(page) > 0

        items = [
            xml(
                "Upload",
                Key=encode(upload.key),
                UploadId=upload.id,
                StorageClass="STANDARD",
                Initiated=iso_time(upload.started),
            )
            for upload in page
        ]

        fields = {
            "Bucket": self.bucket,
            "KeyMarker": encode(marker),
            "UploadIdMarker": id_marker,
            "Prefix": encode(prefix),
            "MaxUploads": limit,
            "IsTruncated": format_boolean(is_truncated),
        }

        if is_truncated:
            fields["NextKeyMarker"] = encode(page[-1].key)
            fields["NextUploadIdMarker"] = page[-1].id

        if encode is quote:
            fields["EncodingType"] = "url"

        self.answer(200, body=xml("ListMultipartUploadsResult", *items, **fields))

    def list_parts(self) -> None:
        upload = self.find_upload()
        limit = min(
            MAX_ENTRIES, parse_integer("max-parts", self.query.get("max-parts") or str(MAX_ENTRIES))
        )
        marker = parse_integer("part-number-marker", self.query.get("part-number-marker") or "0")
        parts = [
            (number, meta) for number, meta in self.files.uploads.parts(upload) if number > marker
        ]

        page = parts[:limit]
        is_truncated = len(parts) > len(page) > 0

        items = [
            xml(
                "Part",
                PartNumber=number,
                LastModified=iso_time(meta["modified"]),
                ETag=f'"{meta["etag"]}"',
                Size=meta["size"],
            )
            for number, meta in page
        ]

        fields = {
            "Bucket": self.bucket,
            "Key": printable(self.key),
            "UploadId": upload.id,
            "PartNumberMarker": marker,
            "NextPartNumberMarker": page[-1][0] if page else 0,
            "MaxParts": limit,
            "IsTruncated": format_boolean(is_truncated),
            "StorageClass": "STANDARD",
        }

        self.answer(200, body=xml("ListPartsResult", *items, **fields))


def _is_after(upload: Upload, marker: str, id_marker: str) -> bool:
    """Return True if the upload comes after the markers, so that the listing contains it."""
    if id_marker:
        return upload.position() > (marker.encode(), id_marker)
    return upload.key.encode() > marker.encode()


def _parse_part(element: ElementTree.Element) -> Part:
    """Parse a part that CompleteMultipartUpload lists."""
    texts = children(element)
    checksums = {
        f"x-amz-checksum-{name.removeprefix('Checksum').lower()}": value
        for name, value in texts.items()
        if name.startswith("Checksum")
    }
    number = parse_part_number(texts.get("PartNumber", "").strip())
    return Part(number, texts.get("ETag", "").strip().strip('"'), checksums)
