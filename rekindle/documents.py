"""Parse and validate JSON documents from the object store, MLflow, a cluster or a folder.

    class Verdict(Document):
        rows: int = Field(0, ge=0)

    verdict = read_object(Verdict, store, "releases/fraud/0123456789ab/verdict.json")
    verdict = read_file(Verdict, folder / "verdict.json")

A malformed document raises InvalidDocument, whose one-line message names the document, the wrong
field and the rule. Unknown fields are ignored, since a later version of Rekindle may have written
the document.
"""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)

from argolocal.common.checked_names import Name, show
from argolocal.common.files import read_regular
from argolocal.common.json_text import MAX_BYTES, loads, to_json
from argolocal.errors import InvalidDocument
from rekindle.errors import rule
from rekindle.names import ArtifactKey

__all__ = [
    "DatasetFile",
    "Document",
    "InvalidDocument",
    "ModelFile",
    "ResultFile",
    "Sealed",
    "describe_first_error",
    "describe_model",
    "is_valid",
    "name_field",
    "parse",
    "parse_object",
    "read_file",
    "read_json_file",
    "read_object",
    "seal",
    "validate",
    "validate_value",
]

if TYPE_CHECKING:
    from rekindle.storage import Store

RESTORE = "Restore it, or remove it."
MODEL_FILE = "model.json"
CHECKSUM = "checksum"


