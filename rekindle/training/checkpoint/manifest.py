"""The manifest of a durable checkpoint, and its validation. `identity` and `layout` are hashes of
the run and of the layout of its state, `bytes` is the size of the state, `chunk` the size of a
chunk in bytes, `chunks` the sha256 of each chunk, and `loader` the state of the data loader."""

import base64
import hashlib
import re
from typing import Annotated, Any

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic needs this TypedDict before Python 3.12

from argolocal.common.json_text import to_json
from rekindle.errors import rule

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}\z")]
# not strict, so that an integer is accepted, too
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
MANIFEST_NAME = re.compile(r"([0-9]{10,16})-[0-9a-f]{12}\.json")


class DamagedCheckpoint(Exception):
    """A checkpoint is invalid, or does not match its hashes."""


def encode_manifest(manifest: Manifest) -> tuple[str, bytes]:
    """Return the object name and the JSON of a manifest."""
    data = to_json(manifest).encode()
    return f"{manifest['step']:010d}-{_short_hash(data)}.json", data


def parse_manifest(name: str, data: bytes) -> Manifest:
    """Validate the JSON `data` of the object `name`, and return the manifest. Raises
    DamagedCheckpoint."""
    if not name.endswith(f"-{_short_hash(data)}.json"):
        raise DamagedCheckpoint("its manifest does not match the hash in its name")

    try:
        manifest = MANIFEST_ADAPTER.validate_json(data)
        base64.b64decode(manifest["loader"], validate=True)
    except ValidationError as error:
        (detail, *_) = error.errors(include_url=False, include_input=False)
        where = ".".join(map(str, detail["loc"]))
        raise DamagedCheckpoint(
            f"its manifest is invalid: {where}: {rule(detail['msg'])}"[:300]
        ) from None
    except ValueError as error:
        raise DamagedCheckpoint(f"its loader state cannot be read: {error}") from None

    if manifest["step"] != parse_step(name):
        raise DamagedCheckpoint(
            f"its name says step {parse_step(name)}, but its manifest says step {manifest['step']}"
        )

    if len(manifest["chunks"]) != -(-manifest["bytes"] // manifest["chunk"]):
        raise DamagedCheckpoint(
            f"it has {len(manifest['chunks'])} chunks for {manifest['bytes']} bytes"
        )

    return manifest


def parse_step(name: str) -> int:
    """Return the step in a manifest's name; -1 if the name is invalid."""
    match = MANIFEST_NAME.fullmatch(name.rpartition("/")[2])
    if match:
        return int(match[1])
    return -1


def _short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
