"""A step is a module that defines `Inputs`, `Outputs` and `run(inputs) -> outputs`. The following
command runs a step:

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
from argolocal.common.checked_names import format_untrusted
from argolocal.common.json_text import describe_non_finite, loads, to_json
from argolocal.common.wording import shorten
from rekindle import project
from rekindle.errors import (
    ConfigError,
    DataError,
    RekindleError,
    format_rule,
    suggest_similar,
    without_secrets,
)
from rekindle.project import user_exceptions
from rekindle.sections import describe_broken_rule

SCALAR_TYPES = (str, int, float, bool, Path)
# the kubelet shows the content of this file as the container's message
TERMINATION_LOG = Path("/dev/termination-log")


class ArtifactMark:
    """Marks a Path field as an artifact: a file or directory in the object store."""


Artifact = Annotated[Path, ArtifactMark()]
# maximum size of the text in an encoded parameter, such as the manifest of a run; etcd limits a
# workflow to 1.5 MB
MAX_PARAMETER_BYTES = 10_000_000
# patterns of input and output fields that contain a sha256
SHA256_PATTERN = "^[0-9a-f]{64}$"
SHA256_OR_EMPTY = "^([0-9a-f]{64})?$"


@cache
def _create_scratch_directory(parent_folder: str, process_id: int) -> Path:
    """Create a directory with an unpredictable name below `parent_folder`, once for each
    process."""
    Path(parent_folder).mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"step-{process_id}-", dir=parent_folder))


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
    outputs. `data_read`: function that gets the inputs, and returns the paths and s3:// URIs of all
    data that the outputs depend on. `not_reused_if`: function that gets the inputs, and returns the
    reason why their outputs must not be reused, or "" if the outputs may be reused. `stored`: names
    of artifacts that the step itself writes to the object store. An output `run_id` is never
    reused.
    """

    ignored_inputs: tuple[str, ...] = ()
    data_read: Callable[[Any], Iterable[str]] = lambda inputs: ()
    not_reused_if: Callable[[Any], str] = lambda inputs: ""
    stored: tuple[str, ...] = ()


class Step(Protocol):
    """A loaded step module. If the module defines REUSE, the step's outputs may come from the
    cache."""

    __doc__: str
    Inputs: type[StepInputs]
    Outputs: type[StepOutputs]
    REUSE: Reuse

    def run(self, inputs: Any) -> StepOutputs: ...


def load_step_module(module_name: str) -> Step:
    """Import the step module `module_name`, such as steps.prepare. Raises ConfigError if the module
    is not a step."""
    return cast(Step, project.load_module(module_name, "step", ("Inputs", "Outputs", "run")))


def short_name(module: str) -> str:
    """Return the name of a step's template in a workflow, such as `prepare` for `steps.prepare`."""
    return module.rpartition(".")[2].replace("_", "-")


def is_artifact(field_info: FieldInfo) -> bool:
    """Return True if a field of Inputs or Outputs is passed as an artifact, and False if it is
    passed as a parameter."""
    return any(isinstance(metadata_mark, ArtifactMark) for metadata_mark in field_info.metadata)


def format_flag(field_name: str) -> str:
    """Return the command-line flag of a field, such as `--label-delay` for `label_delay`."""
    return "--" + field_name.replace("_", "-")


def format_parameter(parameter_value: object) -> str:
    """Format a value as an Argo parameter: numbers, texts and paths as text, all other values (also
    booleans) as JSON."""
    if isinstance(parameter_value, BaseModel):
        return parameter_value.model_dump_json()
    if isinstance(parameter_value, bool) or not isinstance(parameter_value, SCALAR_TYPES):
        return to_json(parameter_value)
    return str(parameter_value)


def encode_parameter(parameter_text: str) -> str:
    """Encode a text for a parameter, as base64 of its zlib compression. The text is encoded,
    because Argo would replace template tags in the plain text."""
    return base64.b64encode(zlib.compress(parameter_text.encode(), 9)).decode()


