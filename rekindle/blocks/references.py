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
    get_dependencies,
    set_dependencies,
)
from rekindle.blocks.dependencies import after_all
from rekindle.blocks.wiring import Block, Condition, blame, describe, raise_error
from rekindle.errors import format_rule, suggest_similar

REFERENCE = re.compile(
    r"tasks(?:\.([\w-]+)|\['([\w-]+)'\])\.(outputs\.(?:parameters(?:\.([\w-]+)|\['([\w-]+)'\])|result))"
)


class References:
    """The scopes of a workflow, and the references between their tasks."""

    def __init__(self) -> None:
        self.scopes: dict[int, Scope] = {}
        # reference to an output → the template tag for the output's value, which comes from the
        # task or the cache
        self.tags: dict[str, str] = {}

    def find_producers(self, scope: Scope, referring_value: object) -> list[str]:
        """Return the names of the tasks in the DAG of `scope` whose outputs `referring_value`
        refers to."""
        producers = self._iterate_producers(scope, referring_value)
        return [
            output_producer.task for output_producer in producers if output_producer.scope is scope
        ]

    # the type is Any, because the result is either text or has the type of `referring_value`
    def localize(self, scope: Scope, referring_value: Any) -> Any:
        """Return `referring_value` rewritten for the DAG of `scope`. If `referring_value` refers to
        outputs of outer DAGs, also pass these outputs to the groups (nested DAGs) around `scope`,
        and let the groups depend on the tasks that produce the outputs."""
        for output_producer in self._iterate_producers(scope, referring_value):
            if output_producer.scope is not scope:
                enclosing_group = next(
                    inner_scope
                    for inner_scope in scope.enclosing()
                    if inner_scope.outer is output_producer.scope
                )
                self._let_group_depend_on(enclosing_group, output_producer.task)

        localized_text = _read_reference_text(referring_value)
        local_text = REFERENCE.sub(
            lambda match: self._localize_reference(scope, match), localized_text
        )
        if isinstance(referring_value, (str, Condition, Parameter)):
            return local_text

        if local_text != localized_text:
            raise_error(
                f"the artifact {referring_value.name} is from a DAG outside {scope.dag.name}: pass"
                " an artifact output of a block."
            )

        return referring_value

    def _iterate_producers(self, scope: Scope, referring_value: object) -> Iterator[Producer]:
        """Yield the tasks whose outputs `referring_value` refers to. If a task is inside a group
        (nested DAG), yield the group's task instead, in the innermost DAG that contains the group
        as well as `scope`."""
        if isinstance(referring_value, StoredArtifact):
            names_by_scope: dict[Scope, str] = {}
            name = referring_value.producer.task
            for outer_scope in referring_value.producer.scope.enclosing():
                names_by_scope[outer_scope] = name
                name = outer_scope.task.name if outer_scope.task else ""

            shared_scope = next(
                (outer_scope for outer_scope in scope.enclosing() if outer_scope in names_by_scope),
                None,
            )
            if shared_scope:
                yield Producer(shared_scope, names_by_scope[shared_scope])

        for match in REFERENCE.finditer(_read_reference_text(referring_value)):
            task_name = match[1] or match[2]
            yield Producer(self._find_owner(scope, task_name), task_name)

    def _find_owner(self, scope: Scope, task_name: str) -> Scope:
        """Return the innermost DAG around `scope` that has a task of this name. Raises
        WiringError."""
        scopes = list(scope.enclosing())
        for outer_scope in scopes:
            if outer_scope.contains(task_name):
                return outer_scope

        task_names = {other_task.name for other_task in scopes[-1].dag.tasks}
        dag_name = next(
            (
                other_scope.dag.name
                for other_scope in self.scopes.values()
                if task_name in other_scope.predecessors
            ),
            None,
        )
        if dag_name:
            hint = f" {task_name} is in {dag_name}: use its outputs in {dag_name}."
        else:
            hint = suggest_similar(task_name, task_names)

        raise_error(
            f'the DAG {scopes[-1].dag.name} has no task "{task_name}" before this one.{hint}'
        )

    def _let_group_depend_on(self, group: Scope, task_name: str) -> None:
        assert group.outer
        assert group.task
        group_task = group.task
        outer_scope = group.outer
        if task_name == group_task.name:
            return

        predecessor_names = outer_scope.predecessors[group_task.name]
        # True if the user has added dependencies of the group, such as `a >> group`
        is_ordered_by_hand = group_task.waits_for != after_all(predecessor_names)
        dependencies = outer_scope.add_dependencies(
            group_task.name, [*predecessor_names, task_name]
        )
        if is_ordered_by_hand:
            dependencies = group_task.waits_for.with_tasks([task_name])
        group_task.waits_for = dependencies

    def connect_plain_tasks(self) -> None:
        """Let plain Hera tasks depend on the tasks whose outputs they use, as blocks do."""
        for scope in list(self.scopes.values()):
            for task in scope.dag.tasks:
                if isinstance(task, Task) and not isinstance(task, Block):
                    with blame(vars(task).get("line", "")):
                        self._connect_task(scope, task)

    def _connect_task(self, scope: Scope, task: Task) -> None:
        task_arguments = as_list(task.arguments)
        task_options = {"when": task.when, "with_param": task.with_param}
        argument_values = [
            argument_value
            for argument_source in [*task_arguments, task_options]
            for argument_value in (
                argument_source.values() if isinstance(argument_source, dict) else [argument_source]
            )
        ]
        producer_names = [
            name
            for argument_value in argument_values
            for name in self.find_producers(scope, argument_value)
        ]

        task.arguments = [
            self._localize_argument(scope, task_argument) for task_argument in task_arguments
        ] or None
        for option_name, argument_value in task_options.items():
            setattr(task, option_name, self.localize(scope, argument_value))

        check_task_fields(task)
        if not task.dependencies:
            set_dependencies(task, get_dependencies(task).with_tasks(producer_names))

    def _localize_argument(self, scope: Scope, task_argument: object) -> Any:
        if isinstance(task_argument, dict):
            return {
                name: self.localize(scope, argument_value)
                for name, argument_value in task_argument.items()
            }

        if isinstance(task_argument, Parameter) and isinstance(task_argument.value, str):
            argument_value = self.localize(scope, task_argument.value)
            # assign the result, because `with_name` returns a copy
            task_argument = task_argument.with_name(task_argument.name or "")
            task_argument.value = argument_value

        if isinstance(task_argument, StoredArtifact):
            return self.localize(scope, task_argument)

        return task_argument

    def _localize_reference(self, scope: Scope, match: re.Match[str]) -> str:
        task_name = match[1] or match[2]
        enclosing_scopes = list(scope.enclosing())
        owner_scope = self._find_owner(scope, task_name)

        reference_text = match[0]
        for group_scope in reversed(enclosing_scopes[: enclosing_scopes.index(owner_scope)]):
            template_tag = self.tags.get(reference_text, f"{{{{{reference_text}}}}}")
            name = self._add_group_input(
                group_scope, template_tag, match[4] or match[5] or "result", task_name
            )
            reference_text = f"inputs.parameters.{name}"

        return reference_text

    def pass_to_group(self, group_scope: Scope, name: str, outer_value: object) -> str:
        """Pass `outer_value`, which is valid in the outer DAG, into a group (nested DAG) as the
        input `name`; return the template tag of the input `name`."""
        assert group_scope.outer
        for producer_name in self.find_producers(group_scope.outer, outer_value):
            self._let_group_depend_on(group_scope, producer_name)

        local_value = self.localize(group_scope.outer, outer_value)
        input_name = self._add_group_input(group_scope, local_value, name, name)
        return f"{{{{inputs.parameters.{input_name}}}}}"

    def _add_group_input(self, scope: Scope, outer_value: str, name: str, task_name: str) -> str:
        """Pass `outer_value` to a group (nested DAG) as an input; return the name of the added
        input."""
        assert scope.task
        group_arguments: dict[str, Any] = scope.task.arguments or {}  # pyright: ignore[reportAssignmentType]
        if group_arguments.get(name, outer_value) != outer_value:
            name = f"{task_name}-{name}"
        if name not in group_arguments:
            scope.task.arguments = group_arguments | {name: outer_value}
            group_inputs: list[Any] = scope.dag.inputs or []  # pyright: ignore[reportAssignmentType]
            scope.dag.inputs = [*group_inputs, Parameter(name=name)]
        return name


