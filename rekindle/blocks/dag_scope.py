"""A DAG under construction: its blocks and their dependencies."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hera.workflows import DAG, NoneArchiveStrategy, Parameter, S3Artifact, Task

from argolocal.common.json_text import to_json
from rekindle.blocks.dependencies import Dependencies, after_all, parse
from rekindle.blocks.wiring import Block, line
from rekindle.keys import CACHED, REUSE, cached_name

VERDICT_OUTPUTS = ("verdict", "reason", "metrics")
# outputs of the whole workflow
EXPORTS = ("run_id", "digest", "model_sha256", "content", *VERDICT_OUTPUTS)


class Graph(DAG):
    """A DAG that records the source line of each task."""

    def _add_sub(self, node: object) -> None:
        super()._add_sub(node)
        if isinstance(node, Task):
            vars(node)["line"] = line()


@dataclass(eq=False)
class Scope:
    """A DAG with blocks; for a group, also its task in the outer DAG."""

    dag: DAG
    outer: "Scope | None" = None
    task: Block | None = None
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

    def add_dependencies(self, task: str, needed: Iterable[str]) -> Dependencies:
        """Let `task` depend on `needed`; return these dependencies without transitive ones."""
        names = list(dict.fromkeys(needed))
        direct = [
            name
            for name in names
            if not any(self._precedes(name, later) for later in names if later != name)
        ]
        self.predecessors[task] = direct
        self.order.setdefault(task, len(self.order))
        return after_all(direct)

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


@dataclass(frozen=True)
class Producer:
    """The task that has an output, and its DAG."""

    scope: Scope
    task: str


class Stored(S3Artifact):
    """An output artifact: files in the object store, referenced by key."""

    producer: Producer

    @classmethod
    def from_key(cls, name: str, key: str, producer: Producer) -> "Stored":
        stored = cls(name=name, key=key, archive=NoneArchiveStrategy())
        stored.producer = producer
        return stored

    # Hera copies arguments; the pipeline must not be copied with them
    def __deepcopy__(self, memo: object) -> "Stored":
        return Stored.from_key(self.name or "", self.key or "", self.producer)


def dependencies_of(task: Task) -> Dependencies:
    """Return what a block or a plain Hera task waits for."""
    if isinstance(task, Block):
        return task.waits_for
    if task.dependencies:
        return after_all(task.dependencies)
    return parse(task.depends)


def set_dependencies(task: Task, dependencies: Dependencies) -> None:
    """Let a block or a plain Hera task wait for `dependencies` only."""
    if isinstance(task, Block):
        task.waits_for = dependencies
    else:
        task.dependencies = None
        task.depends = str(dependencies) or None


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


def declare_reuse(arguments: Iterable[Any], tasks: Iterable[str]) -> None:
    """Set the default of the workflow parameter CACHED: no cached tasks, and every task may look up
    the cache."""
    entries = {cached_name(task): {"task": task, "at": ""} for task in tasks}
    for argument in arguments:
        if argument.name == CACHED:
            argument.value = to_json(entries | {REUSE: "yes"})
