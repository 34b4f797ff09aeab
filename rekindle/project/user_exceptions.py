"""Convert exceptions of a project's code to one-line errors with a location, and with an exit code
that decides whether Argo retries the step.

Exceptions from file access, memory, the network and accelerators may be transient, except for
exceptions about a wrong path. After an exception that is not transient, a retry with the same data
would fail again.
"""

import re
import sys
import sysconfig
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from argolocal.common.wording import truncate
from rekindle.errors import CodeError, RekindleError, suggest_similar, without_secrets
from rekindle.project.folders import BUNDLED_FOLDER, ENGINE_FOLDERS

if TYPE_CHECKING:
    from traceback import FrameSummary

LIBRARY_FOLDERS = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
UNEXPECTED_ARGUMENT = re.compile(r"\b(\w+)\(\) got an unexpected keyword argument '(\w+)'")
# maximum number of characters of an exception's text in an error
MAX_TEXT_CHARS = 600
TRANSIENT_ERRORS = (OSError, MemoryError, EOFError)
PATH_ERRORS = (
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
)
# packages whose exceptions come from the network or a service
NETWORK_PACKAGES = {
    "aiohttp",
    "azure",
    "boto3",
    "botocore",
    "google",
    "grpc",
    "http",
    "httpcore",
    "httpx",
    "mlflow",
    "requests",
    "sqlalchemy",
    "urllib3",
}
TRANSIENT_NAMES = re.compile(
    r"Connect|Disconnect|Time(d)?Out|Timeout|Unavailable|Throttl|RateLimit|OutOfMemory|Temporary|Transient"
)
TRANSIENT_TEXTS = re.compile(
    r"CUDA (driver )?error|cuDNN error|CUBLAS_STATUS|NCCL error|out of memory|allocate"
    r" memory|timed out"
    r"|[Cc]onnection (refused|reset|aborted|closed)|[Tt]emporar(y|ily) (failure|unavailable)"
)


def convert_exception(error: Exception, error_origin: str = "") -> RekindleError:
    """Convert an exception of the project's code to a CodeError if a retry would raise it again,
    otherwise to a RekindleError.

    `error_origin`: start of the message, such as "`predict` failed on the test rows".
    """
    error_text = (
        f"{error_origin}: {describe_exception(error)}"
        if error_origin
        else describe_exception(error)
    )
    is_transient = any(map(_is_transient, _iterate_causes(error)))
    if is_raised_by_project(error) and not is_transient:
        return CodeError(error_text)
    return RekindleError(error_text)


def _is_transient(error: BaseException) -> bool:
    """Return True if the cause of an exception may disappear by itself, so that a retry may
    succeed."""
    if isinstance(error, PATH_ERRORS):
        return False
    if isinstance(error, RekindleError):
        return error.exit_code == 1

    error_types = [
        error_type
        for error_type in type(error).__mro__
        if error_type not in (BaseException, Exception, object)
    ]

    return (
        isinstance(error, TRANSIENT_ERRORS)
        or any(
            error_type.__module__.partition(".")[0] in NETWORK_PACKAGES
            or TRANSIENT_NAMES.search(error_type.__name__)
            for error_type in error_types
        )
        or bool(TRANSIENT_TEXTS.search(str(error)))
    )


