"""A step is a module that defines `Inputs`, `Outputs` and `run(inputs) -> outputs`. This command
runs a step:

    rekindle step steps.prepare --help
    rekindle step steps.prepare --workload=steps.digits --data={} --output digest=digest.txt

Each field of `Inputs` is a flag (`label_delay` → `--label-delay=VALUE`): scalars as text, other
values as JSON. Each field of `Outputs` is written to the file given by `--output NAME=PATH`; an
`Artifact` is moved to this path.
"""

import argparse
import base64
import os
import shutil
import sys
import tempfile
import traceback
import types
import typing
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NoReturn, Protocol, cast

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from argolocal.common import program
from argolocal.common.checked_names import show
from argolocal.common.json_text import describe_not_finite, loads, to_json
from argolocal.common.wording import shorten
from rekindle import project
from rekindle.errors import (
    ConfigError,
    DataError,
    RekindleError,
    did_you_mean,
    rule,
    without_secrets,
)
from rekindle.project import user_exceptions
from rekindle.sections import broken_rule

SCALARS = (str, int, float, bool, Path)
# the kubelet shows the content of this file as the container's message
TERMINATION_LOG = Path("/dev/termination-log")


class ArtifactMark:
    """Marks a Path field as an artifact: a file or directory in the object store."""


Artifact = Annotated[Path, ArtifactMark()]
# maximum size of the text in an encoded parameter, such as the manifest of a run; etcd limits a
# workflow to 1.5 MB
MAX_PARAMETER_BYTES = 10_000_000
SHA256 = "^[0-9a-f]{64}$"  # valid names of input and output fields
SHA256_OR_EMPTY = "^([0-9a-f]{64})?$"


@cache
def _create_scratch_directory(parent: str, process: int) -> Path:
    """Create a directory with an unpredictable name below `parent`, once for each process."""
    Path(parent).mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"step-{process}-", dir=parent))


class StepInputs(BaseModel):
    """The inputs of a step: each field is a flag."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @property
    def workdir(self) -> Path:
        """A scratch directory of this process, on the same disk as the outputs; deleted after
        `run`."""
        path = _create_scratch_directory(
            os.environ.get("TMPDIR", tempfile.gettempdir()), os.getpid()
        )
        path.mkdir(mode=0o700, exist_ok=True)
        return path


class StepOutputs(BaseModel):
    """The outputs of a step: each field is a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class Reuse:
    """Allows the cache to reuse a step's outputs, because they depend only on its inputs, its code
    and the data it reads.

    A step with side effects must not have REUSE. `ignored_inputs`: inputs that do not affect the
    outputs. `data_read`: returns, for the inputs, the paths and s3:// URIs of all data that the
    outputs depend on. `not_reused_if`: function that returns the reason why outputs must not be
    reused for given inputs, or "". `stored`: names of artifacts that the step itself writes to the
    object store. An output `run_id` is never reused.
    """

    ignored_inputs: tuple[str, ...] = ()
    data_read: Callable[[Any], Iterable[str]] = lambda inputs: ()
    not_reused_if: Callable[[Any], str] = lambda inputs: ""
    stored: tuple[str, ...] = ()


class Step(Protocol):
    """A step module. If the module defines REUSE, the step's outputs may come from the cache."""

    __doc__: str
    Inputs: type[StepInputs]
    Outputs: type[StepOutputs]
    REUSE: Reuse

    def run(self, inputs: Any) -> StepOutputs: ...


def load(name: str) -> Step:
    """Import the step module `name`, such as steps.prepare. Raises ConfigError if it is not a
    step."""
    return cast(Step, project.load(name, "step", ("Inputs", "Outputs", "run")))


def short_name(module: str) -> str:
    """Return the name of a step's template in a workflow: `steps.prepare` → `prepare`."""
    return module.rpartition(".")[2].replace("_", "-")


def is_artifact(field: FieldInfo) -> bool:
    """Return True if a field of Inputs or Outputs is passed as an artifact, and False if as a
    parameter."""
    return any(isinstance(mark, ArtifactMark) for mark in field.metadata)


def flag(name: str) -> str:
    """Return the command-line flag of a field: `label_delay` → `--label-delay`."""
    return "--" + name.replace("_", "-")


def to_text(value: object) -> str:
    """Format a value as an Argo parameter: numbers, texts and paths as text, all other values (also
    booleans) as JSON."""
    if isinstance(value, BaseModel):
        return value.model_dump_json()
    if isinstance(value, bool) or not isinstance(value, SCALARS):
        return to_json(value)
    return str(value)


