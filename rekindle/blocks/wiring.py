"""Blocks, their outputs, conditions on these outputs, and errors that name the wrong line of the
pipeline's source."""

import contextlib
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, NoReturn, SupportsIndex, get_args, get_origin

import hera
from hera.workflows import Artifact, Task
from pydantic import BaseModel

from argolocal.common.wording import truncate
from rekindle.blocks.dependencies import Dependencies, parse_depends
from rekindle.errors import MAX_VALUE_CHARS, ConfigError, suggest_similar
from rekindle.keys import CACHED_PARAMETER, REUSED_MODELS, cached_expression

ENGINE_PATHS = (
    f"{Path(__file__).parent}/",
    f"{Path(hera.__file__).parent}/",
    contextlib.__file__,
    "<",
)
# functions of Argo's expression language that convert a parameter, which is always text, to a
# number
NUMBER_FUNCTIONS = {float: "asFloat", int: "asInt"}
# a key of a mapping with only these characters can be part of a JSONPath
MAPPING_KEY = re.compile(r"[\w@%+:/-]+")
# location of the task that is being checked; set by `blame`
BLAMED_LINE: ContextVar[str] = ContextVar("line", default="")


class WiringError(ConfigError):
    """A pipeline connects its tasks wrongly; the message names the line, the mistake and a
    suggestion."""


class UnknownOutput(WiringError, AttributeError):
    """The pipeline uses an output that the task does not have. UnknownOutput is also an
    AttributeError, because `hasattr` and debuggers expect one."""


def current_line() -> str:
    """Return FILE:LINE of the innermost call outside Rekindle and Hera, or the location that the
    context manager `blame` has set."""
    if BLAMED_LINE.get():
        return BLAMED_LINE.get()
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(ENGINE_PATHS):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())

    return f"{path}:{frame.f_lineno}"


@contextlib.contextmanager
def blame(line_location: str) -> Iterator[None]:
    """Report the errors in this context at `line_location`, where the wrong task was created."""
    context_token = BLAMED_LINE.set(line_location)
    try:
        yield
    finally:
        BLAMED_LINE.reset(context_token)


def raise_error(error_message: str, error: type[WiringError] = WiringError) -> NoReturn:
    """Raise `error` with the line of the pipeline that caused it."""
    raise error(f"{current_line()}: {error_message}")


