"""What the rules find, and where they put it."""

from collections.abc import Iterable
from dataclasses import dataclass

from rekindle.errors import did_you_mean

HINTS = 50
SHOWN = 6  # names of what is there


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: where, by which rule, and the way out. What is not `fatal` runs, but seldom as meant."""

    file: str
    path: str
    rule: str
    message: str
    fatal: bool

    def __str__(self) -> str:
        return f"{self.file + ': ' if self.file else ''}{self.path}: {self.message} [{self.rule}]"


class Findings:
    """Findings in the order they are made, each once. An image is one finding, however many containers run it."""

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
        """`did_you_mean` for the first of many mistakes: a hint takes as long as there are names."""
        self.hints += 1
        return did_you_mean(word, set(known)) if self.hints <= HINTS else ""

    def hint(self, word: str, known: Iterable[str]) -> str:
        """The way out of a wrong name: what may be meant, else what is there."""
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
