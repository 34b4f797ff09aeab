"""A DAG under construction: its blocks and their dependencies."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hera.workflows import DAG, NoneArchiveStrategy, Parameter, S3Artifact, Task

from argolocal.common.json_text import to_json
from rekindle.blocks.dependencies import Dependencies, after_all, parse_depends
from rekindle.blocks.wiring import Block, current_line, raise_error
from rekindle.keys import CACHED_PARAMETER, REUSE_FIELD, cached_name

# options of a task that make it a loop
LOOP_OPTIONS = ("with_items", "with_param", "with_sequence")
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
    """A DAG with blocks. If the DAG belongs to a group (a nested DAG), `outer` is the scope of the
    outer DAG, and `task` is the task of the outer DAG that runs the group."""

    dag: DAG
    outer: "Scope | None" = None
    task: Block | None = None
    # guarded tasks: the failure of one of these tasks fails the DAG, even if later tasks succeed
    guarded: list[str] = field(default_factory=list)
    # the tasks that each block depends on, by name of the block
    predecessors: dict[str, list[str]] = field(default_factory=dict)
    # position of each block in the order in which the blocks were created
    order: dict[str, int] = field(default_factory=dict)

    def enclosing(self) -> Iterator["Scope"]:
        """Yield this scope, then the scopes of its outer DAGs, innermost first."""
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
        """Record that `task_name` depends on `predecessor_names`. Return `predecessor_names`
        without the names that follow from other names: if b depends on a, (a, b) becomes b."""
        unique_names = list(dict.fromkeys(predecessor_names))
        direct_predecessors = [
            name
            for name in unique_names
            if not any(
                self._is_before(name, later_name)
                for later_name in unique_names
                if later_name != name
            )
        ]
        self.predecessors[task_name] = direct_predecessors
        self.order.setdefault(task_name, len(self.order))
        return after_all(direct_predecessors)

    def _is_before(self, task_name: str, successor_name: str) -> bool:
        """Return whether `successor_name` depends on `task_name`, directly or indirectly."""
        # a block depends only on blocks that were created before it, so the search can ignore the
        # blocks that were created before `task_name`
        lowest_position = self.order.get(task_name, 0)
        visited_tasks = {successor_name}

        pending_tasks = [successor_name]
        while pending_tasks:
            for earlier_task in self.predecessors.get(pending_tasks.pop(), ()):
                if earlier_task == task_name:
                    return True

                if (
                    earlier_task not in visited_tasks
                    and self.order.get(earlier_task, 0) > lowest_position
                ):
                    visited_tasks.add(earlier_task)
                    pending_tasks.append(earlier_task)

        return False

    def set_target(self) -> None:
        """Set the target of the DAG if some of its tasks are guarded, so that the DAG fails if one
        of the guarded tasks fails.

        The target of the DAG also contains the tasks that no other task waits for, because Argo
        runs only the target tasks and their dependencies.
        """
        if not self.guarded:
            return

        dag_tasks = [task for task in self.dag.tasks if isinstance(task, Task)]
        awaited_names = {name for task in dag_tasks for name in get_dependencies(task).tasks}
        final_names = [
            task.name for task in dag_tasks if task.name not in {*awaited_names, *self.guarded}
        ]
        self.dag.target = " ".join([*self.guarded, *final_names])


@dataclass(frozen=True)
class Producer:
    """The task that produces an output; `scope`: the scope of its DAG."""

    scope: Scope
    task: str


class StoredArtifact(S3Artifact):
    """An output artifact, which other tasks read by its key in the object store."""

    producer: Producer

    @classmethod
    def from_key(cls, artifact_name: str, key: str, producer: Producer) -> "StoredArtifact":
        stored_artifact = cls(name=artifact_name, key=key, archive=NoneArchiveStrategy())
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

    The verdict of an evaluation that may be repeated is not exported, because Argo exports outputs
    in the order of the manifest, and would export the verdict of the first evaluation.
    """
    all_tasks = [task for scope in scopes if scope.dag.name != "finish" for task in scope.dag.tasks]
    blocks = [task for task in all_tasks if isinstance(task, Block) and not task.is_repetition]
    templates_by_name = {template.name: template for template in templates}

    for output_name in WORKFLOW_OUTPUTS:
        producers = [block for block in blocks if output_name in block.outputs]
        if len(producers) != 1:
            continue
        if producers[0].repetitions and output_name in VERDICT_OUTPUTS:
            continue

        template = templates_by_name[getattr(producers[0].template, "name", "")]
        for output in getattr(template, "outputs", None) or ():
            if output.name == output_name and isinstance(output, Parameter):
                output.global_name = output_name


def reject_repeated_groups(scopes: Collection[Scope], templates: Iterable[Any]) -> None:
    """Raise WiringError if several tasks, or a loop, run the DAG of one group (a nested DAG)."""
    all_tasks = [
        task
        for template in templates
        if isinstance(template, DAG)
        for task in template.tasks
        if isinstance(task, Task)
    ]

    for scope in scopes:
        group_tasks = [
            task
            for task in all_tasks
            if scope.predecessors
            and getattr(task.template, "name", task.template) == scope.dag.name
            and not (isinstance(task, Block) and task.is_repetition)
        ]
        if len(group_tasks) > 1 or any(
            getattr(task, loop_option) for task in group_tasks for loop_option in LOOP_OPTIONS
        ):
            raise_error(
                f"the DAG {scope.dag.name} runs several times"
                f" ({', '.join(task.name for task in group_tasks)}), and its blocks"
                f" {', '.join(scope.predecessors)} would overwrite each other's files: instead,"
                " write a Python function that creates the blocks, and call it several times."
            )


def sort_templates(scopes: Iterable[Scope], templates: list[Any]) -> None:
    """Sort the templates in place: first the DAGs of blocks, then other DAGs, the exit DAG and all
    other templates."""
    dag_names = [scope.dag.name for scope in scopes]
    ranks_by_name = {name: rank for rank, name in enumerate(dag_names)}
    ranks_by_name["finish"] = len(dag_names) + 1

    def rank_template(template: Any) -> int:
        if isinstance(template, DAG):
            return ranks_by_name.get(template.name, len(dag_names))
        return ranks_by_name.get(template.name, len(dag_names) + 2)

    templates.sort(key=rank_template)


def set_cache_default(workflow_parameters: Iterable[Any], task_names: Iterable[str]) -> None:
    """Set the default value of the workflow parameter CACHED. The default value of CACHED says that
    no task is cached, and that each task in `task_names` may look for a cached result."""
    cache_rows = {cached_name(task_name): {"task": task_name, "at": ""} for task_name in task_names}
    for workflow_parameter in workflow_parameters:
        if workflow_parameter.name == CACHED_PARAMETER:
            workflow_parameter.value = to_json(cache_rows | {REUSE_FIELD: "yes"})
