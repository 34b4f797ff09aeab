"""The inputs of a step, checked when the pipeline is built: each there, known, and of its kind."""

from collections.abc import Collection, Mapping
from typing import Any

from hera.workflows import Artifact, Parameter, Task
from hera.workflows import models as m
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from rekindle.blocks.wiring import Block, Value, refuse, shown
from rekindle.errors import ConfigError, did_you_mean, rule
from rekindle.sections import Section, parse_section
from rekindle.step import is_artifact

NUMBERS = (int, float)


def reject_unknown(
    task: str, values: Mapping[str, Any], fields: Mapping[str, FieldInfo], options: Collection[str] = ()
) -> None:
    """Raise WiringError for inputs that the step does not have, or that are missing; `options` are other arguments."""
    for name in values.keys() - fields.keys():
        hint = did_you_mean(name, {*fields, *options}) or f" It has {', '.join(fields) or 'none'}."
        refuse(f'{task} has no input "{name}".{hint}')
    if missing := [name for name, info in fields.items() if info.is_required() and values.get(name) is None]:
        kinds = [f"{name} ({'an artifact' if is_artifact(fields[name]) else 'a parameter'})" for name in missing]
        refuse(f"{task} lacks {', '.join(kinds)}: give {', '.join(f'{name}=...' for name in missing)}.")


def check_section(name: str, value: Any, section: type[Section]) -> None:
    """Raise WiringError unless `value` is a valid section of the config, or None for the config's own."""
    if value is None:
        return
    if not isinstance(value, section):
        refuse(f"{name}={value!r} is no section: give config.{name}.model_copy(update={{...}}), or {section.__name__}.")
    fields = set(type(value).model_fields)  # model_copy looks neither at names nor at values
    for unknown in vars(value).keys() - fields:
        refuse(f"config.{name} has no {unknown}.{did_you_mean(unknown, fields)}")
    try:
        parse_section(type(value), vars(value), name)
    except ConfigError as error:
        refuse(str(error))


def bound(task: str, values: Mapping[str, Any], fields: Mapping[str, FieldInfo]) -> dict[str, Any]:
    """The values, each of the kind of its input. Raises WiringError."""
    given = {name: value for name, value in values.items() if value is not None}
    return {name: _bound(f'the input "{name}" of {task}', name, fields[name], value) for name, value in given.items()}


def _bound(what: str, name: str, info: FieldInfo, value: Any) -> Any:
    if isinstance(value, Task):
        near = did_you_mean(name, set(dir(value.outputs))) if isinstance(value, Block) else ""
        refuse(f"{what} is {shown(value)}: give one of its outputs, as in {value.name}.outputs.{name}.{near}")
    if is_artifact(info):
        if isinstance(value, (Artifact, m.Artifact)):
            return value
        given = f"the parameter {value.name}" if isinstance(value, (Value, Parameter)) else repr(value)
        refuse(f"{what} is an artifact, and {given} is none: give an artifact, as in TASK.outputs.{name}.")
    if isinstance(value, (Artifact, m.Artifact)):
        refuse(f"{what} is a parameter, and {value.name} is an artifact: give an output that is text or a number.")
    if isinstance(value, Value):
        _check_kind(what, info.annotation, value)
    elif isinstance(value, Parameter):
        return str(value.value)
    elif not (isinstance(value, str) and "{{" in value):
        try:
            TypeAdapter[Any](info.annotation or Any).validate_python(value)
        except ValidationError as error:
            refuse(f"{what} is {value!r}: {rule(error.errors()[0]['msg'])}")
    return value


def _check_kind(what: str, wanted: Any, value: Value) -> None:
    """Text is no number, nor a mapping; whatever is printed can be text."""
    if wanted in NUMBERS and value.kind not in NUMBERS:
        refuse(f"{what} is a number, and the output {value.name} is none.")
    if wanted is int and value.kind is float:
        refuse(f"{what} is a whole number, and the output {value.name} may have a fraction.")
