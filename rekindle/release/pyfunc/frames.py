"""Converts the rows of a data frame to instances in JSON.

A frame loses information: a missing value makes a column of integers a column of floats, and does
not show whether the value was null or left out. The schema of the request restores this
information.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime, time
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from rekindle.errors import DataError
from rekindle.sections import AnyModel, resolve

if TYPE_CHECKING:
    from pandas import DataFrame

INSTANCES = "instances"
MAX_EXACT_FLOAT = 2**53  # integers above this value lose digits as floats
JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
Schema = dict[str, Any]


class FrameConverter:
    """Converts data frames to the instances of one type of request."""

    def __init__(self, request: type[BaseModel]) -> None:
        self.schema: Schema = request.model_json_schema(schema_generator=AnyModel)
        self.definitions: Schema = self.schema.get("$defs", {})

    @cached_property
    def instance(self) -> Schema:
        """The JSON schema of an instance."""
        instances = resolve(self.schema["properties"][INSTANCES], self.definitions)
        return resolve(instances.get("items", {}), self.definitions)

    @property
    def properties(self) -> Schema:
        return self.instance.get("properties", {})

    @property
    def required(self) -> set[str]:
        return set(self.instance.get("required", []))

    def to_instances(self, frame: "DataFrame") -> list[dict[str, Any]]:
        """Convert each row to an instance. Raises DataError for a large integer that has lost
        digits."""
        return [self._to_instance(row, number) for number, row in enumerate(self._rows(frame))]

    def _rows(self, frame: "DataFrame") -> list[dict[str, Any]]:
        """Return the rows of a frame as dictionaries.

        From a dictionary of text columns, MLflow makes a single row that contains the whole
        columns. Such a frame is converted back to its rows.
        """
        names = list(map(str, frame.columns))

        # `to_dict` is not used, because it converts pandas.NA to None
        rows = [
            dict(zip(names, values, strict=True))
            for values in frame.itertuples(index=False, name=None)
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
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]

    def _is_column(self, name: str, value: object) -> bool:
        """Return True if `value` is a whole column: a list in a field that accepts no lists."""
        types = self._types(self.properties.get(name, {}))
        return isinstance(value, list) and bool(types) and "array" not in types

    def _to_instance(self, row: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Convert a row. A missing value becomes null if the field accepts null and either the
        value is None or the field is required. Otherwise, the field is omitted."""
        instance: dict[str, Any] = {}

        for name, value in row.items():
            field = self.properties.get(name, {})
            # a field without types accepts any value
            accepts_null = name in self.properties and "null" in (self._types(field) or {"null"})
            if not is_missing(value):
                is_optional = accepts_null or name not in self.required
                instance[name] = self._convert(
                    value, field, f"{INSTANCES}[{number}].{name}", is_optional
                )
            elif accepts_null and (value is None or name in self.required):
                instance[name] = None

        return instance

    def _convert(self, value: Any, field: Schema, location: str, is_optional: bool = False) -> Any:
        """Convert a value of a frame to JSON. `is_optional`: the column may contain missing values,
        for which pandas converts its integers to floats."""
        options = list(self._options(field))

        if isinstance(value, Mapping):
            properties = {
                name: inner
                for option in options
                for name, inner in option.get("properties", {}).items()
            }

            other = next(
                (
                    option["additionalProperties"]
                    for option in options
                    if option.get("additionalProperties")
                ),
                {},
            )
            # `additionalProperties: true` allows any other property, without a schema
            if not isinstance(other, dict):
                other = {}

            return {
                name: self._convert(inner, properties.get(name, other), f"{location}.{name}")
                for name, inner in value.items()
            }

        if is_collection(value):
            items: Schema = next((option["items"] for option in options if "items" in option), {})
            return [
                self._convert(item, items, f"{location}[{index}]")
                for index, item in enumerate(value)
            ]

        if is_missing(value) and not isinstance(value, float):
            return None

        return self._convert_scalar(to_python(value), field, location, is_optional)

    def _convert_scalar(self, value: Any, field: Schema, location: str, is_optional: bool) -> Any:
        types = self._types(field)
        formats = {option.get("format") for option in self._options(field)}

        match value:
            case float() if (
                is_optional and value.is_integer() and "integer" in types and "number" not in types
            ):
                return self._to_integer(value, location)
            case Decimal() if "string" not in types:
                return float(value)
            case datetime() if (
                "date" in formats and "date-time" not in formats and is_midnight(value)
            ):
                return value.date().isoformat()
            case datetime():  # with nanoseconds, if it is one of pandas
                return value.isoformat()

        return to_jsonable_python(value, serialize_unknown=True)

    def _to_integer(self, value: float, location: str) -> int:
        if abs(value) > MAX_EXACT_FLOAT:
            raise DataError(
                f"{location} is {value:.0f}, which has lost digits: a column of large integers with"
                ' a missing value needs the dtype "Int64".'
            )
        return int(value)

    def _options(self, field: Schema) -> Iterator[Schema]:
        """Yield the alternatives of a JSON schema."""
        field = resolve(field, self.definitions) if "$ref" in field else field
        alternatives = [*field.get("anyOf", []), *field.get("oneOf", []), *field.get("allOf", [])]
        if not alternatives:
            yield field
        for alternative in alternatives:
            yield from self._options(alternative)

    def _types(self, field: Schema) -> set[str]:
        """Return the JSON types that a field accepts; an empty set if it accepts all types."""
        types: set[str] = set()

        for option in self._options(field):
            choices = option.get("enum", [option["const"]] if "const" in option else [])
            if "type" in option:
                types.update(
                    {option["type"]} if isinstance(option["type"], str) else {*option["type"]}
                )
            elif choices:
                types.update({JSON_TYPES.get(type(choice), "object") for choice in choices})
            else:
                return set()

        return types


def is_missing(value: object) -> bool:
    """Return True for None, NaN, NaT and pandas.NA."""
    import pandas
    from pandas.api.types import is_scalar

    return is_scalar(value) and bool(pandas.isna(value))


def is_collection(value: object) -> bool:
    """Return True for a list, tuple, set or array."""
    return isinstance(value, (list, tuple, set, frozenset)) or getattr(value, "ndim", 0) > 0


def is_midnight(value: datetime) -> bool:
    return value.tzinfo is None and value.time() == time()


def to_python(value: object) -> Any:
    """Convert a NumPy scalar to a Python value, or a NumPy time to a pandas time, which keeps
    nanoseconds."""
    import numpy
    import pandas

    if isinstance(value, numpy.datetime64):
        return pandas.Timestamp(value)
    if isinstance(value, numpy.timedelta64):
        return pandas.Timedelta(value)
    if isinstance(value, numpy.generic):
        return value.item()
    return value
