"""What every section of a config file is; the model of each lies beside what it configures."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, PydanticUserError, ValidationError

from rekindle.errors import ConfigError, rule


class Section(BaseModel):
    """One part of a config file. Unknown keys are errors; every field carries its own documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


def resolved(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema that a reference, or an optional value, means."""
    options = [option for option in schema.get("anyOf", []) if option.get("type") != "null"]
    if len(options) == 1:
        return resolved(options[0], definitions)
    reference = schema.get("$ref", "").rpartition("/")[2]
    return resolved(definitions[reference], definitions) if reference else schema


@lru_cache(64)
def _schema(model: type[BaseModel]) -> dict[str, Any]:
    try:
        return model.model_json_schema()  # milliseconds, and asked for each of thousands of wrong keys
    except PydanticUserError:  # a field of a type that JSON cannot describe
        return {}


def known_keys(model: type[BaseModel], place: Iterable[str | int]) -> set[str]:
    """The keys that the object at `place` of a model may have; empty where that cannot be told."""
    schema = _schema(model)
    definitions = schema.get("$defs", {})
    node = resolved(schema, definitions)  # that of a model which holds itself is a reference
    for part in place:
        inner = node.get("properties", {}).get(part) or node.get("items") or node.get("additionalProperties")
        node = resolved(inner, definitions) if isinstance(inner, dict) else {}
    return set(node.get("properties", ()))


S = TypeVar("S", bound=Section)


def checked(section: type[S], values: Any, name: str) -> S:
    """`values` as the config's section `name`. Raises ConfigError that names each wrong key."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        keys = [(".".join(map(str, [name, *e["loc"]])), e) for e in error.errors()]
        raise ConfigError("\n".join(f"{key} is {e['input']!r}: {rule(e['msg'])}" for key, e in keys)) from error