class Condition:
    """A condition on outputs, for the option `when`. `&`, `|` and `~` combine conditions; write
    each condition in parentheses."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return f"{{{{={self.text}}}}}"

    def __and__(self, other: "Condition") -> "Condition":
        return self._combine("&&", other)

    def __or__(self, other: "Condition") -> "Condition":
        return self._combine("||", other)

    def _combine(self, operator_sign: str, other_condition: object) -> "Condition":
        if not isinstance(other_condition, Condition):
            raise_error(
                f"{describe(other_condition)} is not a condition: combine comparisons of outputs,"
                " each in parentheses."
            )
        return Condition(f"({self.text}) {operator_sign} ({other_condition.text})")

    def __invert__(self) -> "Condition":
        return Condition(f"!({self.text})")

    def __bool__(self) -> bool:
        raise_error(
            f"`{self.text}` is known only at run time: pass it as `when=`, and combine conditions "
            "with & | ~ instead of and, or, not."
        )


class Value(str):
    """An output parameter of a task: text that contains a template tag. A comparison (==, <, ...)
    returns a Condition."""

    name: str
    kind: Any
    expression: str
    # keys of the output if it is a mapping and its keys are known before the run
    keys: Collection[str] = ()

    def __new__(cls, name: str, path: str, output_type: object, expression: str = "") -> "Value":
        """`path`: path of the output in a template tag; `expression`: expression that computes the
        value, used instead of `path`."""
        value = super().__new__(cls, f"{{{{={expression}}}}}" if expression else f"{{{{{path}}}}}")
        value.name = name
        value.kind = output_type
        value.expression = expression or to_expression(path)
        return value

    def __getitem__(self, key: SupportsIndex | slice | str) -> Any:
        """Return one value of a mapping, such as metrics["accuracy"]."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        if not self._is_mapping():
            raise_error(f'{self.name} is not a mapping: remove ["{key}"].')

        if self.keys and key not in self.keys:
            hint = (
                suggest_similar(key, set(self.keys)) or f" It has {', '.join(sorted(self.keys))}."
            )
            raise_error(f'{self.name} has no "{key}".{hint}')

        if not MAPPING_KEY.fullmatch(key):
            raise_error(
                f'{self.name} has no "{key}": a key must consist of letters, digits and "_-@%+:/".'
                " Rename it."
            )

        value_type = getattr(self.kind, "__args__", (str, str))[1]
        return Value(
            f'{self.name}["{key}"]', "", value_type, f"jsonpath({self.expression}, '$.{key}')"
        )

    def __bool__(self) -> bool:
        if sys._getframe(1).f_code.co_filename.startswith(ENGINE_PATHS):
            # True, because Hera tests whether the text is empty, and a template tag is never empty
            return True
        raise_error(
            f"the value of {self.name} is known only at run time: pass a comparison as `when=`,"
            " instead of `if`."
        )

    def _is_mapping(self) -> bool:
        return (get_origin(self.kind) or self.kind) is dict

    def _compare(self, comparison_sign: str, other_value: object) -> Any:
        number_function = NUMBER_FUNCTIONS.get(self.kind)
        if not isinstance(other_value, (str, int, float)):
            # the other object is not a value, because Hera also compares arguments with its own
            # sentinel objects
            return NotImplemented

        if isinstance(other_value, Value) and (other_value.kind in NUMBER_FUNCTIONS) is not bool(
            number_function
        ):
            raise_error(
                f"{self.name} and {other_value.name} cannot be compared: one is a number, the"
                " other is not."
            )
        elif isinstance(other_value, Value):
            if number_function:
                right_operand = f"{number_function}({other_value.expression})"
            else:
                right_operand = other_value.expression
        elif (
            number_function
            and isinstance(other_value, (int, float))
            and not isinstance(other_value, bool)
        ):
            right_operand = repr(other_value)
        elif isinstance(other_value, bool):
            right_operand = f"'{str(other_value).lower()}'"
        elif isinstance(other_value, str) and not number_function:
            allowed_values = get_args(self.kind)
            if get_origin(self.kind) is Literal and other_value not in allowed_values:
                hint = (
                    suggest_similar(other_value, set(allowed_values))
                    or f" Possible values: {', '.join(allowed_values)}."
                )
                raise_error(f'{self.name} is never "{other_value}".{hint}')

            right_operand = "'" + other_value.replace("\\", "\\\\").replace("'", "\\'") + "'"
        else:
            hint = ""
            if number_function:
                expected_type = "a number"
            elif self._is_mapping():
                expected_type = "a mapping"
                hint = f' Compare one of its values, as in {self.name}["KEY"].'
            else:
                expected_type = "text"

            raise_error(
                f"{self.name} is {expected_type}: it cannot be compared with {other_value!r}.{hint}"
            )

        left_operand = (
            f"{number_function}({self.expression})" if number_function else self.expression
        )
        return Condition(f"{left_operand} {comparison_sign} {right_operand}")

    def __eq__(self, other: object) -> Any:
        return self._compare("==", other)

    def __ne__(self, other: object) -> Any:
        return self._compare("!=", other)

    def __lt__(self, other: object) -> Any:
        return self._compare("<", other)

    def __le__(self, other: object) -> Any:
        return self._compare("<=", other)

    def __gt__(self, other: object) -> Any:
        return self._compare(">", other)

    def __ge__(self, other: object) -> Any:
        return self._compare(">=", other)

    __hash__ = str.__hash__


def check_condition(condition_label: str, condition_value: object) -> Condition | str:
    """Return `condition_value` if it is a condition that Argo can evaluate (a Condition, or text
    with a template tag). Raises WiringError if Argo cannot evaluate `condition_value`."""
    if isinstance(condition_value, Value):
        raise_error(
            f"{condition_label} is the output {condition_value.name}: compare it, as in"
            f" TASK.outputs.{condition_value.name} =="
            ' "release".'
        )

    if isinstance(condition_value, Condition) or (
        isinstance(condition_value, str) and "{{" in condition_value
    ):
        return condition_value

    raise_error(
        f"{condition_label} is {describe(condition_value)}: it must be a condition, such as"
        " TASK.outputs.verdict =="
        ' "release". For a value that is known now, use Python\'s `if`.'
    )


def self_or_cached(output_value: Value, task_name: str, experiment_name: object) -> Value:
    """Return an output of `task_name`. The value of the output comes from the cached run if
    `task_name` is cached, otherwise from `task_name` itself.

    The outputs `run_id` and REUSED_MODELS always belong to the current run.
    """
    own_expressions = {
        "run_id": f"('{experiment_name}/' + workflow.name)",
        REUSED_MODELS: f"workflow.parameters.{CACHED_PARAMETER}",
    }
    reused_expression = own_expressions.get(output_value.name) or cached_expression(
        task_name, output_value.name
    )
    # do not use the operator `??`, because Argo before 3.7.16 and 4.0.7 would not replace the
    # template tag of a skipped task
    return Value(
        output_value.name,
        "",
        output_value.kind,
        f"({cached_expression(task_name)} == '' ? {output_value.expression} : {reused_expression})",
    )


