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

from rekindle.keys import FREE_BYTES_HEADER
from rekindle.local.services.s3.checksums import (
    CHECKSUM_PREFIX,
    BodyChecksums,
    Hash,
    create_hash,
    list_checksum_headers,
)
from rekindle.local.services.s3.conditions import (
    applies_to_range,
    check_copy_conditions,
    check_read_conditions,
    check_write_conditions,
    make_validator_headers,
)
from rekindle.local.services.s3.format import (
    ClientMetadata,
    ObjectMetadata,
    S3Error,
    read_file_blocks,
)
from rekindle.local.services.s3.object_files import ListingPosition
from rekindle.local.services.s3.request import (
    MAX_BODY_BYTES,
    S3Request,
    make_xml_element,
    replace_unprintable,
)
from rekindle.local.services.s3.values import (
    RESPONSE_OVERRIDES,
    check_object_key,
    format_token,
    parse_copy_source,
    parse_header_value,
    parse_integer,
    parse_range,
    parse_token,
    parse_xml,
    read_child_texts,
)

# maximum size of an XML request body
MAX_XML_BYTES = 8 << 20
# maximum number of entries in a page of a listing, and in DeleteObjects
MAX_LISTED_ENTRIES = 1000
MAX_USER_METADATA_BYTES = 2 << 10
USER_METADATA_PREFIX = "x-amz-meta-"
STORED_HEADER_NAMES = (
    "content-type",
    "cache-control",
    "content-disposition",
    "content-language",
    "expires",
)


def format_iso_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))


def format_boolean(flag_value: object) -> str:
    if flag_value:
        return "true"
    return "false"


def select_checksum_headers(metadata: ClientMetadata) -> dict[str, str]:
    """Return the headers with the checksums of an object or a part."""
    return {
        header_name: header_value
        for header_name, header_value in metadata["headers"].items()
        if header_name.startswith(CHECKSUM_PREFIX)
    }