def decode_parameter(encoded_parameter: str) -> str:
    """Decode a parameter that `encode_parameter` has encoded. Raises ValueError for an invalid
    encoding, and for a text with more than MAX_PARAMETER_BYTES bytes. A longer text is not
    decompressed beyond MAX_PARAMETER_BYTES."""
    zlib_decoder = zlib.decompressobj()
    try:
        # one byte more than the limit, so that data of exactly this size is read up to its end
        # marker
        decoded_bytes = zlib_decoder.decompress(
            base64.b64decode(encoded_parameter), MAX_PARAMETER_BYTES + 1
        )
    except zlib.error as error:
        raise ValueError(str(error)) from error

    if len(decoded_bytes) > MAX_PARAMETER_BYTES:
        raise ValueError(f"it has more than {MAX_PARAMETER_BYTES:,} bytes after decompression")
    if not zlib_decoder.eof:
        raise ValueError("it is incomplete")
    return decoded_bytes.decode()


def parse_time(time_text: str) -> datetime:
    """Parse the scheduled time of a run, as UTC if the time zone is missing. For an empty text,
    return the current time. Raises ConfigError.
    """
    try:
        parsed_time = datetime.fromisoformat(time_text) if time_text else datetime.now(UTC)
        if parsed_time.tzinfo:
            return parsed_time.astimezone(UTC)
        return parsed_time.replace(tzinfo=UTC)
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"scheduled-time is {time_text!r}: it must be ISO 8601, such as 2026-11-23T03:00:00Z."
        ) from error


def has_zone(time_text: str) -> bool:
    """Return True if a text is an ISO 8601 time with a time zone."""
    try:
        return datetime.fromisoformat(time_text).tzinfo is not None
    except (TypeError, ValueError):
        return False


def parse_inputs(inputs_model: type[StepInputs], flag_texts: dict[str, str]) -> StepInputs:
    """Convert {field: text} to typed inputs. Raises a ConfigError that names each wrong flag, its
    value and the violated rule."""
    input_values: dict[str, Any] = {}
    for name, text in flag_texts.items():
        try:
            input_values[name] = (
                text if _is_scalar(inputs_model.model_fields[name].annotation) else loads(text)
            )
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{format_flag(name)} is {text!r}: it must be JSON ({error})."
            ) from error

    try:
        return inputs_model.model_validate(input_values)
    except ValidationError as error:
        error_lines = [
            _describe_error(inputs_model, error_details, flag_texts)
            for error_details in error.errors()
        ]
        raise ConfigError(*error_lines) from error


def _describe_error(
    inputs_model: type[StepInputs], error: ErrorDetails, flag_texts: dict[str, str]
) -> str:
    name = str(error["loc"][0]) if error["loc"] else ""
    inner_path = "".join(f".{key}" for key in error["loc"][1:])
    if error["type"] == "missing":
        return f"{format_flag(name)}{inner_path} is missing: it is required."
    if name:
        value_description = f"{format_flag(name)}{inner_path} is {error['input']!r}"
    else:
        value_description = "the inputs are wrong"
    return f"{value_description}: {describe_broken_rule(inputs_model, error)}"


def _is_scalar(annotation: object) -> bool:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        member_types = typing.get_args(annotation)
    else:
        member_types = ()
    if member_types:
        return all(
            _is_scalar(member_type) for member_type in member_types if member_type is not type(None)
        )
    if typing.get_origin(annotation) is typing.Literal:
        return True
    return isinstance(annotation, type) and issubclass(annotation, SCALAR_TYPES)


