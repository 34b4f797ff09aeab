"""Base class of the config file's sections. Each section is defined next to the code that it configures."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, PydanticUserError, ValidationError

from rekindle.errors import ConfigError, rule


class Section(BaseModel):
    """A section of a config file. Unknown keys are errors; each field has a description."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


def resolve(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema that a reference or an optional value stands for."""
    options = [option for option in schema.get("anyOf", []) if option.get("type") != "null"]
    if len(options) == 1:
        return resolve(options[0], definitions)
    reference = schema.get("$ref", "").rpartition("/")[2]
    return resolve(definitions[reference], definitions) if reference else schema


@lru_cache(64)
def _schema(model: type[BaseModel]) -> dict[str, Any]:
    try:
        return model.model_json_schema()  # cached: it takes milliseconds, and there may be thousands of wrong keys
    except PydanticUserError:  # the type of a field lacks a JSON schema
        return {}


def known_keys(model: type[BaseModel], path: Iterable[str | int]) -> set[str]:
    """Return the keys that the object at `path` of a model may have; empty if unknown."""
    schema = _schema(model)
    definitions = schema.get("$defs", {})
    node = resolve(schema, definitions)  # the schema of a recursive model is a reference
    for key in path:
        inner = node.get("properties", {}).get(key) or node.get("items") or node.get("additionalProperties")
        node = resolve(inner, definitions) if isinstance(inner, dict) else {}
    return set(node.get("properties", ()))


S = TypeVar("S", bound=Section)


def parse_section(section: type[S], values: Any, name: str) -> S:
    """Validate `values` as the config's section `name`. Raises ConfigError that names each wrong key."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        keys = [(".".join(map(str, [name, *e["loc"]])), e) for e in error.errors()]
        raise ConfigError("\n".join(f"{key} is {e['input']!r}: {rule(e['msg'])}" for key, e in keys)) from error
