"""Validates the body of a request. Each error is a sentence that names its location, such as
`instances[3].amount`."""

import math
import re
from functools import cache
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, SchemaValidator, from_json

from argolocal.common.json_text import numbers
from argolocal.common.wording import cut
from rekindle.errors import DataError, did_you_mean
from rekindle.sections import broken_rule, known_keys

MAX_SHOWN_ERRORS = 5
# larger bodies are validated only up to the first error, since each error takes at least 500 bytes
# of memory
LARGE_BODY_BYTES = 1 << 15
COLLECTIONS = {"list", "set", "frozenset", "tuple", "dict"}
# keys of a pydantic schema whose values contain no further schemas
OPAQUE_KEYS = {"metadata", "cls", "config", "serialization"}
# matches bodies that may contain a number beyond float64 or int64; only these need the slow exact
# check
SUSPICIOUS_NUMBER = re.compile(rb"\d{19}|[eE]\+?\d{3}|NaN|Infinity")

R = TypeVar("R", bound=BaseModel)


def parse(request: type[R], body: bytes) -> R:
    """Parse a request strictly: a text is not accepted as a number, and unknown keys are errors.
    Raises DataError."""
    if SUSPICIOUS_NUMBER.search(body):
        reject_huge_numbers(body)

    try:
        if len(body) > LARGE_BODY_BYTES:
            return fail_fast_validator(request).validate_json(body, strict=True)
        return request.model_validate_json(body, strict=True, extra="forbid")
    except ValidationError as error:
        errors = sorted(
            error.errors(include_url=False), key=lambda detail: detail["type"] != "extra_forbidden"
        )
        lines = list(
            dict.fromkeys(describe_error(request, detail) for detail in errors[:MAX_SHOWN_ERRORS])
        )
        if len(errors) > MAX_SHOWN_ERRORS:
            lines.append(f"There are {len(errors) - MAX_SHOWN_ERRORS:,} more errors.")

        raise DataError(*lines) from error


@cache
def fail_fast_validator(request: type[BaseModel]) -> SchemaValidator:
    """Return a validator that stops at the first error of a collection and at the first unknown
    key.

    pydantic's usual validator collects all errors, which takes 40 s and 4 GB of memory for a body
    of 16 MB.
    """
    # disable prebuilt validators of nested models, because they collect all errors
    return SchemaValidator(add_fail_fast(request.__pydantic_core_schema__), _use_prebuilt=False)


def add_fail_fast(schema: Any, alternative: bool = False) -> Any:
    """Return a schema whose validation stops at the first error. `alternative`: True inside a
    union, where an unknown key only excludes an alternative and must not stop the validation."""
    if isinstance(schema, list):
        return [add_fail_fast(inner, alternative) for inner in schema]
    if not isinstance(schema, dict):
        return schema

    kind = schema.get("type")
    alternative = alternative or kind in ("union", "definitions")
    schema = {
        key: inner if key in OPAQUE_KEYS else add_fail_fast(inner, alternative)
        for key, inner in schema.items()
    }

    if kind in COLLECTIONS:
        schema["fail_fast"] = True
    if kind in ("model-fields", "typed-dict", "dataclass-args"):
        schema["extra_behavior"] = "forbid"

    if kind == "model-fields" and not alternative:
        reject = {"type": "function-plain", "function": {"type": "no-info", "function": reject_key}}
        schema.update({"extra_behavior": "allow", "extras_keys_schema": reject})

    return schema


def reject_key(key: str) -> NoReturn:
    raise DataError(f"the request has the unknown key {format_value(key)} in one of its objects.")


def reject_huge_numbers(body: bytes) -> None:
    """Raise DataError for the first number that is not finite or needs more than 64 bits."""
    try:
        values = from_json(body)
    except ValueError:
        return  # invalid JSON: the parser reports the position of the error later
    for path, value in numbers(values):
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise DataError(
                f"{format_path(path)} is {format_value(value)}: it must fit into 64 bits."
            )
        if not math.isfinite(value):
            raise DataError(f"{format_path(path)} is {value}: it must be a finite number.")


def describe_error(request: type[BaseModel], detail: ErrorDetails) -> str:
    """Format one of pydantic's errors as a sentence with the location, the value and the rule."""
    kind = detail["type"]
    path = detail["loc"]
    message = broken_rule(request, detail)
    where = format_path(path)

    match kind:
        case "json_invalid":
            return f"the request is not JSON: {detail['ctx']['error']}."
        case "missing":
            return f"{where} is missing: it is required."
        case "extra_forbidden":
            hint = did_you_mean(str(path[-1]), known_keys(request, path[:-1]))
            return f"{format_path(path[:-1])} has the unknown key {format_value(path[-1])}.{hint}"
        case "too_short" if detail["input"] == []:
            return f"{where} is empty: it must contain at least {detail['ctx']['min_length']}."
        case "value_error" if not path:
            # the request violates a rule of the workload that concerns several of its fields
            return message

    return f"{where} is {format_value(detail['input'])}: {message[:1].lower() + message[1:]}"


def format_path(path: tuple[str | int, ...]) -> str:
    """Format a location: `instances[3].amount`."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return text.removeprefix(".")[:200] or "the request"


def format_value(value: object) -> str:
    """Format a value of a request, shortened for a message."""
    if isinstance(value, int) and abs(value) > 1 << 200:
        # show only the size, because Python refuses to format very long integers
        return f"a number of {value.bit_length():,} bits"
    return cut(repr(value))
