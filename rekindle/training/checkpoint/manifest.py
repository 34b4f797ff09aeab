"""What a durable checkpoint consists of, as remote.py writes it and as it is read: checked, whoever has written it."""

import base64
import hashlib
import json
import re
from typing import Annotated, Any

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}\z")]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=False)]  # a whole number is one, too


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


FORM = TypeAdapter(Manifest)
NAME = re.compile(r"([0-9]{10,16})-[0-9a-f]{12}\.json")


class Damaged(Exception):
    """A checkpoint whose contents do not match its hashes, or that is none."""


def write(manifest: Manifest) -> tuple[str, bytes]:
    """The name of a manifest, and its bytes."""
    data = json.dumps(manifest).encode()
    return f"{manifest['step']:010d}-{_short(data)}.json", data


def read(name: str, data: bytes) -> Manifest:
    """The manifest in an object of that name. Raises Damaged."""
    if not name.endswith(f"-{_short(data)}.json"):
        raise Damaged("its manifest is damaged, its hash is not the one in its name")
    try:
        manifest = FORM.validate_json(data)
        base64.b64decode(manifest["loader"], validate=True)
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False, include_input=False)
        raise Damaged(f"it is no checkpoint: {'.'.join(map(str, first['loc']))}: {first['msg']}"[:300]) from None
    except ValueError as error:
        raise Damaged(f"its loader state cannot be read: {error}") from None
    if manifest["step"] != step_of(name):
        raise Damaged(f"it is named like one of step {step_of(name)} and is one of step {manifest['step']}")
    if len(manifest["chunks"]) != -(-manifest["bytes"] // manifest["chunk"]):
        raise Damaged(f"it has {len(manifest['chunks'])} chunks for {manifest['bytes']} bytes")
    return manifest


def step_of(name: str) -> int:
    """The step in a manifest's name; -1 for one that no run writes."""
    match = NAME.fullmatch(name.rpartition("/")[2])
    return int(match[1]) if match else -1


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
