"""Parse the values of S3 requests: targets, keys, names of buckets, numbers, ranges and dates.

A target with characters that are not printable ASCII, incomplete escapes or invalid UTF-8 is
refused, not repaired, so that two spellings name the same object only if S3 treats them as equal.
The rules are from the AWS pages "Naming Amazon S3 objects" and "General purpose bucket naming
rules", and from the API reference of each operation.
"""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from ipaddress import IPv4Address
from urllib.parse import parse_qsl, unquote
from xml.etree import ElementTree  # nosec B405  # see `parse_xml`

from rekindle.local.services.s3.format import S3Error
from rekindle.local.services.s3.object_files import START_POSITION, ListingPosition

MAX_KEY_BYTES = 1024
MAX_QUERY_FIELDS = 100
MAX_PARTS = 10_000
MAX_COUNT = 2**31 - 1
# excludes "#", which starts a URL's fragment
TARGET_PATTERN = re.compile(r"/(?:[!\"$&-~]|%[0-9A-Fa-f]{2})*")
COPY_SOURCE_PATTERN = re.compile(r"/?([^/?]+)/([^?]+)(\?.*)?")
COPY_SOURCE_TEXT_PATTERN = re.compile(r"(?:[ -$&-~]|%[0-9A-Fa-f]{2})*")
BUCKET_PATTERN = re.compile(r"[a-z0-9](?:[a-z0-9-]|\.(?!\.)){1,61}[a-z0-9]")
RESERVED_PREFIXES = ("xn--", "sthree-", "amzn-s3-demo-")
RESERVED_SUFFIXES = ("-s3alias", "--ol-s3", ".mrap", "--x-s3", "--table-s3")
# parameters that set a header of the response
RESPONSE_OVERRIDES = {
    f"response-{name}": name
    for name in (
        "cache-control",
        "content-disposition",
        "content-encoding",
        "content-language",
        "content-type",
        "expires",
    )
}
COPY_RANGE_PATTERN = re.compile(r"bytes=([0-9]{1,19})-([0-9]{1,19})")
RANGE_PATTERN = re.compile(r"bytes=([0-9]{1,19})-([0-9]{0,19})|bytes=-([0-9]{1,19})")


@dataclass(frozen=True)
class RequestTarget:
    """The target of a request. `path`: the path as it was sent; `pairs`: names and values of the
    query parameters, in the order of the request."""

    path: str
    pairs: list[tuple[str, str]]
    bucket: str
    key: str

    @property
    def query(self) -> dict[str, str]:
        return dict(self.pairs)


def parse_target(target_text: str) -> RequestTarget:
    """Parse the target of a request line, of the form /BUCKET/KEY?QUERY."""
    if not TARGET_PATTERN.fullmatch(target_text):
        raise _make_invalid_uri_error(
            "it must be a path of printable ASCII characters and complete escapes (%XX)"
        )

    path, _, query_text = target_text.partition("?")
    query_pairs = parse_query(query_text)
    encoded_bucket, _, encoded_key = path[1:].partition("/")

    request_target = RequestTarget(
        path, query_pairs, decode_path(encoded_bucket), decode_path(encoded_key)
    )
    if len(request_target.query) < len(query_pairs):
        raise S3Error(400, "InvalidArgument", "a query parameter is given twice: give it once.")

    if request_target.bucket:
        check_bucket_name(request_target.bucket)

    check_object_key(request_target.key)
    return request_target


def parse_query(query_text: str) -> list[tuple[str, str]]:
    try:
        return parse_qsl(
            query_text, keep_blank_values=True, errors="strict", max_num_fields=MAX_QUERY_FIELDS
        )
    except UnicodeDecodeError:
        raise _make_invalid_uri_error("the query is not UTF-8") from None


def decode_path(encoded_path: str) -> str:
    """Replace the escapes (%XX) of a path by the characters that they stand for."""
    try:
        return unquote(encoded_path, errors="strict")
    except UnicodeDecodeError:
        raise _make_invalid_uri_error("the path is not UTF-8") from None