def encode_parameter(text: str) -> str:
    """Encode a text for a parameter (zlib in base64), since Argo would replace template tags in
    it."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def decode_parameter(parameter: str) -> str:
    """Decode a parameter that `encode_parameter` has encoded. Raises ValueError, also for a text
    with more than MAX_PARAMETER_BYTES bytes, which is never decompressed as a whole."""
    decoder = zlib.decompressobj()
    try:
        # one byte more than the limit, so that data of exactly this size is read up to its end
        # marker
        data = decoder.decompress(base64.b64decode(parameter), MAX_PARAMETER_BYTES + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error

    if len(data) > MAX_PARAMETER_BYTES:
        raise ValueError(f"it has more than {MAX_PARAMETER_BYTES:,} bytes after decompression")
    if not decoder.eof:
        raise ValueError("it is incomplete")
    return data.decode()


def parse_time(text: str) -> datetime:
    """Parse the scheduled time of a run, as UTC if the time zone is missing. For an empty text,
    return the current time. Raises ConfigError.
    """
    try:
        time = datetime.fromisoformat(text) if text else datetime.now(UTC)
        if time.tzinfo:
            return time.astimezone(UTC)
        return time.replace(tzinfo=UTC)
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"scheduled-time is {text!r}: it must be ISO 8601, such as 2026-11-23T03:00:00Z."
        ) from error


def has_zone(time: str) -> bool:
    """Return True if a text is an ISO 8601 time with a time zone."""
    try:
        return datetime.fromisoformat(time).tzinfo is not None
    except (TypeError, ValueError):
        return False


def parse(inputs: type[StepInputs], texts: dict[str, str]) -> StepInputs:
    """Convert {field: text} to typed inputs. Raises a ConfigError that names each wrong flag, its
    value and the violated rule."""
    values: dict[str, Any] = {}
    for name, text in texts.items():
        try:
            values[name] = text if _is_scalar(inputs.model_fields[name].annotation) else loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{flag(name)} is {text!r}: it must be JSON ({error}).") from error

    try:
        return inputs.model_validate(values)
    except ValidationError as error:
        lines = [_describe_error(inputs, e, texts) for e in error.errors()]
        raise ConfigError(*lines) from error


def _describe_error(inputs: type[StepInputs], error: ErrorDetails, texts: dict[str, str]) -> str:
    name = str(error["loc"][0]) if error["loc"] else ""
    inner = "".join(f".{key}" for key in error["loc"][1:])
    if error["type"] == "missing":
        return f"{flag(name)}{inner} is missing: it is required."
    if name:
        subject = f"{flag(name)}{inner} is {error['input']!r}"
    else:
        subject = "the inputs are wrong"
    return f"{subject}: {broken_rule(inputs, error)}"


def _is_scalar(annotation: object) -> bool:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        options = typing.get_args(annotation)
    else:
        options = ()
    if options:
        return all(_is_scalar(o) for o in options if o is not type(None))
    if typing.get_origin(annotation) is typing.Literal:
        return True
    return isinstance(annotation, type) and issubclass(annotation, SCALARS)


class Flags(argparse.ArgumentParser):
    """An argument parser that raises ConfigError, so that an error is shown as one line, without
    the usage text."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See `{self.prog} --help`.")