def _read_reference_text(referring_value: object) -> str:
    """Return the text of an argument, condition or artifact that may contain references."""
    if isinstance(referring_value, Parameter):
        return str(referring_value.value)
    if isinstance(referring_value, (str, Condition)):
        return str(referring_value)

    artifact_source = getattr(referring_value, "from_", None)
    return artifact_source if isinstance(artifact_source, str) else ""


def check_task_fields(task: Task) -> None:
    """Raise WiringError if Hera cannot build the task."""
    for task_argument in as_list(task.arguments):
        for name, argument_value in (
            task_argument.items() if isinstance(task_argument, dict) else ()
        ):
            if isinstance(argument_value, Task):
                raise_error(
                    f'the argument "{name}" of {task.name} is {describe(argument_value)}: pass one'
                    " of its outputs."
                )

    try:
        task._build_dag_task()
    except ValidationError as error:
        first_error, *_ = error.errors()
        field_path = ".".join(map(str, first_error["loc"]))
        raise_error(
            f"{field_path} of {task.name} is {describe(first_error['input'])}:"
            f" {format_rule(first_error['msg'])}"
        )
    except TypeError as error:
        raise_error(f"{task.name} has an argument that is not JSON: {error}.")


def as_list(task_arguments: object) -> list[Any]:
    """Return the arguments of a task as a list; put a single object into a list."""
    if isinstance(task_arguments, list):
        return task_arguments
    if task_arguments:
        return [task_arguments]
    return []
