"""The errors a user can meet. A message says what is wrong (the value), the rule, and the way out.

`exit_code` is what the process ends with. Codes follow sysexits.h where
a retry cannot cure the cause (78 EX_CONFIG, 65 EX_DATAERR, 70 EX_SOFTWARE): a retry strategy tells them apart.
"""

import re
from dataclasses import dataclass

from argolocal.errors import ArgolocalError as RekindleError
from argolocal.errors import ConfigError, Conflict, NotFound, StorageError, did_you_mean, say

__all__ = ["ConfigError", "Conflict", "NotFound", "RekindleError", "StorageError", "did_you_mean", "say"]

# the second form has a slash in its password, the third no scheme: not URLs, but still secrets
USER = re.compile(r"(?<=://)([^\s/?#]*@|[^\s/?#@:]+:(?!\d+([/?#\s]|$))\S*@)|^[^\s/:@]+:(?!//)\S*@")


class DataError(RekindleError):
    """The input data breaks its contract: running again cannot help."""

    exit_code = 65


class CodeError(RekindleError):
    """A user's code raised an exception that it would raise again: FILE:LINE and the text (EX_SOFTWARE)."""

    exit_code = 70


class GivenUp(RekindleError):
    """The coordinator aborted the run with `exit_code`; the process that raises this is not the cause."""


class TrackingError(RekindleError):
    """MLflow is unavailable or refuses a request."""


@dataclass(frozen=True)
class Check:
    """One thing that a doctor examined, and the remedy if it is not ok; one that is not `required` only warns."""

    name: str
    ok: bool
    found: str
    remedy: str = ""
    required: bool = True

    def __str__(self) -> str:
        mark = "ok  " if self.ok else "FAIL" if self.required else "warn"
        return f"{mark} {self.name}: {self.found}" + ("" if self.ok else f"\n     {self.remedy}")


def without_user(text: str) -> str:
    """The text without the user and password of its URLs, since messages end up in logs."""
    return USER.sub("", text)


def innermost(error: BaseException) -> BaseException:
    """What an error comes from, below all that were raised on the way."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    return error


def rule(message: str) -> str:
    """A validator's message as the end of a sentence."""
    message = message.removeprefix("Value error, ")
    return message if message.endswith((".", "?")) else message + "."
