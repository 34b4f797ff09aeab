"""Outputs of blocks, conditions on these outputs, and errors that name the wrong line of the
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

from argolocal.common.wording import cut
from rekindle.blocks.dependencies import Dependencies, parse_depends
from rekindle.errors import MAX_VALUE_CHARS, ConfigError, did_you_mean
from rekindle.keys import CACHED, REUSED_MODELS, cached

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
    """The pipeline uses an output that the task does not have. The error is also an AttributeError,
    because `hasattr` and debuggers expect one."""


def current_line() -> str:
    """Return FILE:LINE of the innermost call outside Rekindle and Hera, or the location that
    `blame` has set."""
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
def blame(location: str) -> Iterator[None]:
    """Report the errors in this context at `location`, where the wrong task was created."""
    token = BLAMED_LINE.set(location)
    try:
        yield
    finally:
        BLAMED_LINE.reset(token)


def refuse(message: str, error: type[WiringError] = WiringError) -> NoReturn:
    """Raise `error` with the line of the pipeline that caused it."""
    raise error(f"{current_line()}: {message}")


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

    def _combine(self, sign: str, other: object) -> "Condition":
        if not isinstance(other, Condition):
            refuse(
                f"{describe(other)} is not a condition: combine comparisons of outputs, each in"
                " parentheses."
            )
        return Condition(f"({self.text}) {sign} ({other.text})")

    def __invert__(self) -> "Condition":
        return Condition(f"!({self.text})")

    def __bool__(self) -> bool:
        refuse(
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

    def __new__(cls, name: str, path: str, kind: object, expression: str = "") -> "Value":
        """`path`: path of the output in a template tag; `expression`: expression that computes the
        value, used instead of `path`."""
        value = super().__new__(cls, f"{{{{={expression}}}}}" if expression else f"{{{{{path}}}}}")
        value.name = name
        value.kind = kind
        value.expression = expression or to_expression(path)
        return value

    def __getitem__(self, key: SupportsIndex | slice | str) -> Any:
        """Return one value of a mapping, such as metrics["accuracy"]."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        if not self._is_mapping():
            refuse(f'{self.name} is not a mapping: remove ["{key}"].')

        if self.keys and key not in self.keys:
            hint = did_you_mean(key, set(self.keys)) or f" It has {', '.join(sorted(self.keys))}."
            refuse(f'{self.name} has no "{key}".{hint}')

        if not MAPPING_KEY.fullmatch(key):
            refuse(
                f'{self.name} has no "{key}": a key must consist of letters, digits and "_-@%+:/".'
                " Rename it."
            )

        kind = getattr(self.kind, "__args__", (str, str))[1]
        return Value(f'{self.name}["{key}"]', "", kind, f"jsonpath({self.expression}, '$.{key}')")

    def __bool__(self) -> bool:
        if sys._getframe(1).f_code.co_filename.startswith(ENGINE_PATHS):
            # True, because Hera tests whether the text is empty, and a template tag is never empty
            return True
        refuse(
            f"the value of {self.name} is known only at run time: pass a comparison as `when=`,"
            " instead of `if`."
        )

    def _is_mapping(self) -> bool:
        return (get_origin(self.kind) or self.kind) is dict

    def _compare(self, sign: str, other: object) -> Any:
        function = NUMBER_FUNCTIONS.get(self.kind)
        if not isinstance(other, (str, int, float)):
            # Hera also compares arguments with its own sentinel objects
            return NotImplemented

        if isinstance(other, Value) and (other.kind in NUMBER_FUNCTIONS) is not bool(function):
            refuse(
                f"{self.name} and {other.name} cannot be compared: one is a number, the other is"
                " not."
            )
        elif isinstance(other, Value):
            if function:
                right_operand = f"{function}({other.expression})"
            else:
                right_operand = other.expression
        elif function and isinstance(other, (int, float)) and not isinstance(other, bool):
            right_operand = repr(other)
        elif isinstance(other, bool):
            right_operand = f"'{str(other).lower()}'"
        elif isinstance(other, str) and not function:
            if get_origin(self.kind) is Literal and other not in (words := get_args(self.kind)):
                hint = did_you_mean(other, set(words)) or f" Possible values: {', '.join(words)}."
                refuse(f'{self.name} is never "{other}".{hint}')

            right_operand = "'" + other.replace("\\", "\\\\").replace("'", "\\'") + "'"
        else:
            hint = ""
            if function:
                kind = "a number"
            elif self._is_mapping():
                kind = "a mapping"
                hint = f' Compare one of its values, as in {self.name}["KEY"].'
            else:
                kind = "text"

            refuse(f"{self.name} is {kind}: it cannot be compared with {other!r}.{hint}")

        left_operand = f"{function}({self.expression})" if function else self.expression
        return Condition(f"{left_operand} {sign} {right_operand}")

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


def check_condition(label: str, value: object) -> Condition | str:
    """Return `value` if Argo can evaluate it: a Condition, or text with a template tag. Raises
    WiringError if Argo cannot evaluate `value`."""
    if isinstance(value, Value):
        refuse(
            f"{label} is the output {value.name}: compare it, as in TASK.outputs.{value.name} =="
            ' "release".'
        )

    if isinstance(value, Condition) or (isinstance(value, str) and "{{" in value):
        return value

    refuse(
        f"{label} is {describe(value)}: it must be a condition, such as TASK.outputs.verdict =="
        ' "release". For a value that is known now, use Python\'s `if`.'
    )


