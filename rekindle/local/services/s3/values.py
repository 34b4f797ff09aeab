"""Parse the values of S3 requests: targets, keys, names of buckets, numbers, ranges and dates.

Only spellings that S3 treats as equal name the same object: targets with characters that are not
printable ASCII, incomplete escapes or invalid UTF-8 are refused, not repaired. The rules are from
the AWS pages "Naming Amazon S3 objects" and "General purpose bucket naming rules", and from the API
reference of each operation.
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
from rekindle.local.services.s3.object_files import START, Position

MAX_KEY_BYTES = 1024
MAX_QUERY_FIELDS = 100
MAX_PARTS = 10_000
MAX_COUNT = 2**31 - 1
# excludes "#", which starts a URL's fragment
TARGET = re.compile(r"/(?:[!\"$&-~]|%[0-9A-Fa-f]{2})*")
COPY_SOURCE = re.compile(r"/?([^/?]+)/([^?]+)(\?.*)?")
COPY_SOURCE_TEXT = re.compile(r"(?:[ -$&-~]|%[0-9A-Fa-f]{2})*")
BUCKET = re.compile(r"[a-z0-9](?:[a-z0-9-]|\.(?!\.)){1,61}[a-z0-9]")
RESERVED_PREFIXES = ("xn--", "sthree-", "amzn-s3-demo-")
RESERVED_SUFFIXES = ("-s3alias", "--ol-s3", ".mrap", "--x-s3", "--table-s3")
# parameters that set a header of the response
OVERRIDES = {
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
COPY_RANGE = re.compile(r"bytes=([0-9]{1,19})-([0-9]{1,19})")
RANGE = re.compile(r"bytes=([0-9]{1,19})-([0-9]{0,19})|bytes=-([0-9]{1,19})")


@dataclass(frozen=True)
class Target:
    """The target of a request. `path`: the path as it was sent; `pairs`: the query parameters."""

    path: str
    pairs: list[tuple[str, str]]
    bucket: str
    key: str

    @property
    def query(self) -> dict[str, str]:
        return dict(self.pairs)


def parse_target(text: str) -> Target:
    """Parse the target of a request line, of the form /BUCKET/KEY?QUERY."""
    if not TARGET.fullmatch(text):
        raise _invalid_uri(
            "it must be a path of printable ASCII characters and complete escapes (%XX)"
        )

    path, _, query = text.partition("?")
    pairs = parse_query(query)
    bucket, _, key = path[1:].partition("/")

    target = Target(path, pairs, decode(bucket), decode(key))
    if len(target.query) < len(pairs):
        raise S3Error(400, "InvalidArgument", "a query parameter is given twice: give it once.")

    if target.bucket:
        check_bucket(target.bucket)

    check_key(target.key)
    return target


def parse_query(text: str) -> list[tuple[str, str]]:
    try:
        return parse_qsl(
            text, keep_blank_values=True, errors="strict", max_num_fields=MAX_QUERY_FIELDS
        )
    except UnicodeDecodeError:
        raise _invalid_uri("the query is not UTF-8") from None


def decode(text: str) -> str:
    """Replace the escapes of a path."""
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise _invalid_uri("the path is not UTF-8") from None


def check_bucket(name: str) -> None:
    """Raise S3Error if S3 does not allow the name for a bucket."""
    has_reserved_part = name.startswith(RESERVED_PREFIXES) or name.endswith(RESERVED_SUFFIXES)
    if not BUCKET.fullmatch(name) or has_reserved_part or is_address(name):
        message = (
            f"{name!r} must be 3 to 63 letters (a-z), digits, dots, hyphens, and no name that S3"
            " reserves."
        )
        raise S3Error(400, "InvalidBucketName", message)


def check_key(key: str) -> None:
    """Raise S3Error if S3 does not allow the key for an object."""
    if len(key.encode()) > MAX_KEY_BYTES:
        raise S3Error(
            400,
            "KeyTooLongError",
            f"Your key is too long: a key has at most {MAX_KEY_BYTES} bytes.",
        )

    depth = 0
    for segment in key.split("/"):
        if segment == "..":
            depth -= 1
        elif segment not in ("", "."):
            depth += 1

        if depth < 0:
            raise _invalid_uri('the parts ".." of the key lead out of the bucket')


def parse_copy_source(text: str) -> tuple[str, str]:
    """Return bucket and key of the value of x-amz-copy-source."""
    match = COPY_SOURCE.fullmatch(text)
    if not match or not COPY_SOURCE_TEXT.fullmatch(text):
        message = f"x-amz-copy-source is {text[:100]!r}: it must be BUCKET/KEY, with escapes (%XX)."
        raise S3Error(400, "InvalidArgument", message)

    if match[3]:
        raise S3Error(501, "NotImplemented", "copying a version is not supported.")

    bucket = decode(match[1])
    key = decode(match[2])
    check_bucket(bucket)
    check_key(key)

    return bucket, key


def parse_integer(name: str, text: str, highest: int = MAX_COUNT) -> int:
    """Parse a parameter or header as a number from 0 to `highest`."""
    if not re.fullmatch(r"[0-9]{1,19}", text) or int(text) > highest:
        raise S3Error(
            400,
            "InvalidArgument",
            f"{name} is {text[:40]!r}: it must be an integer between 0 and {highest}.",
        )
    return int(text)


def parse_part_number(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text) or not 1 <= int(text) <= MAX_PARTS:
        message = f"Part number must be an integer between 1 and {MAX_PARTS}, inclusive"
        raise S3Error(400, "InvalidArgument", message)
    return int(text)


def parse_range(text: str, size: int) -> tuple[int, int] | None:
    """Return the start and end of the byte range that a Range header selects from an object; None
    if the header must be ignored."""
    match = RANGE.fullmatch(text)
    if not match:
        return None

    first, last, suffix = match.groups()
    if suffix:
        start = max(0, size - int(suffix))
        end = size
    elif last and int(last) < int(first):
        return None
    else:
        start = int(first)
        end = min(size, int(last) + 1 if last else size)

    if start >= end:
        raise S3Error(416, "InvalidRange", f"Range is {text}, but the object has {size} bytes.")

    return start, end


def parse_copy_range(text: str | None, size: int) -> tuple[int, int]:
    """Return the start and end of the bytes that x-amz-copy-source-range selects from an object;
    without this header, those of the whole object."""
    if text is None:
        return 0, size

    match = COPY_RANGE.fullmatch(text)
    if not match or not int(match[1]) <= int(match[2]) < size:
        message = (
            f"x-amz-copy-source-range is {text[:80]!r}: it must be bytes=FIRST-LAST, and LAST less"
            f" than the size of the source, {size}."
        )
        raise S3Error(400, "InvalidArgument", message)

    return int(match[1]), int(match[2]) + 1


def parse_date(text: str | None) -> datetime | None:
    """Parse the time in a header; return None for a date that must be ignored according to HTTP."""
    try:
        date = parsedate_to_datetime(text or "")
    except (ValueError, OverflowError):
        return None
    if date.tzinfo:
        return date
    return None


def parse_header_value(name: str, text: str) -> str:
    """Return `text`, the value of the parameter `name`, which sets a header of the response. Raises
    S3Error if a header cannot contain the text."""
    if not re.fullmatch(r"[\t\x20-\x7e\xa0-\xff]*", text):
        message = f"Header value cannot be represented using ISO-8859-1: {name} is {text[:100]!r}."
        raise S3Error(400, "InvalidArgument", message)
    return text


def parse_base64(text: str, size: int) -> bytes | None:
    """Decode a checksum; return None unless it has `size` bytes."""
    try:
        value = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    if len(value) == size:
        return value
    return None


def format_token(position: Position) -> str:
    """Return the continuation token of a position."""
    kind = "p" if position.is_prefix else "k"
    return base64.urlsafe_b64encode((kind + position.text).encode()).decode()


def parse_token(text: str) -> Position:
    """Return the position of a continuation token."""
    try:
        decoded = base64.b64decode(text, altchars=b"-_", validate=True).decode()
    except ValueError:
        decoded = "?"
    position = Position(decoded[1:], decoded.startswith("p"))
    if decoded and format_token(position) != text:
        raise S3Error(400, "InvalidArgument", "The continuation token provided is incorrect")
    if decoded:
        return position
    return START


class WithoutDocumentType(ElementTree.TreeBuilder):
    """Builds an XML document, and rejects a document type declaration in every encoding."""

    def doctype(self, *_: object) -> None:
        raise S3Error(400, "MalformedXML", "the body declares a document type: remove it.")


def parse_xml(data: bytes, tag: str) -> ElementTree.Element:
    """Parse the XML body of a request, whose root is `tag`; remove the XML namespace from its
    tags."""
    try:
        parser = ElementTree.XMLParser(target=WithoutDocumentType())  # nosec B314
        parser.feed(data)
        root: ElementTree.Element = parser.close()
    except (ElementTree.ParseError, LookupError, ValueError) as error:
        # an unknown encoding raises LookupError or ValueError
        raise S3Error(400, "MalformedXML", f"the body is not XML: {error}.") from error

    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]

    if root.tag != tag:
        raise S3Error(400, "MalformedXML", f"the body is <{root.tag[:40]}>: it must be <{tag}>.")

    return root


def children(element: ElementTree.Element) -> Mapping[str, str]:
    """Return the texts of an element's children by tag. Raises S3Error if a tag is repeated, or if
    a child has children."""
    texts = {child.tag: child.text or "" for child in element}
    if len(texts) < len(element) or any(len(child) for child in element):
        raise S3Error(400, "MalformedXML", f"<{element.tag}> has repeated or nested elements.")
    return texts


def is_address(name: str) -> bool:
    """Return True for an IPv4 address."""
    try:
        IPv4Address(name)
    except ValueError:
        return False
    return True


def _invalid_uri(reason: str) -> S3Error:
    return S3Error(400, "InvalidURI", f"Couldn't parse the specified URI: {reason}.")
