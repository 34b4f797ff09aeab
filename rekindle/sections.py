"""The base class of the sections of a config, and the description of their keys. Also copies the
first rows of a data file."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails

from rekindle.errors import ConfigError, did_you_mean, rule

# suffixes of data files with one row per line
LINE_FORMATS = (".csv", ".tsv", ".jsonl", ".ndjson")
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
# matches a URI that was converted to a Path: Path("s3://a") becomes s3:/a
COLLAPSED_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
TYPES = {"boolean": "true | false", "string": "text", "object": "mapping", "null": "null"}


class Section(BaseModel):
    """A section of a config file. Unknown keys are errors; each field has a description."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _reject_true_as_number(cls, value: object, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation in (
            int,
            float,
        ):
            raise ValueError("it must be a number, not true or false")
        return value


def resolve(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Follow references (`$ref`) in a schema, and unwrap an optional type to the schema without
    null. Return any other schema unchanged."""
    options = [option for option in schema.get("anyOf", []) if option.get("type") != "null"]
    if len(options) == 1:
        return resolve(options[0], definitions)
    reference = schema.get("$ref", "").rpartition("/")[2]
    if reference:
        return resolve(definitions[reference], definitions)
    return schema


class AnyModel(GenerateJsonSchema):
    """A generator of JSON schemas that allows any value for types that JSON schema cannot
    describe."""

    # without ClassVar, as in the base class, whose attribute it overrides
    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def handle_invalid_for_json_schema(self, schema: object, error_info: str) -> dict[str, Any]:
        return {}


# cached, because computing a schema takes milliseconds, and each of possibly thousands of wrong
# keys needs it
@lru_cache(64)
def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema(schema_generator=AnyModel)


def known_keys(model: type[BaseModel], path: Iterable[str | int]) -> set[str]:
    """Return the keys that are valid at `path` of a model; an empty set if they are unknown."""
    return set(_schemas_at(model, path)[1].get("properties", ()))


def broken_rule(model: type[BaseModel], error: ErrorDetails) -> str:
    """Return a sentence with the rule that a value violates according to pydantic. For a pattern,
    which is hard to read, the sentence contains the description of the field instead."""
    description = _schemas_at(model, error["loc"])[0].get("description")
    if error["type"] == "string_pattern_mismatch" and description:
        return f"it has the wrong form for: {description}."
    return rule(error["msg"])


def _schemas_at(
    model: type[BaseModel], path: Iterable[str | int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the JSON schema at `path` of a model, once as written and once with its reference
    resolved; {} if `path` is unknown."""
    schema = _schema(model)
    definitions = schema.get("$defs", {})
    inner = schema
    # the schema of a recursive model is a reference
    node = resolve(schema, definitions)

    for key in path:
        inner = (
            node.get("properties", {}).get(key)
            or node.get("items")
            or node.get("additionalProperties")
        )
        inner = inner if isinstance(inner, dict) else {}
        node = resolve(inner, definitions)

    return inner, node


class Setting(NamedTuple):
    """One key of a config file. `default` is None if the key is required, or is a section."""

    key: str
    values: str
    default: Any
    description: str


def settings(model: type[BaseModel], key: str = "") -> list[Setting]:
    """Describe `key` (such as "train.workers"), or all keys below `key` if it is a section (such as
    "train"; "": all keys).

    Raises ConfigError if `key` is unknown.
    """
    path = list(filter(None, key.split(".")))
    for depth, part in enumerate(path):
        node = _schemas_at(model, path[:depth])[1]
        properties = node.get("properties", {})
        if part not in properties and not isinstance(node.get("additionalProperties"), dict):
            if properties:
                key_list = f" Known: {', '.join(sorted(properties))}."
            else:
                key_list = " This setting has no keys."

            hint = did_you_mean(part, properties) or key_list
            raise ConfigError(f"{'.'.join(path[: depth + 1])} is not a known key.{hint}")

    return list(
        _describe(
            ".".join(path),
            _schemas_at(model, path)[0],
            _schema(model).get("$defs", {}),
            frozenset(),
        )
    )


def _describe(
    key: str, node: dict[str, Any], definitions: dict[str, Any], above: frozenset[str]
) -> Iterator[Setting]:
    target = resolve(node, definitions)
    title = target.get("title", "")
    inner = dict(target.get("properties", {}))

    entry_schema = target.get("additionalProperties")
    if isinstance(entry_schema, dict) and "$ref" in entry_schema:
        inner["NAME"] = entry_schema

    if not inner or title in above:
        yield Setting(
            key,
            _describe_values(node, definitions),
            node.get("default"),
            node.get("description", ""),
        )
        return

    for name, value in inner.items():
        yield from _describe(f"{key}.{name}".lstrip("."), value, definitions, above | {title})


def _describe_values(node: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Describe the values that a JSON schema allows, such as `integer >= 1`, `linear | cosine`,
    `list of text`."""
    options = node.get("anyOf")
    if options:
        return " | ".join(
            dict.fromkeys(_describe_values(option, definitions) for option in options)
        )

    choices = node.get("enum", [node["const"]] if "const" in node else None)
    if choices:
        return " | ".join(str(choice) or '""' for choice in choices)

    node = resolve(node, definitions)
    kind = str(node.get("type", "any value"))
    if kind == "array":
        return f"list of {_describe_values(node.get('items', {}), definitions)}"

    bounds = [f"{sign} {node[bound]}" for bound, sign in BOUNDS.items() if bound in node]
    return f"{node.get('format') or TYPES.get(kind, kind)} {', '.join(bounds)}".rstrip()


def leaves(value: object, key: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each value in a section. For models, mappings and lists, the
    values inside are yielded, not the containers."""
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from leaves(getattr(value, name), f"{key}.{name}")
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from leaves(item, f"{key}.{name}")
    elif isinstance(value, list | tuple | set | frozenset):
        for number, item in enumerate(value):
            yield from leaves(item, f"{key}.{number}")
    else:
        yield key, value


def absolute_paths(value: Any, key: str, folder_for_key: Callable[[str], Path]) -> Any:
    """Return `value` with each relative `Path` in it resolved against the folder that
    `folder_for_key` returns for its key.

    Raises ValueError for a URI in a `Path`, because `Path` collapses the two slashes.
    """
    if isinstance(value, Path):
        if COLLAPSED_URI.match(str(value)):
            raise ValueError(f"{key} is a URI, but the field is a Path: declare it as `str`.")
        return folder_for_key(key) / value.expanduser()

    if isinstance(value, BaseModel):
        old_values = {name: getattr(value, name) for name in type(value).model_fields}
        new_values = {
            n: absolute_paths(old, f"{key}.{n}", folder_for_key) for n, old in old_values.items()
        }

        changed = {name: new for name, new in new_values.items() if new is not old_values[name]}
        if changed:
            return value.model_copy(update=changed)
        return value

    if type(value) is dict:
        entries = {
            n: absolute_paths(item, f"{key}.{n}", folder_for_key) for n, item in value.items()
        }
        if any(entries[name] is not item for name, item in value.items()):
            return entries
        return value

    if type(value) in (list, tuple, set, frozenset):
        old_items = list(value)
        new_items = [
            absolute_paths(item, f"{key}.{n}", folder_for_key) for n, item in enumerate(old_items)
        ]

        is_changed = any(new is not old for new, old in zip(new_items, old_items, strict=True))
        if is_changed:
            return type(value)(new_items)
        return value

    return value


S = TypeVar("S", bound=Section)


def parse_section(section: type[S], values: object, name: str) -> S:
    """Validate `values` as the section `name` ("": all sections). Raises a ConfigError that names
    each wrong key."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        raise ConfigError(*(_error_sentence(section, name, e) for e in error.errors())) from error


def _error_sentence(section: type[Section], name: str, error: ErrorDetails) -> str:
    key = ".".join(map(str, [name, *error["loc"]])).lstrip(".")
    if error["type"] == "extra_forbidden":
        *path, last_key = error["loc"]
        return f"{key} is not a known key.{did_you_mean(str(last_key), known_keys(section, path))}"
    if isinstance(error["input"], str | int | float | None):
        shown_value = error["input"]
    else:
        shown_value = type(error["input"]).__name__
    if error["type"] == "missing":
        return f"{key} is missing."
    return f"{key} is {shown_value!r}: {broken_rule(section, error)}"


def copy_first_rows(source: Path, rows: int, folder: Path) -> Path | None:
    """Copy about `rows` rows of a CSV, JSON lines or parquet file to `folder`.

    Return the copy, or None for another format.
    """
    target = folder / source.name

    if source.suffix in LINE_FORMATS and source.is_file():
        copy_lines(source, target, rows + 1)
    elif source.suffix == ".parquet" and source.is_file():
        import polars as pl

        pl.scan_parquet(source).head(rows).collect().write_parquet(target)
    else:
        return None

    return target


def copy_lines(source: Path, target: Path, lines: int) -> None:
    """Copy the first `lines` lines; if the last one ends inside a quoted field, continue to the end
    of that field."""
    quotes = 0
    with source.open("rb") as read, target.open("wb") as write:
        for number, line in enumerate(read):
            if number >= lines and quotes % 2 == 0:
                break
            write.write(line)
            quotes += line.count(b'"')
