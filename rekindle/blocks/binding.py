"""Validation of a step's inputs when the pipeline is built: names, required values and types."""

from collections.abc import Collection, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hera.workflows import Artifact, Parameter, Task
from hera.workflows import models as m
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from rekindle.blocks.wiring import Block, Value, check_condition, describe, refuse
from rekindle.errors import ConfigError, did_you_mean, rule
from rekindle.gate import Gate, check_bounds
from rekindle.sections import Section, parse_section
from rekindle.step import Step, is_artifact, load
from rekindle.workload import load as load_workload

# fields of Hera's Task that may be passed to a block as options
TASK_OPTIONS = (
    "when",
    "with_items",
    "with_param",
    "with_sequence",
    "continue_on",
    "hooks",
    "on_exit",
)
STEP_ARGUMENTS = ("task", "pod", "after", "inputs")  # names of the arguments of blocks.step
LIST_TYPES = (list, tuple, set, frozenset)
TYPE_NAMES = {
    dict: "a mapping",
    list: "a list",
    float: "a number",
    int: "an integer",
    bool: "true or false",
}


def load_step(module: str) -> Step:
    """Import the step `module`. Raises WiringError if the module cannot be imported."""
    try:
        return load(module)
    except ConfigError as error:
        refuse(" ".join(error.lines))


def check_input_names(
    task: str,
    values: Mapping[str, Any],
    fields: Mapping[str, FieldInfo],
    options: Collection[str] = (),
) -> None:
    """Raise WiringError for unknown or missing inputs. `options`: other valid names, which the
    error may suggest for a misspelt input."""
    for name in sorted(values.keys() - fields.keys()):
        if name in TASK_OPTIONS:
            refuse(
                f"{task} does not accept `{name}`: it is an option of blocks.step, and `when` also"
                " of blocks.group."
            )

        hint = (
            did_you_mean(name, {*fields, *options})
            or f" Its inputs: {', '.join(fields) or 'none'}."
        )
        refuse(f'{task} has no input "{name}".{hint}')

    missing = [
        name for name, info in fields.items() if info.is_required() and values.get(name) is None
    ]
    if missing:
        kinds = [
            f"{name} ({'an artifact' if is_artifact(fields[name]) else 'a parameter'})"
            for name in missing
        ]
        refuse(
            f"{task} lacks {', '.join(kinds)}: pass {', '.join(f'{name}=...' for name in missing)}."
        )


def dump_model(value: object) -> Any:
    """Convert a pydantic model, such as a section of the config, to a mapping; return any other
    value unchanged."""
    if isinstance(value, (Artifact, Parameter, Task)):
        return value
    if isinstance(value, BaseModel) and not type(value).__module__.startswith("hera."):
        return value.model_dump(mode="json")
    return value


def check_section(name: str, value: object, section: type[Section]) -> None:
    """Raise WiringError unless `value` is a valid `section` of the config, or None."""
    if value is None:
        return

    if not isinstance(value, section):
        refuse(
            f"{name} is {describe(value)}, not the section `{name}`: pass"
            f" config.{name}.model_copy(update={{...}}) or a {section.__name__}."
        )

    # validate again, because `model_copy` does not validate changed fields
    fields = set(type(value).model_fields)
    for unknown in vars(value).keys() - fields:
        refuse(f"config.{name} has no {unknown}.{did_you_mean(unknown, fields)}")

    try:
        parse_section(type(value), vars(value), name)
    except ConfigError as error:
        refuse(" ".join(error.lines))


def check_workload(workload: str, data: object = None, **bounds: object) -> None:
    """Raise WiringError unless the workload exists, accepts the settings in `data` and computes the
    metrics in `bounds`.

    Values that contain a template tag are not checked, because they are known only at run time.
    """
    if "{{" in str(workload):
        return

    try:
        module = load_workload(workload)
        if data is not None and "{{" not in str(data):
            parse_section(module.Data, data, "data")

        check_bounds(parse_section(Gate, bounds, "gate"), module.metrics)
    except ConfigError as error:
        refuse(" ".join(error.lines))


def check_options(task: str, options: Mapping[str, Any]) -> None:
    """Raise WiringError for a loop or a condition that Argo could not evaluate."""
    if options.get("when") is not None:
        check_condition(f"`when` of {task}", options["when"])

    items = options.get("with_items")
    if isinstance(items, (str, Mapping)) or not hasattr(items or [], "__iter__"):
        if isinstance(items, Value):
            suggestion = "pass an output, which is known only at run time, as with_param"
        else:
            suggestion = "it must be a list"

        refuse(f"with_items of {task} is {describe(items)}: {suggestion}.")

    parameter = options.get("with_param")
    if isinstance(parameter, Value) and not _is_compatible(parameter.kind, list):
        refuse(
            f"with_param of {task} is {describe(parameter)}, which is not a list: pass an output of"
            " type list."
        )

    if parameter is not None and not isinstance(parameter, (str, list, tuple, Parameter)):
        refuse(f"with_param of {task} is {describe(parameter)}: it must be an output of type list.")


