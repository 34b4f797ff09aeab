"""The body of a request, checked: every fault is a sentence with its place, such as `instances[3].amount`."""

import math
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import SchemaValidator, from_json

from rekindle.errors import DataError, did_you_mean, rule
from rekindle.sections import known_keys

MOST_SHOWN = 5  # faults of one request
LARGE = 1 << 15  # bytes of a body that could hold more faults than are worth their memory: 500 bytes and more each
COLLECTIONS = {"list", "set", "frozenset", "tuple", "dict"}
OPAQUE = {"metadata", "cls", "config", "serialization"}  # of a schema
# what may be a number that no float64 or int64 holds; the exact check is slow
SUSPICIOUS = re.compile(rb"\d{19}|[eE]\+?\d{3}|NaN|Infinity")

R = TypeVar("R", bound=BaseModel)


def parse(request: type[R], body: bytes) -> R:
    """The request, by its types alone: text is no number and unknown keys are faults. Raises DataError."""
    if SUSPICIOUS.search(body):
        refuse_huge_numbers(body)
    try:
        if len(body) > LARGE:
            return quick_to_refuse(request).validate_json(body, strict=True)
        return request.model_validate_json(body, strict=True, extra="forbid")
    except ValidationError as error:
        faults = sorted(error.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden")
        lines = list(dict.fromkeys(sentence(request, fault) for fault in faults[:MOST_SHOWN]))
        if len(faults) > MOST_SHOWN:
            lines.append(f"There are {len(faults) - MOST_SHOWN:,} more faults.")
        raise DataError("\n".join(lines)) from error


@cache
def quick_to_refuse(request: type[BaseModel]) -> SchemaValidator:
    """A validator that stops at the first fault of a collection, and at the first unknown key.

    pydantic collects all others before it says one: of 16 MB in 40 s and 4 GB of memory.
    """
    # the parts have validators already, which do not stop
    return SchemaValidator(hastened(request.__pydantic_core_schema__), _use_prebuilt=False)


def hastened(schema: Any, alternative: bool = False) -> Any:
    """The schema with that; in one of several alternatives an unknown key is a fault that another may not have."""
    if isinstance(schema, list):
        return [hastened(part, alternative) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    alternative = alternative or kind in ("union", "definitions")
    schema = {key: part if key in OPAQUE else hastened(part, alternative) for key, part in schema.items()}
    if kind in COLLECTIONS:
        schema["fail_fast"] = True
    if kind in ("model-fields", "typed-dict", "dataclass-args"):
        schema["extra_behavior"] = "forbid"
    if kind == "model-fields" and not alternative:
        refusal = {"type": "function-plain", "function": {"type": "no-info", "function": refuse_key}}
        schema |= {"extra_behavior": "allow", "extras_keys_schema": refusal}
    return schema


def refuse_key(key: str) -> NoReturn:
    raise DataError(f"the request has {shown(key)} in one of its objects, which is not known.")


def refuse_huge_numbers(body: bytes) -> None:
    """Raises DataError that names the first number which is not finite or needs more than 64 bits."""
    try:
        values = from_json(body)
    except ValueError:
        return  # not JSON: the parser says where
    for place, value in numbers(values):
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise DataError(f"{shown_place(place)} is {shown(value)}: it must fit into 64 bits.")
        if not math.isfinite(value):
            raise DataError(f"{shown_place(place)} is {value}: it must be a finite number.")


def numbers(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], int | float]]:
    """All numbers in a JSON value, with their places."""
    if isinstance(value, (int, float)):
        yield place, value
    elif isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(inner, (*place, key))


def sentence(request: type[BaseModel], fault: Any) -> str:
    """What is wrong, where, and the rule, of one of pydantic's errors."""
    kind, place, message = fault["type"], fault["loc"], rule(fault["msg"])
    where = shown_place(place)
    match kind:
        case "json_invalid":
            return f"the request is not JSON: {fault['ctx']['error']}."
        case "missing":
            return f"{where} is missing: it is required."
        case "extra_forbidden":
            hint = did_you_mean(str(place[-1]), known_keys(request, place[:-1]))
            return f"{shown_place(place[:-1])} has {shown(place[-1])}, which is not known.{hint}"
        case "too_short" if fault["input"] == []:
            return f"{where} is empty: it must hold at least {fault['ctx']['min_length']}."
        case "value_error" if not place:  # a rule of the workload over the whole request
            return message
    return f"{where} is {shown(fault['input'])}: {message[:1].lower() + message[1:]}"


def shown_place(place: tuple[str | int, ...]) -> str:
    """`instances[3].amount`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")[:200] or "the request"


def shown(value: Any) -> str:
    """A value of a request, as short as a message needs it."""
    if isinstance(value, int) and abs(value) > 1 << 200:
        return f"a number of {value.bit_length():,} bits"  # Python refuses to write out the longest
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
