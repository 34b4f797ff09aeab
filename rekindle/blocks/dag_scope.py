"""A DAG under construction: its blocks and their dependencies."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hera.workflows import DAG, NoneArchiveStrategy, Parameter, S3Artifact, Task

from argolocal.common.json_text import to_json
from rekindle.blocks.dependencies import Dependencies, after_all, parse_depends
from rekindle.blocks.wiring import Block, current_line
from rekindle.keys import CACHED_PARAMETER, REUSE_FIELD, cached_name

VERDICT_OUTPUTS = ("verdict", "reason", "metrics")
# names of the outputs that a workflow exports
WORKFLOW_OUTPUTS = ("run_id", "digest", "model_sha256", "content", *VERDICT_OUTPUTS)


class Graph(DAG):
    """A DAG that records which line of the pipeline created each task."""

    def _add_sub(self, node: object) -> None:
        super()._add_sub(node)
        if isinstance(node, Task):
            vars(node)["line"] = current_line()


@dataclass(eq=False)
class Scope:
    """A DAG with blocks. If the DAG belongs to a group, `task` is the task of this group in the
    outer DAG."""

    dag: DAG
    outer: "Scope | None" = None
    task: Block | None = None
    # tasks whose failure fails the DAG, even if later tasks succeed
    guarded: list[str] = field(default_factory=list)
    # the tasks that each block depends on, by name of the block
    predecessors: dict[str, list[str]] = field(default_factory=dict)
    # position of each block in the order of creation
    order: dict[str, int] = field(default_factory=dict)

    def enclosing(self) -> Iterator["Scope"]:
        """Yield this scope, then the scopes of the outer DAGs, innermost first."""
        scope: Scope | None = self
        while scope:
            yield scope
            scope = scope.outer

    def contains(self, task_name: str) -> bool:
        """Return whether this DAG contains a task (a block or a plain Hera task) with this name."""
        return task_name in self.predecessors or any(
            existing_task.name == task_name for existing_task in self.dag.tasks
        )

    def add_dependencies(self, task_name: str, predecessor_names: Iterable[str]) -> Dependencies:
        """Let `task_name` depend on `predecessor_names`; return the dependencies that are not
        already implied by others."""
        unique_names = list(dict.fromkeys(predecessor_names))
        direct_predecessors = [
            name
            for name in unique_names
            if not any(
                self._precedes(name, later_name)
                for later_name in unique_names
                if later_name != name
            )
        ]
        self.predecessors[task_name] = direct_predecessors
        self.order.setdefault(task_name, len(self.order))
        return after_all(direct_predecessors)

    def _precedes(self, name: str, successor_name: str) -> bool:
        """Return whether `successor_name` depends on `name`, directly or indirectly."""
        # blocks depend only on earlier blocks, so the search ignores blocks that were created
        # before `name`
        lowest_position = self.order.get(name, 0)
        visited_tasks = {successor_name}

        pending_tasks = [successor_name]
        while pending_tasks:
            for earlier_task in self.predecessors.get(pending_tasks.pop(), ()):
                if earlier_task == name:
                    return True

                if (
                    earlier_task not in visited_tasks
                    and self.order.get(earlier_task, 0) > lowest_position
                ):
                    visited_tasks.add(earlier_task)
                    pending_tasks.append(earlier_task)

        return False


@dataclass(frozen=True)
class Producer:
    """The task that produces an output, and the DAG of this task."""

    scope: Scope
    task: str


class StoredArtifact(S3Artifact):
    """An output artifact: files in the object store, referenced by key."""

    producer: Producer

    @classmethod
    def from_key(cls, name: str, key: str, producer: Producer) -> "StoredArtifact":
        stored_artifact = cls(name=name, key=key, archive=NoneArchiveStrategy())
        stored_artifact.producer = producer
        return stored_artifact

    # Hera deep-copies arguments, but the pipeline, which `producer` refers to, must not be copied
    def __deepcopy__(self, memo: object) -> "StoredArtifact":
        return StoredArtifact.from_key(self.name or "", self.key or "", self.producer)


def get_dependencies(task: Task) -> Dependencies:
    """Return the dependencies of a block or of a plain Hera task."""
    if isinstance(task, Block):
        return task.waits_for
    if task.dependencies:
        return after_all(task.dependencies)
    return parse_depends(task.depends)


def set_dependencies(task: Task, dependencies: Dependencies) -> None:
    """Replace the dependencies of a block or of a plain Hera task."""
    if isinstance(task, Block):
        task.waits_for = dependencies
    else:
        task.dependencies = None
        task.depends = str(dependencies) or None


def export_outputs(scopes: Collection[Scope], templates: Iterable[Any]) -> None:
    """Export each output named in WORKFLOW_OUTPUTS as an output of the workflow if exactly one task
    has it.

    The verdict of an evaluation that may be repeated is not exported: Argo exports outputs in the
    order of the manifest, so it would export the verdict of the first evaluation.
    """
    all_tasks = [task for scope in scopes if scope.dag.name != "finish" for task in scope.dag.tasks]
    blocks = [task for task in all_tasks if isinstance(task, Block) and not task.is_repetition]

    producers_by_output = {
        name: [task for task in blocks if name in task.outputs] for name in WORKFLOW_OUTPUTS
    }
    for name, [task] in (
        (name, all_tasks) for name, all_tasks in producers_by_output.items() if len(all_tasks) == 1
    ):
        if task.repetitions and name in VERDICT_OUTPUTS:
            continue

        template = next(
            candidate_template
            for candidate_template in templates
            if candidate_template.name == getattr(task.template, "name", "")
        )
        for output in getattr(template, "outputs", None) or ():
            if output.name == name and isinstance(output, Parameter):
                output.global_name = name


def set_cache_default(workflow_parameters: Iterable[Any], task_names: Iterable[str]) -> None:
    """Set the default value of the workflow parameter CACHED. The default contains no cached
    outputs, and permits each of `task_names` to look up the cache."""
    cache_rows = {cached_name(task_name): {"task": task_name, "at": ""} for task_name in task_names}
    for workflow_parameter in workflow_parameters:
        if workflow_parameter.name == CACHED_PARAMETER:
            workflow_parameter.value = to_json(cache_rows | {REUSE_FIELD: "yes"})