class Document(BaseModel):
    """The base class of documents. Types are strict: a text field, for example, rejects a
    number."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)


def name_field(kind: type[Name], *, optional: bool = False) -> AfterValidator:
    """Return the pydantic validator of a text field that must be a valid `kind` of name. With
    `optional`, the field may be empty."""

    def check(text: str) -> str:
        if (text or not optional) and not kind.matches(text):
            raise ValueError(f"{show(text)} is not {kind.KIND}: {kind.RULE}")
        return text

    return AfterValidator(check)


D = TypeVar("D", bound=BaseModel)


class BestValidation(Document):
    """The step with the lowest loss on the held-out samples. `validation_loss` becomes None for a
    loss that is not finite. `released` is True if the model has the weights of this step instead of
    the last weights."""

    step: int = Field(ge=0, lt=2**53)
    validation_loss: float | None
    released: bool = False


class Sealed(Document):
    """A document with the sha256 of its other fields in `checksum`.

    The checksum is "" if an earlier version of Rekindle or another program wrote the document.
    """

    checksum: str = ""

    @model_validator(mode="before")
    @classmethod
    def _verify_checksum(cls, fields: Any) -> Any:
        recorded = fields.get(CHECKSUM) if isinstance(fields, dict) else None
        if recorded and recorded != (actual := _checksum(fields)):
            raise ValueError(
                f"the sha256 of its fields is {actual}, and {show(recorded)} in {CHECKSUM}: it was"
                " changed"
            )
        return fields


class ResultFile(Document):
    """The recorded content of a file in the result of a training program."""

    size: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class ModelFile(Sealed):
    """model.json of a trained model. `start` is the key prefix of the release with the initial
    weights, `digest` is the digest of the dataset, and `identity` is the hash of all inputs of the
    training. `fingerprint` describes the machine, as far as the bits of the weights depend on it.
    `chosen` describes how validation chose the family; `paused` is True if the training stopped
    before its end and can be resumed. Unknown fields are preserved, since a workload may add its
    own fields.

    `files`: files of the result of a training program, by path; empty for a model with weights.
    `is_file`: True if the result is one file, not a folder.
    """

    model_config = ConfigDict(extra="allow")
    sha256: str = Field(min_length=1)  # sha256 of the weights, or of the list of the result's files
    files: dict[Annotated[str, name_field(ArtifactKey)], ResultFile] = Field(default_factory=dict)
    is_file: bool = False
    workload: str
    family: str = ""
    start: str = ""
    digest: str = ""
    identity: str = ""
    step: int = Field(default=0, ge=0)
    model: dict[str, JsonValue] = Field(default_factory=dict)
    train: dict[str, JsonValue] = Field(default_factory=dict)
    fingerprint: dict[str, JsonValue] = Field(default_factory=dict)
    chosen: dict[str, JsonValue] = Field(default_factory=dict)
    best: BestValidation | None = None
    paused: bool = False

    @model_validator(mode="after")
    def _check_number_of_files(self) -> "ModelFile":
        if self.is_file and len(self.files) != 1:
            raise ValueError("files must have one file if is_file is true")
        return self

    def as_json(self) -> dict[str, Any]:
        """Return the fields that are set in the document; leave out defaults."""
        return self.model_dump(exclude_unset=True)


def describe_model(fields: Mapping[str, Any]) -> bytes:
    """Return the content of model.json with these fields and their checksum."""
    return seal(fields)


def seal(fields: Mapping[str, Any]) -> bytes:
    """Return `fields` and their checksum as JSON, as `Sealed` reads them."""
    return to_json({**fields, CHECKSUM: _checksum(loads(to_json(fields)))}, indent=1).encode()


def _checksum(fields: Mapping[str, Any]) -> str:
    others = {name: value for name, value in fields.items() if name != CHECKSUM}
    return hashlib.sha256(to_json(others, sort_keys=True).encode()).hexdigest()


class DatasetFile(Document):
    """dataset.json of a dataset or a release."""

    facts: dict[str, JsonValue] = Field(default_factory=dict)
    digest: str = ""


def parse(model: type[D], data: bytes | str, source: str, remedy: str = RESTORE) -> D:
    """Parse a document. Raises InvalidDocument. `source`: name of the object or file, for the error
    message; `remedy`: last sentence of the message."""
    try:
        return validate(model, data)
    except ValueError as error:
        raise InvalidDocument(f"{source} is malformed: {error}. {remedy}") from None


def validate(model: type[D], data: bytes | str) -> D:
    """Parse a document. Raises ValueError with the first wrong field and its rule; unlike the error
    of `parse`, this error does not name the source of the document."""
    try:
        value = loads(data)
    except ValueError as error:
        raise ValueError(f"it is not valid JSON ({error})") from None
    return validate_value(model, value)


def validate_value(model: type[D], value: Any) -> D:
    """Validate a parsed JSON value, and return it as a document. Raises ValueError like
    `validate`."""
    with suppress(ValidationError):
        return model.model_validate(value)

    # convert to JSON text first, so that tuples are accepted as arrays, and messages name JSON
    # types
    try:
        return model.model_validate_json(to_json(value, default=str))
    except ValidationError as error:
        raise ValueError(describe_first_error(error)) from None


def is_valid(model: type[BaseModel], value: Any) -> bool:
    """Return True if a parsed JSON value is a valid document of the type `model`."""
    try:
        validate_value(model, value)
    except ValueError:
        return False
    return True


def parse_object(data: bytes | str, source: str) -> dict[str, Any]:
    """Parse a JSON object with arbitrary fields. Raises InvalidDocument."""
    return parse(_Object, data, source).model_dump()


def read_object(model: type[D], store: "Store", key: str) -> D:
    """Read a document in the object store. Raises NotFound or StorageError, and InvalidDocument if
    the document is malformed."""
    return parse(model, store.get(key), store.uri(key))


def read_file(model: type[D], path: Path, remedy: str = RESTORE) -> D:
    """Read a document from a file. Raises InvalidDocument, also for a missing or unreadable
    file."""
    try:
        data = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise InvalidDocument(
            f"{path} cannot be read: {error.strerror or error}. Restore it."
        ) from error
    return parse(model, data, str(path), remedy)


def read_json_file(path: Path) -> dict[str, Any]:
    """Read a JSON object with arbitrary fields in a file. Raises InvalidDocument."""
    return read_file(_Object, path).model_dump()


class _Object(Document):
    """A JSON object with arbitrary fields."""

    model_config = ConfigDict(extra="allow")


def describe_first_error(error: ValidationError) -> str:
    """Return the first wrong field of a document, and the rule that it violates."""
    first = error.errors(include_url=False, include_input=False)[0]
    path = ".".join(map(str, first["loc"]))
    broken_rule = rule(first["msg"]).removesuffix(".")
    if path:
        return f"{show(path)}: {broken_rule}"
    return broken_rule


class StatusCause(Document):
    """A wrong field of an object that the API server rejected."""

    field: str | None = None
    message: str | None = None


class StatusDetails(Document):
    causes: list[StatusCause] | None = None


class KubernetesStatus(Document):
    """An error of the API server. Source: Kubernetes, meta/v1 Status."""

    message: str | None = None
    reason: str | None = None
    code: int | None = None
    details: StatusDetails | None = None
