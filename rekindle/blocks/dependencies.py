"""Data types for the conditions under which a task starts; `str` converts them to the text of
Argo's `depends`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from argolocal.validate.graph import list_awaited_results

FAILURES = ("Failed", "Errored")
# all final phases of a task; a task that depends on any of these phases of another task always runs
FINAL_PHASES = ("Succeeded", *FAILURES)
CONJUNCTION = re.compile(r"[\w.-]+( && [\w.-]+)*")


@dataclass(frozen=True)
class Alternatives:
    """Results of tasks, at least one of which must occur. Examples: An alternative is
    `train.Failed`, `train` (succeeded or skipped), or a `depends` expression of the user."""

    results: tuple[str, ...]

    @property
    def tasks(self) -> set[str]:
        return {task for task, _ in list_awaited_results({"depends": str(self)})}

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

    def with_tasks(self, task_names: Iterable[str]) -> "Dependencies":
        """Return these dependencies, extended by the tasks in `task_names` that are not yet
        included."""
        missing_tasks = [name for name in dict.fromkeys(task_names) if name not in self.tasks]
        return self & after_all(missing_tasks)

    def __str__(self) -> str:
        condition_texts = [str(condition) for condition in self.conditions]
        if len(condition_texts) > 1:
            condition_texts = [f"({text})" if "||" in text else text for text in condition_texts]
        return " && ".join(condition_texts)


def after_all(task_results: Iterable[str]) -> Dependencies:
    """Return dependencies that are met when all of `task_results` have occurred. A task result is
    the name of a task, or for example `train.Failed`."""
    return Dependencies(tuple(Alternatives((task_result,)) for task_result in task_results))


def after_any(task_names: Iterable[str], end_phases: Iterable[str]) -> Dependencies:
    """Return a dependency that is met when at least one of `task_names` ends in one of
    `end_phases`."""
    end_phases = tuple(end_phases)
    task_results = tuple(
        f"{task_name}.{end_phase}" for task_name in task_names for end_phase in end_phases
    )
    return Dependencies((Alternatives(task_results),) if task_results else ())


def parse_depends(depends_text: str | None) -> Dependencies:
    """Parse a `depends` expression that the user or Hera has written."""
    if depends_text and CONJUNCTION.fullmatch(depends_text):
        return after_all(depends_text.split(" && "))
    return after_all([depends_text] if depends_text else [])