class Flags(argparse.ArgumentParser):
    """An argument parser that raises ConfigError, so that an error is shown as one line, without
    the usage text."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See `{self.prog} --help`.")


def create_parser(
    program_name: str, inputs_model: type[StepInputs], description: str = ""
) -> argparse.ArgumentParser:
    """Create the command-line parser of a step from its fields."""
    flag_parser = Flags(
        prog=f"rekindle step {program_name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    for field_name, field_info in inputs_model.model_fields.items():
        if field_info.is_required():
            default_text = ""
        else:
            default_text = format_parameter(field_info.get_default(call_default_factory=True))

        required_or_default = "required" if field_info.is_required() else f"default: {default_text}"
        flag_help = f"{field_info.description or ''} ({required_or_default})".strip().replace(
            "%", "%%"
        )
        flag_parser.add_argument(
            format_flag(field_name),
            metavar="VALUE",
            dest=field_name,
            help=flag_help,
            default=argparse.SUPPRESS,
        )

    return flag_parser


def write_outputs(outputs: StepOutputs, output_files: dict[str, Path]) -> None:
    """Write each output to its file. Artifacts are moved by a rename, so no output file is ever
    incomplete."""
    for name, output_field in type(outputs).model_fields.items():
        if name not in output_files:
            continue

        output_file = output_files[name]
        output_value = getattr(outputs, name)
        output_file.parent.mkdir(parents=True, exist_ok=True)

        if is_artifact(output_field):
            if output_file.is_dir():
                shutil.rmtree(output_file)

            shutil.move(output_value, output_file)
        else:
            output_file.write_text(format_output(name, output_value))


def format_output(output_name: str, output_value: object) -> str:
    """Format an output for Argo. Raises DataError for a text that Argo would change, and for a
    number that is not finite."""
    if isinstance(output_value, BaseModel):
        plain_value = output_value.model_dump(mode="json")
    else:
        plain_value = output_value

    not_finite_problem = describe_non_finite({output_name: plain_value})
    if not_finite_problem:
        raise DataError(
            f"the output {not_finite_problem}, since conditions and other tasks cannot read it."
            " Return a finite number, or raise rekindle.DataError with the reason."
        )

    output_text = format_parameter(output_value)
    if not isinstance(output_value, SCALAR_TYPES):
        # in JSON, "{{" occurs only inside strings, where this escape stands for the same character
        output_text = output_text.replace("{{", "{\\u007b")

    try:
        return check_output_text(output_text)
    except ValueError as error:
        raise DataError(
            f"the output {output_name} is {shorten(ascii(output_text))}: {error}. Change the text,"
            " or return it as an artifact or in a list, which is passed as JSON."
        ) from None


def check_output_text(output_text: str) -> str:
    """Return `output_text` if Argo can pass it to other tasks unchanged; otherwise raise a
    ValueError that says why not."""
    if "{{" in output_text:
        raise ValueError('it must not contain "{{", which Argo replaces in the tasks that get it')
    if "\0" in output_text:
        raise ValueError("it must not contain a NUL, which no argument of a program may have")
    # the encoding raises ValueError for a lone surrogate
    output_text.encode()
    return output_text


def check_output_texts(outputs_model: type[StepOutputs], output_texts: Mapping[str, str]) -> None:
    """Raise ValueError if one of the texts, such as those in a cache entry, is not a valid value of
    its output."""
    for name, text in output_texts.items():
        output_field = outputs_model.model_fields.get(name)
        if output_field is None or is_artifact(output_field):
            raise ValueError(f"{format_untrusted(name)} is not an output of the step")

        parsed_value = text if _is_scalar(output_field.annotation) else loads(text)
        constrained_type: Any = Annotated[output_field.annotation, output_field]  # type: ignore[valid-type]
        try:
            TypeAdapter(constrained_type).validate_python(parsed_value)
        except ValidationError as error:
            broken_rule = format_rule(error.errors()[0]["msg"]).removesuffix(".")
            raise ValueError(
                f"the output {name} is {format_untrusted(text)}: {broken_rule}"
            ) from None


def verify_artifacts(step_inputs: StepInputs) -> None:
    """Raise DataError if the files of an input, a dataset or a trained model, were changed after
    they had been written."""
    from rekindle.content.verified_artifacts import read_digest_input, verify_artifact

    for name, input_field in type(step_inputs).model_fields.items():
        if is_artifact(input_field):
            verify_artifact(name, getattr(step_inputs, name), read_digest_input(step_inputs))


Execute = Callable[[str, StepInputs, dict[str, Path], argparse.Namespace], None]


def execute(
    step_module: str,
    step_inputs: StepInputs,
    output_files: dict[str, Path],
    cache_options: argparse.Namespace,
) -> None:
    """Run a step and write its outputs."""
    write_outputs(load_step_module(step_module).run(step_inputs), output_files)


def main(command_arguments: list[str], execute_step: Execute = execute) -> int:
    """Run one step and return its exit code (see rekindle/errors.py)."""
    if not command_arguments or command_arguments[0] in ("-h", "--help"):
        sys.stdout.write(f"{__doc__}")
        if command_arguments:
            return 0
        return 2

    try:
        step_module = load_step_module(command_arguments[0])
        flag_parser = create_parser(command_arguments[0], step_module.Inputs, step_module.__doc__)
        output_help = (
            f"file for one of the outputs: {', '.join(step_module.Outputs.model_fields) or 'none'}"
        )
        flag_parser.add_argument(
            "--output", action="append", default=[], metavar="NAME=PATH", help=output_help
        )
        cache_flags = Flags(prog=flag_parser.prog, add_help=False, allow_abbrev=False)

        if hasattr(step_module, "REUSE"):
            cache_flags.add_argument(
                "--entry",
                default="",
                help="RUN/TASK: record the outputs in the cache, as those of this task",
            )
            cache_flags.add_argument(
                "--reuse", default="no", help="yes: reuse the cached outputs of an earlier run"
            )

        cache_options, other_arguments = cache_flags.parse_known_args(command_arguments[1:])
        parsed_inputs, unknown_arguments = flag_parser.parse_known_args(other_arguments)
        if unknown_arguments:
            flag_names = {*map(format_flag, step_module.Inputs.model_fields), "--output"}
            name = unknown_arguments[0].partition("=")[0]
            hint = (
                suggest_similar(name, flag_names)
                or f" Its inputs: {', '.join(sorted(flag_names))}."
            )
            raise ConfigError(
                f"{unknown_arguments[0]} is not an input of {command_arguments[0]}.{hint}"
            )

        flag_values = vars(parsed_inputs)
        output_files = {}

        for output_argument in flag_values.pop("output"):
            name, _, path = output_argument.partition("=")
            if name not in step_module.Outputs.model_fields or not path:
                hint = suggest_similar(name, set(step_module.Outputs.model_fields))
                raise ConfigError(
                    f"--output {output_argument}: it must be NAME=PATH with the name of an"
                    f" output.{hint}"
                )

            output_files[name] = Path(path)

        step_inputs = parse_inputs(step_module.Inputs, flag_values)
        try:
            verify_artifacts(step_inputs)
            execute_step(command_arguments[0], step_inputs, output_files, cache_options)
        finally:
            shutil.rmtree(step_inputs.workdir, ignore_errors=True)
    except RekindleError as error:
        return fail(error)
    except Exception as error:
        traceback.print_exc()
        return fail(user_exceptions.convert_exception(error))

    return 0


def fail(error: RekindleError) -> int:
    """Write an error to stderr and to the termination log of the container; return the exit code of
    the error."""
    # Argo copies the termination log to the status of the run, and `report` copies it to MLflow
    error_message = without_secrets(str(error))

    # keep the exit code even if the disk is full
    with suppress(OSError):
        sys.stderr.write(f"error: {error_message}\n")
    with suppress(OSError):
        termination_log = Path(os.environ.get(program.TERMINATION_LOG_VARIABLE, TERMINATION_LOG))
        if termination_log.exists() and os.access(termination_log, os.W_OK):
            termination_log.write_text(error_message[:4096])
    return error.exit_code
