"""Map a request to its operation, and reject requests that the embedded S3 endpoint does not
support."""

from collections.abc import Callable
from dataclasses import dataclass

from rekindle.local.services.s3.format import S3Error
from rekindle.local.services.s3.multipart import COMPOSITE, MultipartRequest
from rekindle.local.services.s3.values import is_address

# the headers of S3 that are supported or harmless; all other headers would change the meaning of a
# request, so they are rejected
SUPPORTED_HEADERS = {
    "x-amz-acl",
    "x-amz-content-sha256",
    "x-amz-date",
    "x-amz-decoded-content-length",
    "x-amz-mp-object-size",
    "x-amz-optional-object-attributes",
    "x-amz-request-payer",
    "x-amz-sdk-checksum-algorithm",
    "x-amz-security-token",
    "x-amz-server-side-encryption",
    "x-amz-storage-class",
    "x-amz-trailer",
    "x-amz-user-agent",
}
SUPPORTED_PREFIXES = ("x-amz-checksum-", "x-amz-meta-")
COPY_HEADERS = {
    "x-amz-copy-source",
    "x-amz-copy-source-if-match",
    "x-amz-copy-source-if-modified-since",
    "x-amz-copy-source-if-none-match",
    "x-amz-copy-source-if-unmodified-since",
}
# headers that are supported only with these values, which equal the default behaviour
SUPPORTED_VALUES = {
    "x-amz-checksum-type": (COMPOSITE,),
    "x-amz-acl": ("private", "bucket-owner-full-control"),
    "x-amz-server-side-encryption": ("AES256",),
    "x-amz-storage-class": ("STANDARD",),
}


CONDITIONS = ("if-match", "if-none-match", "if-modified-since", "if-unmodified-since", "if-range")
WRITE_CONDITIONS = ("if-match", "if-none-match")


class Handler(MultipartRequest):
    """Handles one request; ROUTES maps requests to methods."""

    def act(self) -> None:
        self.fields = {
            name.lower(): ",".join(self.headers.get_all(name, [])) for name in self.headers
        }
        self.reject_unsupported_headers()

        for name, values in SUPPORTED_VALUES.items():
            value = self.fields[name] if name in self.fields else values[0]
            if value not in values:
                message = (
                    f"the value {value[:80]!r} of {name} is not supported here: use"
                    f" {' or '.join(values)}."
                )
                raise S3Error(501, "NotImplemented", message)

        self.reject_bucket_in_host()
        route = self.find_route()
        self.reject_unsupported_conditions(route)
        route.action(self)

    def reject_unsupported_headers(self) -> None:
        """Raise S3Error for a header of S3 that this operation would ignore."""
        supported_headers = SUPPORTED_HEADERS
        if self.command == "PUT" and "x-amz-copy-source" in self.fields:
            is_part = "uploadId" in self.query
            own_header = "x-amz-copy-source-range" if is_part else "x-amz-metadata-directive"
            supported_headers = SUPPORTED_HEADERS | COPY_HEADERS | {own_header}

        for name in self.fields:
            is_supported = name in supported_headers or name.startswith(SUPPORTED_PREFIXES)
            if name.startswith("x-amz-") and not is_supported:
                raise S3Error(
                    501, "NotImplemented", f"the header {name[:80]} is not supported here."
                )

        # with Content-Range, the body would be only a part of the object
        if self.command == "PUT" and "content-range" in self.fields:
            raise S3Error(
                501, "NotImplemented", "Content-Range of a write is not supported: send all bytes."
            )

    def reject_unsupported_conditions(self, route: "Route") -> None:
        """Raise S3Error if a writing request has a condition that would be ignored."""
        if self.command in ("GET", "HEAD"):
            return

        for name in CONDITIONS:
            is_supported = route.has_conditions and name in WRITE_CONDITIONS
            if name in self.fields and not is_supported:
                message = f"the condition {name} of this operation is not supported here."
                raise S3Error(501, "NotImplemented", message)

    def reject_bucket_in_host(self) -> None:
        """Raise S3Error if the bucket is part of the host name, as in data.localhost, instead of
        the first part of the path."""
        host = self.fields.get("host", "").partition(":")[0].lower().rstrip(".")
        # the name of a bucket may contain dots
        has_bucket = any(host.startswith(f"{name}.") for name in list(self.files.index))
        if not is_address(host) and (host.endswith(".localhost") or has_bucket):
            message = f"the host {host[:80]!r} contains a bucket: use the path style, /BUCKET/KEY."
            raise S3Error(501, "NotImplemented", message)

    def find_route(self) -> "Route":
        """Return the route of the request. Raises S3Error for a request that is not supported."""
        kind = "object" if self.key else "bucket" if self.bucket else "service"
        subresource = next((name for name in SUBRESOURCES if name in self.query), "")

        route = ROUTES.get((self.command, kind, subresource))
        if not route:
            raise S3Error(
                501, "NotImplemented", f"{self.command} {kind} {subresource} is not supported here."
            )

        known_names = {subresource, *route.parameters, *SIGNATURE_PARAMETERS}
        for name in self.query:
            if name not in known_names and not (
                route.has_overrides and name.startswith("response-")
            ):
                message = (
                    f"{self.command} {kind} with the parameter {name[:80]!r} is not supported here."
                )
                raise S3Error(501, "NotImplemented", message)

        # a listing has no owners
        if self.query.get("fetch-owner", "false").lower() != "false":
            raise S3Error(501, "NotImplemented", "fetch-owner=true is not supported here.")

        return route


