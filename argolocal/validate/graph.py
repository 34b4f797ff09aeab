"""Check the dependencies of tasks: the field `depends` must be a valid expression, and `depends`
and `dependencies` must name existing tasks and not form a cycle."""

import ast
import re
from collections.abc import Callable, Mapping, Set
from graphlib import CycleError, TopologicalSorter

from argolocal.manifest.loops import has_loop
from argolocal.manifest.types import Data
from argolocal.validate.findings import Findings

TASK_RESULTS = (
    "Succeeded",
    "Failed",
    "Errored",
    "Skipped",
    "Omitted",
    "Daemoned",
    "AnySucceeded",
    "AllFailed",
)
# result of a loop in `depends` → corresponding result for a task without a loop
LOOP_RESULTS = {
    "AnySucceeded": "Succeeded",
    "AllFailed": "Failed",
}
TASK_REFERENCE = re.compile(r"([A-Za-z0-9_][-A-Za-z0-9_]*)(?:\.([A-Za-z]+))?")

Predecessors = Mapping[str, Set[str]]


def check_graph(
    findings: Findings, path: str, dag: Data, tasks: Mapping[str, Data]
) -> Predecessors | None:
    """Check the dependencies of a DAG's tasks. Return a mapping from the name of a task to the
    names of the tasks that it waits for, or None if the dependencies are cyclic."""
    for name in str(dag.get("target") or "").split():
        if name not in tasks and "{{" not in str(dag["target"]):
            findings.add(
                f"{path}.target",
                "depends",
                f'the task "{name}" does not exist.{findings.hint(name, tasks)}',
            )

    has_depends = any("depends" in task for task in tasks.values())
    if has_depends and any("dependencies" in task for task in tasks.values()):
        findings.add(
            path, "depends", "the DAG has both depends and dependencies: it must use one of them."
        )

    for name in [name for name, task in tasks.items() if has_depends and "continueOn" in task]:
        message = (
            "a DAG with depends must not have continueOn: write results in depends, as A.Succeeded"
            " || A.Failed."
        )
        findings.add(f"{path}.tasks[{name}].continueOn", "depends", message)

    predecessors = {
        name: _find_predecessors(findings, f"{path}.tasks[{name}].depends", tasks, name)
        for name in tasks
    }
    for name in tasks if any(predecessors.values()) else ():
        if name[:1].isdigit():
            message = f'"{name}" must not begin with a digit in a DAG with dependencies.'
            findings.add(f"{path}.tasks[{name}]", "name", message)

    try:
        TopologicalSorter(predecessors).prepare()
    except CycleError as error:
        *task_cycle, _ = reversed(error.args[1])
        first_index = task_cycle.index(min(task_cycle, key=list(tasks).index))
        cycle_text = " → ".join([*task_cycle[first_index:], *task_cycle[: first_index + 1]])
        findings.add(
            path, "depends", f"{cycle_text} is a cycle: remove one of these tasks from `depends`."
        )

        return None

    return predecessors


def find_finished_before(predecessors: Predecessors) -> Callable[[str], Callable[[str], bool]]:
    """Return a function `f` for which `f(task)(other)` is True if the task `other` always finishes
    before `task` starts.

    The ancestors of a task are stored as the bits of an integer, because this needs less memory
    than sets of names.
    """
    bit_by_task = {name: 1 << bit_index for bit_index, name in enumerate(predecessors)}
    ancestor_bits: dict[str, int] = {}

    for name in TopologicalSorter(predecessors).static_order():
        ancestor_bits[name] = 0
        for predecessor in predecessors[name]:
            ancestor_bits[name] |= ancestor_bits[predecessor] | bit_by_task[predecessor]

    return lambda task: (
        lambda other_task: bool(ancestor_bits[task] & bit_by_task.get(other_task, 0))
    )


def list_awaited_results(task: Data) -> list[tuple[str, str]]:
    """Return (name, result) for each task that `task` waits for. The result is a word such as
    Failed, or "" for a task name without a result."""
    depends_text = str(task.get("depends") or "")
    dependencies = task.get("dependencies") or []
    return [*TASK_REFERENCE.findall(depends_text), *((str(name), "") for name in dependencies)]


def _find_predecessors(
    findings: Findings, path: str, tasks: Mapping[str, Data], task_name: str
) -> set[str]:
    """Check the dependencies of the task `task_name`, and return the names of the tasks that it
    waits for."""
    depends_text = str(tasks[task_name].get("depends") or "")

    references = list_awaited_results(tasks[task_name])
    for predecessor_name, awaited_result in references:
        if predecessor_name not in tasks:
            findings.add(
                path,
                "depends",
                "this DAG does not have a task"
                f' "{predecessor_name}".{findings.hint(predecessor_name, tasks)}',
            )
        elif (
            awaited_result in LOOP_RESULTS
            and (predecessor_name, "") not in references
            and not has_loop(tasks[predecessor_name])
        ):
            reason = (
                f"but {predecessor_name} does not loop, or its loop is empty: use"
                f" {predecessor_name}.{LOOP_RESULTS[awaited_result]}."
            )
            findings.add(
                path,
                "depends",
                f'"{predecessor_name}.{awaited_result}" is a result of loops, {reason}',
            )

        if awaited_result and awaited_result not in TASK_RESULTS:
            findings.add(
                path,
                "depends",
                f'"{awaited_result}" is not a result of'
                f" tasks.{findings.hint(awaited_result, TASK_RESULTS)}",
            )

    try:
        python_expression = (
            TASK_REFERENCE.sub("a", depends_text)
            .replace("&&", " and ")
            .replace("||", " or ")
            .replace("!", " not ")
        )
        ast.parse(python_expression.strip() or "a", mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        message = (
            f'"{depends_text}" cannot be parsed: it must consist of tasks with &&, ||, ! and'
            " parentheses."
        )
        findings.add(path, "depends", message)

    return {predecessor_name for predecessor_name, _ in references if predecessor_name in tasks}
