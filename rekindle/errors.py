"""The errors a user can meet. A message says what is wrong (the value), the rule, and the way out.

Raised deep, printed once at the edge: `exit_code` is what the process ends with. Codes follow sysexits.h where
a retry cannot cure the cause (78 EX_CONFIG, 65 EX_DATAERR), so that a retry strategy can tell them apart.
"""

import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches

# the second form has a slash in its password, the third no scheme: no URLs, but nobody's business all the same
USER = re.compile(r"(?<=://)([^\s/?#]*@|[^\s/?#@:]+:(?!\d+([/?#\s]|$))\S*@)|^[^\s/:@]+:(?!//)\S*@")


class RekindleError(Exception):
    """Anything a user can act on; everything else is a bug and keeps its traceback."""

    exit_code = 1


class ConfigError(RekindleError):
    """A setting, a flag or a manifest is wrong: running again cannot help."""

    exit_code = 78


class DataError(RekindleError):
    """The input data breaks its contract: running again cannot help."""

    exit_code = 65


class GivenUp(RekindleError):
    """The coordinator has given up the run; `exit_code` is its verdict, and the process that hears it not to blame."""


class StorageError(RekindleError):
    """The object store is away, refuses, or holds something else than expected."""


class TrackingError(RekindleError):
    """MLflow is away or refuses."""


class Conflict(StorageError):
    """A conditional write lost: somebody else wrote first."""


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


def say(text: str) -> None:
    """One line to stderr, at once; a full disk below it costs the line, not the run."""
    with suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def without_user(text: str) -> str:
    """The user and password of every URL taken out: what is printed ends up in logs."""
    return USER.sub("", text)


def rule(message: str) -> str:
    """A validator's message as the end of a sentence."""
    message = message.removeprefix("Value error, ")
    return message if message.endswith((".", "?")) else message + "."


def did_you_mean(word: str, known: list[str] | set[str]) -> str:
    """' Did you mean "x"?' for the nearest of `known`, else ''."""
    near = get_close_matches(word, sorted(known), n=1, cutoff=0.5)
    return f' Did you mean "{near[0]}"?' if near else ""