def check_bucket_name(bucket_name: str) -> None:
    """Raise S3Error if S3 does not allow the name for a bucket."""
    has_reserved_part = bucket_name.startswith(RESERVED_PREFIXES) or bucket_name.endswith(
        RESERVED_SUFFIXES
    )
    if not BUCKET_PATTERN.fullmatch(bucket_name) or has_reserved_part or is_ip_address(bucket_name):
        error_message = (
            f"{bucket_name!r} must be 3 to 63 letters (a-z), digits, dots, hyphens, and no name"
            " that S3 reserves."
        )
        raise S3Error(400, "InvalidBucketName", error_message)


def check_object_key(object_key: str) -> None:
    """Raise S3Error if S3 does not allow the key for an object."""
    if len(object_key.encode()) > MAX_KEY_BYTES:
        raise S3Error(
            400,
            "KeyTooLongError",
            f"Your key is too long: a key has at most {MAX_KEY_BYTES} bytes.",
        )

    folder_depth = 0
    for key_segment in object_key.split("/"):
        if key_segment == "..":
            folder_depth -= 1
        elif key_segment not in ("", "."):
            folder_depth += 1

        if folder_depth < 0:
            raise _make_invalid_uri_error('the parts ".." of the key lead out of the bucket')


def parse_copy_source(source_text: str) -> tuple[str, str]:
    """Return bucket and key of the value of x-amz-copy-source."""
    source_match = COPY_SOURCE_PATTERN.fullmatch(source_text)
    if not source_match or not COPY_SOURCE_TEXT_PATTERN.fullmatch(source_text):
        error_message = (
            f"x-amz-copy-source is {source_text[:100]!r}: it must be BUCKET/KEY, with escapes"
            " (%XX)."
        )
        raise S3Error(400, "InvalidArgument", error_message)

    if source_match[3]:
        raise S3Error(501, "NotImplemented", "copying a version is not supported.")

    source_bucket = decode_path(source_match[1])
    source_key = decode_path(source_match[2])
    check_bucket_name(source_bucket)
    check_object_key(source_key)

    return source_bucket, source_key


def parse_integer(field_name: str, integer_text: str, maximum: int = MAX_COUNT) -> int:
    """Parse a parameter or header as a number from 0 to `maximum`."""
    if not re.fullmatch(r"[0-9]{1,19}", integer_text) or int(integer_text) > maximum:
        raise S3Error(
            400,
            "InvalidArgument",
            f"{field_name} is {integer_text[:40]!r}: it must be an integer between 0 and"
            f" {maximum}.",
        )
    return int(integer_text)


