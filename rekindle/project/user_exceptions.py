"""Convert exceptions of a project's code to one-line errors with a location, and with an exit code
that decides whether Argo retries the step.

Exceptions from file access, memory, the network and accelerators may be transient. A wrong path is
not. For all other exceptions, a retry with the same data would fail again.
"""

import re
import sys
import sysconfig
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from argolocal.common.wording import cut
from rekindle.errors import CodeError, RekindleError, did_you_mean, without_secrets
from rekindle.project.folders import BUNDLED, ENGINE

if TYPE_CHECKING:
    from traceback import FrameSummary

LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
UNEXPECTED_ARGUMENT = re.compile(r"\b(\w+)\(\) got an unexpected keyword argument '(\w+)'")
MAX_TEXT = 600  # maximum number of characters of an exception's text in an error
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


def as_error(error: Exception, where: str = "") -> RekindleError:
    """Convert an exception of the project's code to a CodeError if a retry would raise it again,
    otherwise to a RekindleError.

    `where`: start of the message, such as "`predict` failed on the test rows".
    """
    text = f"{where}: {describe(error)}" if where else describe(error)
    is_transient = any(map(_is_transient, _causes(error)))
    if is_raised_by_project(error) and not is_transient:
        return CodeError(text)
    return RekindleError(text)


def _is_transient(error: BaseException) -> bool:
    """Return True if the exception may be transient, so that a retry may succeed."""
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


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes."""
    seen_ids: set[int] = set()

    pending = [error]
    while pending:
        cause = pending.pop()
        if id(cause) in seen_ids:
            continue

        seen_ids.add(id(cause))
        yield cause
        direct_cause = cause.__cause__ or (
            None if cause.__suppress_context__ else cause.__context__
        )
        pending += [direct_cause] if direct_cause else []
        pending += cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()


def describe(error: Exception) -> str:
    """Format an exception as FILE:LINE of the innermost frame in the project, the text of the
    exception, and a hint on a misspelt name."""
    # imported in this function, since `rekindle --help` does not need it
    from pydantic import ValidationError

    message = str(error)

    if isinstance(error, ValidationError):
        first = error.errors()[0]
        message = f"{'.'.join(map(str, first['loc']))} is {first['input']!r}: {first['msg']}"

    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {_one_line(error, message)}."

    frames = _own_frames(error)
    frame = next(
        (frame for frame in reversed(frames) if not _is_engine(frame.filename)), frames[-1]
    )
    # an `assert` without a message raises an exception without text
    text = _one_line(error, message or frame.line or "")

    return f"{frame.filename}:{frame.lineno}: {text}.{_nearest_name(error, frame.filename)}"


def _one_line(error: Exception, message: str) -> str:
    message = without_secrets(message)
    text = " ".join(f"{type(error).__name__}: {message}".split()).rstrip(": ")
    return cut(text, MAX_TEXT)


def _nearest_name(error: Exception, file: str) -> str:
    """Return a hint for a misspelt attribute, or for a misspelt argument of a function that `file`
    uses."""
    if isinstance(error, AttributeError) and error.name:
        if isinstance(error.obj, str | int | float):
            owner = type(error.obj)
        else:
            owner = error.obj

        return did_you_mean(error.name, [name for name in dir(owner) if not name.startswith("_")])

    if isinstance(error, TypeError) and (match := UNEXPECTED_ARGUMENT.search(str(error))):
        users = [
            vars(module)
            for module in list(sys.modules.values())
            if getattr(module, "__file__", "") == file
        ]

        names = {name: value for namespace in users for name, value in namespace.items()}
        modules = [value for value in names.values() if isinstance(value, ModuleType)]
        functions = [names.get(match[1]), *(getattr(module, match[1], None) for module in modules)]

        function = next(filter(callable, functions), None)
        if function:
            return did_you_mean(match[2], list(signature(function).parameters))

        return ""

    return ""


def is_raised_by_project(error: BaseException) -> bool:
    """Return True if `error` was raised by the project's code or a library that it called, not by
    rekindle or argolocal."""
    return not _is_engine(_own_frames(error)[-1].filename)


def _own_frames(error: BaseException) -> list["FrameSummary"]:
    """Return the traceback's frames outside of libraries; if all frames are in libraries, return
    all of them."""
    # imported in this function, since `rekindle --help` does not need it
    import traceback

    frames = list(traceback.extract_tb(error.__traceback__))
    outside = [
        frame
        for frame in frames
        if any(map(Path(frame.filename).is_relative_to, ENGINE))
        or not frame.filename.startswith(("<", *LIBRARIES))
    ]
    return outside or frames


def _is_engine(file: str) -> bool:
    """Return True if a file belongs to rekindle or argolocal, but not to the reference project in
    the wheel."""
    path = Path(file)
    return any(map(path.is_relative_to, ENGINE)) and not path.is_relative_to(BUNDLED)
