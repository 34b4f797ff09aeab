"""Map a request to its operation, and reject requests that the embedded S3 endpoint does not
support."""

from collections.abc import Callable
from dataclasses import dataclass

from rekindle.local.services.s3.format import S3Error
from rekindle.local.services.s3.multipart import COMPOSITE_CHECKSUM, MultipartRequest
from rekindle.local.services.s3.values import is_ip_address

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
SUPPORTED_HEADER_PREFIXES = ("x-amz-checksum-", "x-amz-meta-")
COPY_HEADERS = {
    "x-amz-copy-source",
    "x-amz-copy-source-if-match",
    "x-amz-copy-source-if-modified-since",
    "x-amz-copy-source-if-none-match",
    "x-amz-copy-source-if-unmodified-since",
}
# headers that are supported only with the values listed here, which request the default behaviour
SUPPORTED_HEADER_VALUES = {
    "x-amz-checksum-type": (COMPOSITE_CHECKSUM,),
    "x-amz-acl": ("private", "bucket-owner-full-control"),
    "x-amz-server-side-encryption": ("AES256",),
    "x-amz-storage-class": ("STANDARD",),
}


CONDITION_HEADERS = (
    "if-match",
    "if-none-match",
    "if-modified-since",
    "if-unmodified-since",
    "if-range",
)
WRITE_CONDITION_HEADERS = ("if-match", "if-none-match")


class RequestHandler(MultipartRequest):
    """Handles one request; ROUTES maps requests to methods."""

    def act(self) -> None:
        self.fields = {
            header_name.lower(): ",".join(self.headers.get_all(header_name, []))
            for header_name in self.headers
        }
        self.reject_unsupported_headers()

        for header_name, supported_values in SUPPORTED_HEADER_VALUES.items():
            header_value = (
                self.fields[header_name] if header_name in self.fields else supported_values[0]
            )
            if header_value not in supported_values:
                error_message = (
                    f"the value {header_value[:80]!r} of {header_name} is not supported here: use"
                    f" {' or '.join(supported_values)}."
                )
                raise S3Error(501, "NotImplemented", error_message)

        self.reject_bucket_in_host()
        route = self.find_route()
        self.reject_unsupported_conditions(route)
        route.action(self)

    def reject_unsupported_headers(self) -> None:
        """Raise S3Error for a header of S3 that this operation would ignore."""
        supported_headers = SUPPORTED_HEADERS
        if self.command == "PUT" and "x-amz-copy-source" in self.fields:
            is_part_upload = "uploadId" in self.query
            allowed_header = (
                "x-amz-copy-source-range" if is_part_upload else "x-amz-metadata-directive"
            )
            supported_headers = SUPPORTED_HEADERS | COPY_HEADERS | {allowed_header}

        for header_name in self.fields:
            is_supported = header_name in supported_headers or header_name.startswith(
                SUPPORTED_HEADER_PREFIXES
            )
            if header_name.startswith("x-amz-") and not is_supported:
                raise S3Error(
                    501, "NotImplemented", f"the header {header_name[:80]} is not supported here."
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

        for condition_header in CONDITION_HEADERS:
            is_supported = route.has_conditions and condition_header in WRITE_CONDITION_HEADERS
            if condition_header in self.fields and not is_supported:
                error_message = (
                    f"the condition {condition_header} of this operation is not supported here."
                )
                raise S3Error(501, "NotImplemented", error_message)

    def reject_bucket_in_host(self) -> None:
        """Raise S3Error if the bucket is part of the host name, as in data.localhost, instead of
        the first part of the path."""
        request_host = self.fields.get("host", "").partition(":")[0].lower().rstrip(".")
        # the name of a bucket may contain dots
        has_bucket = any(
            request_host.startswith(f"{bucket_name}.") for bucket_name in list(self.files.index)
        )
        if not is_ip_address(request_host) and (request_host.endswith(".localhost") or has_bucket):
            error_message = (
                f"the host {request_host[:80]!r} contains a bucket: use the path style,"
                " /BUCKET/KEY."
            )
            raise S3Error(501, "NotImplemented", error_message)

    def find_route(self) -> "Route":
        """Return the route of the request. Raises S3Error for an unsupported request."""
        resource_kind = "object" if self.key else "bucket" if self.bucket else "service"
        subresource = next((name for name in SUBRESOURCES if name in self.query), "")

        route = ROUTES_BY_REQUEST.get((self.command, resource_kind, subresource))
        if not route:
            raise S3Error(
                501,
                "NotImplemented",
                f"{self.command} {resource_kind} {subresource} is not supported here.",
            )

        known_parameters = {subresource, *route.parameters, *SIGNATURE_PARAMETERS}
        for name in self.query:
            if name not in known_parameters and not (
                route.has_overrides and name.startswith("response-")
            ):
                error_message = (
                    f"{self.command} {resource_kind} with the parameter {name[:80]!r} is not"
                    " supported here."
                )
                raise S3Error(501, "NotImplemented", error_message)

        # fetch-owner is rejected, because the embedded endpoint does not record owners of objects
        if self.query.get("fetch-owner", "false").lower() != "false":
            raise S3Error(501, "NotImplemented", "fetch-owner=true is not supported here.")

        return route


@dataclass(frozen=True)
class Route:
    """An operation. `parameters`: supported query parameters. `has_overrides` is True if query
    parameters response-* may set response headers. `has_conditions` is True if the operation
    supports WRITE_CONDITION_HEADERS."""

    action: Callable[[RequestHandler], None]
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
LIST_OBJECTS_PARAMETERS = (
    "continuation-token",
    "delimiter",
    "encoding-type",
    "fetch-owner",
    "max-keys",
    "prefix",
    "start-after",
)
LIST_UPLOADS_PARAMETERS = (
    "encoding-type",
    "key-marker",
    "max-uploads",
    "prefix",
    "upload-id-marker",
)
ROUTES_BY_REQUEST: dict[tuple[str, str, str], Route] = {
    ("PUT", "bucket", ""): Route(RequestHandler.create_bucket),
    ("HEAD", "bucket", ""): Route(RequestHandler.head_bucket),
    ("GET", "bucket", "location"): Route(RequestHandler.locate_bucket),
    ("GET", "bucket", "list-type"): Route(RequestHandler.list_objects, LIST_OBJECTS_PARAMETERS),
    ("GET", "bucket", "uploads"): Route(RequestHandler.list_uploads, LIST_UPLOADS_PARAMETERS),
    ("POST", "bucket", "delete"): Route(RequestHandler.delete_objects),
    ("PUT", "object", ""): Route(RequestHandler.put_object, has_conditions=True),
    ("GET", "object", ""): Route(RequestHandler.get_object, has_overrides=True),
    ("HEAD", "object", ""): Route(RequestHandler.get_object, has_overrides=True),
    ("DELETE", "object", ""): Route(RequestHandler.delete_object, has_conditions=True),
    ("POST", "object", "uploads"): Route(RequestHandler.create_upload),
    ("PUT", "object", "uploadId"): Route(RequestHandler.upload_part, ("partNumber",)),
    ("GET", "object", "uploadId"): Route(
        RequestHandler.list_parts, ("max-parts", "part-number-marker")
    ),
    ("POST", "object", "uploadId"): Route(RequestHandler.complete_upload, has_conditions=True),
    ("DELETE", "object", "uploadId"): Route(RequestHandler.abort_upload),
}