def parse_part_number(number_text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", number_text) or not 1 <= int(number_text) <= MAX_PARTS:
        error_message = f"Part number must be an integer between 1 and {MAX_PARTS}, inclusive"
        raise S3Error(400, "InvalidArgument", error_message)
    return int(number_text)


def parse_range(range_header: str, object_bytes: int) -> tuple[int, int] | None:
    """Return the start and end of the byte range that a Range header selects from an object; None
    if the header must be ignored."""
    range_match = RANGE_PATTERN.fullmatch(range_header)
    if not range_match:
        return None

    first_byte, last_byte, suffix_length = range_match.groups()
    if suffix_length:
        start_offset = max(0, object_bytes - int(suffix_length))
        end_offset = object_bytes
    elif last_byte and int(last_byte) < int(first_byte):
        return None
    else:
        start_offset = int(first_byte)
        end_offset = min(object_bytes, int(last_byte) + 1 if last_byte else object_bytes)

    if start_offset >= end_offset:
        raise S3Error(
            416,
            "InvalidRange",
            f"Range is {range_header}, but the object has {object_bytes} bytes.",
        )

    return start_offset, end_offset


def parse_copy_range(range_header: str | None, object_bytes: int) -> tuple[int, int]:
    """Return the start and end of the bytes that x-amz-copy-source-range selects from an object.
    Without this header, return the start and end of the whole object."""
    if range_header is None:
        return 0, object_bytes

    range_match = COPY_RANGE_PATTERN.fullmatch(range_header)
    if not range_match or not int(range_match[1]) <= int(range_match[2]) < object_bytes:
        error_message = (
            f"x-amz-copy-source-range is {range_header[:80]!r}: it must be bytes=FIRST-LAST, and"
            f" LAST less than the size of the source, {object_bytes}."
        )
        raise S3Error(400, "InvalidArgument", error_message)

    return int(range_match[1]), int(range_match[2]) + 1


def parse_date(date_text: str | None) -> datetime | None:
    """Parse the time in a header; return None for a date that must be ignored according to HTTP."""
    try:
        parsed_date = parsedate_to_datetime(date_text or "")
    except (ValueError, OverflowError):
        return None
    if parsed_date.tzinfo:
        return parsed_date
    return None


def parse_header_value(parameter_name: str, header_value: str) -> str:
    """Return `header_value`, the value of the parameter `parameter_name`, which sets a header of
    the response. Raises S3Error if a header cannot contain the text."""
    if not re.fullmatch(r"[\t\x20-\x7e\xa0-\xff]*", header_value):
        error_message = (
            f"Header value cannot be represented using ISO-8859-1: {parameter_name} is"
            f" {header_value[:100]!r}."
        )
        raise S3Error(400, "InvalidArgument", error_message)
    return header_value


def parse_base64(base64_text: str, size_bytes: int) -> bytes | None:
    """Decode a checksum; return None unless it has `size_bytes` bytes."""
    try:
        decoded_bytes = base64.b64decode(base64_text, validate=True)
    except ValueError:
        return None
    if len(decoded_bytes) == size_bytes:
        return decoded_bytes
    return None


def format_token(listing_position: ListingPosition) -> str:
    """Return the continuation token for a position in a listing."""
    position_kind = "p" if listing_position.is_prefix else "k"
    return base64.urlsafe_b64encode((position_kind + listing_position.text).encode()).decode()


def parse_token(token_text: str) -> ListingPosition:
    """Return the position in a listing that a continuation token stands for."""
    try:
        decoded_text = base64.b64decode(token_text, altchars=b"-_", validate=True).decode()
    except ValueError:
        decoded_text = "?"
    listing_position = ListingPosition(decoded_text[1:], decoded_text.startswith("p"))
    if decoded_text and format_token(listing_position) != token_text:
        raise S3Error(400, "InvalidArgument", "The continuation token provided is incorrect")
    if decoded_text:
        return listing_position
    return START_POSITION


class DoctypeRejectingBuilder(ElementTree.TreeBuilder):
    """Builds an XML document, and rejects a document type declaration in every encoding."""

    def doctype(self, *_: object) -> None:
        raise S3Error(400, "MalformedXML", "the body declares a document type: remove it.")


def parse_xml(xml_bytes: bytes, root_tag: str) -> ElementTree.Element:
    """Parse the XML body of a request, whose root is `root_tag`; remove the XML namespace from its
    tags."""
    try:
        xml_parser = ElementTree.XMLParser(target=DoctypeRejectingBuilder())  # nosec B314
        xml_parser.feed(xml_bytes)
        root_element: ElementTree.Element = xml_parser.close()
    except (ElementTree.ParseError, LookupError, ValueError) as error:
        # an unknown encoding raises LookupError or ValueError
        raise S3Error(400, "MalformedXML", f"the body is not XML: {error}.") from error

    for xml_element in root_element.iter():
        xml_element.tag = xml_element.tag.rpartition("}")[2]

    if root_element.tag != root_tag:
        raise S3Error(
            400, "MalformedXML", f"the body is <{root_element.tag[:40]}>: it must be <{root_tag}>."
        )

    return root_element


def read_child_texts(xml_element: ElementTree.Element) -> Mapping[str, str]:
    """Return the texts of an element's children by tag. Raises S3Error if a tag is repeated, or if
    a child has children."""
    child_texts = {child_element.tag: child_element.text or "" for child_element in xml_element}
    if len(child_texts) < len(xml_element) or any(
        len(child_element) for child_element in xml_element
    ):
        raise S3Error(400, "MalformedXML", f"<{xml_element.tag}> has repeated or nested elements.")
    return child_texts


def is_ip_address(host_name: str) -> bool:
    """Return True for an IPv4 address."""
    try:
        IPv4Address(host_name)
    except ValueError:
        return False
    return True


def _make_invalid_uri_error(reason: str) -> S3Error:
    return S3Error(400, "InvalidURI", f"Couldn't parse the specified URI: {reason}.")
