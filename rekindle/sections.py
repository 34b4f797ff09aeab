"""The base class of the sections of a config, and descriptions of their keys. `copy_first_rows`
copies the first rows of a data file."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails

from rekindle.errors import ConfigError, format_rule, suggest_similar

# suffixes of data files with one row per line
LINE_FORMATS = (".csv", ".tsv", ".jsonl", ".ndjson")
BOUND_SIGNS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
# matches a URI that was converted to a Path, such as s3:/a for Path("s3://a")
COLLAPSED_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
TYPE_NAMES = {"boolean": "true | false", "string": "text", "object": "mapping", "null": "null"}


class Section(BaseModel):
    """The base class of the sections of a config file. An unknown key is an error, and each field
    has a description."""

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


def resolve_schema(json_schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Follow references (`$ref`) in a schema, and unwrap an optional type to the schema without
    null. A schema without a reference and with a required type is returned unchanged."""
    schema_options = [
        schema_option
        for schema_option in json_schema.get("anyOf", [])
        if schema_option.get("type") != "null"
    ]
    if len(schema_options) == 1:
        return resolve_schema(schema_options[0], definitions)
    schema_name = json_schema.get("$ref", "").rpartition("/")[2]
    if schema_name:
        return resolve_schema(definitions[schema_name], definitions)
    return json_schema


class LenientSchemaGenerator(GenerateJsonSchema):
    """A generator of JSON schemas that allows any value for types that JSON schema cannot
    describe."""

    # the attribute is not a ClassVar, because the overridden attribute of the base class is not a
    # ClassVar
    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def handle_invalid_for_json_schema(self, schema: object, error_info: str) -> dict[str, Any]:
        return {}


# cached, because computing a schema takes milliseconds, and each of possibly thousands of wrong
# keys needs it
@lru_cache(64)
def _get_json_schema(section_type: type[BaseModel]) -> dict[str, Any]:
    return section_type.model_json_schema(schema_generator=LenientSchemaGenerator)


def list_valid_keys(section_type: type[BaseModel], path: Iterable[str | int]) -> set[str]:
    """Return the keys that are valid at `path` of a model; an empty set if the valid keys are
    unknown."""
    return set(_find_schemas(section_type, path)[1].get("properties", ()))


def describe_broken_rule(section_type: type[BaseModel], error: ErrorDetails) -> str:
    """Return a sentence with the rule that a value violates according to pydantic. If the rule is a
    regular expression, which is hard to read, the sentence contains the field's description
    instead."""
    key_description = _find_schemas(section_type, error["loc"])[0].get("description")
    if error["type"] == "string_pattern_mismatch" and key_description:
        return f"it has the wrong form for: {key_description}."
    return format_rule(error["msg"])


