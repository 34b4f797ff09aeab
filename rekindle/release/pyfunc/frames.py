"""Converts the rows of a data frame to instances in JSON.

A data frame loses information: a missing value makes a column of integers a column of floats, and
does not show whether the value was null or left out. The lost information is restored from the
schema of the request.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime, time
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from rekindle.errors import DataError
from rekindle.sections import LenientSchemaGenerator, resolve_schema

if TYPE_CHECKING:
    from pandas import DataFrame

INSTANCES_KEY = "instances"
# integers above this value lose digits as floats
MAX_EXACT_FLOAT = 2**53
JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
JsonSchema = dict[str, Any]


class FrameConverter:
    """Converts data frames to the instances of one type of request."""

    def __init__(self, request_type: type[BaseModel]) -> None:
        self.schema: JsonSchema = request_type.model_json_schema(
            schema_generator=LenientSchemaGenerator
        )
        self.definitions: JsonSchema = self.schema.get("$defs", {})

    @cached_property
    def instance(self) -> JsonSchema:
        """The JSON schema of an instance."""
        instances_schema = resolve_schema(
            self.schema["properties"][INSTANCES_KEY], self.definitions
        )
        return resolve_schema(instances_schema.get("items", {}), self.definitions)

    @property
    def properties(self) -> JsonSchema:
        return self.instance.get("properties", {})

    @property
    def required(self) -> set[str]:
        return set(self.instance.get("required", []))

    def to_instances(self, data_frame: "DataFrame") -> list[dict[str, Any]]:
        """Convert each row to an instance. Raises DataError for a large integer that has lost
        digits."""
        return [
            self._to_instance(row, row_number)
            for row_number, row in enumerate(self._list_rows(data_frame))
        ]

    def _list_rows(self, data_frame: "DataFrame") -> list[dict[str, Any]]:
        """Return the rows of a frame as dictionaries.

        MLflow converts a dictionary of text columns to a frame with a single row, whose values are
        the whole columns. A frame whose values are whole columns is converted back to its rows.
        """
        column_names = list(map(str, data_frame.columns))

        # `to_dict` is not used, because it converts pandas.NA to None
        rows = [
            dict(zip(column_names, row_values, strict=True))
            for row_values in data_frame.itertuples(index=False, name=None)
        ]
        if (
            len(rows) != 1
            or not rows[0]
            or not all(map(self._is_column, rows[0], rows[0].values()))
        ):
            return rows

        [columns] = rows
        if len({len(column) for column in columns.values()}) != 1:
            raise DataError(
                f"the columns {', '.join(columns)} must have the same length, with a value for each"
                " row."
            )

        return [
            dict(zip(columns, row_values, strict=True))
            for row_values in zip(*columns.values(), strict=True)
        ]

    def _is_column(self, field_name: str, cell_value: object) -> bool:
        """Return True if `cell_value` is a whole column, that is, a list in a field that accepts no
        lists."""
        field_types = self._list_types(self.properties.get(field_name, {}))
        return isinstance(cell_value, list) and bool(field_types) and "array" not in field_types

    def _to_instance(self, row: Mapping[str, Any], row_number: int) -> dict[str, Any]:
        """Convert a row of a data frame to an instance. A missing value becomes null if the field
        accepts null and either the value is None or the field is required. A missing value that
        does not become null is omitted."""
        instance: dict[str, Any] = {}

        for field_name, field_value in row.items():
            field_schema = self.properties.get(field_name, {})
            # a field whose schema names no types accepts any value
            accepts_null = field_name in self.properties and "null" in (
                self._list_types(field_schema) or {"null"}
            )
            if not is_missing(field_value):
                is_optional = accepts_null or field_name not in self.required
                instance[field_name] = self._convert_value(
                    field_value,
                    field_schema,
                    f"{INSTANCES_KEY}[{row_number}].{field_name}",
                    is_optional,
                )
            elif accepts_null and (field_value is None or field_name in self.required):
                instance[field_name] = None

        return instance

    def _convert_value(
        self, cell_value: Any, field_schema: JsonSchema, location: str, is_optional: bool = False
    ) -> Any:
        """Convert a value of a frame to JSON. `is_optional` is True if the column may contain
        missing values, for which pandas converts its integers to floats."""
        schema_options = list(self._list_options(field_schema))

        if isinstance(cell_value, Mapping):
            properties = {
                property_name: inner_schema
                for schema_option in schema_options
                for property_name, inner_schema in schema_option.get("properties", {}).items()
            }

            other_schema = next(
                (
                    schema_option["additionalProperties"]
                    for schema_option in schema_options
                    if schema_option.get("additionalProperties")
                ),
                {},
            )
            # `additionalProperties: true` allows any other property, without a schema
            if not isinstance(other_schema, dict):
                other_schema = {}

            return {
                property_name: self._convert_value(
                    property_value,
                    properties.get(property_name, other_schema),
                    f"{location}.{property_name}",
                )
                for property_name, property_value in cell_value.items()
            }

        if is_collection(cell_value):
            items_schema: JsonSchema = next(
                (
                    schema_option["items"]
                    for schema_option in schema_options
                    if "items" in schema_option
                ),
                {},
            )
            return [
                self._convert_value(list_item, items_schema, f"{location}[{index}]")
                for index, list_item in enumerate(cell_value)
            ]

        if is_missing(cell_value) and not isinstance(cell_value, float):
            return None

        return self._convert_scalar(to_python(cell_value), field_schema, location, is_optional)

    def _convert_scalar(
        self, cell_value: Any, field_schema: JsonSchema, location: str, is_optional: bool
    ) -> Any:
        field_types = self._list_types(field_schema)
        field_formats = {
            schema_option.get("format") for schema_option in self._list_options(field_schema)
        }

        match cell_value:
            case float() if (
                is_optional
                and cell_value.is_integer()
                and "integer" in field_types
                and "number" not in field_types
            ):
                return self._to_integer(cell_value, location)
            case Decimal() if "string" not in field_types:
                return float(cell_value)
            case datetime() if (
                "date" in field_formats
                and "date-time" not in field_formats
                and is_midnight(cell_value)
            ):
                return cell_value.date().isoformat()
            case datetime():
                # a pandas.Timestamp is formatted with its nanoseconds
                return cell_value.isoformat()

        return to_jsonable_python(cell_value, serialize_unknown=True)

    def _to_integer(self, cell_value: float, location: str) -> int:
        if abs(cell_value) > MAX_EXACT_FLOAT:
            raise DataError(
                f"{location} is {cell_value:.0f}, which has lost digits: a column of large"
                ' integers with a missing value needs the dtype "Int64".'
            )
        return int(cell_value)

    def _list_options(self, field_schema: JsonSchema) -> Iterator[JsonSchema]:
        """Yield the alternatives of a JSON schema."""
        field_schema = (
            resolve_schema(field_schema, self.definitions)
            if "$ref" in field_schema
            else field_schema
        )
        alternatives = [
            *field_schema.get("anyOf", []),
            *field_schema.get("oneOf", []),
            *field_schema.get("allOf", []),
        ]
        if not alternatives:
            yield field_schema
        for alternative in alternatives:
            yield from self._list_options(alternative)

    def _list_types(self, field_schema: JsonSchema) -> set[str]:
        """Return the JSON types that a field accepts; an empty set if it accepts all types."""
        json_types: set[str] = set()

        for schema_option in self._list_options(field_schema):
            allowed_values = schema_option.get(
                "enum", [schema_option["const"]] if "const" in schema_option else []
            )
            if "type" in schema_option:
                json_types.update(
                    {schema_option["type"]}
                    if isinstance(schema_option["type"], str)
                    else {*schema_option["type"]}
                )
            elif allowed_values:
                json_types.update(
                    {
                        JSON_TYPES.get(type(allowed_value), "object")
                        for allowed_value in allowed_values
                    }
                )
            else:
                return set()

        return json_types


def is_missing(cell_value: object) -> bool:
    """Return True for None, NaN, NaT and pandas.NA."""
    import pandas
    from pandas.api.types import is_scalar

    return is_scalar(cell_value) and bool(pandas.isna(cell_value))


def is_collection(cell_value: object) -> bool:
    """Return True for a list, tuple, set or array."""
    return (
        isinstance(cell_value, (list, tuple, set, frozenset)) or getattr(cell_value, "ndim", 0) > 0
    )


def is_midnight(cell_value: datetime) -> bool:
    return cell_value.tzinfo is None and cell_value.time() == time()


def to_python(cell_value: object) -> Any:
    """Convert a NumPy scalar to a Python value, or a NumPy time to a pandas time, which keeps
    nanoseconds."""
    import numpy
    import pandas

    if isinstance(cell_value, numpy.datetime64):
        return pandas.Timestamp(cell_value)
    if isinstance(cell_value, numpy.timedelta64):
        return pandas.Timedelta(cell_value)
    if isinstance(cell_value, numpy.generic):
        return cell_value.item()
    return cell_value
