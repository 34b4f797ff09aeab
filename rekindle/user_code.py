"""Convert exceptions of a project's code to one-line errors with their location and an exit code for retries.

    except Exception as error:
        raise user_code.as_error(error)    # steps/power.py:29: KeyError: 'kwh'.

Most exceptions recur on the same data. Exceptions of files, memory, network and accelerators may be transient; a wrong
path is not, although it is an OSError.
"""

import re
from collections.abc import Iterator

from rekindle import project
from rekindle.errors import CodeError, RekindleError

TRANSIENT = (OSError, MemoryError, EOFError)
WRONG_PATH = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
NETWORK = {  # packages whose exceptions come from the network or a service
    *("aiohttp", "azure", "boto3", "botocore", "google", "grpc", "http", "httpcore", "httpx", "mlflow", "requests"),
    *("sqlalchemy", "urllib3"),
}
NAMES = re.compile(
    r"Connect|Disconnect|Time(d)?Out|Timeout|Unavailable|Throttl|RateLimit|OutOfMemory|Temporary|Transient"
)
TEXTS = re.compile(
    r"CUDA (driver )?error|cuDNN error|CUBLAS_STATUS|NCCL error|out of memory|allocate memory|timed out"
    r"|[Cc]onnection (refused|reset|aborted|closed)|[Tt]emporar(y|ily) (failure|unavailable)"
)


def as_error(error: Exception, where: str = "") -> RekindleError:
    """Convert an exception of the project's code: a CodeError if it would be raised again, else a RekindleError.

    `where`: start of the message, such as "`predict` failed on the test rows".
    """
    text = f"{where}: {project.describe(error)}" if where else project.describe(error)
    transient = any(map(_is_transient, _causes(error)))
    return CodeError(text) if project.raises(error) and not transient else RekindleError(text)


def _is_transient(error: BaseException) -> bool:
    """Return True if running again may not raise the exception."""
    if isinstance(error, WRONG_PATH):
        return False
    if isinstance(error, RekindleError):
        return error.exit_code == 1
    kinds = [kind for kind in type(error).__mro__ if kind not in (BaseException, Exception, object)]
    return (
        isinstance(error, TRANSIENT)
        or any(kind.__module__.partition(".")[0] in NETWORK or NAMES.search(kind.__name__) for kind in kinds)
        or bool(TEXTS.search(str(error)))
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes."""
    seen: set[int] = set()
    pending = [error]
    while pending:
        cause = pending.pop()
        if id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        earlier = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
        pending += [earlier] if earlier else []
        pending += cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()
