"""Findings: the problems that the rules of this package report."""

from collections.abc import Iterable
from dataclasses import dataclass

from argolocal.common.wording import escape_to_one_line, join_first_names
from argolocal.errors import suggest_similar

# maximum number of hints for all findings of a manifest
MAX_HINTS = 50
# maximum number of names in a hint
MAX_SHOWN_NAMES = 6


@dataclass(frozen=True)
class Finding:
    """A problem of a manifest. `path` is the field with the problem. The message of a finding also
    names the remedy. A problem that is `fatal` prevents the run."""

    file: str
    path: str
    rule: str
    message: str
    fatal: bool

    def __str__(self) -> str:
        text = f"{self.file + ': ' if self.file else ''}{self.path}: {self.message} [{self.rule}]"
        # escape line breaks, so that a value cannot look like a second finding
        return escape_to_one_line(text)


class Findings:
    """Collects findings in order and without duplicates. A problem of an image is reported only
    once, even if several containers use the image."""

    def __init__(self, file: str = "") -> None:
        self.file = file
        self.findings: dict[Finding, None] = {}
        self.hint_count = 0
        self.image_paths: dict[tuple[str, str], list[str]] = {}

    def add(self, path: str, rule: str, message: str, fatal: bool = True) -> None:
        """Add a finding; by default, a fatal one."""
        self.findings[Finding(self.file, path, rule, message, fatal)] = None

    def warn(self, path: str, rule: str, message: str) -> None:
        """Add a finding that does not prevent the run."""
        self.add(path, rule, message, fatal=False)

    def suggest(self, unknown_name: str, existing_names: Iterable[str]) -> str:
        """Return a question such as ' Did you mean "x"?', or "" if no name is similar. After
        MAX_HINTS calls, always return "", because each search takes time."""
        self.hint_count += 1
        if self.hint_count <= MAX_HINTS:
            return suggest_similar(unknown_name, set(existing_names))
        return ""

    def hint(self, unknown_name: str, existing_names: Iterable[str]) -> str:
        """Return a hint for an unknown name: a similar name, or else the first existing names."""
        suggestion = self.suggest(unknown_name, existing_names)
        if suggestion or self.hint_count > MAX_HINTS:
            return suggestion or " Correct the name."
        sorted_names = sorted(set(existing_names))
        if sorted_names:
            return f" Available: {join_first_names(sorted_names, MAX_SHOWN_NAMES)}."
        return " Define it, or remove the reference."

    def add_image(self, path: str, image: str, problem: str) -> None:
        """Add a problem of an image that the container at `path` uses."""
        self.image_paths.setdefault((image, problem), []).append(path)

    def all(self) -> list[Finding]:
        """Return all findings. Each problem of an image is one finding, even if several containers
        use the image."""
        for (image, problem), image_paths in self.image_paths.items():
            if len(image_paths) > 1:
                container_count_text = f" {len(image_paths)} containers run this image."
            else:
                container_count_text = ""
            self.warn(image_paths[0], "image", f'"{image}" {problem}{container_count_text}')
        self.image_paths.clear()
        return list(self.findings)
