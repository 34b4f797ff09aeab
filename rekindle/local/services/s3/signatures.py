"""Verify the signatures of S3 requests: version 4 in headers, URLs and chunks, version 2 in URLs
(used by MLflow).

Version 4 is defined by the AWS page "Authenticating Requests (AWS Signature Version 4)", version 2
by the page "Signing and authenticating REST requests".
"""

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import Message
from urllib.parse import quote, unquote_to_bytes

from rekindle.local.services.s3.format import S3Error
from rekindle.local.services.s3.values import OVERRIDES, Target, parse_integer

ALGORITHM = "AWS4-HMAC-SHA256"
SCOPE = r"\d{8}/[^/,\s]+/s3/aws4_request"  # day, region, service
AUTHORIZATION = re.compile(
    rf"{ALGORITHM} Credential=([^/,\s]+)/({SCOPE})\s*,"
    r"\s*SignedHeaders=([^,\s]+)\s*,\s*Signature=([0-9a-f]{64})"
)
PAYLOAD = re.compile(r"[0-9a-f]{64}|UNSIGNED-PAYLOAD|STREAMING-[A-Z0-9-]{1,60}")
MAX_SKEW_S = 900  # maximum difference between the time of a signature and our clock
MAX_URL_LIFE_S = 7 * 86400  # maximum validity of a URL with a signature of version 4
EMPTY_SHA256 = hashlib.sha256().hexdigest()
# the parameters that version 2 signs
SUBRESOURCES = ("delete", "location", "partNumber", "uploadId", "uploads", "versionId")


@dataclass
class Signature:
    """The signature of a request, and the chain of signatures of the chunks of its body."""

    key: bytes
    date: str
    scope: str
    last: str = ""

    def next(self, kind: str, *lines: str) -> str:
        """Return the signature of `lines` and the previous signature. `kind` is "" for the request,
        which is signed first, "-PAYLOAD" for a chunk of its body, and "-TRAILER" for its trailing
        headers."""
        text = "\n".join(
            [ALGORITHM + kind, self.date, self.scope, *([self.last] if kind else []), *lines]
        )
        self.last = hmac.digest(self.key, text.encode(), "sha256").hex()
        return self.last

    def chunk(self, digest: str) -> str:
        return self.next("-PAYLOAD", EMPTY_SHA256, digest)

    def trailer(self, lines: bytes) -> str:
        """Return the signature of the trailing headers, including line ends."""
        return self.next("-TRAILER", hashlib.sha256(lines).hexdigest())


def verify(
    method: str, target: Target, headers: Message, keys: tuple[str, str], now: float
) -> Signature | None:
    """Verify a request; return its signature, or None for version 2. `keys`: access key and secret
    key.

    Raises S3Error if the signature is missing, wrong or not valid now.
    """
    pairs = target.pairs

    query = target.query
    if "Signature" in query:
        return _verify_version_2(method, target.path, query, headers, keys, now)

    is_presigned = "X-Amz-Signature" in query
    if is_presigned:
        access_key, _, scope = query.get("X-Amz-Credential", "").partition("/")
        names = query.get("X-Amz-SignedHeaders", "")
        signature = query["X-Amz-Signature"]
        date = query.get("X-Amz-Date", "")
        payload = headers.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
        if query.get("X-Amz-Algorithm") != ALGORITHM or not re.fullmatch(SCOPE, scope):
            message = f"X-Amz-Algorithm must be {ALGORITHM}, and X-Amz-Credential a scope of s3."
            raise S3Error(400, "AuthorizationQueryParametersError", message)
        pairs = [(name, value) for name, value in pairs if name != "X-Amz-Signature"]
    elif match := AUTHORIZATION.fullmatch(headers.get("authorization", "")):
        access_key, scope, names, signature = match.groups()
        date = headers.get("x-amz-date", "")

        payload = headers.get("x-amz-content-sha256", "")
        if not PAYLOAD.fullmatch(payload):
            message = (
                f"x-amz-content-sha256 is {payload[:80]!r}: it must be a sha256, UNSIGNED-PAYLOAD"
                " or STREAMING-…."
            )
            raise S3Error(400, "InvalidArgument", message)
    else:
        raise S3Error(
            403,
            "AccessDenied",
            "a request must be signed (version 4): set AWS_* as `rekindle env` prints.",
        )

    _check_access_key(access_key, keys)
    signed_names = names.split(";")

    unsigned_names = [
        name
        for name in {name.lower() for name in headers} - set(signed_names)
        if name.startswith("x-amz-")
    ]
    if "host" not in signed_names or unsigned_names:
        raise S3Error(
            403, "AccessDenied", f"headers are not signed: {', '.join(unsigned_names or ['host'])}."
        )

    if is_presigned:
        life = parse_integer("X-Amz-Expires", query.get("X-Amz-Expires", ""))
    else:
        life = None

    _check_time(date, scope, life, now)
    values = [
        f"{name}:{','.join(' '.join(value.split()) for value in headers.get_all(name, ['']))}"
        for name in signed_names
    ]

    canonical_request = [
        method,
        quote(unquote_to_bytes(target.path), safe="/-_.~"),
        _canonical_query(pairs),
        *values,
        "",
        names,
        payload,
    ]

    expected = Signature(signing_key(keys[1], scope), date, scope)

    _compare(
        signature,
        expected.next(
            "", hashlib.sha256("\n".join(canonical_request).encode("latin-1")).hexdigest()
        ),
    )

    return expected