def _find_schemas(
    section_type: type[BaseModel], path: Iterable[str | int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the JSON schema at `path` of a model, first as written, then with its reference
    resolved. Both returned schemas are {} if `path` is unknown."""
    root_schema = _get_json_schema(section_type)
    definitions = root_schema.get("$defs", {})
    unresolved_schema = root_schema
    # the schema of a recursive model is a reference
    resolved_schema = resolve_schema(root_schema, definitions)

    for key in path:
        unresolved_schema = (
            resolved_schema.get("properties", {}).get(key)
            or resolved_schema.get("items")
            or resolved_schema.get("additionalProperties")
        )
        unresolved_schema = unresolved_schema if isinstance(unresolved_schema, dict) else {}
        resolved_schema = resolve_schema(unresolved_schema, definitions)

    return unresolved_schema, resolved_schema


class Setting(NamedTuple):
    """One key of a config file. `values` describes the allowed values. `default` is None if the key
    is required, or is a section."""

    key: str
    values: str
    default: Any
    description: str


def describe_settings(section_type: type[BaseModel], key: str = "") -> list[Setting]:
    """Describe the config key `key`, such as "train.workers". If `key` is a section, such as
    "train", describe all keys below it; if `key` is empty, describe all keys of the config.

    Raises ConfigError if `key` is unknown.
    """
    path = list(filter(None, key.split(".")))
    for depth, key_part in enumerate(path):
        parent_schema = _find_schemas(section_type, path[:depth])[1]
        section_properties = parent_schema.get("properties", {})
        if key_part not in section_properties and not isinstance(
            parent_schema.get("additionalProperties"), dict
        ):
            if section_properties:
                known_keys_text = f" Known: {', '.join(sorted(section_properties))}."
            else:
                known_keys_text = " This setting has no keys."

            hint = suggest_similar(key_part, section_properties) or known_keys_text
            raise ConfigError(f"{'.'.join(path[: depth + 1])} is not a known key.{hint}")

    return list(
        _describe_schema_keys(
            ".".join(path),
            _find_schemas(section_type, path)[0],
            _get_json_schema(section_type).get("$defs", {}),
            frozenset(),
        )
    )


def _describe_schema_keys(
    key: str,
    key_schema: dict[str, Any],
    definitions: dict[str, Any],
    enclosing_titles: frozenset[str],
) -> Iterator[Setting]:
    resolved_schema = resolve_schema(key_schema, definitions)
    schema_title = resolved_schema.get("title", "")
    inner_schemas = dict(resolved_schema.get("properties", {}))

    entry_schema = resolved_schema.get("additionalProperties")
    if isinstance(entry_schema, dict) and "$ref" in entry_schema:
        inner_schemas["NAME"] = entry_schema

    if not inner_schemas or schema_title in enclosing_titles:
        yield Setting(
            key,
            _describe_values(key_schema, definitions),
            key_schema.get("default"),
            key_schema.get("description", ""),
        )
        return

    for name, inner_schema in inner_schemas.items():
        yield from _describe_schema_keys(
            f"{key}.{name}".lstrip("."),
            inner_schema,
            definitions,
            enclosing_titles | {schema_title},
        )


def _describe_values(value_schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Describe the values that a JSON schema allows, such as `integer >= 1`, `linear | cosine`,
    `list of text`."""
    schema_options = value_schema.get("anyOf")
    if schema_options:
        return " | ".join(
            dict.fromkeys(
                _describe_values(schema_option, definitions) for schema_option in schema_options
            )
        )

    allowed_values = value_schema.get(
        "enum", [value_schema["const"]] if "const" in value_schema else None
    )
    if allowed_values:
        return " | ".join(str(allowed_value) or '""' for allowed_value in allowed_values)

    value_schema = resolve_schema(value_schema, definitions)
    type_name = str(value_schema.get("type", "any value"))
    if type_name == "array":
        return f"list of {_describe_values(value_schema.get('items', {}), definitions)}"

    bound_texts = [
        f"{bound_sign} {value_schema[bound_name]}"
        for bound_name, bound_sign in BOUND_SIGNS.items()
        if bound_name in value_schema
    ]
    return (
        f"{value_schema.get('format') or TYPE_NAMES.get(type_name, type_name)}"
        f" {', '.join(bound_texts)}"
    ).rstrip()


def iterate_leaves(section_value: object, key: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each value in a section. For a model, mapping or list, its
    values are yielded instead of the container itself."""
    if isinstance(section_value, BaseModel):
        for name in type(section_value).model_fields:
            yield from iterate_leaves(getattr(section_value, name), f"{key}.{name}")
    elif isinstance(section_value, Mapping):
        for name, child_value in section_value.items():
            yield from iterate_leaves(child_value, f"{key}.{name}")
    elif isinstance(section_value, list | tuple | set | frozenset):
        for item_number, child_value in enumerate(section_value):
            yield from iterate_leaves(child_value, f"{key}.{item_number}")
    else:
        yield key, section_value


def make_paths_absolute(section_value: Any, key: str, folder_for_key: Callable[[str], Path]) -> Any:
    """Return `section_value` with each relative `Path` in it resolved against the folder that
    `folder_for_key` returns for its key.

    Raises ValueError for a URI in a `Path`, because `Path` collapses the two slashes.
    """
    if isinstance(section_value, Path):
        if COLLAPSED_URI.match(str(section_value)):
            raise ValueError(f"{key} is a URI, but the field is a Path: declare it as `str`.")
        return folder_for_key(key) / section_value.expanduser()

    if isinstance(section_value, BaseModel):
        old_values = {
            name: getattr(section_value, name) for name in type(section_value).model_fields
        }
        new_values = {
            child_name: make_paths_absolute(old_value, f"{key}.{child_name}", folder_for_key)
            for child_name, old_value in old_values.items()
        }

        changed_values = {
            name: new_value
            for name, new_value in new_values.items()
            if new_value is not old_values[name]
        }
        if changed_values:
            return section_value.model_copy(update=changed_values)
        return section_value

    if type(section_value) is dict:
        new_entries = {
            child_name: make_paths_absolute(child_value, f"{key}.{child_name}", folder_for_key)
            for child_name, child_value in section_value.items()
        }
        if any(new_entries[name] is not child_value for name, child_value in section_value.items()):
            return new_entries
        return section_value

    if type(section_value) in (list, tuple, set, frozenset):
        old_items = list(section_value)
        new_items = [
            make_paths_absolute(child_value, f"{key}.{child_name}", folder_for_key)
            for child_name, child_value in enumerate(old_items)
        ]

        is_changed = any(
            new_value is not old_value
            for new_value, old_value in zip(new_items, old_items, strict=True)
        )
        if is_changed:
            return type(section_value)(new_items)
        return section_value

    return section_value


S = TypeVar("S", bound=Section)


def parse_section(section_type: type[S], section_values: object, section_name: str) -> S:
    """Validate `section_values` as the section `section_name` ("": all sections). Raises a
    ConfigError that names each wrong key."""
    try:
        return section_type.model_validate(section_values)
    except ValidationError as error:
        raise ConfigError(
            *(
                _describe_error(section_type, section_name, error_details)
                for error_details in error.errors()
            )
        ) from error


def _describe_error(section_type: type[Section], section_name: str, error: ErrorDetails) -> str:
    key = ".".join(map(str, [section_name, *error["loc"]])).lstrip(".")
    if error["type"] == "extra_forbidden":
        *path, last_key = error["loc"]
        return (
            f"{key} is not a known"
            f" key.{suggest_similar(str(last_key), list_valid_keys(section_type, path))}"
        )
    if isinstance(error["input"], str | int | float | None):
        shown_value = error["input"]
    else:
        shown_value = type(error["input"]).__name__
    if error["type"] == "missing":
        return f"{key} is missing."
    return f"{key} is {shown_value!r}: {describe_broken_rule(section_type, error)}"


def copy_first_rows(source_file: Path, row_count: int, target_folder: Path) -> Path | None:
    """Copy about `row_count` rows of a CSV, JSON lines or parquet file to `target_folder`.

    Return the path of the copy; None if the file has another format, or does not exist.
    """
    target_file = target_folder / source_file.name

    if source_file.suffix in LINE_FORMATS and source_file.is_file():
        copy_lines(source_file, target_file, row_count + 1)
    elif source_file.suffix == ".parquet" and source_file.is_file():
        import polars as pl

        pl.scan_parquet(source_file).head(row_count).collect().write_parquet(target_file)
    else:
        return None

    return target_file


def copy_lines(source_file: Path, target_file: Path, line_count: int) -> None:
    """Copy the first `line_count` lines of a file. If the last copied line ends inside a quoted
    field, also copy the lines up to the end of this field."""
    quote_count = 0
    with source_file.open("rb") as source_stream, target_file.open("wb") as target_stream:
        for line_number, line in enumerate(source_stream):
            if line_number >= line_count and quote_count % 2 == 0:
                break
            target_stream.write(line)
            quote_count += line.count(b'"')
