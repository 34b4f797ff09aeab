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

from argolocal.common.checked_names import CheckedName, format_untrusted
from argolocal.common.files import read_regular_file
from argolocal.common.json_text import MAX_BYTES, loads, to_json
from argolocal.errors import InvalidDocument
from rekindle.errors import format_rule
from rekindle.names import ArtifactKey

__all__ = [
    "DatasetFile",
    "Document",
    "InvalidDocument",
    "ModelFile",
    "ResultFile",
    "Sealed",
    "describe_first_error",
    "encode_model_description",
    "is_valid",
    "name_field",
    "parse",
    "parse_and_validate",
    "parse_object",
    "read_file",
    "read_json_file",
    "read_object",
    "seal_fields",
    "validate_value",
]

if TYPE_CHECKING:
    from rekindle.storage import Store

RESTORE_REMEDY = "Restore it, or remove it."
MODEL_FILE = "model.json"
CHECKSUM = "checksum"


class Document(BaseModel):
    """The base class of documents. The fields of documents have strict types: a text field, for
    example, rejects a number."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)


def name_field(name_type: type[CheckedName], *, is_optional: bool = False) -> AfterValidator:
    """Return a pydantic validator for a text field that contains a name of the type `name_type`,
    such as ModelName. With `is_optional`, the field may be empty."""

    def check(name_text: str) -> str:
        if (name_text or not is_optional) and not name_type.matches(name_text):
            raise ValueError(
                f"{format_untrusted(name_text)} is not {name_type.KIND}: {name_type.RULE}"
            )
        return name_text

    return AfterValidator(check)


D = TypeVar("D", bound=BaseModel)


class BestValidation(Document):
    """The training step whose weights had the lowest loss on the held-out samples.
    `validation_loss` is None if that loss is not finite. `released` is True if the trained model
    has the weights of this best step, and False if the model has the weights of the last step."""

    step: int = Field(ge=0, lt=2**53)
    validation_loss: float | None
    released: bool = False


class Sealed(Document):
    """A document whose field `checksum` is the sha256 of the other fields.

    The checksum is "" if an earlier version of Rekindle or another program wrote the document.
    """

    checksum: str = ""

    @model_validator(mode="before")
    @classmethod
    def _verify_checksum(cls, document_fields: Any) -> Any:
        if not isinstance(document_fields, dict) or not document_fields.get(CHECKSUM):
            return document_fields

        recorded_checksum = document_fields[CHECKSUM]
        actual_checksum = _compute_checksum(document_fields)
        if recorded_checksum != actual_checksum:
            raise ValueError(
                f"the sha256 of its fields is {actual_checksum}, but its {CHECKSUM} is"
                f" {format_untrusted(recorded_checksum)}: it was changed"
            )
        return document_fields


class ResultFile(Document):
    """The recorded content of a file in the result of a training program."""

    size: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class ModelFile(Sealed):
    """model.json of a trained model. `start` is the key prefix of the release with the initial
    weights, `digest` is the digest of the dataset, and `identity` is the hash of all inputs of the
    training. `fingerprint` contains the properties of the machine that affect the bits of the
    weights. `chosen` describes how validation chose the family. `paused` is True if the training
    stopped before its end and can be resumed. Unknown fields are preserved, since a workload may
    add its own fields.

    `files`: files of the result of a training program, by path; empty for a model with weights.
    `is_file` is True if the result is one file, not a folder.
    """

    model_config = ConfigDict(extra="allow")
    # sha256 of the weights, or of the list of the result's files
    sha256: str = Field(min_length=1)
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
        """Return the fields that are set in the document; leave out fields with their default
        values."""
        return self.model_dump(exclude_unset=True)


def encode_model_description(model_fields: Mapping[str, Any]) -> bytes:
    """Return the content of model.json with these fields and their checksum."""
    return seal_fields(model_fields)


def seal_fields(document_fields: Mapping[str, Any]) -> bytes:
    """Return `document_fields` and their checksum as JSON, as `Sealed` reads them."""
    return to_json(
        {**document_fields, CHECKSUM: _compute_checksum(loads(to_json(document_fields)))}, indent=1
    ).encode()


def _compute_checksum(document_fields: Mapping[str, Any]) -> str:
    other_fields = {name: value for name, value in document_fields.items() if name != CHECKSUM}
    return hashlib.sha256(to_json(other_fields, sort_keys=True).encode()).hexdigest()


class DatasetFile(Document):
    """dataset.json of a dataset or a release."""

    facts: dict[str, JsonValue] = Field(default_factory=dict)
    digest: str = ""


def parse(
    document_type: type[D],
    json_content: bytes | str,
    source_name: str,
    remedy: str = RESTORE_REMEDY,
) -> D:
    """Parse a document. Raises InvalidDocument. `source_name`: name of the object or file, for
    the error message; `remedy`: last sentence of the message."""
    try:
        return parse_and_validate(document_type, json_content)
    except ValueError as error:
        raise InvalidDocument(f"{source_name} is malformed: {error}. {remedy}") from None


def parse_and_validate(document_type: type[D], json_content: bytes | str) -> D:
    """Parse a document. Raises ValueError with the first wrong field and the violated rule; unlike
    the error of `parse`, the ValueError does not name the source of the document."""
    try:
        parsed_value = loads(json_content)
    except ValueError as error:
        raise ValueError(f"it is not valid JSON ({error})") from None
    return validate_value(document_type, parsed_value)


def validate_value(document_type: type[D], parsed_value: Any) -> D:
    """Validate a parsed JSON value, and return it as a document. Raises ValueError like
    `parse_and_validate`."""
    with suppress(ValidationError):
        return document_type.model_validate(parsed_value)

    # validate JSON text instead of the value, because pydantic then accepts tuples as arrays, and
    # its error messages name the types of JSON
    try:
        return document_type.model_validate_json(to_json(parsed_value, default=str))
    except ValidationError as error:
        raise ValueError(describe_first_error(error)) from None


def is_valid(document_type: type[BaseModel], parsed_value: Any) -> bool:
    """Return True if a parsed JSON value is a valid document of the type `document_type`."""
    try:
        validate_value(document_type, parsed_value)
    except ValueError:
        return False
    return True


def parse_object(json_content: bytes | str, source_name: str) -> dict[str, Any]:
    """Parse a JSON object with arbitrary fields. Raises InvalidDocument."""
    return parse(_Object, json_content, source_name).model_dump()


def read_object(document_type: type[D], store: "Store", key: str) -> D:
    """Read a document in the object store. Raises NotFound or StorageError, and InvalidDocument if
    the document is malformed."""
    return parse(document_type, store.get(key), store.uri(key))


def read_file(document_type: type[D], path: Path, remedy: str = RESTORE_REMEDY) -> D:
    """Read a document from a file. Raises InvalidDocument, also for a missing or unreadable
    file."""
    try:
        file_content = read_regular_file(path, MAX_BYTES)
    except OSError as error:
        raise InvalidDocument(
            f"{path} cannot be read: {error.strerror or error}. Restore it."
        ) from error
    return parse(document_type, file_content, str(path), remedy)


def read_json_file(path: Path) -> dict[str, Any]:
    """Read a JSON object with arbitrary fields in a file. Raises InvalidDocument."""
    return read_file(_Object, path).model_dump()


class _Object(Document):
    """A JSON object with arbitrary fields."""

    model_config = ConfigDict(extra="allow")


def describe_first_error(error: ValidationError) -> str:
    """Return the first wrong field of a document, and the rule that it violates."""
    first_error = error.errors(include_url=False, include_input=False)[0]
    path = ".".join(map(str, first_error["loc"]))
    broken_rule = format_rule(first_error["msg"]).removesuffix(".")
    if path:
        return f"{format_untrusted(path)}: {broken_rule}"
    return broken_rule


class StatusCause(Document):
    """A wrong field of an object that the API server rejected."""

    field: str | None = None
    message: str | None = None


class StatusDetails(Document):
    causes: list[StatusCause] | None = None


class KubernetesStatus(Document):
    """An error of the Kubernetes API server. Source: the fields are defined by Kubernetes (meta/v1,
    Status)."""

    message: str | None = None
    reason: str | None = None
    code: int | None = None
    details: StatusDetails | None = None