class Outputs:
    """The outputs of a task, by name."""

    def __init__(self, task_name: str, output_values: Mapping[str, Any]) -> None:
        self._task = task_name
        self._values = dict(output_values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._values:
            if self._values:
                output_listing = f" It has {', '.join(self._values)}."
            else:
                output_listing = " Its list of outputs is empty."
            hint = suggest_similar(name, set(self._values)) or output_listing
            raise_error(f'{self._task} has no output "{name}".{hint}', UnknownOutput)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __dir__(self) -> list[str]:
        return list(self._values)


class Block(Task):
    """A Hera Task that runs a step, with its typed `outputs` and the `inputs` passed to it."""

    outputs: Outputs
    inputs: dict[str, Any]
    waits_for: Dependencies
    # the block whose outputs this block uses
    predecessor: "Block | None" = None
    # the step that the block runs, and the kind of its pod
    origin: tuple[str, str] = ("", "")
    # the blocks that repeat the evaluation of this block, see recipe/repetition.py
    repetitions: "list[Block]"
    # True if this block repeats another block or its DAG
    is_repetition: bool = False

    # Hera reads this property, and sets it when the user writes `a >> b`
    @property
    def depends(self) -> str | None:
        return str(self.waits_for) or None

    @depends.setter
    def depends(self, text: str | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.waits_for = parse_depends(text)

    def follow(self, previous_block: "Block") -> "Block":
        """Set the predecessor of this block, that is, the block whose outputs this block uses;
        return this block."""
        self.predecessor = previous_block
        return self

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self.__dict__.get("outputs", ()):
            raise_error(
                f"{name} is an output of {self.name}: write .outputs.{name}.", UnknownOutput
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name}")


def resolve(start_block: object, input_name: str, default_value: object = None) -> Any:
    """Return the output or input `input_name` of `start_block` or, if `start_block` has neither, of
    its nearest predecessor with such an output or input.

    If no such output or input exists, return `default_value`, or raise WiringError if
    `default_value` is None.
    """
    if not isinstance(start_block, Block):
        raise_error(
            f"{describe(start_block)} is not a block: pass the task that a block returned, such as"
            " blocks.prepare()."
        )

    for candidate_block in _with_predecessors(start_block):
        if input_name in candidate_block.outputs:
            return getattr(candidate_block.outputs, input_name)
        if input_name in candidate_block.inputs:
            return candidate_block.inputs[input_name]

    if default_value is not None:
        return default_value

    hint = suggest_similar(input_name, set(dir(start_block.outputs)))
    raise_error(
        f'{start_block.name} does not provide "{input_name}", which is required: pass it as'
        f" {input_name}=...{hint}"
    )


def resolve_digest(block: Block, step_inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the input `digest`, the digest of the dataset of `block`. The digest is "" if the
    block that provides the dataset has no output `digest`.

    Return {} if `step_inputs` contains another dataset, because the digest of this dataset is
    unknown.
    """
    if "dataset" in step_inputs:
        return {}
    for candidate_block in _with_predecessors(block):
        value_names = {*candidate_block.outputs, *candidate_block.inputs}
        if "dataset" in value_names:
            return {"digest": resolve(candidate_block, "digest") if "digest" in value_names else ""}
    return {"digest": ""}


def find_provider(start_block: Block, output_name: str) -> Block | None:
    """Return the block with the output `output_name`, which is `start_block` or the nearest of its
    predecessors."""
    return next(
        (
            candidate_block
            for candidate_block in _with_predecessors(start_block)
            if output_name in candidate_block.outputs
        ),
        None,
    )


def _with_predecessors(block: Block) -> Iterator[Block]:
    """Yield the block and its predecessors, nearest first."""
    current_block: Block | None = block
    while current_block:
        yield current_block
        current_block = current_block.predecessor


def resolve_missing_inputs(
    block: "Block", given_inputs: Mapping[str, Any], *input_names: str
) -> dict[str, Any]:
    """Return the values of the `input_names` that are not in `given_inputs`, from `block` or its
    predecessors."""
    return {name: resolve(block, name) for name in input_names if name not in given_inputs}


def describe(described_value: object) -> str:
    """Return a short description of a value for messages, on one line."""
    type_nouns: dict[type[Task | Artifact | Value], str] = {
        Task: "the task",
        Artifact: "the artifact",
        Value: "the output",
    }
    for value_type, noun in type_nouns.items():
        if isinstance(described_value, value_type):
            return f"{noun} {described_value.name}"

    if isinstance(described_value, Condition):
        return f"the condition `{described_value.text}`"
    if callable(described_value) and hasattr(described_value, "__name__"):
        return (
            f"the {'class' if isinstance(described_value, type) else 'function'}"
            f" {described_value.__name__}"
        )

    value_text = " ".join(repr(described_value).split())
    if isinstance(described_value, str):
        return truncate(value_text, MAX_VALUE_CHARS)

    if isinstance(described_value, BaseModel) or len(value_text) > MAX_VALUE_CHARS:
        return f"a {type(described_value).__name__}"

    return value_text


def to_expression(path: str) -> str:
    """Convert the path in a template tag to an expression, which needs brackets around names with a
    hyphen: a.b-c becomes a['b-c']."""
    first_name, *other_names = path.split(".")
    return first_name + "".join(
        f"['{name}']" if "-" in name else f".{name}" for name in other_names
    )