@dataclass(frozen=True)
class Route:
    """An operation. `parameters`: supported query parameters; `has_overrides`: query parameters
    response-* may set response headers; `has_conditions`: True if the operation supports
    WRITE_CONDITIONS."""

    action: Callable[[Handler], None]
    parameters: tuple[str, ...] = ()
    has_overrides: bool = False
    has_conditions: bool = False


SUBRESOURCES = ("list-type", "location", "delete", "uploads", "uploadId")
SIGNATURE_PARAMETERS = (
    "x-id",
    "X-Amz-Algorithm",
    "X-Amz-Content-Sha256",
    "X-Amz-Credential",
    "X-Amz-Date",
    "X-Amz-Expires",
    "X-Amz-Security-Token",
    "X-Amz-Signature",
    "X-Amz-SignedHeaders",
    "AWSAccessKeyId",
    "Expires",
    "Signature",
)
LIST_OBJECTS = (
    "continuation-token",
    "delimiter",
    "encoding-type",
    "fetch-owner",
    "max-keys",
    "prefix",
    "start-after",
)
LIST_UPLOADS = ("encoding-type", "key-marker", "max-uploads", "prefix", "upload-id-marker")
ROUTES: dict[tuple[str, str, str], Route] = {
    ("PUT", "bucket", ""): Route(Handler.create_bucket),
    ("HEAD", "bucket", ""): Route(Handler.head_bucket),
    ("GET", "bucket", "location"): Route(Handler.locate_bucket),
    ("GET", "bucket", "list-type"): Route(Handler.list_objects, LIST_OBJECTS),
    ("GET", "bucket", "uploads"): Route(Handler.list_uploads, LIST_UPLOADS),
    ("POST", "bucket", "delete"): Route(Handler.delete_objects),
    ("PUT", "object", ""): Route(Handler.put_object, has_conditions=True),
    ("GET", "object", ""): Route(Handler.get_object, has_overrides=True),
    ("HEAD", "object", ""): Route(Handler.get_object, has_overrides=True),
    ("DELETE", "object", ""): Route(Handler.delete_object, has_conditions=True),
    ("POST", "object", "uploads"): Route(Handler.create_upload),
    ("PUT", "object", "uploadId"): Route(Handler.upload_part, ("partNumber",)),
    ("GET", "object", "uploadId"): Route(Handler.list_parts, ("max-parts", "part-number-marker")),
    ("POST", "object", "uploadId"): Route(Handler.complete_upload, has_conditions=True),
    ("DELETE", "object", "uploadId"): Route(Handler.abort_upload),
}
