"""User-facing errors. A message names the wrong value, the rule, and the remedy.

`exit_code` is the exit code of the process. Retry strategies do not retry the codes in
`exit_codes.PERMANENT`, which mean that a retry cannot help.
"""

import re
from dataclasses import dataclass
from typing import Any

from argolocal.common import addresses, exit_codes
from argolocal.common.addresses import HIDDEN, format_address
from argolocal.common.wording import cut
from argolocal.errors import ArgolocalError as RekindleError
from argolocal.errors import ConfigError, Conflict, NotFound, StorageError, did_you_mean, say

__all__ = [
    "ConfigError",
    "Conflict",
    "NotFound",
    "RekindleError",
    "StorageError",
    "did_you_mean",
    "format_address",
    "say",
]

MAX_VALUE_CHARS = 100  # maximum number of characters of a wrong value in a message
# matches the value of an invalid header in error messages of requests and http.client, because it
# may be a token, for example with a newline at its end
HEADER_VALUE = re.compile(r"(?<=header value)(?=:? b?['\"]).*", re.DOTALL)


class DataError(RekindleError):
    """The input data is invalid, so a retry cannot help."""

    exit_code = exit_codes.INVALID_DATA


class CodeError(RekindleError):
    """The user's code raised an exception that a retry would raise again; the message has its
    FILE:LINE and text."""

    exit_code = exit_codes.CODE_ERROR


class RunAborted(RekindleError):
    """The coordinator aborted the run with `exit_code`. The cause was another process."""


class TrackingError(RekindleError):
    """MLflow is unavailable or refuses a request."""


@dataclass(frozen=True)
class Check:
    """The result of one check of `rekindle doctor`, with the remedy for a failure. `found`
    describes the result; `required` is False if a failure is only a warning."""

    name: str
    ok: bool
    found: str
    remedy: str = ""
    required: bool = True

    def __str__(self) -> str:
        mark = "ok  " if self.ok else "FAIL" if self.required else "warn"
        return f"{mark} {self.name}: {self.found}" + ("" if self.ok else f"\n     {self.remedy}")


def without_secrets(text: str) -> str:
    """Remove secrets from a message, namely passwords and tokens in addresses, and values of
    invalid headers.

    To show a single address, use `format_address`: it also hides secrets that look like ordinary
    words in a message.
    """
    shown_text = addresses.without_secrets(text)
    return HEADER_VALUE.sub(" is not allowed (the value is not shown)", shown_text)


def describe_cause(error: BaseException, address: str) -> str:
    """Return the text of an error of a request to `address`, without secrets.

    For a malformed address, return only the class of the error: clients disagree about which part
    is the password, and may quote it as a host or port.
    """
    if HIDDEN in format_address(address):
        return f"{type(error).__name__}; the address must be http(s)://HOST[:PORT]"
    return " ".join(without_secrets(str(error)).split())


def innermost(error: BaseException) -> BaseException:
    """Return the first exception in the chain of causes of an error."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    return error


def in_one_line(value: object) -> str:
    """Format a wrong value for a message, on one line of at most 100 characters."""
    return cut(" ".join(repr(value).split()), MAX_VALUE_CHARS)


def to_number(value: Any) -> float | None:
    """Convert a number of Python, NumPy or torch to a float; return None for any other value."""
    try:
        if isinstance(value, str):
            return None
        # detach first, because torch warns about the conversion of a tensor with a gradient
        detach = getattr(value, "detach", None)
        return float(detach() if detach else value)
    except (TypeError, ValueError, RuntimeError):
        return None


def rule(message: str) -> str:
    """Format the message of a pydantic validator as the end of a sentence; a regular expression in
    the message is left out."""
    message = message.removeprefix("Value error, ")
    if message.startswith("String should match pattern"):
        return "it has the wrong form."
    if message.endswith((".", "?")):
        return message
    return message + "."
