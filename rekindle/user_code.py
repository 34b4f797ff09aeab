"""Convert exceptions of a project's code to one-line errors with their location and an exit code for retries.

    except Exception as error:
        raise user_code.as_error(error)    # steps/power.py:29: KeyError: 'kwh'.

Most exceptions recur on the same data. Exceptions of files, memory, network and accelerators may be transient; the
OSError of a wrong path is not.
"""

import re
from collections.abc import Iterator

from rekindle import project
from rekindle.errors import CodeError, RekindleError

TRANSIENT_ERRORS = (OSError, MemoryError, EOFError)
PATH_ERRORS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
NETWORK_PACKAGES = {  # packages whose exceptions come from the network or a service
    *("aiohttp", "azure", "boto3", "botocore", "google", "grpc", "http", "httpcore", "httpx", "mlflow", "requests"),
    *("sqlalchemy", "urllib3"),
}
TRANSIENT_NAMES = re.compile(
    r"Connect|Disconnect|Time(d)?Out|Timeout|Unavailable|Throttl|RateLimit|OutOfMemory|Temporary|Transient"
)
TRANSIENT_TEXTS = re.compile(
    r"CUDA (driver )?error|cuDNN error|CUBLAS_STATUS|NCCL error|out of memory|allocate memory|timed out"
    r"|[Cc]onnection (refused|reset|aborted|closed)|[Tt]emporar(y|ily) (failure|unavailable)"
)


def as_error(error: Exception, where: str = "") -> RekindleError:
    """Convert an exception of the project's code: a CodeError if it would be raised again, else a RekindleError.

    `where`: start of the message, such as "`predict` failed on the test rows".
    """
    text = f"{where}: {project.describe(error)}" if where else project.describe(error)
    is_transient = any(map(_is_transient, _causes(error)))
    return CodeError(text) if project.raises(error) and not is_transient else RekindleError(text)


def _is_transient(error: BaseException) -> bool:
    """Return True if running again may not raise the exception."""
    if isinstance(error, PATH_ERRORS):
        return False
    if isinstance(error, RekindleError):
        return error.exit_code == 1
    error_types = [
        error_type for error_type in type(error).__mro__ if error_type not in (BaseException, Exception, object)
    ]
    return (
        isinstance(error, TRANSIENT_ERRORS)
        or any(
            error_type.__module__.partition(".")[0] in NETWORK_PACKAGES or TRANSIENT_NAMES.search(error_type.__name__)
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
        direct_cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
        pending += [direct_cause] if direct_cause else []
        pending += cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()
