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
from rekindle.local.services.s3.values import RESPONSE_OVERRIDES, RequestTarget, parse_integer

SIGNATURE_ALGORITHM = "AWS4-HMAC-SHA256"
# day, region, service
SCOPE_PATTERN = r"\d{8}/[^/,\s]+/s3/aws4_request"
AUTHORIZATION_PATTERN = re.compile(
    rf"{SIGNATURE_ALGORITHM} Credential=([^/,\s]+)/({SCOPE_PATTERN})\s*,"
    r"\s*SignedHeaders=([^,\s]+)\s*,\s*Signature=([0-9a-f]{64})"
)
PAYLOAD_PATTERN = re.compile(r"[0-9a-f]{64}|UNSIGNED-PAYLOAD|STREAMING-[A-Z0-9-]{1,60}")
# maximum difference between the time of a signature and the server's clock
MAX_CLOCK_SKEW_S = 900
# maximum validity of a URL with a signature of version 4
MAX_URL_LIFETIME_S = 7 * 86400
EMPTY_SHA256 = hashlib.sha256().hexdigest()
# parameters that a signature of version 2 includes
SIGNED_SUBRESOURCES = ("delete", "location", "partNumber", "uploadId", "uploads", "versionId")


@dataclass
class Signature:
    """The signature of a request, and then of the chunks of its body. Each signature includes the
    previous signature, `last`."""

    key: bytes
    date: str
    scope: str
    last: str = ""

    def next(self, signature_kind: str, *signed_lines: str) -> str:
        """Compute the signature of `signed_lines` and of the previous signature, and keep it as the
        new previous signature. `signature_kind` is "" for the request, which is signed first,
        "-PAYLOAD" for a chunk of its body, and "-TRAILER" for its trailing headers."""
        string_to_sign = "\n".join(
            [
                SIGNATURE_ALGORITHM + signature_kind,
                self.date,
                self.scope,
                *([self.last] if signature_kind else []),
                *signed_lines,
            ]
        )
        self.last = hmac.digest(self.key, string_to_sign.encode(), "sha256").hex()
        return self.last

    def chunk(self, chunk_digest: str) -> str:
        return self.next("-PAYLOAD", EMPTY_SHA256, chunk_digest)

    def trailer(self, trailer_lines: bytes) -> str:
        """Return the signature of the trailing headers, including line ends."""
        return self.next("-TRAILER", hashlib.sha256(trailer_lines).hexdigest())


@dataclass(frozen=True)
class ClaimedSignature:
    """The signature of version 4 that a request claims to have. `scope`: day, region and service of
    the key; `signed_headers`: names of the signed headers, separated by ";"; `date`: time of the
    signature; `payload_hash`: sha256 of the body, or a word such as UNSIGNED-PAYLOAD."""

    access_key: str
    scope: str
    signed_headers: str
    signature: str
    date: str
    payload_hash: str


def verify(
    http_method: str,
    request_target: RequestTarget,
    request_headers: Message,
    access_keys: tuple[str, str],
    now_seconds: float,
) -> Signature | None:
    """Verify the signature of a request; return the signature, or None for a signature of version
    2. `access_keys`: access key and secret key.

    Raises S3Error if the signature is missing, wrong or not valid now.
    """
    query_parameters = request_target.query
    if "Signature" in query_parameters:
        return _verify_version_2(
            http_method,
            request_target.path,
            query_parameters,
            request_headers,
            access_keys,
            now_seconds,
        )

    is_presigned = "X-Amz-Signature" in query_parameters
    if is_presigned:
        claimed_signature = _read_url_signature(query_parameters, request_headers)
    else:
        claimed_signature = _read_header_signature(request_headers)

    _check_access_key(claimed_signature.access_key, access_keys)
    _check_signed_headers(claimed_signature, request_headers)

    if is_presigned:
        lifetime_seconds = parse_integer("X-Amz-Expires", query_parameters.get("X-Amz-Expires", ""))
    else:
        lifetime_seconds = None

    signing_date = claimed_signature.date
    credential_scope = claimed_signature.scope
    _check_signing_time(signing_date, credential_scope, lifetime_seconds, now_seconds)

    expected_signature = Signature(
        compute_signing_key(access_keys[1], credential_scope), signing_date, credential_scope
    )
    canonical_request = _make_canonical_request(
        http_method, request_target, request_headers, claimed_signature
    )
    request_digest = hashlib.sha256(canonical_request.encode("latin-1")).hexdigest()
    _compare_signatures(claimed_signature.signature, expected_signature.next("", request_digest))
    return expected_signature


