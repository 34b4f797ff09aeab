"""Format texts for a terminal: escape control characters, shorten messages, and write durations in words."""

import re

MAX_MESSAGE_LENGTH = 3000
COLOR = re.compile("\x1b\\[[0-9;]*m")
# characters that control a terminal or the direction of text, except tab and newline
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def duration(seconds: float | None) -> str:
    """Return a duration in words: `0.06 s`, `41 s`, `2 min 05 s`, `3 h 20 min`; "" for None."""
    if seconds is None:
        return ""
    if seconds < 59.5:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, remainder = divmod(round(seconds), 60)
    return f"{minutes} min {remainder:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def visible(text: str) -> str:
    """Remove colours and escape control characters, so that a pod's output cannot control the terminal."""
    return CONTROL.sub(lambda character: f"\\u{ord(character[0]):04x}", COLOR.sub("", text))


def shorten(text: str) -> str:
    """Return `visible(text)`, cut at MAX_MESSAGE_LENGTH characters: a message may quote a value of any length."""
    excess = len(text) - MAX_MESSAGE_LENGTH
    return visible(text) if excess <= 0 else f"{visible(text[:MAX_MESSAGE_LENGTH])}... ({excess:,} characters more)"
