"""Types for names from untrusted sources, such as the response of a server, a command line or a
file. Every instance of a type of names is a valid name.

    RunName("fraud-x7k2p")                    # raises InvalidName for "../project", "" or 5
    RunName.parse_or_none(row.get("name"))    # returns None for an invalid name

Convert a name to its type before it becomes part of a path, an object key or a request.
"""

import re
from typing import ClassVar, Self
from urllib.parse import quote

from argolocal.common.wording import shorten
from argolocal.errors import ConfigError

# DNS label
LABEL_PATTERN = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
# control characters, Unicode characters that hide or reorder text, and lone surrogates
INVISIBLE_CHARACTERS = (
    "\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff"
)
MAX_SHOWN_CHARACTERS = 100


class InvalidName(ConfigError):
    """A value is not a valid name."""


class CheckedName(str):
    """A string that is a valid name. Each subclass defines a rule for names, and its constructor
    rejects values that break the rule."""

    KIND: ClassVar[str]
    RULE: ClassVar[str]
    PATTERN: ClassVar[re.Pattern[str]]
    MAX_BYTES: ClassVar[int]

    __slots__ = ()

    def __new__(cls, value: object, value_source: str = "") -> Self:
        """Return the name. Raises InvalidName, whose message contains `value_source`, the origin
        of the value."""
        if cls.matches(value):
            return super().__new__(cls, value)
        origin = f" ({value_source})" if value_source else ""
        raise InvalidName(
            f"{format_untrusted(value)} is not {cls.KIND}{origin}: {cls.RULE}. Correct the name."
        )

    @classmethod
    def matches(cls, value: object) -> bool:
        """Return True if the value is a valid name."""
        if not isinstance(value, str) or not cls.PATTERN.fullmatch(value):
            return False
        return len(value.encode()) <= cls.MAX_BYTES

    @classmethod
    def parse_or_none(cls, value: object) -> Self | None:
        """Return the name, or None if the value is not a valid name."""
        if cls.matches(value):
            return cls(value)
        return None


class ObjectName(CheckedName):
    """The name of a Kubernetes object."""

    KIND = "the name of a Kubernetes object"
    RULE = (
        'it must consist of 1 to 253 lower case letters, digits, "-" and ".", each part between'
        " dots as in a host name"
    )
    PATTERN = re.compile(rf"{LABEL_PATTERN}(\.{LABEL_PATTERN})*")
    MAX_BYTES = 253


class RunName(ObjectName):
    """The name of a run, which is also the name of its workflow, of its folder on this machine, and
    of its folder in the object store."""

    KIND = "the name of a run"


class PathName(CheckedName):
    """The name of an object on a server, used as one segment of a request's path."""

    KIND = "a name in a path"
    RULE = (
        'it must have 1 to 253 characters, without "/", "%" and control characters, and must not be'
        ' "." or ".."'
    )
    PATTERN = re.compile(rf"(?!\.{{1,2}}\Z)[^/%{INVISIBLE_CHARACTERS}]+")
    MAX_BYTES = 253

    @property
    def quoted(self) -> str:
        return quote(self, safe=":")


def format_untrusted(value: object) -> str:
    """Format an untrusted value for a message: quoted, shortened, and with escaped control
    characters."""
    text = value if isinstance(value, str) else repr(value)
    shown_start = shorten(text[:MAX_SHOWN_CHARACTERS])
    quoted_text = f'"{shown_start}"' if isinstance(value, str) else shown_start
    visible_text = re.sub(
        f"[{INVISIBLE_CHARACTERS}]", lambda match: f"\\u{ord(match[0]):04x}", quoted_text
    )

    omitted_count = len(text) - MAX_SHOWN_CHARACTERS
    if omitted_count > 0:
        return f"{visible_text}... ({omitted_count:,} characters more)"
    return visible_text