def _read_url_signature(
    query_parameters: Mapping[str, str], request_headers: Message
) -> ClaimedSignature:
    """Return the signature in the URL of a request. Raises S3Error if the form of the signature is
    wrong."""
    access_key, _, credential_scope = query_parameters.get("X-Amz-Credential", "").partition("/")
    if query_parameters.get("X-Amz-Algorithm") != SIGNATURE_ALGORITHM or not re.fullmatch(
        SCOPE_PATTERN, credential_scope
    ):
        error_message = (
            f"X-Amz-Algorithm must be {SIGNATURE_ALGORITHM}, and X-Amz-Credential a scope of s3."
        )
        raise S3Error(400, "AuthorizationQueryParametersError", error_message)

    return ClaimedSignature(
        access_key,
        credential_scope,
        query_parameters.get("X-Amz-SignedHeaders", ""),
        query_parameters["X-Amz-Signature"],
        query_parameters.get("X-Amz-Date", ""),
        request_headers.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD"),
    )


def _read_header_signature(request_headers: Message) -> ClaimedSignature:
    """Return the signature in the headers of a request. Raises S3Error if the signature is missing,
    or if its form is wrong."""
    authorization_match = AUTHORIZATION_PATTERN.fullmatch(request_headers.get("authorization", ""))
    if not authorization_match:
        raise S3Error(
            403,
            "AccessDenied",
            "a request must be signed (version 4): set AWS_* as `rekindle env` prints.",
        )

    payload_hash = request_headers.get("x-amz-content-sha256", "")
    if not PAYLOAD_PATTERN.fullmatch(payload_hash):
        error_message = (
            f"x-amz-content-sha256 is {payload_hash[:80]!r}: it must be a sha256,"
            " UNSIGNED-PAYLOAD or STREAMING-…."
        )
        raise S3Error(400, "InvalidArgument", error_message)

    access_key, credential_scope, signed_headers, signature = authorization_match.groups()
    signing_date = request_headers.get("x-amz-date", "")
    return ClaimedSignature(
        access_key, credential_scope, signed_headers, signature, signing_date, payload_hash
    )


def _check_signed_headers(claimed_signature: ClaimedSignature, request_headers: Message) -> None:
    """Raise S3Error unless Host and all headers x-amz-* are signed."""
    signed_names = claimed_signature.signed_headers.split(";")
    request_names = {header_name.lower() for header_name in request_headers}
    unsigned_names = [
        header_name
        for header_name in request_names - set(signed_names)
        if header_name.startswith("x-amz-")
    ]
    if "host" not in signed_names or unsigned_names:
        raise S3Error(
            403, "AccessDenied", f"headers are not signed: {', '.join(unsigned_names or ['host'])}."
        )


def _make_canonical_request(
    http_method: str,
    request_target: RequestTarget,
    request_headers: Message,
    claimed_signature: ClaimedSignature,
) -> str:
    """Return the text of a request that is signed by signature version 4."""
    canonical_headers: list[str] = []
    for header_name in claimed_signature.signed_headers.split(";"):
        header_values = request_headers.get_all(header_name, [""])
        joined_values = ",".join(" ".join(header_value.split()) for header_value in header_values)
        canonical_headers.append(f"{header_name}:{joined_values}")

    signed_pairs = [
        (parameter_name, parameter_value)
        for parameter_name, parameter_value in request_target.pairs
        if parameter_name != "X-Amz-Signature"
    ]
    return "\n".join(
        [
            http_method,
            quote(unquote_to_bytes(request_target.path), safe="/-_.~"),
            _canonicalize_query(signed_pairs),
            *canonical_headers,
            "",
            claimed_signature.signed_headers,
            claimed_signature.payload_hash,
        ]
    )


def _check_access_key(access_key: str, access_keys: tuple[str, str]) -> None:
    if not hmac.compare_digest(access_key.encode(), access_keys[0].encode()):
        raise S3Error(
            403,
            "InvalidAccessKeyId",
            "The access key is not this endpoint's: set AWS_ACCESS_KEY_ID.",
        )