def validate_inputs(
    task: str, values: Mapping[str, Any], fields: Mapping[str, FieldInfo]
) -> dict[str, Any]:
    """Validate the inputs of a task, and return those that are not None. Raises WiringError if a
    value has the wrong type."""
    return {
        name: _validate_input(f'the input "{name}" of {task}', name, fields[name], value)
        for name, value in values.items()
        if value is not None
    }


def _validate_input(label: str, name: str, info: FieldInfo, value: object) -> Any:
    if isinstance(value, Task):
        outputs = list(value.outputs) if isinstance(value, Block) else []
        listing = f": {', '.join(outputs)}" if outputs else ""
        if name in outputs:
            suggestion = f", as in TASK.outputs.{name}"
        else:
            suggestion = listing + did_you_mean(name, outputs)

        refuse(f"{label} is {describe(value)}: pass one of its outputs{suggestion}.")

    if is_artifact(info):
        if isinstance(value, (Artifact, m.Artifact)):
            return value

        if isinstance(value, (Value, Parameter)):
            source = f"the parameter {value.name}"
        else:
            source = repr(value)

        refuse(
            f"{label} is an artifact, and {source} is not: pass an artifact, as in"
            f" TASK.outputs.{name}."
        )

    if isinstance(value, (Artifact, m.Artifact)):
        refuse(
            f"{label} is a parameter, and {value.name} is an artifact: pass an output that is text"
            " or a number."
        )

    if isinstance(value, Value):
        _check_type(label, info.annotation, value)
        return value

    if isinstance(value, Parameter):
        return str(value.value)

    is_unrestricted_text = info.annotation is str and not info.metadata
    if isinstance(value, str) and (is_unrestricted_text or "{{" in value):
        return value

    try:
        TypeAdapter[Any](Annotated[info.annotation or Any, info]).validate_python(value)  # pyright: ignore
    except ValidationError as error:
        first_error = error.errors()[0]
        choices = [choice for choice in get_args(info.annotation) if isinstance(choice, str)]
        if first_error["type"] == "literal_error":
            hint = did_you_mean(str(value), choices)
        else:
            hint = ""

        refuse(f"{label} is {describe(value)}: {rule(first_error['msg'])}{hint}")

    return value


def _check_type(label: str, annotation: object, value: Value) -> None:
    """Raise WiringError if an input of type `annotation` does not accept the output `value`. An
    input of type str accepts every output."""
    if annotation is int and value.kind is float:
        refuse(f"{label} is an integer, and the output {value.name} may have a fraction.")
    if not _is_compatible(value.kind, annotation):
        kinds = [
            TYPE_NAMES.get(get_origin(kind) or kind, "text") for kind in (annotation, value.kind)
        ]
        refuse(f"{label} is {kinds[0]}, and the output {value.name} is {kinds[1]}.")


def _is_compatible(kind: object, annotation: object) -> bool:
    """Return whether an output of type `kind` may be passed to an input of type `annotation`."""
    for union, opposite in ((kind, annotation), (annotation, kind)):
        if get_origin(union) in (Union, UnionType):
            options = [option for option in get_args(union) if option is not type(None)]
            return any(
                _is_compatible(option, opposite)
                if union is kind
                else _is_compatible(opposite, option)
                for option in options
            )

    if Any in (kind, annotation) or None in (kind, annotation) or annotation is str:
        return True
    if get_origin(annotation) is Literal:
        return kind is str or bool({*get_args(kind)} & {*get_args(annotation)})
    if annotation in (int, float, bool):
        return kind is annotation or (kind is int and annotation is float)

    outer, inner = (get_origin(each) or each for each in (annotation, kind))
    is_json = _is_json_type(outer)
    if not is_json or not _is_json_type(inner):
        return not is_json or inner not in (str, int, float, bool, Literal)
    if (outer in LIST_TYPES) != (inner in LIST_TYPES):
        return False

    if outer in (list, dict) and outer is inner:
        pairs = zip(get_args(kind), get_args(annotation), strict=False)
    else:
        pairs = ()

    return all(_is_compatible(item_kind, item_annotation) for item_kind, item_annotation in pairs)


def _is_json_type(kind: object) -> bool:
    """Return whether a step parses values of this type from JSON, as it does for mappings, lists
    and pydantic models."""
    return kind in (dict, *LIST_TYPES) or (isinstance(kind, type) and issubclass(kind, BaseModel))
