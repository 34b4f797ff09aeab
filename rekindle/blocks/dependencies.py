"""Data types for the conditions under which a task starts; `str` renders them as Argo's
`depends`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from argolocal.validate.graph import results_awaited_by

FAILURES = ("Failed", "Errored")
# all final phases of a task; a task that depends on any of these phases of another task always runs
FINAL_PHASES = ("Succeeded", *FAILURES)
CONJUNCTION = re.compile(r"[\w.-]+( && [\w.-]+)*")


@dataclass(frozen=True)
class Alternatives:
    """Results of which at least one must occur. Examples: `train.Failed`, `train` (succeeded or
    skipped), or a `depends` expression of the user."""

    results: tuple[str, ...]

    @property
    def tasks(self) -> set[str]:
        return {task for task, _ in results_awaited_by({"depends": str(self)})}

    def __str__(self) -> str:
        return " || ".join(self.results)


@dataclass(frozen=True)
class Dependencies:
    """The conditions that must all hold before a task starts."""

    conditions: tuple[Alternatives, ...] = ()

    @property
    def tasks(self) -> set[str]:
        return {task for condition in self.conditions for task in condition.tasks}

    def __and__(self, other: "Dependencies") -> "Dependencies":
        return Dependencies(self.conditions + other.conditions)

    def with_tasks(self, names: Iterable[str]) -> "Dependencies":
        """Return these dependencies, extended by those of the tasks `names` that are not yet
        included."""
        missing = [name for name in dict.fromkeys(names) if name not in self.tasks]
        return self & after_all(missing)

    def __str__(self) -> str:
        texts = [str(condition) for condition in self.conditions]
        if len(texts) > 1:
            texts = [f"({text})" if "||" in text else text for text in texts]
        return " && ".join(texts)


def after_all(results: Iterable[str]) -> Dependencies:
    """Return dependencies that are met when all of `results` have occurred. A result is a task name
    or, for example, `train.Failed`."""
    return Dependencies(tuple(Alternatives((result,)) for result in results))


def after_any(tasks: Iterable[str], phases: Iterable[str]) -> Dependencies:
    """Return a dependency that is met when at least one of `tasks` ends in one of `phases`."""
    phases = tuple(phases)
    results = tuple(f"{task}.{phase}" for task in tasks for phase in phases)
    return Dependencies((Alternatives(results),) if results else ())


def parse_depends(text: str | None) -> Dependencies:
    """Parse a `depends` expression that the user or Hera has written."""
    if text and CONJUNCTION.fullmatch(text):
        return after_all(text.split(" && "))
    return after_all([text] if text else [])
