"""Parse and validate the manifest that a run records in its parameter `manifest`."""

from typing import Any

from pydantic import ConfigDict, Field

from argolocal.common.json_text import loads
from rekindle.content.manifest_types import WorkflowSpec
from rekindle.documents import Document, InvalidDocument, validate_value
from rekindle.step import decode_parameter

SOURCE = "the parameter `manifest` of the run"
REMEDY = "Submit the run again."


class _Object(Document):
    """A JSON object that may have more fields than its type."""

    model_config = ConfigDict(extra="allow")


class Metadata(_Object):
    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None


class Manifest(_Object):
    """The parts of a workflow that the readers of a recorded manifest use."""

    metadata: Metadata = Field(default_factory=Metadata)
    spec: WorkflowSpec


def unpack_manifest(encoded_manifest: str) -> dict[str, Any]:
    """Decode the manifest in a value of the parameter `manifest`; return {} for an empty value.
    Raises InvalidDocument."""
    if not encoded_manifest:
        return {}
    try:
        manifest_text = decode_parameter(encoded_manifest)
    except ValueError as error:
        raise InvalidDocument(f"{SOURCE} is malformed: {error}. {REMEDY}") from None
    return parse_manifest(manifest_text)


def parse_manifest(manifest_text: str) -> dict[str, Any]:
    """Return the manifest in a JSON text. Raises InvalidDocument."""
    try:
        parsed_manifest = loads(manifest_text)
    except ValueError as error:
        raise InvalidDocument(f"{SOURCE} is not valid JSON ({error}). {REMEDY}") from None
    validate_manifest(parsed_manifest, SOURCE)
    return parsed_manifest


def validate_manifest(manifest: Any, manifest_source: str) -> None:
    """Raise InvalidDocument unless a value is the manifest of a workflow."""
    try:
        validate_value(Manifest, manifest)
    except ValueError as error:
        raise InvalidDocument(f"{manifest_source} is malformed: {error}. {REMEDY}") from None