def self_or_cached(value: Value, task: str, experiment: object) -> Value:
    """Return an output of `task`. Its value comes from the cached run if `task` is cached,
    otherwise from `task` itself.

    The outputs `run_id` and REUSED_MODELS always belong to the current run.
    """
    own_values = {
        "run_id": f"('{experiment}/' + workflow.name)",
        REUSED_MODELS: f"workflow.parameters.{CACHED}",
    }
    reused_value = own_values.get(value.name) or cached(task, value.name)
    # not the operator `??`, because Argo before 3.7.16 and 4.0.7 would not replace the template tag
    # of a skipped task
    return Value(
        value.name, "", value.kind, f"({cached(task)} == '' ? {value.expression} : {reused_value})"
    )


class Outputs:
    """The outputs of a task, by name."""

    def __init__(self, task: str, values: Mapping[str, Any]) -> None:
        self._task = task
        self._values = dict(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._values:
            if self._values:
                listing = f" It has {', '.join(self._values)}."
            else:
                listing = " Its list of outputs is empty."
            hint = did_you_mean(name, set(self._values)) or listing
            refuse(f'{self._task} has no output "{name}".{hint}', UnknownOutput)
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
    predecessor: "Block | None" = None  # the block whose outputs this block uses
    origin: tuple[str, str] = ("", "")  # the step that the block runs, and the kind of its pod
    repetitions: "list[Block]"  # the blocks that repeat this block, see `workflow.repeat`
    is_repetition: bool = False  # True if this block repeats another block or its DAG

    # Hera reads this property, and sets it when the user writes `a >> b`
    @property
    def depends(self) -> str | None:
        return str(self.waits_for) or None

    @depends.setter
    def depends(self, text: str | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.waits_for = parse_depends(text)

    def follow(self, predecessor: "Block") -> "Block":
        """Set the predecessor of this block, which is the block whose outputs it uses; return this
        block."""
        self.predecessor = predecessor
        return self

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self.__dict__.get("outputs", ()):
            refuse(f"{name} is an output of {self.name}: write .outputs.{name}.", UnknownOutput)
        raise AttributeError(f"{type(self).__name__} has no attribute {name}")


def resolve(block: object, name: str, default: object = None) -> Any:
    """Return the output or input `name` of `block` or, if `block` has neither, of its nearest
    predecessor with such an output or input.

    If no such output or input exists, return `default`, or raise WiringError if `default` is None.
    """
    if not isinstance(block, Block):
        refuse(
            f"{describe(block)} is not a block: pass the task that a block returned, such as"
            " blocks.prepare()."
        )

    for current in _with_predecessors(block):
        if name in current.outputs:
            return getattr(current.outputs, name)
        if name in current.inputs:
            return current.inputs[name]

    if default is not None:
        return default

    hint = did_you_mean(name, set(dir(block.outputs)))
    refuse(
        f'{block.name} does not provide "{name}", which is required: pass it as {name}=...{hint}'
    )


def resolve_digest(block: Block, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the input `digest` for the dataset of `block`. Its value is "" if the block that
    provides the dataset has no output `digest`.

    Return {} if `inputs` contains a dataset, because the digest of that dataset is unknown.
    """
    if "dataset" in inputs:
        return {}
    for current in _with_predecessors(block):
        names = {*current.outputs, *current.inputs}
        if "dataset" in names:
            return {"digest": resolve(current, "digest") if "digest" in names else ""}
    return {"digest": ""}


def find_provider(block: Block, name: str) -> Block | None:
    """Return the block with the output `name`: `block`, or the nearest of its predecessors."""
    return next((current for current in _with_predecessors(block) if name in current.outputs), None)


def _with_predecessors(block: Block) -> Iterator[Block]:
    """Yield the block and its predecessors, nearest first."""
    current: Block | None = block
    while current:
        yield current
        current = current.predecessor


def resolve_missing(block: "Block", inputs: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the values of the `names` that are not in `inputs`, from `block` or its
    predecessors."""
    return {name: resolve(block, name) for name in names if name not in inputs}


def describe(value: object) -> str:
    """Return a short description of a value for messages, on one line."""
    kinds: dict[type[Task | Artifact | Value], str] = {
        Task: "the task",
        Artifact: "the artifact",
        Value: "the output",
    }
    for kind, noun in kinds.items():
        if isinstance(value, kind):
            return f"{noun} {value.name}"

    if isinstance(value, Condition):
        return f"the condition `{value.text}`"
    if callable(value) and hasattr(value, "__name__"):
        return f"the {'class' if isinstance(value, type) else 'function'} {value.__name__}"

    text = " ".join(repr(value).split())
    if isinstance(value, str):
        return cut(text, MAX_VALUE_CHARS)

    if isinstance(value, BaseModel) or len(text) > MAX_VALUE_CHARS:
        return f"a {type(value).__name__}"

    return text


def to_expression(path: str) -> str:
    """Convert the path of a tag to an expression, in which names with a hyphen are put in
    brackets."""
    first, *names = path.split(".")
    return first + "".join(f"['{name}']" if "-" in name else f".{name}" for name in names)
