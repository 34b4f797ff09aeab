"""Validation of a step's inputs when the pipeline is built: names, required values and types."""

from collections.abc import Collection, Mapping
from typing import Any

from hera.workflows import Artifact, Parameter, Task
from hera.workflows import models as m
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from rekindle.blocks.wiring import Block, Value, describe, refuse
from rekindle.errors import ConfigError, did_you_mean, rule
from rekindle.sections import Section, parse_section
from rekindle.step import is_artifact

NUMBERS = (int, float)


def reject_unknown(
    task: str, values: Mapping[str, Any], fields: Mapping[str, FieldInfo], options: Collection[str] = ()
) -> None:
    """Raise WiringError for unknown or missing inputs; `options`: names of other arguments, for suggestions."""
    for name in values.keys() - fields.keys():
        hint = did_you_mean(name, {*fields, *options}) or f" Its inputs: {', '.join(fields) or 'none'}."
        refuse(f'{task} has no input "{name}".{hint}')
    if missing := [name for name, info in fields.items() if info.is_required() and values.get(name) is None]:
        kinds = [f"{name} ({'an artifact' if is_artifact(fields[name]) else 'a parameter'})" for name in missing]
        refuse(f"{task} lacks {', '.join(kinds)}: pass {', '.join(f'{name}=...' for name in missing)}.")


def check_section(name: str, value: Any, section: type[Section]) -> None:
    """Raise WiringError unless `value` is a valid section of the config, or None (the config's own section)."""
    if value is None:
        return
    if not isinstance(value, section):
        copy = f"config.{name}.model_copy(update={{...}})"
        refuse(f"{name}={value!r} is not a section of a config: pass {copy} or a {section.__name__}.")
    fields = set(type(value).model_fields)  # model_copy validates neither names nor values
    for unknown in vars(value).keys() - fields:
        refuse(f"config.{name} has no {unknown}.{did_you_mean(unknown, fields)}")
    try:
        parse_section(type(value), vars(value), name)
    except ConfigError as error:
        refuse(str(error))


def validate_inputs(task: str, values: Mapping[str, Any], fields: Mapping[str, FieldInfo]) -> dict[str, Any]:
    """Return the values that are not None, each of the type of its input. Raises WiringError."""
    return {
        name: _validate(f'the input "{name}" of {task}', name, fields[name], value)
        for name, value in values.items()
        if value is not None
    }


def _validate(label: str, name: str, info: FieldInfo, value: Any) -> Any:
    if isinstance(value, Task):
        near = did_you_mean(name, set(dir(value.outputs))) if isinstance(value, Block) else ""
        refuse(f"{label} is {describe(value)}: pass one of its outputs, as in {value.name}.outputs.{name}.{near}")
    if is_artifact(info):
        if isinstance(value, (Artifact, m.Artifact)):
            return value
        source = f"the parameter {value.name}" if isinstance(value, (Value, Parameter)) else repr(value)
        refuse(f"{label} is an artifact, and {source} is not: pass an artifact, as in TASK.outputs.{name}.")
    if isinstance(value, (Artifact, m.Artifact)):
        refuse(f"{label} is a parameter, and {value.name} is an artifact: pass an output that is text or a number.")
    if isinstance(value, Value):
        _check_type(label, info.annotation, value)
    elif isinstance(value, Parameter):
        return str(value.value)
    elif not (isinstance(value, str) and "{{" in value):
        try:
            TypeAdapter[Any](info.annotation or Any).validate_python(value)
        except ValidationError as error:
            refuse(f"{label} is {value!r}: {rule(error.errors()[0]['msg'])}")
    return value


def _check_type(label: str, annotation: Any, value: Value) -> None:
    """Reject text and mappings for a number, and floats for an integer; every output can be passed as text."""
    if annotation in NUMBERS and value.kind not in NUMBERS:
        refuse(f"{label} is a number, and the output {value.name} is not.")
    if annotation is int and value.kind is float:
        refuse(f"{label} is an integer, and the output {value.name} may have a fraction.")