def _compare_signatures(request_signature: str, expected_signature: str) -> None:
    if not hmac.compare_digest(request_signature.encode(), expected_signature.encode()):
        raise S3Error(
            403, "SignatureDoesNotMatch", "the signature is wrong: set AWS_SECRET_ACCESS_KEY."
        )


def _check_signing_time(
    signing_date: str, credential_scope: str, lifetime_seconds: int | None, now_seconds: float
) -> None:
    """Raise S3Error unless a signature of `signing_date` is valid now; `lifetime_seconds`:
    validity of a URL in seconds."""
    if not re.fullmatch(r"[0-9]{8}T[0-9]{6}Z", signing_date) or not credential_scope.startswith(
        signing_date[:8]
    ):
        raise S3Error(
            403,
            "AccessDenied",
            f"X-Amz-Date is {signing_date!r}: its day must equal the day in the credential.",
        )

    age_seconds = (
        now_seconds
        - datetime.strptime(signing_date, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    )
    if lifetime_seconds is None and abs(age_seconds) > MAX_CLOCK_SKEW_S:
        raise S3Error(
            403,
            "RequestTimeTooSkewed",
            f"signed at {signing_date}, {age_seconds:.0f} seconds ago: set the clock.",
        )

    if lifetime_seconds is not None and not (
        0 < lifetime_seconds <= MAX_URL_LIFETIME_S
        and -MAX_CLOCK_SKEW_S < age_seconds < lifetime_seconds
    ):
        raise S3Error(
            403,
            "AccessDenied",
            f"Request has expired: signed at {signing_date} for {lifetime_seconds} seconds.",
        )


def _canonicalize_query(query_pairs: list[tuple[str, str]]) -> str:
    return "&".join(
        sorted(
            f"{quote(parameter_name, safe='-_.~')}={quote(parameter_value, safe='-_.~')}"
            for parameter_name, parameter_value in query_pairs
        )
    )


def compute_signing_key(secret_key: str, credential_scope: str) -> bytes:
    """Return the signing key for one day, region and service."""
    derived_key = f"AWS4{secret_key}".encode()
    for scope_component in credential_scope.split("/"):
        derived_key = hmac.digest(derived_key, scope_component.encode(), "sha256")
    return derived_key


def _verify_version_2(
    http_method: str,
    request_path: str,
    query_parameters: Mapping[str, str],
    request_headers: Message,
    access_keys: tuple[str, str],
    now_seconds: float,
) -> None:
    _check_access_key(query_parameters.get("AWSAccessKeyId", ""), access_keys)
    expiry_text = query_parameters.get("Expires", "")
    if not re.fullmatch(r"[0-9]{1,12}", expiry_text) or int(expiry_text) < now_seconds:
        raise S3Error(
            403,
            "AccessDenied",
            f"Request has expired: it was valid until {expiry_text or 'never'}.",
        )

    signed_names = sorted(
        name
        for name in query_parameters
        if name in SIGNED_SUBRESOURCES or name in RESPONSE_OVERRIDES
    )
    subresource_query = "&".join(
        f"{name}={query_parameters[name]}" if query_parameters[name] else name
        for name in signed_names
    )
    candidate_paths = [request_path]
    # add the slash, which botocore signs but does not send
    if request_path.count("/") == 1 and len(request_path) > 1:
        candidate_paths.append(f"{request_path}/")

    amazon_headers = sorted(
        f"{name.lower()}:{value.strip()}"
        for name, value in request_headers.items()
        if name.lower().startswith("x-amz-")
    )

    signed_lines = [
        http_method,
        request_headers.get("content-md5", ""),
        request_headers.get("content-type", ""),
        expiry_text,
        *amazon_headers,
    ]

    valid_signatures: list[str] = []
    for candidate_path in candidate_paths:
        string_to_sign = "\n".join(
            [*signed_lines, candidate_path + ("?" if signed_names else "") + subresource_query]
        )
        signature_digest = hmac.digest(access_keys[1].encode(), string_to_sign.encode(), "sha1")
        valid_signatures.append(base64.b64encode(signature_digest).decode())

    query_signature = query_parameters["Signature"].encode()
    signature_matches = [
        hmac.compare_digest(valid_signature.encode(), query_signature)
        for valid_signature in valid_signatures
    ]
    _compare_signatures(
        query_parameters["Signature"],
        valid_signatures[signature_matches.index(True) if any(signature_matches) else 0],
    )
