"""Texts that a terminal shows, and numbers in words."""

import re

MAX_MESSAGE_LENGTH = 3000
COLOR = re.compile("\x1b\\[[0-9;]*m")
# but tabs and ends of lines: what steers a terminal, or turns the direction of a text
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def duration(seconds: float | None) -> str:
    """Return a duration in words: `0.06 s`, `41 s`, `2 min 05 s`, `3 h 20 min`; "" for None."""
    if seconds is None:
        return ""
    if seconds < 59.5:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    whole, rest = divmod(round(seconds), 60)
    return f"{whole} min {rest:02d} s" if whole < 60 else f"{whole // 60} h {whole % 60:02d} min"


def visible(text: str) -> str:
    """The text without colours, its control characters written out: what pods print cannot steer a terminal."""
    return CONTROL.sub(lambda character: f"\\u{ord(character[0]):04x}", COLOR.sub("", text))


def shorten(text: str) -> str:
    """Return `text` as `visible`, cut where nobody reads on: it may quote a value of any length."""
    more = len(text) - MAX_MESSAGE_LENGTH
    return visible(text) if more <= 0 else f"{visible(text[:MAX_MESSAGE_LENGTH])}... ({more:,} characters more)"