def _check_access_key(access_key: str, keys: tuple[str, str]) -> None:
    if not hmac.compare_digest(access_key.encode(), keys[0].encode()):
        raise S3Error(
            403,
            "InvalidAccessKeyId",
            "The access key is not this endpoint's: set AWS_ACCESS_KEY_ID.",
        )


def _compare(signature: str, expected: str) -> None:
    if not hmac.compare_digest(signature.encode(), expected.encode()):
        raise S3Error(
            403, "SignatureDoesNotMatch", "the signature is wrong: set AWS_SECRET_ACCESS_KEY."
        )


def _check_time(date: str, scope: str, life: int | None, now: float) -> None:
    """Raise S3Error unless a signature of `date` is valid now; `life`: validity of a URL in
    seconds."""
    if not re.fullmatch(r"[0-9]{8}T[0-9]{6}Z", date) or not scope.startswith(date[:8]):
        raise S3Error(
            403,
            "AccessDenied",
            f"X-Amz-Date is {date!r}: its day must equal the day in the credential.",
        )

    age = now - datetime.strptime(date, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    if life is None and abs(age) > MAX_SKEW_S:
        raise S3Error(
            403, "RequestTimeTooSkewed", f"signed at {date}, {age:.0f} seconds ago: set the clock."
        )

    if life is not None and not (0 < life <= MAX_URL_LIFE_S and -MAX_SKEW_S < age < life):
        raise S3Error(
            403, "AccessDenied", f"Request has expired: signed at {date} for {life} seconds."
        )


def _canonical_query(pairs: list[tuple[str, str]]) -> str:
    return "&".join(
        sorted(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in pairs)
    )


def signing_key(secret: str, scope: str) -> bytes:
    """Return the signing key for one day, region and service."""
    key = f"AWS4{secret}".encode()
    for component in scope.split("/"):
        key = hmac.digest(key, component.encode(), "sha256")
    return key


def _verify_version_2(
    method: str,
    path: str,
    query: Mapping[str, str],
    headers: Message,
    keys: tuple[str, str],
    now: float,
) -> None:
    _check_access_key(query.get("AWSAccessKeyId", ""), keys)
    expiry = query.get("Expires", "")
    if not re.fullmatch(r"[0-9]{1,12}", expiry) or int(expiry) < now:
        raise S3Error(
            403, "AccessDenied", f"Request has expired: it was valid until {expiry or 'never'}."
        )

    signed_names = sorted(name for name in query if name in SUBRESOURCES or name in OVERRIDES)
    subresources = "&".join(
        f"{name}={query[name]}" if query[name] else name for name in signed_names
    )
    resources = [path]
    # add the slash, which botocore signs but does not send
    if path.count("/") == 1 and len(path) > 1:
        resources.append(f"{path}/")

    amazon_headers = sorted(
        f"{name.lower()}:{value.strip()}"
        for name, value in headers.items()
        if name.lower().startswith("x-amz-")
    )

    lines = [
        method,
        headers.get("content-md5", ""),
        headers.get("content-type", ""),
        expiry,
        *amazon_headers,
    ]

    signatures: list[str] = []
    for resource in resources:
        text = "\n".join([*lines, resource + ("?" if signed_names else "") + subresources])
        digest = hmac.digest(keys[1].encode(), text.encode(), "sha1")
        signatures.append(base64.b64encode(digest).decode())

    query_signature = query["Signature"].encode()
    is_equal = [
        hmac.compare_digest(signature.encode(), query_signature) for signature in signatures
    ]
    _compare(query["Signature"], signatures[is_equal.index(True) if any(is_equal) else 0])
