"""The manifest of a durable checkpoint, and its validation. `identity` and `layout` are hashes of
the run and of the layout of its state, `bytes` is the size of the state, `chunk` the size of a
chunk in bytes, `chunks` the sha256 of each chunk, and `loader` the state of the data loader."""

import base64
import hashlib
import re
from typing import Annotated, Any

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError, with_config

# pydantic needs this TypedDict before Python 3.12
from typing_extensions import TypedDict

from argolocal.common.json_text import to_json
from rekindle.errors import format_rule

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}\z")]
# not strict, so that an integer is also accepted
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=False)]


@with_config({"strict": True, "extra": "allow"})
class IntervalFacts(TypedDict):
    trained_seconds: Seconds
    losses: Annotated[int, Field(ge=0)]


@with_config({"strict": True})
class Manifest(TypedDict):
    identity: str
    layout: str
    step: Annotated[int, Field(ge=0, lt=2**53)]
    bytes: Annotated[int, Field(ge=0)]
    chunk: Annotated[int, Field(gt=0)]
    chunks: list[Digest]
    loader: str  # base64
    facts: IntervalFacts
    fingerprint: dict[str, Any]


MANIFEST_ADAPTER = TypeAdapter(Manifest)
MANIFEST_NAME_PATTERN = re.compile(r"([0-9]{10,16})-[0-9a-f]{12}\.json")


class DamagedCheckpoint(Exception):
    """A checkpoint is invalid, or its bytes do not match the hashes in its manifest."""


def encode_manifest(manifest: Manifest) -> tuple[str, bytes]:
    """Return the object name and the JSON of a manifest."""
    manifest_bytes = to_json(manifest).encode()
    return f"{manifest['step']:010d}-{_short_hash(manifest_bytes)}.json", manifest_bytes


def parse_manifest(object_name: str, manifest_bytes: bytes) -> Manifest:
    """Validate the JSON `manifest_bytes` of the object `object_name`, and return the manifest.
    Raises DamagedCheckpoint."""
    if not object_name.endswith(f"-{_short_hash(manifest_bytes)}.json"):
        raise DamagedCheckpoint("its manifest does not match the hash in its name")

    try:
        manifest = MANIFEST_ADAPTER.validate_json(manifest_bytes)
        base64.b64decode(manifest["loader"], validate=True)
    except ValidationError as error:
        (error_detail, *_) = error.errors(include_url=False, include_input=False)
        error_location = ".".join(map(str, error_detail["loc"]))
        raise DamagedCheckpoint(
            f"its manifest is invalid: {error_location}: {format_rule(error_detail['msg'])}"[:300]
        ) from None
    except ValueError as error:
        raise DamagedCheckpoint(f"its loader state cannot be read: {error}") from None

    if manifest["step"] != parse_step(object_name):
        raise DamagedCheckpoint(
            f"its name says step {parse_step(object_name)}, but its manifest says step"
            f" {manifest['step']}"
        )

    if len(manifest["chunks"]) != -(-manifest["bytes"] // manifest["chunk"]):
        raise DamagedCheckpoint(
            f"it has {len(manifest['chunks'])} chunks for {manifest['bytes']} bytes"
        )

    return manifest


def parse_step(manifest_name: str) -> int:
    """Return the step that the name of a manifest contains; -1 if the name is invalid."""
    name_match = MANIFEST_NAME_PATTERN.fullmatch(manifest_name.rpartition("/")[2])
    if name_match:
        return int(name_match[1])
    return -1


def _short_hash(hashed_bytes: bytes) -> str:
    return hashlib.sha256(hashed_bytes).hexdigest()[:12]
