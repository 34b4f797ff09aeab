"""A DAG while blocks are put into it: which of them come after which."""

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hera.workflows import DAG, Parameter, Task

from rekindle.blocks.wiring import Block
from rekindle.keys import CACHED, REUSE, cached_name

EXPORTS = ("run_id", "digest", "verdict", "reason", "metrics", "model_sha256")  # outputs of the whole workflow


@dataclass(eq=False)
class Scope:
    """A DAG in which blocks stand, and for a group its task in the DAG around it."""

    dag: DAG
    outer: "Scope | None" = None
    task: Task | None = None
    guarded: list[str] = field(default_factory=list)  # tasks whose failure is the DAG's, whatever comes after them
    before: dict[str, list[str]] = field(default_factory=dict)  # block → the tasks that it comes after
    order: dict[str, int] = field(default_factory=dict)  # block → its number

    def path(self) -> Iterator["Scope"]:
        """This DAG, and those around it."""
        scope: Scope | None = self
        while scope:
            yield scope
            scope = scope.outer

    def holds(self, task: str) -> bool:
        """True if a task of this name stands in this DAG, a block or one of plain Hera."""
        return task in self.before or any(other.name == task for other in self.dag.tasks)

    def after(self, task: str, needed: Iterable[str]) -> str | None:
        """Note that `task` comes after `needed`; gives what Argo's `depends` must say, without what follows from it."""
        names = list(dict.fromkeys(needed))
        direct = [name for name in names if not any(self._leads(name, other) for other in names if other != name)]
        self.before[task] = direct
        self.order.setdefault(task, len(self.order))
        return " && ".join(direct) or None

    def _leads(self, name: str, to: str) -> bool:
        """Whether `to` comes after `name`. Blocks only come after those that were made before them."""
        least, seen, left = self.order.get(name, 0), {to}, [to]
        while left:
            for earlier in self.before.get(left.pop(), ()):
                if earlier == name:
                    return True
                if earlier not in seen and self.order.get(earlier, 0) > least:
                    seen.add(earlier)
                    left.append(earlier)
        return False


def export(scopes: Collection[Scope], templates: Iterable[Any]) -> None:
    """Outputs that only one task has become outputs of the workflow."""
    tasks = [task for scope in scopes if scope.dag.name != "finish" for task in scope.dag.tasks]
    blocks = [task for task in tasks if isinstance(task, Block)]
    makers = {name: [task for task in blocks if name in task.outputs] for name in EXPORTS}
    for name, [task] in ((name, tasks) for name, tasks in makers.items() if len(tasks) == 1):
        template = next(t for t in templates if t.name == getattr(task.template, "name", ""))
        for output in getattr(template, "outputs", None) or ():
            if output.name == name and isinstance(output, Parameter):
                output.global_name = name


def declare_reuse(arguments: Any, tasks: Iterable[str]) -> None:
    """The default of the workflow parameter CACHED: of no task is anything known, and all may look."""
    known = {cached_name(task): {"task": task, "at": ""} for task in tasks}
    for argument in arguments:
        if argument.name == CACHED:
            argument.value = json.dumps(known | {REUSE: "yes"})