def parser(name: str, inputs: type[StepInputs], description: str = "") -> argparse.ArgumentParser:
    """Create the command-line parser of a step from its fields."""
    result = Flags(
        prog=f"rekindle step {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    for field_name, field in inputs.model_fields.items():
        if field.is_required():
            default = ""
        else:
            default = to_text(field.get_default(call_default_factory=True))

        rule = "required" if field.is_required() else f"default: {default}"
        note = f"{field.description or ''} ({rule})".strip().replace("%", "%%")
        result.add_argument(
            flag(field_name), metavar="VALUE", dest=field_name, help=note, default=argparse.SUPPRESS
        )

    return result


def write_outputs(outputs: StepOutputs, targets: dict[str, Path]) -> None:
    """Write each output to its file. Artifacts are moved by a rename, so no file is ever
    incomplete."""
    for name, field in type(outputs).model_fields.items():
        if name not in targets:
            continue

        target = targets[name]
        value = getattr(outputs, name)
        target.parent.mkdir(parents=True, exist_ok=True)

        if is_artifact(field):
            if target.is_dir():
                shutil.rmtree(target)

            shutil.move(value, target)
        else:
            target.write_text(output_text(name, value))


def output_text(name: str, value: object) -> str:
    """Format an output for Argo. Raises DataError for a text that Argo would change, and for a
    number that is not finite."""
    if isinstance(value, BaseModel):
        plain_value = value.model_dump(mode="json")
    else:
        plain_value = value

    problem = describe_not_finite({name: plain_value})
    if problem:
        raise DataError(
            f"the output {problem}, since conditions and other tasks cannot read it. Return a"
            " finite number, or raise rekindle.DataError with the reason."
        )

    text = to_text(value)
    if not isinstance(value, SCALARS):
        # valid, because "{{" in JSON occurs only inside strings, where an escape means the same
        text = text.replace("{{", "{\\u007b")

    try:
        return check_output_text(text)
    except ValueError as error:
        raise DataError(
            f"the output {name} is {shorten(ascii(text))}: {error}. Change the text, or return it"
            " as an artifact or in a list, which is passed as JSON."
        ) from None


def check_output_text(text: str) -> str:
    """Return `text` if Argo can pass it to other tasks unchanged; otherwise raise a ValueError that
    says why not."""
    if "{{" in text:
        raise ValueError('it must not contain "{{", which Argo replaces in the tasks that get it')
    if "\0" in text:
        raise ValueError("it must not contain a NUL, which no argument of a program may have")
    text.encode()  # raises ValueError for a lone surrogate
    return text


def check_output_texts(outputs: type[StepOutputs], texts: Mapping[str, str]) -> None:
    """Raise ValueError if one of the texts, such as those in a cache entry, is not a valid value of
    its output."""
    for name, text in texts.items():
        field = outputs.model_fields.get(name)
        if field is None or is_artifact(field):
            raise ValueError(f"{show(name)} is not an output of the step")

        value = text if _is_scalar(field.annotation) else loads(text)
        constrained_type: Any = Annotated[field.annotation, field]  # type: ignore[valid-type]
        try:
            TypeAdapter(constrained_type).validate_python(value)
        except ValidationError as error:
            reason = rule(error.errors()[0]["msg"]).removesuffix(".")
            raise ValueError(f"the output {name} is {show(text)}: {reason}") from None


def verify_artifacts(inputs: StepInputs) -> None:
    """Raise DataError if the files of an input, a dataset or a trained model, were changed after
    they had been written."""
    from rekindle.content.verified_artifacts import find_digest_input, verify_artifact

    for name, field in type(inputs).model_fields.items():
        if is_artifact(field):
            verify_artifact(name, getattr(inputs, name), find_digest_input(inputs))


Execute = Callable[[str, StepInputs, dict[str, Path], argparse.Namespace], None]


def execute(
    module: str, inputs: StepInputs, targets: dict[str, Path], options: argparse.Namespace
) -> None:
    """Run a step and write its outputs."""
    write_outputs(load(module).run(inputs), targets)


def main(argv: list[str], execute: Execute = execute) -> int:
    """Run one step and return its exit code (see rekindle/errors.py)."""
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(f"{__doc__}")
        if argv:
            return 0
        return 2

    try:
        step = load(argv[0])
        flags = parser(argv[0], step.Inputs, step.__doc__)
        note = f"file for one of the outputs: {', '.join(step.Outputs.model_fields) or 'none'}"
        flags.add_argument("--output", action="append", default=[], metavar="NAME=PATH", help=note)
        cache_flags = Flags(prog=flags.prog, add_help=False, allow_abbrev=False)

        if hasattr(step, "REUSE"):
            cache_flags.add_argument(
                "--entry",
                default="",
                help="RUN/TASK: record the outputs in the cache, as those of this task",
            )
            cache_flags.add_argument(
                "--reuse", default="no", help="yes: reuse the cached outputs of an earlier run"
            )

        options, rest = cache_flags.parse_known_args(argv[1:])
        parsed_inputs, unknown = flags.parse_known_args(rest)
        if unknown:
            names = {*map(flag, step.Inputs.model_fields), "--output"}
            name = unknown[0].partition("=")[0]
            hint = did_you_mean(name, names) or f" Its inputs: {', '.join(sorted(names))}."
            raise ConfigError(f"{unknown[0]} is not an input of {argv[0]}.{hint}")

        arguments = vars(parsed_inputs)
        targets = {}

        for pair in arguments.pop("output"):
            name, _, path = pair.partition("=")
            if name not in step.Outputs.model_fields or not path:
                hint = did_you_mean(name, set(step.Outputs.model_fields))
                raise ConfigError(
                    f"--output {pair}: it must be NAME=PATH with the name of an output.{hint}"
                )

            targets[name] = Path(path)

        inputs = parse(step.Inputs, arguments)
        try:
            verify_artifacts(inputs)
            execute(argv[0], inputs, targets, options)
        finally:
            shutil.rmtree(inputs.workdir, ignore_errors=True)
    except RekindleError as error:
        return fail(error)
    except Exception as error:
        traceback.print_exc()
        return fail(user_exceptions.as_error(error))

    return 0


def fail(error: RekindleError) -> int:
    """Write an error to stderr and to the termination log of the container; return its exit
    code."""
    # Argo copies the termination log to the status of the run, and `report` copies it to MLflow
    message = without_secrets(str(error))

    with suppress(OSError):  # keep the exit code even if the disk is full
        sys.stderr.write(f"error: {message}\n")
    with suppress(OSError):
        log = Path(os.environ.get(program.TERMINATION_LOG, TERMINATION_LOG))
        if log.exists() and os.access(log, os.W_OK):
            log.write_text(message[:4096])
    return error.exit_code
