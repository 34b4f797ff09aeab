"""User-facing errors. The message of an error names the wrong value, the rule, and the remedy.

`exit_code` of an error is the exit code of the process. Retry strategies do not retry the exit
codes in `exit_codes.PERMANENT`, which mean that a retry cannot help.
"""

import re
from dataclasses import dataclass
from typing import Any

from argolocal.common import addresses, exit_codes
from argolocal.common.addresses import HIDDEN_MARK, format_address
from argolocal.common.wording import truncate
from argolocal.errors import ArgolocalError as RekindleError
from argolocal.errors import (
    ConfigError,
    Conflict,
    NotFound,
    StorageError,
    suggest_similar,
    write_stderr,
)

__all__ = [
    "ConfigError",
    "Conflict",
    "NotFound",
    "RekindleError",
    "StorageError",
    "format_address",
    "suggest_similar",
    "write_stderr",
]

# maximum number of characters of a wrong value in a message
MAX_VALUE_CHARS = 100
# matches the header value that requests and http.client quote when they reject it; it may be a
# token, for example one with a newline at its end
HEADER_VALUE = re.compile(r"(?<=header value)(?=:? b?['\"]).*", re.DOTALL)


class DataError(RekindleError):
    """The input data is invalid, so a retry cannot help."""

    exit_code = exit_codes.INVALID_DATA


class CodeError(RekindleError):
    """The user's code raised an exception that a retry would raise again. The message contains the
    FILE:LINE and the text of the exception."""

    exit_code = exit_codes.CODE_ERROR


class RunAborted(RekindleError):
    """The coordinator aborted the run because another process failed; `exit_code` is the exit code
    of the run."""


class TrackingError(RekindleError):
    """MLflow is unavailable or refuses a request."""


@dataclass(frozen=True)
class Check:
    """The result of one check of `rekindle doctor`. `found` describes what the check found, and
    `remedy` how to correct a failure. `required` is False if a failure is only a warning."""

    name: str
    ok: bool
    found: str
    remedy: str = ""
    required: bool = True

    def __str__(self) -> str:
        outcome_mark = "ok  " if self.ok else "FAIL" if self.required else "warn"
        return f"{outcome_mark} {self.name}: {self.found}" + (
            "" if self.ok else f"\n     {self.remedy}"
        )


def without_secrets(text: str) -> str:
    """Remove secrets from a message, namely passwords and tokens in addresses, and values of
    invalid headers.

    To show a single address, use `format_address`, which also hides secrets that look like ordinary
    words in a message.
    """
    shown_text = addresses.remove_address_secrets(text)
    return HEADER_VALUE.sub(" is not allowed (the value is not shown)", shown_text)


def describe_cause(error: BaseException, request_address: str) -> str:
    """Return the text of an error of a request to `request_address`, without secrets.

    For a malformed address, return only the class of the error. HTTP clients disagree about which
    part of a malformed address is the password, and may quote the password as the host or port.
    """
    if HIDDEN_MARK in format_address(request_address):
        return f"{type(error).__name__}; the address must be http(s)://HOST[:PORT]"
    return " ".join(without_secrets(str(error)).split())


def find_innermost_cause(error: BaseException) -> BaseException:
    """Return the first exception in the chain of causes of an error."""
    while inner_error := error.__cause__ or error.__context__:
        error = inner_error
    return error


def format_in_one_line(wrong_value: object) -> str:
    """Format a wrong value for a message, on one line of at most 100 characters."""
    return truncate(" ".join(repr(wrong_value).split()), MAX_VALUE_CHARS)


def to_number(numeric_value: Any) -> float | None:
    """Convert a number of Python, NumPy or torch to a float; return None for any other value."""
    try:
        if isinstance(numeric_value, str):
            return None
        # detach first, because torch warns about the conversion of a tensor with a gradient
        detach_method = getattr(numeric_value, "detach", None)
        return float(detach_method() if detach_method else numeric_value)
    except (TypeError, ValueError, RuntimeError):
        return None


def format_rule(validator_message: str) -> str:
    """Format the message of a pydantic validator as the end of a sentence; a regular expression in
    the message is left out."""
    validator_message = validator_message.removeprefix("Value error, ")
    if validator_message.startswith("String should match pattern"):
        return "it has the wrong form."
    if validator_message.endswith((".", "?")):
        return validator_message
    return validator_message + "."
