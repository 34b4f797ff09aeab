"""Check that `depends` and `dependencies` of tasks can be parsed, name existing tasks, and are not
cyclic."""

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


def check(
    findings: Findings, path: str, dag: Data, tasks: Mapping[str, Data]
) -> Predecessors | None:
    """Return the tasks that each task waits for, or None if the dependencies are cyclic."""
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
        name: _predecessors(findings, f"{path}.tasks[{name}].depends", tasks, name)
        for name in tasks
    }
    for name in tasks if any(predecessors.values()) else ():
        if name[:1].isdigit():
            message = f'"{name}" must not begin with a digit in a DAG with dependencies.'
            findings.add(f"{path}.tasks[{name}]", "name", message)

    try:
        TopologicalSorter(predecessors).prepare()
    except CycleError as error:
        *cycle, _ = reversed(error.args[1])
        first_index = cycle.index(min(cycle, key=list(tasks).index))
        cycle_text = " → ".join([*cycle[first_index:], *cycle[: first_index + 1]])
        findings.add(
            path, "depends", f"{cycle_text} is a cycle: remove one of these tasks from `depends`."
        )

        return None

    return predecessors


def find_finished_before(predecessors: Predecessors) -> Callable[[str], Callable[[str], bool]]:
    """Return a function `f`. `f(task)(other)` is True if the task `other` always finishes before
    `task` starts.

    The ancestors of a task are stored as bits of an integer, because sets of names would need more
    memory.
    """
    bits = {name: 1 << number for number, name in enumerate(predecessors)}
    ancestor_bits: dict[str, int] = {}

    for name in TopologicalSorter(predecessors).static_order():
        ancestor_bits[name] = 0
        for predecessor in predecessors[name]:
            ancestor_bits[name] |= ancestor_bits[predecessor] | bits[predecessor]

    return lambda task: lambda other: bool(ancestor_bits[task] & bits.get(other, 0))


def results_awaited_by(task: Data) -> list[tuple[str, str]]:
    """Return (name, result) for each task that `task` waits for. The result is, for example,
    Failed, or "" if none is given."""
    depends = str(task.get("depends") or "")
    dependencies = task.get("dependencies") or []
    return [*TASK_REFERENCE.findall(depends), *((str(name), "") for name in dependencies)]


def _predecessors(findings: Findings, path: str, tasks: Mapping[str, Data], task: str) -> set[str]:
    """Return the names of the tasks that `task` waits for."""
    text = str(tasks[task].get("depends") or "")

    references = results_awaited_by(tasks[task])
    for name, result in references:
        if name not in tasks:
            findings.add(
                path,
                "depends",
                f'this DAG does not have a task "{name}".{findings.hint(name, tasks)}',
            )
        elif result in LOOP_RESULTS and (name, "") not in references and not has_loop(tasks[name]):
            reason = (
                f"but {name} does not loop, or its loop is empty: use"
                f" {name}.{LOOP_RESULTS[result]}."
            )
            findings.add(path, "depends", f'"{name}.{result}" is a result of loops, {reason}')

        if result and result not in TASK_RESULTS:
            findings.add(
                path,
                "depends",
                f'"{result}" is not a result of tasks.{findings.hint(result, TASK_RESULTS)}',
            )

    try:
        python_expression = (
            TASK_REFERENCE.sub("a", text)
            .replace("&&", " and ")
            .replace("||", " or ")
            .replace("!", " not ")
        )
        ast.parse(python_expression.strip() or "a", mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        message = (
            f'"{text}" cannot be parsed: it must consist of tasks with &&, ||, ! and parentheses.'
        )
        findings.add(path, "depends", message)

    return {name for name, _ in references if name in tasks}
