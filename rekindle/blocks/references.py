"""Rewrites references to outputs of other tasks so that they are valid in a task's DAG, and adds
dependencies."""

import re
from typing import Any

from hera.workflows import Parameter, Task
from pydantic import ValidationError

from rekindle.blocks.scope import Scope, merge
from rekindle.blocks.wiring import Block, Condition, Stored, Value, blame, describe, refuse
from rekindle.errors import did_you_mean, rule

REFERENCE = re.compile(
    r"tasks(?:\.([\w-]+)|\['([\w-]+)'\])\.(outputs\.(?:parameters(?:\.([\w-]+)|\['([\w-]+)'\])|result))"
)


class References:
    """The scopes of a workflow, and the references between their tasks."""

    def __init__(self) -> None:
        self.scopes: dict[int, Scope] = {}
        # reference to an output → template tag for its value, computed or cached
        self.tags: dict[str, str] = {}

    def localize(self, scope: Scope, value: Any, needed: list[str]) -> Any:
        """Return `value` rewritten for the DAG of `scope`; add the tasks of this DAG that it
        depends on to `needed`."""
        if isinstance(value, Stored):
            self._depend_on(scope, value.producer, needed)
            return value

        if isinstance(value, (Value, Condition, Parameter)):
            value = str(value.value if isinstance(value, Parameter) else value)

        if isinstance(value, str):
            text = value
        else:
            text = getattr(value, "from_", None)

        if not isinstance(text, str) or "tasks" not in text:
            return value

        local = REFERENCE.sub(lambda match: self._localize_reference(scope, match, needed), text)
        if isinstance(value, str):
            return local

        if local != text:
            refuse(
                f"the artifact {value.name} is from a DAG outside {scope.dag.name}: pass an"
                " artifact output of a block."
            )

        return value

    def _depend_on(self, scope: Scope, producer: tuple[Scope, str], needed: list[str]) -> None:
        """Let a task in `scope` depend on `producer`. A group stands for its tasks in outer
        DAGs."""
        names: dict[Scope, str] = {}  # DAG → the task in it that is or contains the producer
        name = producer[1]

        for outer in producer[0].path():
            names[outer] = name
            name = outer.task.name if outer.task else ""

        group = None
        for outer in scope.path():
            if outer in names:
                if group:
                    return self._let_group_depend_on(group, names[outer])
                return needed.append(names[outer])

            group = outer

    def _let_group_depend_on(self, group: Scope, name: str) -> None:
        assert group.task and group.outer
        task = group.task
        outer = group.outer
        if name != task.name:
            names = outer.predecessors[task.name]
            # True after `a >> group`
            is_ordered_by_hand = task.depends != (" && ".join(names) or None)
            depends = outer.add_dependencies(task.name, [*names, name])
            task.depends = merge(task.depends, [name]) if is_ordered_by_hand else depends

    def connect_plain_tasks(self) -> None:
        """Let plain Hera tasks depend on the tasks whose outputs they use, as blocks do."""
        for scope in list(self.scopes.values()):
            for task in scope.dag.tasks:
                if isinstance(task, Task) and not isinstance(task, Block):
                    with blame(vars(task).get("line", "")):
                        self._connect(scope, task)

    def _connect(self, scope: Scope, task: Task) -> None:
        needed: list[str] = []
        task.arguments = [
            self._localize_argument(scope, item, needed) for item in as_list(task.arguments)
        ] or None
        for option in ("when", "with_param"):
            setattr(task, option, self.localize(scope, getattr(task, option), needed))
        check_fields(task)
        if not task.dependencies:
            task.depends = merge(task.depends, needed)

    def _localize_argument(self, scope: Scope, argument: Any, needed: list[str]) -> Any:
        if isinstance(argument, dict):
            return {name: self.localize(scope, value, needed) for name, value in argument.items()}
        if isinstance(argument, Parameter) and isinstance(argument.value, str):
            argument = argument.with_name(argument.name or "")  # `with_name` returns a copy
            argument.value = self.localize(scope, argument.value, needed)
            return argument
        if isinstance(argument, Stored):
            return self.localize(scope, argument, needed)
        return argument

    def _localize_reference(self, scope: Scope, match: re.Match[str], needed: list[str]) -> str:
        task = match[1] or match[2]
        path = list(scope.path())

        owner = next((outer for outer in path if outer.contains(task)), None)
        if owner is None:
            names = {other.name for other in path[-1].dag.tasks}
            dag = next((s.dag.name for s in self.scopes.values() if task in s.predecessors), None)
            if dag:
                hint = f" {task} is in {dag}: use its outputs in {dag}."
            else:
                hint = did_you_mean(task, names)

            refuse(f'the DAG {path[-1].dag.name} has no task "{task}" before this one.{hint}')

        self._depend_on(scope, (owner, task), needed)
        value = match[0]
        for group in reversed(path[: path.index(owner)]):
            tag = self.tags.get(value, f"{{{{{value}}}}}")
            name = self._pass_into(group, tag, match[4] or match[5] or "result", task)
            value = f"inputs.parameters{name}"

        return value

    def pass_in(self, group: Scope, name: str, value: Any) -> str:
        """Pass `value`, which is valid in the outer DAG, into a group as the input `name`; return
        the input's tag."""
        assert group.outer
        needed: list[str] = []
        local = self.localize(group.outer, value, needed)
        for task in needed:
            self._let_group_depend_on(group, task)
        return f"{{{{inputs.parameters{self._pass_into(group, local, name, name)}}}}}"

    def _pass_into(self, scope: Scope, value: str, name: str, task: str) -> str:
        """Pass `value` into a group as an input; return the input's name with a leading dot."""
        assert scope.task
        arguments: dict[str, Any] = scope.task.arguments or {}  # pyright: ignore[reportAssignmentType]
        if arguments.get(name, value) != value:
            name = f"{task}-{name}"
        if name not in arguments:
            scope.task.arguments = arguments | {name: value}
            inputs: list[Any] = scope.dag.inputs or []  # pyright: ignore[reportAssignmentType]
            scope.dag.inputs = [*inputs, Parameter(name=name)]
        return f".{name}"


def check_fields(task: Task) -> None:
    """Raise WiringError unless Hera can build the task."""
    for argument in as_list(task.arguments):
        for name, value in argument.items() if isinstance(argument, dict) else ():
            if isinstance(value, Task):
                refuse(
                    f'the argument "{name}" of {task.name} is {describe(value)}: pass one of its'
                    " outputs."
                )

    try:
        task._build_dag_task()
    except ValidationError as error:
        first, *_ = error.errors()
        field = ".".join(map(str, first["loc"]))
        refuse(f"{field} of {task.name} is {describe(first['input'])}: {rule(first['msg'])}")
    except TypeError as error:
        refuse(f"{task.name} has an argument that is not JSON: {error}.")


def as_list(arguments: Any) -> list[Any]:
    """Return the arguments of a task as a list."""
    if isinstance(arguments, list):
        return arguments
    if arguments:
        return [arguments]
    return []
