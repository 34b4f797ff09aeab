"""Conditions of S3 requests. They are defined by the AWS page "Add preconditions to S3 operations
with conditional requests" and by RFC 9110."""

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import formatdate

from rekindle.local.services.s3.format import Meta, S3Error
from rekindle.local.services.s3.values import parse_date

COPY_PREFIX = "x-amz-copy-source-"


def check_read(headers: Mapping[str, str], meta: Meta) -> None:
    """Raise S3Error unless an object satisfies the conditions of GetObject or HeadObject."""
    failed_status = _failed_status(headers, "", meta)
    if failed_status:
        raise S3Error(
            failed_status,
            "PreconditionFailed",
            "the object does not satisfy the conditions.",
            validators(meta),
        )


def check_copy_source(headers: Mapping[str, str], meta: Meta) -> None:
    """Raise S3Error unless the source of a copy satisfies the conditions of CopyObject."""
    if _failed_status(headers, COPY_PREFIX, meta):
        raise S3Error(
            412,
            "PreconditionFailed",
            "the source does not satisfy the conditions x-amz-copy-source-if-….",
        )


def check_write(headers: Mapping[str, str], current: Meta | None) -> None:
    """Raise S3Error unless the current object satisfies the conditions of a request that writes or
    deletes it."""
    match = headers.get("if-match")

    none_match = headers.get("if-none-match")
    if none_match not in (None, "*"):
        raise S3Error(
            501, "NotImplemented", f"If-None-Match is {none_match[:80]!r}: a write can only have *."
        )

    if none_match and current:
        raise S3Error(412, "PreconditionFailed", "If-None-Match is *, but the object exists.")

    if match is not None and not current:
        raise S3Error(
            404, "NoSuchKey", f"If-Match is {match[:80]!r}, but the object does not exist."
        )

    if match is not None and current and not _contains(match, current):
        raise S3Error(
            412,
            "PreconditionFailed",
            f'If-Match is {match[:80]!r}, the ETag is "{current["etag"]}".',
        )


def applies_to_range(headers: Mapping[str, str], meta: Meta) -> bool:
    """Return True if If-Range is absent or names this object."""
    value = headers.get("if-range")
    return value is None or value in validators(meta).values()


def validators(meta: Meta) -> dict[str, str]:
    """Return the headers that identify the version of an object."""
    return {"ETag": f'"{meta["etag"]}"', "Last-Modified": formatdate(meta["modified"], usegmt=True)}


def _failed_status(headers: Mapping[str, str], prefix: str, meta: Meta) -> int:
    """Return the status of a condition that fails, or 0. An ETag takes precedence over a date."""
    match = headers.get(f"{prefix}if-match")
    none_match = headers.get(f"{prefix}if-none-match")
    modified_since = parse_date(headers.get(f"{prefix}if-modified-since"))
    unmodified_since = parse_date(headers.get(f"{prefix}if-unmodified-since"))
    # round down, because HTTP dates have whole seconds
    modified = datetime.fromtimestamp(int(meta["modified"]), UTC)

    if match is not None:
        if not _contains(match, meta):
            return 412
    elif unmodified_since and modified > unmodified_since:
        return 412

    if none_match is not None:
        if _contains(none_match, meta):
            return 304
    elif modified_since and modified <= modified_since:
        return 304

    return 0


def _contains(etags: str, meta: Meta) -> bool:
    """Return True if a list of ETags, or *, names the object."""
    names = [etag.strip().removeprefix("W/").strip('"') for etag in etags.split(",")]
    return "*" in names or meta["etag"] in names
