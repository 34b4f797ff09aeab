"""Findings: the problems that the rules of this package report."""

from collections.abc import Iterable
from dataclasses import dataclass

from argolocal.common.wording import first_names, one_line
from argolocal.errors import did_you_mean

MAX_HINTS = 50
MAX_NAMES = 6  # maximum number of names in a hint


@dataclass(frozen=True)
class Finding:
    """A problem of a manifest. The message of a finding names the remedy. A `fatal` problem
    prevents the run."""

    file: str
    path: str
    rule: str
    message: str
    fatal: bool

    def __str__(self) -> str:
        text = f"{self.file + ': ' if self.file else ''}{self.path}: {self.message} [{self.rule}]"
        # escape line breaks, so that a value cannot look like a second finding
        return one_line(text)


class Findings:
    """Collects findings in order and without duplicates. A problem of an image is reported only
    once, even if several containers use the image."""

    def __init__(self, file: str = "") -> None:
        self.file = file
        self.findings: dict[Finding, None] = {}
        self.hint_count = 0
        self.image_paths: dict[tuple[str, str], list[str]] = {}

    def add(self, path: str, rule: str, message: str, fatal: bool = True) -> None:
        self.findings[Finding(self.file, path, rule, message, fatal)] = None

    def warn(self, path: str, rule: str, message: str) -> None:
        self.add(path, rule, message, fatal=False)

    def suggest(self, word: str, names: Iterable[str]) -> str:
        """Return the result of `did_you_mean` for the first MAX_HINTS calls, and "" for later
        calls, because a search in many names is slow."""
        self.hint_count += 1
        if self.hint_count <= MAX_HINTS:
            return did_you_mean(word, set(names))
        return ""

    def hint(self, word: str, choices: Iterable[str]) -> str:
        """Return a hint for an unknown name that states a similar name or all existing names."""
        suggestion = self.suggest(word, choices)
        if suggestion or self.hint_count > MAX_HINTS:
            return suggestion or " Correct the name."
        names = sorted(set(choices))
        if names:
            return f" Available: {first_names(names, MAX_NAMES)}."
        return " Define it, or remove the reference."

    def add_image(self, path: str, image: str, problem: str) -> None:
        self.image_paths.setdefault((image, problem), []).append(path)

    def all(self) -> list[Finding]:
        for (image, problem), paths in self.image_paths.items():
            if len(paths) > 1:
                others = f" {len(paths)} containers run this image."
            else:
                others = ""
            self.warn(paths[0], "image", f'"{image}" {problem}{others}')
        self.image_paths.clear()
        return list(self.findings)
