"""A DAG under construction: its blocks and their dependencies."""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hera.workflows import DAG, Parameter, Task

from argolocal.common.json_text import to_json
from rekindle.blocks.wiring import Block, line
from rekindle.keys import CACHED, REUSE, cached_name

VERDICT_OUTPUTS = ("verdict", "reason", "metrics")
# outputs of the whole workflow
EXPORTS = ("run_id", "digest", "model_sha256", "content", *VERDICT_OUTPUTS)


class Graph(DAG):
    """A DAG that records the source line of each task."""

    def _add_sub(self, node: Any) -> None:
        super()._add_sub(node)
        if isinstance(node, Task):
            vars(node)["line"] = line()


@dataclass(eq=False)
class Scope:
    """A DAG with blocks; for a group, also its task in the outer DAG."""

    dag: DAG
    outer: "Scope | None" = None
    task: Task | None = None
    # tasks whose failure fails the DAG, even if later tasks succeed
    guarded: list[str] = field(default_factory=list)
    # block → the tasks that it depends on
    predecessors: dict[str, list[str]] = field(default_factory=dict)
    # block → its position in the order of creation
    order: dict[str, int] = field(default_factory=dict)

    def path(self) -> Iterator["Scope"]:
        """Yield this DAG, then each outer DAG."""
        scope: Scope | None = self
        while scope:
            yield scope
            scope = scope.outer

    def contains(self, task: str) -> bool:
        """Return whether this DAG has a task of this name, a block or a plain Hera task."""
        return task in self.predecessors or any(other.name == task for other in self.dag.tasks)

    def add_dependencies(self, task: str, needed: Iterable[str]) -> str | None:
        """Let `task` depend on `needed`; return Argo's `depends`, without transitive
        dependencies."""
        names = list(dict.fromkeys(needed))
        direct = [
            name
            for name in names
            if not any(self._precedes(name, later) for later in names if later != name)
        ]
        self.predecessors[task] = direct
        self.order.setdefault(task, len(self.order))
        return " && ".join(direct) or None

    def _precedes(self, name: str, successor: str) -> bool:
        """Return whether `successor` depends on `name`, also indirectly: blocks depend only on
        earlier blocks."""
        lowest = self.order.get(name, 0)
        seen = {successor}

        pending = [successor]
        while pending:
            for earlier in self.predecessors.get(pending.pop(), ()):
                if earlier == name:
                    return True

                if earlier not in seen and self.order.get(earlier, 0) > lowest:
                    seen.add(earlier)
                    pending.append(earlier)

        return False


def merge(depends: str | None, names: Iterable[str]) -> str | None:
    """Add dependencies to Argo's `depends`, unless it mentions them already."""
    missing = [
        name for name in dict.fromkeys(names) if name not in re.findall(r"[\w-]+", depends or "")
    ]
    if depends and missing and "||" in depends:
        first = f"({depends})"
    else:
        first = depends
    return " && ".join([*([first] if first else []), *missing]) or None


def export(scopes: Collection[Scope], templates: Iterable[Any]) -> None:
    """Make an output in EXPORTS an output of the workflow if exactly one task has it.

    The verdict of an evaluation that may be repeated is not exported: Argo would export the first,
    because it exports the outputs of tasks again in the order of the manifest when their DAG ends.
    """
    tasks = [task for scope in scopes if scope.dag.name != "finish" for task in scope.dag.tasks]
    blocks = [task for task in tasks if isinstance(task, Block) and not task.is_repetition]

    producers = {name: [task for task in blocks if name in task.outputs] for name in EXPORTS}
    for name, [task] in ((name, tasks) for name, tasks in producers.items() if len(tasks) == 1):
        if task.repetitions and name in VERDICT_OUTPUTS:
            continue

        template = next(t for t in templates if t.name == getattr(task.template, "name", ""))
        for output in getattr(template, "outputs", None) or ():
            if output.name == name and isinstance(output, Parameter):
                output.global_name = name


def declare_reuse(arguments: Any, tasks: Iterable[str]) -> None:
    """Set the default of the workflow parameter CACHED: no cached tasks, and every task may look up
    the cache."""
    entries = {cached_name(task): {"task": task, "at": ""} for task in tasks}
    for argument in arguments:
        if argument.name == CACHED:
            argument.value = to_json(entries | {REUSE: "yes"})
