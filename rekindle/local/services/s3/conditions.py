"""Conditions of S3 requests. The conditions are defined by the AWS page "Add preconditions to S3
operations with conditional requests" and by RFC 9110."""

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import formatdate

from rekindle.local.services.s3.format import ObjectMetadata, S3Error
from rekindle.local.services.s3.values import parse_date

COPY_CONDITION_PREFIX = "x-amz-copy-source-"


def check_read_conditions(request_headers: Mapping[str, str], metadata: ObjectMetadata) -> None:
    """Raise S3Error unless an object satisfies the conditions of GetObject or HeadObject."""
    failed_status = _find_failed_status(request_headers, "", metadata)
    if failed_status:
        raise S3Error(
            failed_status,
            "PreconditionFailed",
            "the object does not satisfy the conditions.",
            make_validator_headers(metadata),
        )


def check_copy_conditions(request_headers: Mapping[str, str], metadata: ObjectMetadata) -> None:
    """Raise S3Error unless the source of a copy satisfies the conditions of CopyObject."""
    if _find_failed_status(request_headers, COPY_CONDITION_PREFIX, metadata):
        raise S3Error(
            412,
            "PreconditionFailed",
            "the source does not satisfy the conditions x-amz-copy-source-if-….",
        )


def check_write_conditions(
    request_headers: Mapping[str, str], current_metadata: ObjectMetadata | None
) -> None:
    """Raise S3Error unless the current object satisfies the conditions of a request that writes or
    deletes it."""
    match_etags = request_headers.get("if-match")

    none_match_etags = request_headers.get("if-none-match")
    if none_match_etags not in (None, "*"):
        raise S3Error(
            501,
            "NotImplemented",
            f"If-None-Match is {none_match_etags[:80]!r}: a write can only have *.",
        )

    if none_match_etags and current_metadata:
        raise S3Error(412, "PreconditionFailed", "If-None-Match is *, but the object exists.")

    if match_etags is not None and not current_metadata:
        raise S3Error(
            404, "NoSuchKey", f"If-Match is {match_etags[:80]!r}, but the object does not exist."
        )

    if (
        match_etags is not None
        and current_metadata
        and not _contains_etag(match_etags, current_metadata)
    ):
        raise S3Error(
            412,
            "PreconditionFailed",
            f'If-Match is {match_etags[:80]!r}, the ETag is "{current_metadata["etag"]}".',
        )


def applies_to_range(request_headers: Mapping[str, str], metadata: ObjectMetadata) -> bool:
    """Return True if the request has no If-Range, or if its If-Range names the current version of
    the object."""
    if_range = request_headers.get("if-range")
    return if_range is None or if_range in make_validator_headers(metadata).values()


def make_validator_headers(metadata: ObjectMetadata) -> dict[str, str]:
    """Return the headers that identify the version of an object."""
    return {
        "ETag": f'"{metadata["etag"]}"',
        "Last-Modified": formatdate(metadata["modified"], usegmt=True),
    }


def _find_failed_status(
    request_headers: Mapping[str, str], header_prefix: str, metadata: ObjectMetadata
) -> int:
    """Return the HTTP status of the first condition that fails; 0 if none fails. A condition on the
    ETag takes precedence over a condition on the date."""
    match_etags = request_headers.get(f"{header_prefix}if-match")
    none_match_etags = request_headers.get(f"{header_prefix}if-none-match")
    modified_since = parse_date(request_headers.get(f"{header_prefix}if-modified-since"))
    unmodified_since = parse_date(request_headers.get(f"{header_prefix}if-unmodified-since"))
    # round the time down, because HTTP dates have whole seconds
    modified_time = datetime.fromtimestamp(int(metadata["modified"]), UTC)

    if match_etags is not None:
        if not _contains_etag(match_etags, metadata):
            return 412
    elif unmodified_since and modified_time > unmodified_since:
        return 412

    if none_match_etags is not None:
        if _contains_etag(none_match_etags, metadata):
            return 304
    elif modified_since and modified_time <= modified_since:
        return 304

    return 0


def _contains_etag(etag_list: str, metadata: ObjectMetadata) -> bool:
    """Return True if a list of ETags, or *, names the object."""
    listed_etags = [etag.strip().removeprefix("W/").strip('"') for etag in etag_list.split(",")]
    return "*" in listed_etags or metadata["etag"] in listed_etags
