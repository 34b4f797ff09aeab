"""Validates the body of a request to a model server. Each error is a sentence that names its
location, such as `instances[3].amount`."""

import math
import re
from functools import cache
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, SchemaValidator, from_json

from argolocal.common.json_text import find_numbers
from argolocal.common.wording import truncate
from rekindle.errors import DataError, suggest_similar
from rekindle.sections import describe_broken_rule, list_valid_keys

MAX_SHOWN_ERRORS = 5
# bodies of more than this number of bytes are validated only up to the first error, since each
# error takes at least 500 bytes of memory
LARGE_BODY_BYTES = 1 << 15
COLLECTION_TYPES = {"list", "set", "frozenset", "tuple", "dict"}
# keys of a pydantic schema whose values contain no further schemas
OPAQUE_KEYS = {"metadata", "cls", "config", "serialization"}
# matches bodies that may contain a number beyond float64 or int64; only matching bodies need the
# slow exact check
SUSPICIOUS_NUMBER = re.compile(rb"\d{19}|[eE]\+?\d{3}|NaN|Infinity")

R = TypeVar("R", bound=BaseModel)


def parse_body(request_type: type[R], body: bytes) -> R:
    """Parse a request strictly: a text is not accepted as a number, and unknown keys are errors.
    Raises DataError."""
    if SUSPICIOUS_NUMBER.search(body):
        reject_huge_numbers(body)

    try:
        if len(body) > LARGE_BODY_BYTES:
            return make_fail_fast_validator(request_type).validate_json(body, strict=True)
        return request_type.model_validate_json(body, strict=True, extra="forbid")
    except ValidationError as error:
        validation_errors = sorted(
            error.errors(include_url=False),
            key=lambda error_detail: error_detail["type"] != "extra_forbidden",
        )
        error_lines = list(
            dict.fromkeys(
                describe_error(request_type, error_detail)
                for error_detail in validation_errors[:MAX_SHOWN_ERRORS]
            )
        )
        if len(validation_errors) > MAX_SHOWN_ERRORS:
            error_lines.append(
                f"There are {len(validation_errors) - MAX_SHOWN_ERRORS:,} more errors."
            )

        raise DataError(*error_lines) from error


@cache
def make_fail_fast_validator(request_type: type[BaseModel]) -> SchemaValidator:
    """Return a validator that stops at the first error of a collection and at the first unknown
    key.

    pydantic's usual validator collects all errors, which takes 40 s and 4 GB of memory for a body
    of 16 MB.
    """
    # disable prebuilt validators of nested models, because they collect all errors
    return SchemaValidator(
        add_fail_fast(request_type.__pydantic_core_schema__), _use_prebuilt=False
    )


def add_fail_fast(schema: Any, is_alternative: bool = False) -> Any:
    """Return a schema whose validation stops at the first error. `is_alternative` is True inside a
    union, where an unknown key only excludes an alternative and must not stop the validation."""
    if isinstance(schema, list):
        return [add_fail_fast(inner_schema, is_alternative) for inner_schema in schema]
    if not isinstance(schema, dict):
        return schema

    schema_type = schema.get("type")
    is_alternative = is_alternative or schema_type in ("union", "definitions")
    schema = {
        key: inner_schema if key in OPAQUE_KEYS else add_fail_fast(inner_schema, is_alternative)
        for key, inner_schema in schema.items()
    }

    if schema_type in COLLECTION_TYPES:
        schema["fail_fast"] = True
    if schema_type in ("model-fields", "typed-dict", "dataclass-args"):
        schema["extra_behavior"] = "forbid"

    if schema_type == "model-fields" and not is_alternative:
        reject_schema = {
            "type": "function-plain",
            "function": {"type": "no-info", "function": reject_unknown_key},
        }
        schema.update({"extra_behavior": "allow", "extras_keys_schema": reject_schema})

    return schema


def reject_unknown_key(key: str) -> NoReturn:
    raise DataError(f"the request has the unknown key {format_value(key)} in one of its objects.")


def reject_huge_numbers(body: bytes) -> None:
    """Raise DataError for the first number that is not finite or needs more than 64 bits."""
    try:
        parsed_values = from_json(body)
    except ValueError:
        # ignore invalid JSON, because the parser later reports the position of the error
        return
    for number_path, json_number in find_numbers(parsed_values):
        if isinstance(json_number, int) and not -(1 << 63) <= json_number < 1 << 63:
            raise DataError(
                f"{format_path(number_path)} is {format_value(json_number)}: it must fit into 64"
                " bits."
            )
        if not math.isfinite(json_number):
            raise DataError(
                f"{format_path(number_path)} is {json_number}: it must be a finite number."
            )


def describe_error(request_type: type[BaseModel], error_detail: ErrorDetails) -> str:
    """Format one of pydantic's errors as a sentence with the location, the value and the rule."""
    error_type = error_detail["type"]
    error_path = error_detail["loc"]
    error_message = describe_broken_rule(request_type, error_detail)
    error_location = format_path(error_path)

    match error_type:
        case "json_invalid":
            return f"the request is not JSON: {error_detail['ctx']['error']}."
        case "missing":
            return f"{error_location} is missing: it is required."
        case "extra_forbidden":
            spelling_hint = suggest_similar(
                str(error_path[-1]), list_valid_keys(request_type, error_path[:-1])
            )
            return (
                f"{format_path(error_path[:-1])} has the unknown key"
                f" {format_value(error_path[-1])}.{spelling_hint}"
            )
        case "too_short" if error_detail["input"] == []:
            return (
                f"{error_location} is empty: it must contain at least"
                f" {error_detail['ctx']['min_length']}."
            )
        case "value_error" if not error_path:
            # the request violates a rule of the workload that concerns several of its fields
            return error_message

    return (
        f"{error_location} is {format_value(error_detail['input'])}:"
        f" {error_message[:1].lower() + error_message[1:]}"
    )


def format_path(path: tuple[str | int, ...]) -> str:
    """Format a location: `instances[3].amount`."""
    path_text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return path_text.removeprefix(".")[:200] or "the request"


def format_value(request_value: object) -> str:
    """Format a value of a request, shortened for a message."""
    if isinstance(request_value, int) and abs(request_value) > 1 << 200:
        # show only the size, because Python refuses to format very long integers
        return f"a number of {request_value.bit_length():,} bits"
    return truncate(repr(request_value))
