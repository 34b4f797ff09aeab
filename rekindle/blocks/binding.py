"""Validation of a step's inputs when the pipeline is built: names, required values and types."""

from collections.abc import Collection, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hera.workflows import Artifact, Parameter, Task
from hera.workflows import models as m
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from rekindle.blocks.settings import ClusterConfig
from rekindle.blocks.wiring import Block, Value, check_condition, describe, raise_error
from rekindle.errors import ConfigError, format_rule, suggest_similar
from rekindle.gate import Gate, check_bounds
from rekindle.sections import Section, parse_section
from rekindle.step import Step, is_artifact, load_step_module
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
# names of the arguments of blocks.step
STEP_ARGUMENTS = ("task", "pod", "after", "inputs")
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
        return load_step_module(module)
    except ConfigError as error:
        raise_error(" ".join(error.lines))


def check_input_names(
    task_name: str,
    input_values: Mapping[str, Any],
    input_fields: Mapping[str, FieldInfo],
    valid_options: Collection[str] = (),
) -> None:
    """Raise WiringError for unknown or missing inputs of a step. `valid_options`: other valid
    names, which the error may suggest for a misspelt input."""
    for name in sorted(input_values.keys() - input_fields.keys()):
        if name in TASK_OPTIONS:
            raise_error(
                f"{task_name} does not accept `{name}`: it is an option of blocks.step, and `when`"
                " also of blocks.group."
            )

        hint = (
            suggest_similar(name, {*input_fields, *valid_options})
            or f" Its inputs: {', '.join(input_fields) or 'none'}."
        )
        raise_error(f'{task_name} has no input "{name}".{hint}')

    missing_inputs = [
        name
        for name, input_field in input_fields.items()
        if input_field.is_required() and input_values.get(name) is None
    ]
    if missing_inputs:
        input_descriptions = [
            f"{name} ({'an artifact' if is_artifact(input_fields[name]) else 'a parameter'})"
            for name in missing_inputs
        ]
        raise_error(
            f"{task_name} lacks {', '.join(input_descriptions)}: pass"
            f" {', '.join(f'{name}=...' for name in missing_inputs)}."
        )


def dump_model(model_or_value: object) -> Any:
    """Convert a pydantic model, such as a section of the config, to a mapping; return any other
    value unchanged."""
    if isinstance(model_or_value, (Artifact, Parameter, Task)):
        return model_or_value
    if isinstance(model_or_value, BaseModel) and not type(model_or_value).__module__.startswith(
        "hera."
    ):
        return model_or_value.model_dump(mode="json")
    return model_or_value


def check_section(section_name: str, section_value: object, section_type: type[Section]) -> None:
    """Raise WiringError unless `section_value` is a valid `section_type` of the config, or None."""
    if section_value is None:
        return

    if not isinstance(section_value, section_type):
        raise_error(
            f"{section_name} is {describe(section_value)}, not the section `{section_name}`: pass"
            f" config.{section_name}.model_copy(update={{...}}) or a {section_type.__name__}."
        )

    # validate the section again, because `model_copy` does not validate changed fields
    valid_fields = set(type(section_value).model_fields)
    for unknown_field in vars(section_value).keys() - valid_fields:
        raise_error(
            f"config.{section_name} has no {unknown_field}."
            f"{suggest_similar(unknown_field, valid_fields)}"
        )

    try:
        parse_section(type(section_value), vars(section_value), section_name)
    except ConfigError as error:
        raise_error(" ".join(error.lines))


def check_workload(
    workload_name: str, data_settings: object = None, **metric_bounds: object
) -> None:
    """Raise WiringError unless the workload exists, accepts the settings in `data_settings` and
    computes the metrics in `metric_bounds`.

    A setting that contains a template tag is not checked, because its value is known only at run
    time.
    """
    if "{{" in str(workload_name):
        return

    try:
        workload_module = load_workload(workload_name)
        if data_settings is not None and "{{" not in str(data_settings):
            parse_section(workload_module.Data, data_settings, "data")

        check_bounds(parse_section(Gate, metric_bounds, "gate"), workload_module.metrics)
    except ConfigError as error:
        raise_error(" ".join(error.lines))


def check_options(task_name: str, task_options: Mapping[str, Any]) -> None:
    """Raise WiringError if the task options contain a loop or a condition that Argo could not
    evaluate."""
    if task_options.get("when") is not None:
        check_condition(f"`when` of {task_name}", task_options["when"])

    loop_items = task_options.get("with_items")
    if isinstance(loop_items, (str, Mapping)) or not hasattr(loop_items or [], "__iter__"):
        if isinstance(loop_items, Value):
            suggestion = "pass an output, which is known only at run time, as with_param"
        else:
            suggestion = "it must be a list"

        raise_error(f"with_items of {task_name} is {describe(loop_items)}: {suggestion}.")

    loop_parameter = task_options.get("with_param")
    if isinstance(loop_parameter, Value) and not _is_compatible(loop_parameter.kind, list):
        raise_error(
            f"with_param of {task_name} is {describe(loop_parameter)}, which is not a list: pass"
            " an output of type list."
        )

    if loop_parameter is not None and not isinstance(loop_parameter, (str, list, tuple, Parameter)):
        raise_error(
            f"with_param of {task_name} is {describe(loop_parameter)}: it must be an output of"
            " type list."
        )


