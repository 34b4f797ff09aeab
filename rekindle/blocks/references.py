"""Rewrite references to outputs of other DAGs as inputs of the task's own DAG, and add dependencies
on the tasks that produce these outputs."""

import re
from collections.abc import Iterator
from typing import Any

from hera.workflows import Parameter, Task
from pydantic import ValidationError

from rekindle.blocks.dag_scope import (
    Producer,
    Scope,
    StoredArtifact,
    dependencies_of,
    set_dependencies,
)
from rekindle.blocks.dependencies import after_all
from rekindle.blocks.wiring import Block, Condition, blame, describe, refuse
from rekindle.errors import did_you_mean, rule

REFERENCE = re.compile(
    r"tasks(?:\.([\w-]+)|\['([\w-]+)'\])\.(outputs\.(?:parameters(?:\.([\w-]+)|\['([\w-]+)'\])|result))"
)


class References:
    """The scopes of a workflow, and the references between their tasks."""

    def __init__(self) -> None:
        self.scopes: dict[int, Scope] = {}
        # template tag of each output's value (from the task or the cache), by the reference to the
        # output
        self.tags: dict[str, str] = {}

    def find_producers(self, scope: Scope, value: object) -> list[str]:
        """Return the tasks in the DAG of `scope` whose outputs `value` refers to."""
        producers = self._producers(scope, value)
        return [producer.task for producer in producers if producer.scope is scope]

    # the type is Any, because the result is either text or has the type of `value`
    def localize(self, scope: Scope, value: Any) -> Any:
        """Return `value` rewritten for the DAG of `scope`. If `value` refers to outputs of outer
        DAGs, let the groups around `scope` depend on the tasks that produce them."""
        for producer in self._producers(scope, value):
            if producer.scope is not scope:
                group = next(inner for inner in scope.enclosing() if inner.outer is producer.scope)
                self._let_group_depend_on(group, producer.task)

        text = _text_of(value)
        local = REFERENCE.sub(lambda match: self._localize_reference(scope, match), text)
        if isinstance(value, (str, Condition, Parameter)):
            return local

        if local != text:
            refuse(
                f"the artifact {value.name} is from a DAG outside {scope.dag.name}: pass an"
                " artifact output of a block."
            )

        return value

    def _producers(self, scope: Scope, value: object) -> Iterator[Producer]:
        """Yield the tasks whose outputs `value` refers to. If a task is inside a group, yield the
        group's task instead, in the innermost DAG that contains both the group and `scope`."""
        if isinstance(value, StoredArtifact):
            names: dict[Scope, str] = {}
            name = value.producer.task
            for outer in value.producer.scope.enclosing():
                names[outer] = name
                name = outer.task.name if outer.task else ""

            shared = next((outer for outer in scope.enclosing() if outer in names), None)
            if shared:
                yield Producer(shared, names[shared])

        for match in REFERENCE.finditer(_text_of(value)):
            task = match[1] or match[2]
            yield Producer(self._find_owner(scope, task), task)

    def _find_owner(self, scope: Scope, task: str) -> Scope:
        """Return the innermost DAG around `scope` that has a task of this name. Raises
        WiringError."""
        path = list(scope.enclosing())
        for outer in path:
            if outer.contains(task):
                return outer

        names = {other.name for other in path[-1].dag.tasks}
        dag = next((s.dag.name for s in self.scopes.values() if task in s.predecessors), None)
        if dag:
            hint = f" {task} is in {dag}: use its outputs in {dag}."
        else:
            hint = did_you_mean(task, names)

        refuse(f'the DAG {path[-1].dag.name} has no task "{task}" before this one.{hint}')

    def _let_group_depend_on(self, group: Scope, name: str) -> None:
        assert group.outer
        assert group.task
        task = group.task
        outer = group.outer
        if name == task.name:
            return

        names = outer.predecessors[task.name]
        # True if the user has added dependencies of the group, such as `a >> group`
        is_ordered_by_hand = task.waits_for != after_all(names)
        dependencies = outer.add_dependencies(task.name, [*names, name])
        if is_ordered_by_hand:
            dependencies = task.waits_for.with_tasks([name])
        task.waits_for = dependencies

    def connect_plain_tasks(self) -> None:
        """Let plain Hera tasks depend on the tasks whose outputs they use, as blocks do."""
        for scope in list(self.scopes.values()):
            for task in scope.dag.tasks:
                if isinstance(task, Task) and not isinstance(task, Block):
                    with blame(vars(task).get("line", "")):
                        self._connect(scope, task)

    def _connect(self, scope: Scope, task: Task) -> None:
        arguments = as_list(task.arguments)
        options = {"when": task.when, "with_param": task.with_param}
        values = [
            value
            for argument in [*arguments, options]
            for value in (argument.values() if isinstance(argument, dict) else [argument])
        ]
        needed = [name for value in values for name in self.find_producers(scope, value)]

        task.arguments = [self._localize_argument(scope, item) for item in arguments] or None
        for option, value in options.items():
            setattr(task, option, self.localize(scope, value))

        check_fields(task)
        if not task.dependencies:
            set_dependencies(task, dependencies_of(task).with_tasks(needed))

    def _localize_argument(self, scope: Scope, argument: object) -> Any:
        if isinstance(argument, dict):
            return {name: self.localize(scope, value) for name, value in argument.items()}

        if isinstance(argument, Parameter) and isinstance(argument.value, str):
            value = self.localize(scope, argument.value)
            # assign the result, because `with_name` returns a copy
            argument = argument.with_name(argument.name or "")
            argument.value = value

        if isinstance(argument, StoredArtifact):
            return self.localize(scope, argument)

        return argument

    def _localize_reference(self, scope: Scope, match: re.Match[str]) -> str:
        task = match[1] or match[2]
        path = list(scope.enclosing())
        owner = self._find_owner(scope, task)

        value = match[0]
        for group in reversed(path[: path.index(owner)]):
            tag = self.tags.get(value, f"{{{{{value}}}}}")
            name = self._add_group_input(group, tag, match[4] or match[5] or "result", task)
            value = f"inputs.parameters.{name}"

        return value

    def pass_to_group(self, group: Scope, name: str, value: object) -> str:
        """Pass `value`, which is valid in the outer DAG, into a group as the input `name`; return
        the template tag of this input."""
        assert group.outer
        for task in self.find_producers(group.outer, value):
            self._let_group_depend_on(group, task)

        local = self.localize(group.outer, value)
        return f"{{{{inputs.parameters.{self._add_group_input(group, local, name, name)}}}}}"

    def _add_group_input(self, scope: Scope, value: str, name: str, task: str) -> str:
        """Pass `value` to a group as an input; return the name of this input."""
        assert scope.task
        arguments: dict[str, Any] = scope.task.arguments or {}  # pyright: ignore[reportAssignmentType]
        if arguments.get(name, value) != value:
            name = f"{task}-{name}"
        if name not in arguments:
            scope.task.arguments = arguments | {name: value}
            inputs: list[Any] = scope.dag.inputs or []  # pyright: ignore[reportAssignmentType]
            scope.dag.inputs = [*inputs, Parameter(name=name)]
        return name


def _text_of(value: object) -> str:
    """Return the text of an argument, condition or artifact that may refer to outputs."""
    if isinstance(value, Parameter):
        return str(value.value)
    if isinstance(value, (str, Condition)):
        return str(value)

    source = getattr(value, "from_", None)
    return source if isinstance(source, str) else ""


def check_fields(task: Task) -> None:
    """Raise WiringError if Hera cannot build the task."""
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


def as_list(arguments: object) -> list[Any]:
    """Return the arguments of a task as a list; put a single object into a list."""
    if isinstance(arguments, list):
        return arguments
    if arguments:
        return [arguments]
    return []
