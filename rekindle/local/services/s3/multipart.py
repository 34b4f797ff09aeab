"""The operations of the embedded S3 endpoint on multipart uploads."""

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree  # nosec B405  # see `parse_xml`

from rekindle.local.services.s3.checksums import CHECKSUM_PREFIX, create_hash, list_checksum_headers
from rekindle.local.services.s3.conditions import check_copy_conditions
from rekindle.local.services.s3.format import (
    ClientMetadata,
    ObjectMetadata,
    S3Error,
    read_file_blocks,
    read_metadata,
)
from rekindle.local.services.s3.object_operations import (
    MAX_LISTED_ENTRIES,
    ObjectRequest,
    format_boolean,
    format_iso_time,
    select_checksum_headers,
)
from rekindle.local.services.s3.request import MAX_BODY_BYTES, make_xml_element, replace_unprintable
from rekindle.local.services.s3.uploads import ListedPart, Upload
from rekindle.local.services.s3.values import (
    parse_copy_range,
    parse_integer,
    parse_part_number,
    read_child_texts,
)

# value of x-amz-checksum-type for a checksum that is computed from the checksums of the parts
COMPOSITE_CHECKSUM = "COMPOSITE"


class MultipartRequest(ObjectRequest):
    """A request to the embedded S3 endpoint, with a method for each operation on buckets, objects
    and multipart uploads."""

    def create_upload(self) -> None:
        self.files.find(self.bucket, self.key)
        checksum_algorithm = self.fields.get("x-amz-checksum-algorithm", "")
        checksum_headers: dict[str, str] = {}
        if checksum_algorithm:
            create_hash(checksum_algorithm)
            checksum_headers["x-amz-checksum-algorithm"] = checksum_algorithm.upper()
            checksum_headers["x-amz-checksum-type"] = COMPOSITE_CHECKSUM

        upload = self.files.uploads.start(
            self.bucket, self.key, self.attributes(), checksum_algorithm.lower()
        )
        response_xml = make_xml_element(
            "InitiateMultipartUploadResult",
            Bucket=self.bucket,
            Key=replace_unprintable(self.key),
            UploadId=upload.id,
        )
        self.answer(200, checksum_headers, body=response_xml)

    def find_upload(self) -> Upload:
        return self.files.uploads.find(self.bucket, self.key, self.query["uploadId"])

    def upload_part(self) -> None:
        if "x-amz-copy-source" in self.fields:
            return self.copy_part()

        part_number = parse_part_number(self.query.get("partNumber", ""))
        upload = self.find_upload()

        metadata = self.add_part(upload, part_number, self.save())
        self.answer(200, {"ETag": f'"{metadata["etag"]}"', **select_checksum_headers(metadata)})

    def add_part(self, upload: Upload, part_number: int, temporary_path: Path) -> ObjectMetadata:
        """Rename a temporary file to a part of an upload; return its metadata."""
        try:
            metadata = read_metadata(temporary_path)
            if not metadata:
                raise S3Error(500, "InternalError", f"{temporary_path} cannot be read back.")
            if upload.checksum and CHECKSUM_PREFIX + upload.checksum not in metadata["headers"]:
                error_message = (
                    "Checksum Type mismatch occurred, expected checksum Type:"
                    f" {upload.checksum}: send the checksum of each part."
                )
                raise S3Error(400, "InvalidRequest", error_message)
            self.files.uploads.add(upload, part_number, temporary_path)
        finally:
            temporary_path.unlink(missing_ok=True)

        return metadata

    def copy_part(self) -> None:
        part_number = parse_part_number(self.query.get("partNumber", ""))
        upload = self.find_upload()
        source_bucket, source_key = self.find_copy_source()
        source_file, source_metadata = self.files.open(source_bucket, source_key)

        with source_file:
            check_copy_conditions(self.fields, source_metadata)
            start_offset, end_offset = parse_copy_range(
                self.fields.get("x-amz-copy-source-range"), source_metadata["size"]
            )
            if end_offset - start_offset > MAX_BODY_BYTES:
                raise S3Error(400, "InvalidRequest", "a part has at most 5 GiB: copy a range.")

            md5_hash = hashlib.md5(usedforsecurity=False)
            checksum_hashes = dict([create_hash(upload.checksum)] if upload.checksum else [])

            def read_and_hash() -> Iterator[bytes]:
                for block in read_file_blocks([(source_file, end_offset)], start_offset):
                    for block_hash in (md5_hash, *checksum_hashes.values()):
                        block_hash.update(block)
                    yield block

            def make_metadata(_: int) -> ClientMetadata:
                headers = {
                    header_name: base64.b64encode(checksum_hash.digest()).decode()
                    for header_name, checksum_hash in checksum_hashes.items()
                }
                return {"key": self.key, "etag": md5_hash.hexdigest(), "headers": headers}

            temporary_path = self.files.write(read_and_hash(), make_metadata)

        part_metadata = self.add_part(upload, part_number, temporary_path)
        response_xml = make_xml_element(
            "CopyPartResult",
            ETag=f'"{part_metadata["etag"]}"',
            LastModified=format_iso_time(part_metadata["modified"]),
        )
        self.answer(200, body=response_xml)

    def complete_upload(self) -> None:
        upload = self.find_upload()
        if list_checksum_headers(self.fields):
            error_message = (
                "a checksum of a complete multipart upload is not supported: send the checksums of"
                " its parts."
            )
            raise S3Error(501, "NotImplemented", error_message)

        request_xml = self.read_xml("CompleteMultipartUpload", needs_checksum=False)
        listed_parts = [
            _parse_part(part_element) for part_element in request_xml if part_element.tag == "Part"
        ]
        if not listed_parts:
            raise S3Error(400, "MalformedXML", "the body must have at least one element <Part>.")

        declared_size = self.fields.get("x-amz-mp-object-size")
        if declared_size is None:
            expected_bytes = None
        else:
            expected_bytes = parse_integer("x-amz-mp-object-size", declared_size, 10**18)

        temporary_path = self.files.uploads.assemble(upload, listed_parts, expected_bytes)
        etag = self.files.commit(
            self.bucket, self.key, temporary_path, self.check_write_conditions
        )["etag"]
        self.files.uploads.remove(upload)

        response_xml = make_xml_element(
            "CompleteMultipartUploadResult",
            Bucket=self.bucket,
            Key=replace_unprintable(self.key),
            ETag=f'"{etag}"',
        )

        self.answer(200, body=response_xml)

    def abort_upload(self) -> None:
        self.files.uploads.remove(self.find_upload())
        self.answer(204)

    def list_uploads(self) -> None:
        self.files.find(self.bucket, "")
        query_parameters = self.query
        encode_key = self.encoding()
        max_uploads = min(
            MAX_LISTED_ENTRIES,
            parse_integer(
                "max-uploads", query_parameters.get("max-uploads") or str(MAX_LISTED_ENTRIES)
            ),
        )
        key_prefix = query_parameters.get("prefix", "")
        key_marker = query_parameters.get("key-marker", "")
        # S3 ignores an upload-id-marker without a key-marker
        upload_id_marker = query_parameters.get("upload-id-marker", "") if key_marker else ""

        matching_uploads = [
            upload
            for upload in self.files.uploads.list_bucket_uploads(self.bucket)
            if upload.key.startswith(key_prefix)
            and _is_after_markers(upload, key_marker, upload_id_marker)
        ]

        page_uploads = matching_uploads[:max_uploads]
        is_truncated = len(matching_uploads) > len(page_uploads) > 0

        upload_elements = [
            make_xml_element(
                "Upload",
                Key=encode_key(upload.key),
                UploadId=upload.id,
                StorageClass="STANDARD",
                Initiated=format_iso_time(upload.started),
            )
            for upload in page_uploads
        ]

        listing_fields = {
            "Bucket": self.bucket,
            "KeyMarker": encode_key(key_marker),
            "UploadIdMarker": upload_id_marker,
            "Prefix": encode_key(key_prefix),
            "MaxUploads": max_uploads,
            "IsTruncated": format_boolean(is_truncated),
        }

        if is_truncated:
            listing_fields["NextKeyMarker"] = encode_key(page_uploads[-1].key)
            listing_fields["NextUploadIdMarker"] = page_uploads[-1].id

        if encode_key is quote:
            listing_fields["EncodingType"] = "url"

        self.answer(
            200,
            body=make_xml_element("ListMultipartUploadsResult", *upload_elements, **listing_fields),
        )

    def list_parts(self) -> None:
        upload = self.find_upload()
        max_parts = min(
            MAX_LISTED_ENTRIES,
            parse_integer("max-parts", self.query.get("max-parts") or str(MAX_LISTED_ENTRIES)),
        )
        part_number_marker = parse_integer(
            "part-number-marker", self.query.get("part-number-marker") or "0"
        )
        remaining_parts = [
            (part_number, metadata)
            for part_number, metadata in self.files.uploads.parts(upload)
            if part_number > part_number_marker
        ]

        page_parts = remaining_parts[:max_parts]
        is_truncated = len(remaining_parts) > len(page_parts) > 0

        part_elements = [
            make_xml_element(
                "Part",
                PartNumber=part_number,
                LastModified=format_iso_time(metadata["modified"]),
                ETag=f'"{metadata["etag"]}"',
                Size=metadata["size"],
            )
            for part_number, metadata in page_parts
        ]

        listing_fields = {
            "Bucket": self.bucket,
            "Key": replace_unprintable(self.key),
            "UploadId": upload.id,
            "PartNumberMarker": part_number_marker,
            "NextPartNumberMarker": page_parts[-1][0] if page_parts else 0,
            "MaxParts": max_parts,
            "IsTruncated": format_boolean(is_truncated),
            "StorageClass": "STANDARD",
        }

        self.answer(200, body=make_xml_element("ListPartsResult", *part_elements, **listing_fields))


def _is_after_markers(upload: Upload, key_marker: str, upload_id_marker: str) -> bool:
    """Return True if the upload comes after the markers, so that the listing contains it."""
    if upload_id_marker:
        return upload.position() > (key_marker.encode(), upload_id_marker)
    return upload.key.encode() > key_marker.encode()


def _parse_part(part_element: ElementTree.Element) -> ListedPart:
    """Parse a part that CompleteMultipartUpload lists."""
    child_texts = read_child_texts(part_element)
    checksums = {
        f"x-amz-checksum-{child_name.removeprefix('Checksum').lower()}": checksum_text
        for child_name, checksum_text in child_texts.items()
        if child_name.startswith("Checksum")
    }
    part_number = parse_part_number(child_texts.get("PartNumber", "").strip())
    return ListedPart(part_number, child_texts.get("ETag", "").strip().strip('"'), checksums)