def check_pod_kinds(cluster: ClusterConfig, known_kinds: Collection[str]) -> None:
    """Raise WiringError if a setting names a kind of pods that no task of the pipeline creates."""
    settings_by_kind = {kind: f"cluster.pods.{kind} is set" for kind in cluster.pods}
    settings_by_kind.update({kind: f"cluster.unqueued names {kind}" for kind in cluster.unqueued})
    for pod_kind in sorted(settings_by_kind.keys() - set(known_kinds)):
        raise_error(
            f"{settings_by_kind[pod_kind]}, but no task has pods of this"
            f" kind.{suggest_similar(pod_kind, set(known_kinds))}"
        )


def validate_inputs(
    task_name: str, input_values: Mapping[str, Any], input_fields: Mapping[str, FieldInfo]
) -> dict[str, Any]:
    """Validate the inputs of a task, and return those that are not None. Raises WiringError if a
    value has the wrong type."""
    return {
        name: _validate_input(
            f'the input "{name}" of {task_name}', name, input_fields[name], input_value
        )
        for name, input_value in input_values.items()
        if input_value is not None
    }


def _validate_input(
    input_label: str, input_name: str, input_field: FieldInfo, input_value: object
) -> Any:
    if isinstance(input_value, Task):
        output_names = list(input_value.outputs) if isinstance(input_value, Block) else []
        output_listing = f": {', '.join(output_names)}" if output_names else ""
        if input_name in output_names:
            suggestion = f", as in TASK.outputs.{input_name}"
        else:
            suggestion = output_listing + suggest_similar(input_name, output_names)

        raise_error(
            f"{input_label} is {describe(input_value)}: pass one of its outputs{suggestion}."
        )

    if is_artifact(input_field):
        if isinstance(input_value, (Artifact, m.Artifact)):
            return input_value

        if isinstance(input_value, (Value, Parameter)):
            value_source = f"the parameter {input_value.name}"
        else:
            value_source = repr(input_value)

        raise_error(
            f"{input_label} is an artifact, and {value_source} is not: pass an artifact, as in"
            f" TASK.outputs.{input_name}."
        )

    if isinstance(input_value, (Artifact, m.Artifact)):
        raise_error(
            f"{input_label} is a parameter, and {input_value.name} is an artifact: pass an output"
            " that is text or a number."
        )

    if isinstance(input_value, Value):
        _check_type(input_label, input_field.annotation, input_value)
        return input_value

    if isinstance(input_value, Parameter):
        return str(input_value.value)

    is_unrestricted_text = input_field.annotation is str and not input_field.metadata
    if isinstance(input_value, str) and (is_unrestricted_text or "{{" in input_value):
        return input_value

    try:
        input_type: Any = Annotated[input_field.annotation or Any, input_field]  # pyright: ignore
        TypeAdapter[Any](input_type).validate_python(input_value)
    except ValidationError as error:
        first_error = error.errors()[0]
        choices = [choice for choice in get_args(input_field.annotation) if isinstance(choice, str)]
        if first_error["type"] == "literal_error":
            hint = suggest_similar(str(input_value), choices)
        else:
            hint = ""

        raise_error(
            f"{input_label} is {describe(input_value)}: {format_rule(first_error['msg'])}{hint}"
        )

    return input_value


def _check_type(input_label: str, input_type: object, output_value: Value) -> None:
    """Raise WiringError if an input of type `input_type` does not accept the output
    `output_value`. An input of type str accepts every output."""
    if input_type is int and output_value.kind is float:
        raise_error(
            f"{input_label} is an integer, and the output {output_value.name} may have a fraction."
        )
    if not _is_compatible(output_value.kind, input_type):
        type_names = [
            TYPE_NAMES.get(get_origin(type_annotation) or type_annotation, "text")
            for type_annotation in (input_type, output_value.kind)
        ]
        raise_error(
            f"{input_label} is {type_names[0]}, and the output {output_value.name} is"
            f" {type_names[1]}."
        )


def _is_compatible(output_type: object, input_type: object) -> bool:
    """Return whether an output of type `output_type` may be passed to an input of type
    `input_type`."""
    for union_type, other_type in ((output_type, input_type), (input_type, output_type)):
        if get_origin(union_type) in (Union, UnionType):
            union_members = [
                union_member
                for union_member in get_args(union_type)
                if union_member is not type(None)
            ]
            return any(
                _is_compatible(union_member, other_type)
                if union_type is output_type
                else _is_compatible(other_type, union_member)
                for union_member in union_members
            )

    if Any in (output_type, input_type) or None in (output_type, input_type) or input_type is str:
        return True
    if get_origin(input_type) is Literal:
        return output_type is str or bool({*get_args(output_type)} & {*get_args(input_type)})
    if input_type in (int, float, bool):
        return output_type is input_type or (output_type is int and input_type is float)

    input_origin, output_origin = (
        get_origin(type_annotation) or type_annotation
        for type_annotation in (input_type, output_type)
    )
    is_json = _is_json_type(input_origin)
    if not is_json or not _is_json_type(output_origin):
        return not is_json or output_origin not in (str, int, float, bool, Literal)
    if (input_origin in LIST_TYPES) != (output_origin in LIST_TYPES):
        return False

    if input_origin in (list, dict) and input_origin is output_origin:
        argument_pairs = zip(get_args(output_type), get_args(input_type), strict=False)
    else:
        argument_pairs = ()

    return all(
        _is_compatible(output_argument, input_argument)
        for output_argument, input_argument in argument_pairs
    )


def _is_json_type(annotation: object) -> bool:
    """Return whether a step reads values of this type from JSON: mappings, lists and pydantic
    models."""
    return annotation in (dict, *LIST_TYPES) or (
        isinstance(annotation, type) and issubclass(annotation, BaseModel)
    )
