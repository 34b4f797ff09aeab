"""Findings of the rules."""

from collections.abc import Iterable
from dataclasses import dataclass

from argolocal.errors import did_you_mean

HINTS = 50
SHOWN = 6  # most names listed in a hint


@dataclass(frozen=True)
class Finding:
    """One problem: path, rule, and a message with the fix. If not `fatal` it runs, but rarely as intended."""

    file: str
    path: str
    rule: str
    message: str
    fatal: bool

    def __str__(self) -> str:
        return f"{self.file + ': ' if self.file else ''}{self.path}: {self.message} [{self.rule}]"


class Findings:
    """Findings in order, without duplicates. An image is one finding, however many containers use it."""

    def __init__(self, file: str = "") -> None:
        self.file = file
        self.findings: dict[Finding, None] = {}
        self.hints = 0
        self.images: dict[tuple[str, str], list[str]] = {}

    def add(self, path: str, rule: str, message: str, fatal: bool = True) -> None:
        self.findings[Finding(self.file, path, rule, message, fatal)] = None

    def warn(self, path: str, rule: str, message: str) -> None:
        self.add(path, rule, message, fatal=False)

    def near(self, word: str, known: Iterable[str]) -> str:
        """`did_you_mean`, for the first HINTS mistakes only: its cost grows with the number of names."""
        self.hints += 1
        return did_you_mean(word, set(known)) if self.hints <= HINTS else ""

    def hint(self, word: str, known: Iterable[str]) -> str:
        """A hint for an unknown name: a similar one, or those that exist."""
        if (near := self.near(word, known)) or self.hints > HINTS:
            return near or " Name one that is there."
        names = sorted(set(known))
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return f" There is {', '.join(names[:SHOWN])}{more}." if names else " There is none: add it, or take this out."

    def image(self, path: str, image: str, why: str) -> None:
        self.images.setdefault((image, why), []).append(path)

    def all(self) -> list[Finding]:
        for (image, why), paths in self.images.items():
            others = f" {len(paths)} containers run it." if len(paths) > 1 else ""
            self.warn(paths[0], "image", f'"{image}" {why}{others}')
        self.images.clear()
        return list(self.findings)