def _iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its causes, and the exceptions in exception groups."""
    seen_ids: set[int] = set()

    pending_errors = [error]
    while pending_errors:
        current_error = pending_errors.pop()
        if id(current_error) in seen_ids:
            continue

        seen_ids.add(id(current_error))
        yield current_error

        direct_cause = current_error.__cause__
        if direct_cause is None and not current_error.__suppress_context__:
            direct_cause = current_error.__context__
        if direct_cause:
            pending_errors.append(direct_cause)

        if isinstance(current_error, BaseExceptionGroup):
            pending_errors += current_error.exceptions


def describe_exception(error: Exception) -> str:
    """Format an exception as FILE:LINE of the innermost frame in the project, the text of the
    exception, and a hint on a misspelt name."""
    # imported in this function, since `rekindle --help` does not need it
    from pydantic import ValidationError

    error_message = str(error)

    if isinstance(error, ValidationError):
        first_error = error.errors()[0]
        error_message = (
            f"{'.'.join(map(str, first_error['loc']))} is {first_error['input']!r}:"
            f" {first_error['msg']}"
        )

    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {_format_in_one_line(error, error_message)}."

    own_frames = _list_own_frames(error)
    innermost_frame = next(
        (frame for frame in reversed(own_frames) if not _is_engine(frame.filename)),
        own_frames[-1],
    )
    # an `assert` without a message raises an exception without text
    error_text = _format_in_one_line(error, error_message or innermost_frame.line or "")

    return (
        f"{innermost_frame.filename}:{innermost_frame.lineno}:"
        f" {error_text}.{_suggest_name(error, innermost_frame.filename)}"
    )


def _format_in_one_line(error: Exception, error_message: str) -> str:
    error_message = without_secrets(error_message)
    error_text = " ".join(f"{type(error).__name__}: {error_message}".split()).rstrip(": ")
    return truncate(error_text, MAX_TEXT_CHARS)


def _suggest_name(error: Exception, file: str) -> str:
    """Return a hint for a misspelt attribute, or for a misspelt argument of a function that `file`
    uses."""
    if isinstance(error, AttributeError) and error.name:
        if isinstance(error.obj, str | int | float):
            object_type = type(error.obj)
        else:
            object_type = error.obj

        return suggest_similar(
            error.name, [name for name in dir(object_type) if not name.startswith("_")]
        )

    if isinstance(error, TypeError):
        argument_match = UNEXPECTED_ARGUMENT.search(str(error))
        if argument_match:
            return _suggest_argument(argument_match[1], argument_match[2], file)

    return ""


def _suggest_argument(function_name: str, argument_name: str, file: str) -> str:
    """Return a hint for a misspelt argument of a function that `file` defines or imports, directly
    or in a module; Return "" if the function is not found."""
    user_namespaces = [
        vars(module)
        for module in list(sys.modules.values())
        if getattr(module, "__file__", "") == file
    ]

    objects_by_name = {
        name: named_object
        for namespace in user_namespaces
        for name, named_object in namespace.items()
    }
    used_modules = [
        named_object
        for named_object in objects_by_name.values()
        if isinstance(named_object, ModuleType)
    ]
    candidate_functions = [
        objects_by_name.get(function_name),
        *(getattr(module, function_name, None) for module in used_modules),
    ]

    called_function = next(filter(callable, candidate_functions), None)
    if called_function:
        return suggest_similar(argument_name, list(signature(called_function).parameters))
    return ""


def is_raised_by_project(error: BaseException) -> bool:
    """Return True if `error` was raised by the project's code or a library that it called, not by
    rekindle or argolocal."""
    return not _is_engine(_list_own_frames(error)[-1].filename)


def _list_own_frames(error: BaseException) -> list["FrameSummary"]:
    """Return the traceback's frames outside of libraries; if all frames are in libraries, return
    all of them."""
    # imported in this function, since `rekindle --help` does not need it
    import traceback

    all_frames = list(traceback.extract_tb(error.__traceback__))
    project_frames = [
        frame
        for frame in all_frames
        if any(map(Path(frame.filename).is_relative_to, ENGINE_FOLDERS))
        or not frame.filename.startswith(("<", *LIBRARY_FOLDERS))
    ]
    return project_frames or all_frames


def _is_engine(file: str) -> bool:
    """Return True if a file belongs to rekindle or argolocal, but not to the reference project in
    the wheel."""
    path = Path(file)
    return any(map(path.is_relative_to, ENGINE_FOLDERS)) and not path.is_relative_to(BUNDLED_FOLDER)
