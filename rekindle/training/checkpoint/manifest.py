"""The manifest of a durable checkpoint. Manifests from the object store are validated."""

import base64
import hashlib
import re
from typing import Annotated, Any

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic needs this TypedDict before Python 3.12

from argolocal.common.json_text import to_json
from rekindle.errors import rule

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}\z")]
# not strict: an integer is accepted, too
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=False)]


@with_config({"strict": True, "extra": "allow"})
class Facts(TypedDict):
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
    facts: Facts
    fingerprint: dict[str, Any]


MANIFEST = TypeAdapter(Manifest)
NAME = re.compile(r"([0-9]{10,16})-[0-9a-f]{12}\.json")


class Damaged(Exception):
    """A checkpoint that is invalid or does not match its hashes."""


def write(manifest: Manifest) -> tuple[str, bytes]:
    """Return the name and the bytes of a manifest."""
    data = to_json(manifest).encode()
    return f"{manifest['step']:010d}-{_short(data)}.json", data


def read(name: str, data: bytes) -> Manifest:
    """Return the manifest from an object with the given name and data. Raises Damaged."""
    if not name.endswith(f"-{_short(data)}.json"):
        raise Damaged("its manifest does not match the hash in its name")

    try:
        manifest = MANIFEST.validate_json(data)
        base64.b64decode(manifest["loader"], validate=True)
    except ValidationError as error:
        (detail, *_) = error.errors(include_url=False, include_input=False)
        where = ".".join(map(str, detail["loc"]))
        raise Damaged(f"its manifest is invalid: {where}: {rule(detail['msg'])}"[:300]) from None
    except ValueError as error:
        raise Damaged(f"its loader state cannot be read: {error}") from None

    if manifest["step"] != step_of(name):
        raise Damaged(
            f"its name says step {step_of(name)}, but its manifest says step {manifest['step']}"
        )

    if len(manifest["chunks"]) != -(-manifest["bytes"] // manifest["chunk"]):
        raise Damaged(f"it has {len(manifest['chunks'])} chunks for {manifest['bytes']} bytes")

    return manifest


def step_of(name: str) -> int:
    """Return the step in a manifest's name; -1 if the name is invalid."""
    match = NAME.fullmatch(name.rpartition("/")[2])
    if match:
        return int(match[1])
    return -1


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