class ObjectRequest(S3Request):
    """A request to the embedded S3 endpoint, with a method for each operation on buckets and
    objects. `fields`: the request's headers, by lower-case name."""

    fields: dict[str, str]

    def attributes(self) -> dict[str, str]:
        """Return the request's headers that are stored with an object."""
        user_metadata = {
            header_name: header_value
            for header_name, header_value in self.fields.items()
            if header_name.startswith(USER_METADATA_PREFIX)
        }

        metadata_bytes = sum(
            len(header_name) - len(USER_METADATA_PREFIX) + len(header_value)
            for header_name, header_value in user_metadata.items()
        )
        if metadata_bytes > MAX_USER_METADATA_BYTES:
            error_message = (
                f"the metadata headers have {metadata_bytes} bytes: at most"
                f" {MAX_USER_METADATA_BYTES} are allowed."
            )
            raise S3Error(400, "MetadataTooLarge", error_message)

        stored_headers = {
            header_name: header_value
            for header_name, header_value in self.fields.items()
            if header_name in STORED_HEADER_NAMES
        }
        content_codings = [
            content_coding.strip()
            for content_coding in self.fields.get("content-encoding", "").split(",")
        ]

        content_coding = ", ".join(
            content_coding
            for content_coding in content_codings
            if content_coding not in ("", "aws-chunked")
        )
        if content_coding:
            stored_headers["content-encoding"] = content_coding

        return {**stored_headers, **user_metadata}

    def save(self) -> Path:
        """Write the request's body to a temporary file, and verify its length and all checksums."""
        if "content-length" not in self.fields:
            raise S3Error(411, "MissingContentLength", "Content-Length is missing: send it.")
        body_checksums = BodyChecksums({**self.fields})
        stored_attributes = self.attributes()

        def make_metadata(size_bytes: int) -> ClientMetadata:
            body_checksums.verify(size_bytes)
            stored_headers_with_sums = {**stored_attributes, **body_checksums.stored_headers()}
            return {
                "key": self.key,
                "etag": body_checksums.etag,
                "headers": stored_headers_with_sums,
            }

        return self.files.write(self.receive(body_checksums), make_metadata)

    def read_xml(self, root_tag: str, needs_checksum: bool) -> ElementTree.Element:
        """Read the request's body, an XML document with the root `root_tag`, and verify its
        checksums."""
        if self.unread_bytes > MAX_XML_BYTES:
            raise S3Error(400, "MalformedXML", f"a body of {self.unread_bytes} bytes is too large.")

        body_checksums = BodyChecksums({**self.fields})
        if needs_checksum and not body_checksums.has_claimed_checksum:
            raise S3Error(
                400, "InvalidRequest", "Missing required header for this request: Content-MD5"
            )

        body_bytes = b"".join(bytes(body_block) for body_block in self.receive(body_checksums))
        body_checksums.verify(len(body_bytes))
        return parse_xml(body_bytes, root_tag)

    def make_response_headers(self, metadata: ObjectMetadata) -> dict[str, Any]:
        headers: dict[str, Any] = {"content-type": "binary/octet-stream", **metadata["headers"]}
        includes_checksums = self.fields.get("x-amz-checksum-mode", "").upper() == "ENABLED"
        if not includes_checksums or "range" in self.fields:
            headers = {
                header_name: header_value
                for header_name, header_value in headers.items()
                if not header_name.startswith("x-amz-checksum-")
            }

        for parameter, header_name in RESPONSE_OVERRIDES.items():
            if parameter in self.query:
                headers[header_name] = parse_header_value(parameter, self.query[parameter])

        return {**headers, **make_validator_headers(metadata), "Accept-Ranges": "bytes"}

    def check_write_conditions(self, current_metadata: ObjectMetadata | None) -> None:
        check_write_conditions(self.fields, current_metadata)

    def encoding(self) -> Callable[[str], str]:
        """Return the function that encodes the keys in a listing, as the request asks for."""
        encoding_type = self.query.get("encoding-type")
        if encoding_type not in (None, "url"):
            raise S3Error(400, "InvalidArgument", "Invalid Encoding Method specified in Request")
        if encoding_type:
            return quote
        return str

    def create_bucket(self) -> None:
        if self.unread_bytes:
            self.read_xml("CreateBucketConfiguration", needs_checksum=False)
        self.files.create(self.bucket)
        self.answer(200, {"Location": f"/{self.bucket}"})

    def head_bucket(self) -> None:
        self.files.find(self.bucket, "")
        free_bytes = shutil.disk_usage(self.files.root).free
        self.answer(200, {"x-amz-bucket-region": "us-east-1", FREE_BYTES_HEADER: free_bytes})

    def locate_bucket(self) -> None:
        self.files.find(self.bucket, "")
        # an empty location means us-east-1
        self.answer(200, body=make_xml_element("LocationConstraint"))

    def list_objects(self) -> None:
        query_parameters = self.query
        if query_parameters["list-type"] != "2":
            raise S3Error(
                400,
                "InvalidArgument",
                f"list-type is {query_parameters['list-type'][:40]!r}: it must be 2.",
            )

        encode_key = self.encoding()
        key_prefix = query_parameters.get("prefix", "")
        delimiter = query_parameters.get("delimiter", "")
        max_keys = min(
            MAX_LISTED_ENTRIES,
            parse_integer("max-keys", query_parameters.get("max-keys") or str(MAX_LISTED_ENTRIES)),
        )

        if query_parameters.get("continuation-token"):
            after_position = parse_token(query_parameters["continuation-token"])
        else:
            after_position = ListingPosition(query_parameters.get("start-after", ""))

        listing_page = self.files.page(self.bucket, key_prefix, delimiter, after_position, max_keys)
        object_elements = [
            make_xml_element(
                "Contents",
                Key=encode_key(metadata["key"]),
                LastModified=format_iso_time(metadata["modified"]),
                ETag=f'"{metadata["etag"]}"',
                Size=metadata["size"],
                StorageClass="STANDARD",
            )
            for metadata in listing_page.entries
        ]

        object_elements += [
            make_xml_element("CommonPrefixes", Prefix=encode_key(common_prefix))
            for common_prefix in listing_page.common_prefixes
        ]

        listing_fields = {
            "Name": self.bucket,
            "Prefix": encode_key(key_prefix),
            "Delimiter": encode_key(delimiter),
            "MaxKeys": max_keys,
            "KeyCount": len(object_elements),
            "IsTruncated": format_boolean(listing_page.next_after),
        }

        if listing_page.next_after:
            listing_fields["NextContinuationToken"] = format_token(listing_page.next_after)
        if "continuation-token" in query_parameters:
            listing_fields["ContinuationToken"] = query_parameters["continuation-token"]
        if "start-after" in query_parameters:
            listing_fields["StartAfter"] = encode_key(query_parameters["start-after"])
        if encode_key is quote:
            listing_fields["EncodingType"] = "url"

        self.answer(
            200, body=make_xml_element("ListBucketResult", *object_elements, **listing_fields)
        )

    def delete_objects(self) -> None:
        self.files.find(self.bucket, "")
        request_xml = self.read_xml("Delete", needs_checksum=True)

        listed_objects = [
            read_child_texts(object_element)
            for object_element in request_xml
            if object_element.tag == "Object"
        ]
        if not 1 <= len(listed_objects) <= MAX_LISTED_ENTRIES or not all(
            listed_object.get("Key") for listed_object in listed_objects
        ):
            error_message = (
                f"the body must have 1 to {MAX_LISTED_ENTRIES} elements <Object>, each with a"
                " <Key>."
            )
            raise S3Error(400, "MalformedXML", error_message)

        is_quiet = (request_xml.findtext("Quiet") or "").strip().lower() == "true"
        response_elements = []

        for listed_object in listed_objects:
            try:
                self.delete_listed_object(listed_object)
                if not is_quiet:
                    response_elements.append(make_xml_element("Deleted", Key=listed_object["Key"]))
            except S3Error as error:
                response_elements.append(
                    make_xml_element(
                        "Error",
                        Key=listed_object["Key"],
                        Code=error.code,
                        Message=replace_unprintable(str(error)),
                    )
                )

        self.answer(200, body=make_xml_element("DeleteResult", *response_elements))

    def delete_listed_object(self, listed_object: Mapping[str, str]) -> None:
        """Delete an object listed in a DeleteObjects request, if the conditions of its XML element
        hold."""
        object_key = listed_object["Key"]
        check_object_key(object_key)

        if listed_object.get("VersionId", "null") != "null":
            raise S3Error(
                404, "NoSuchVersion", "the bucket does not keep versions: leave out VersionId."
            )

        unsupported_names = listed_object.keys() - {"Key", "VersionId", "ETag"}
        if unsupported_names:
            raise S3Error(
                501,
                "NotImplemented",
                f"{min(unsupported_names)[:80]!r} of an object is not supported here.",
            )

        conditions = {"if-match": listed_object["ETag"]} if "ETag" in listed_object else {}
        self.files.delete(
            self.bucket, object_key, lambda current: check_write_conditions(conditions, current)
        )

    def put_object(self) -> None:
        if "x-amz-copy-source" in self.fields:
            return self.copy_object()
        self.check_write_conditions(self.files.find(self.bucket, self.key))
        metadata = self.files.commit(
            self.bucket, self.key, self.save(), self.check_write_conditions
        )
        self.answer(200, {"ETag": f'"{metadata["etag"]}"', **select_checksum_headers(metadata)})

    def copy_object(self) -> None:
        source_bucket, source_key = self.find_copy_source()
        metadata_directive = self.fields.get("x-amz-metadata-directive", "COPY")
        if metadata_directive not in ("COPY", "REPLACE"):
            raise S3Error(
                400, "InvalidArgument", f"Unknown metadata directive: {metadata_directive[:40]!r}."
            )

        if metadata_directive == "COPY" and (source_bucket, source_key) == (self.bucket, self.key):
            error_message = (
                "This copy request is illegal because it is trying to copy an object to itself"
                " without changes."
            )
            raise S3Error(400, "InvalidRequest", error_message)

        self.files.find(self.bucket, self.key)
        source_file, source_metadata = self.files.open(source_bucket, source_key)
        with source_file:
            check_copy_conditions(self.fields, source_metadata)
            if source_metadata["size"] > MAX_BODY_BYTES:
                error_message = (
                    "The specified copy source is larger than the maximum allowable size for a"
                    f" copy source: {MAX_BODY_BYTES}"
                )
                raise S3Error(400, "InvalidRequest", error_message)

            if metadata_directive == "REPLACE":
                # keep the checksums of the source, because the copied data is the same
                stored_headers = {**self.attributes(), **select_checksum_headers(source_metadata)}
            else:
                stored_headers = source_metadata["headers"]

            temporary_path = self.files.write(
                *self.prepare_copy(source_file, source_metadata, stored_headers)
            )

        new_metadata = self.files.commit(
            self.bucket, self.key, temporary_path, self.check_write_conditions
        )
        checksum_fields = {
            f"Checksum{checksum_header.removeprefix(CHECKSUM_PREFIX).upper()}": checksum_text
            for checksum_header, checksum_text in select_checksum_headers(new_metadata).items()
        }

        response_xml = make_xml_element(
            "CopyObjectResult",
            ETag=f'"{new_metadata["etag"]}"',
            LastModified=format_iso_time(new_metadata["modified"]),
            **checksum_fields,
        )
        self.answer(200, body=response_xml)

    def find_copy_source(self) -> tuple[str, str]:
        """Return bucket and key of the source of a copy."""
        claimed_checksums = list_checksum_headers(self.fields)
        if claimed_checksums:
            error_message = (
                f"{claimed_checksums[0]} of a copy is not supported: use x-amz-checksum-algorithm."
            )
            raise S3Error(501, "NotImplemented", error_message)

        return parse_copy_source(self.fields["x-amz-copy-source"])

    def prepare_copy(
        self, source_file: BinaryIO, source_metadata: ObjectMetadata, stored_headers: dict[str, str]
    ) -> tuple[Iterator[bytes], Callable[[int], ClientMetadata]]:
        """Return the data blocks of a copied object, and a function that returns its metadata with
        the checksum that the request asks for."""
        checksum_hashes: dict[str, Hash] = {}
        checksum_algorithm = self.fields.get("x-amz-checksum-algorithm")
        if checksum_algorithm:
            checksum_header, checksum_hash = create_hash(checksum_algorithm)
            checksum_hashes[checksum_header] = checksum_hash
            stored_headers = {
                header_name: text
                for header_name, text in stored_headers.items()
                if not header_name.startswith(CHECKSUM_PREFIX)
            }

        # the ETag of a multipart object depends on its parts, and a copy of the object has no parts
        md5_hash = hashlib.md5(usedforsecurity=False) if "-" in source_metadata["etag"] else None
        all_hashes = [*checksum_hashes.values(), *([md5_hash] if md5_hash else [])]

        def read_and_hash() -> Iterator[bytes]:
            for block in read_file_blocks([(source_file, source_metadata["size"])]):
                for block_hash in all_hashes:
                    block_hash.update(block)
                yield block

        def make_metadata(_: int) -> ClientMetadata:
            checksum_texts = {
                header_name: base64.b64encode(checksum_hash.digest()).decode()
                for header_name, checksum_hash in checksum_hashes.items()
            }
            etag = md5_hash.hexdigest() if md5_hash else source_metadata["etag"]
            return {"key": self.key, "etag": etag, "headers": {**stored_headers, **checksum_texts}}

        return read_and_hash(), make_metadata

    def get_object(self) -> None:
        object_file, metadata = self.files.open(self.bucket, self.key)
        with object_file:
            check_read_conditions(self.fields, metadata)
            response_headers = self.make_response_headers(metadata)
            object_bytes = metadata["size"]
            http_status = 200
            start_offset = 0
            end_offset = object_bytes

            if applies_to_range(self.fields, metadata):
                byte_range = parse_range(self.fields.get("range", ""), object_bytes)
            else:
                byte_range = None

            if byte_range:
                http_status = 206
                start_offset, end_offset = byte_range
                response_headers["Content-Range"] = (
                    f"bytes {start_offset}-{end_offset - 1}/{object_bytes}"
                )

            self.answer(http_status, response_headers, content_length=end_offset - start_offset)
            if self.command == "GET" and end_offset > start_offset:
                self.connection.sendfile(object_file, start_offset, end_offset - start_offset)

    def delete_object(self) -> None:
        self.files.delete(self.bucket, self.key, self.check_write_conditions)
        self.answer(204)
