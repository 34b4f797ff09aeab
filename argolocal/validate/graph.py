"""Dependencies of tasks: `depends` and `dependencies` parse, name existing tasks, and have no cycle."""

import ast
import re
from collections.abc import Callable, Mapping, Set
from graphlib import CycleError, TopologicalSorter

from argolocal.manifest.loops import loops
from argolocal.manifest.tag_scope import Data
from argolocal.validate.findings import Findings

RESULTS = ("Succeeded", "Failed", "Errored", "Skipped", "Omitted", "Daemoned", "AnySucceeded", "AllFailed")
OF_LOOPS = {"AnySucceeded": "Succeeded", "AllFailed": "Failed"}  # and the result of a task without a loop
TASK = re.compile(r"([A-Za-z0-9_][-A-Za-z0-9_]*)(?:\.([A-Za-z]+))?")

Before = Mapping[str, Set[str]]


def check(findings: Findings, path: str, dag: Data, tasks: Mapping[str, Data]) -> Before | None:
    """The tasks that each task waits for, or None if there is a cycle."""
    for name in str(dag.get("target") or "").split():
        if name not in tasks and "{{" not in str(dag["target"]):
            findings.add(f"{path}.target", "depends", f'"{name}" is no task.{findings.hint(name, tasks)}')
    depends = any("depends" in t for t in tasks.values())
    if depends and any("dependencies" in t for t in tasks.values()):
        findings.add(path, "depends", "it has both depends and dependencies: a DAG must use one of them.")
    for name in [name for name, task in tasks.items() if depends and "continueOn" in task]:
        why = "it is not for a DAG with depends: write there what the next tasks wait for, as A.Succeeded || A.Failed."
        findings.add(f"{path}.tasks[{name}].continueOn", "depends", why)
    before = {name: _depends(findings, f"{path}.tasks[{name}].depends", task, tasks) for name, task in tasks.items()}
    for name in tasks if any(before.values()) else ():
        if name[:1].isdigit():
            findings.add(f"{path}.tasks[{name}]", "name", f'"{name}" must not begin with a digit where tasks wait.')
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        *cycle, _ = reversed(error.args[1])
        first = cycle.index(min(cycle, key=list(tasks).index))
        around = " → ".join([*cycle[first:], *cycle[: first + 1]])
        findings.add(path, "depends", f"{around} is a cycle: take one of these out of `depends`.")
        return None
    return before


def finished(before: Before) -> Callable[[str], Callable[[str], bool]]:
    """For a task: whether another one has certainly finished when it starts.

    An integer bit set per task: sets of all ancestors would need quadratic memory.
    """
    bit = {name: 1 << number for number, name in enumerate(before)}
    seen: dict[str, int] = {}
    for name in TopologicalSorter(before).static_order():
        seen[name] = 0
        for predecessor in before[name]:
            seen[name] |= seen[predecessor] | bit[predecessor]
    return lambda task: lambda other: bool(seen[task] & bit.get(other, 0))


def _depends(findings: Findings, path: str, task: Data, tasks: Mapping[str, Data]) -> set[str]:
    """The tasks that `task` waits for."""
    text = str(task.get("depends") or "")
    named = [(name, result) for name, result in TASK.findall(text)]
    named += [(str(name), "") for name in task.get("dependencies") or []]
    for name, result in named:
        if name not in tasks:
            findings.add(path, "depends", f'"{name}" is no task of this DAG.{findings.hint(name, tasks)}')
        elif result in OF_LOOPS and (name, "") not in named and not loops(tasks[name]):
            why = f"{name} does not loop, or over nothing: ask for {name}.{OF_LOOPS[result]}."
            findings.add(path, "depends", f'"{name}.{result}" is the result of a loop, and {why}')
        if result and result not in RESULTS:
            findings.add(path, "depends", f'"{result}" is no result of a task.{findings.hint(result, RESULTS)}')
    try:
        python = TASK.sub("a", text).replace("&&", " and ").replace("||", " or ").replace("!", " not ")
        ast.parse(python.strip() or "a", mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        findings.add(path, "depends", f'"{text}" cannot be read: it must be tasks with &&, ||, ! and parentheses.')
    return {name for name, _ in named if name in tasks}
