"""The body of a request to the API is a JSON object of a limited size, with fields of known
types."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from argolocal.common.checked_names import format_untrusted
from argolocal.common.json_text import loads
from argolocal.manifest.allowed_values import API_VERSION
from argolocal.manifest.shape import remove_nulls
from argolocal.manifest.types import Object
from argolocal.server.api.errors import INVALID_ARGUMENT, RESOURCE_EXHAUSTED, ApiError

# The API server of Kubernetes takes at most 3 MiB, and a message of gRPC has at most 4 MiB.
MAX_BODY_BYTES = 4 << 20
# fields of `metadata` that a user sets; the server sets all other fields
METADATA_FIELDS = ("name", "generateName", "namespace", "labels", "annotations")


class Body:
    """The JSON object that a client has sent."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    @classmethod
    async def read(cls, request: Request) -> "Body":
        """Return the body of a request; {} for an empty body. Raises ApiError."""
        too_large = ApiError(
            RESOURCE_EXHAUSTED,
            f"the body is larger than {MAX_BODY_BYTES >> 20} MiB: send a smaller object",
            413,
        )
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES:
            raise too_large

        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > MAX_BODY_BYTES:
                raise too_large
        return cls.parse(bytes(data))

    @classmethod
    def parse(cls, data: bytes) -> "Body":
        """Parse the JSON text of a body. Raises ApiError."""
        try:
            values = loads(data) if data.strip() else {}
        except ValueError as error:
            raise ApiError(INVALID_ARGUMENT, f"the body is not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise ApiError(
                INVALID_ARGUMENT,
                f"the body is {format_untrusted(values)}: it must be a JSON object",
            )
        return cls(values)

    def text(self, name: str) -> str:
        """Return a field that is a text; "" if the field is missing. Raises ApiError."""
        return self._typed(name, str, "")

    def boolean(self, name: str) -> bool:
        """Return a field that is true or false; False if the field is missing. Raises ApiError."""
        return self._typed(name, bool, False)

    def integer(self, name: str) -> int | None:
        """Return a field that is a whole number, or None. Raises ApiError."""
        value = self.values.get(name)
        if isinstance(value, bool) or not (value is None or isinstance(value, int)):
            raise _wrong_type(name, value, "a whole number")
        return value

    def texts(self, name: str) -> list[str]:
        """Return a field that is a list of texts; [] if the field is missing. Raises ApiError."""
        values: list[object] = self._typed(name, list, [])
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) < len(values):
            raise _wrong_type(name, values, "a list of strings")
        return texts

    def part(self, name: str) -> "Body":
        """Return a field that is an object; {} if the field is missing. Raises ApiError."""
        return Body(self._typed(name, dict, {}))

    def manifest(self, name: str, kind: str, namespace: str) -> Object:
        """Return an object of Argo that a client wants to store or run, without the fields that
        belong to the server. Raises ApiError."""
        values = self._typed(name, dict, {})
        if not values:
            raise ApiError(INVALID_ARGUMENT, f"{name} body not specified")

        given_kind = values.get("kind") or kind
        version = values.get("apiVersion") or API_VERSION
        if given_kind != kind or version != API_VERSION:
            raise ApiError(
                INVALID_ARGUMENT,
                f"{name} is a {format_untrusted(given_kind)} of {format_untrusted(version)}: it"
                f" must be a {kind} of"
                f" {API_VERSION}",
            )

        document = Body(values)
        metadata = {
            key: value
            for key, value in document.part("metadata").values.items()
            if key in METADATA_FIELDS and value is not None and value != ""
        }
        if namespace:
            given_namespace = metadata.setdefault("namespace", namespace)
            if given_namespace != namespace:
                raise ApiError(
                    INVALID_ARGUMENT,
                    "the namespace of the provided object does not match the namespace sent on the"
                    f" request: {format_untrusted(given_namespace)} and"
                    f" {format_untrusted(namespace)}",
                )
        spec = remove_nulls(document.part("spec").values)
        _drop_empty_names(spec)
        return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}

    def _typed(self, name: str, type: type, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, type):
            words = {str: "a string", bool: "true or false", list: "a list", dict: "an object"}
            raise _wrong_type(name, value, words[type])
        return value


def _wrong_type(name: str, value: object, rule: str) -> ApiError:
    return ApiError(INVALID_ARGUMENT, f"{name} is {format_untrusted(value)}: it must be {rule}")


def _drop_empty_names(value: object) -> None:
    """Remove the empty names of containers, which clients in Go send for a missing name."""
    if isinstance(value, list):
        for item in value:
            _drop_empty_names(item)
    elif isinstance(value, dict):
        for field in ("container", "script"):
            container = value.get(field)
            if isinstance(container, dict) and container.get("name") == "":
                del container["name"]
        for item in value.values():
            _drop_empty_names(item)


def query_flag(query: Mapping[str, str], name: str) -> bool:
    """Return the boolean value of a query parameter; False if the parameter is missing."""
    return query.get(name, "").lower() in ("true", "1", "t")
