"""Visit the tasks of a DAG in Argo's order, but skip tasks that cannot change.

    Order(targets, needs, eager_tasks).walk(visit, on_blocked)    # `visit` returns a VisitResult

On every pass, Argo visits the ancestors of each target, then the target. A completed task, or a
task with unfinished dependencies, cannot change, so a pass here takes O(running tasks), not
O(tasks).
"""

import re
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Mapping
from heapq import heappop, heappush
from typing import Any

from argolocal.manifest.types import Task

NAME_OR_RESULT = re.compile(r"[a-zA-Z0-9][-a-zA-Z0-9]*?\.[A-Z][a-zA-Z]+|[a-zA-Z0-9][-a-zA-Z0-9]*")
# (True if dependents of the task may start, True if the task is completed)
VisitResult = tuple[bool | None, bool]
# the VisitResult if a limit blocks this task and all other tasks that have not started
BLOCKED_BY_LIMIT: VisitResult = (None, False)


class Order:
    """The order of one DAG. `eager_tasks`: tasks that are visited even if a limit blocks new tasks,
    because their `when` may be false."""

    def __init__(
        self,
        targets: Iterable[str],
        needs: Mapping[str, Collection[str]],
        eager_tasks: Collection[str],
    ) -> None:
        self.names = with_ancestors(targets, needs)
        self.index = {name: index for index, name in enumerate(self.names)}
        self.eager_tasks = eager_tasks
        self.passed_tasks = set[str]()  # names of the tasks whose dependents may start
        self.unfinished_counts = {name: len(needs[name]) for name in self.names}
        self.dependents: dict[str, list[str]] = {name: [] for name in self.names}

        for name in self.names:
            for need in needs[name]:
                self.dependents[need].append(name)

        self.live_indexes: list[int] = []
        self.ready_heap: list[int] = []  # heap of the indexes of ready tasks
        self.new_indexes: list[int] = []

        for name in self.names:
            if not self.unfinished_counts[name]:
                self._push(name, self.live_indexes, 0)

    def walk(
        self, visit: Callable[[str], VisitResult], on_blocked: Callable[[str], object]
    ) -> None:
        """Visit all tasks that can change, in order, including tasks that become ready during the
        pass.

        Calls `on_blocked` once for each ready task that a limit blocks.
        """
        live_indexes = self.live_indexes
        self.live_indexes = []
        position = 0
        is_blocked = False

        while True:
            is_new = (
                bool(self.ready_heap)
                and not is_blocked
                and (position == len(live_indexes) or self.ready_heap[0] < live_indexes[position])
            )
            if is_new:
                index = heappop(self.ready_heap)
            elif position < len(live_indexes):
                index = live_indexes[position]
                position = position + 1
            else:
                break

            name = self.names[index]
            try:
                may_continue, is_complete = visit(name)
            except Exception:  # the next pass visits this task and the following tasks
                if is_new:
                    heappush(self.ready_heap, index)

                self.live_indexes += live_indexes[position - (not is_new) :]
                raise

            if is_new and may_continue is None:
                heappush(self.ready_heap, index)
                is_blocked = True
                continue

            if may_continue and name not in self.passed_tasks:
                self.passed_tasks.add(name)
                for dependent in self.dependents[name]:
                    self.unfinished_counts[dependent] -= 1
                    if not self.unfinished_counts[dependent]:
                        self._push(dependent, live_indexes, position)

            if not is_complete:
                self.live_indexes.append(index)

        new_indexes = self.new_indexes
        self.new_indexes = []
        for index in new_indexes if is_blocked else ():
            on_blocked(self.names[index])

    def _push(self, name: str, live_indexes: list[int], position: int) -> None:
        if name in self.eager_tasks:
            insort(live_indexes, self.index[name], position)
        else:
            heappush(self.ready_heap, self.index[name])
            self.new_indexes.append(self.index[name])


def with_ancestors(names: Iterable[str], needs: Mapping[str, Collection[str]]) -> list[str]:
    """Return `names` and their ancestors in topological order."""
    ordered_names: dict[str, None] = {}

    for target in names:
        entered_names = {target}
        if target not in ordered_names:
            stack = [(target, iter(needs[target]))]
        else:
            stack = []

        while stack:
            unvisited_names = stack[-1][1]
            ancestor = next(
                (
                    need
                    for need in unvisited_names
                    if need not in ordered_names and need not in entered_names
                ),
                None,
            )
            if ancestor is None:
                ordered_names[stack.pop()[0]] = None
            else:
                entered_names.add(ancestor)
                stack.append((ancestor, iter(needs[ancestor])))

    return list(ordered_names)


def parse_dependencies(task: Task, tasks: dict[str, dict[str, Any]]) -> tuple[list[str], str]:
    """Return the dependencies of `task`, and its `depends` as an expression in which the
    dependencies are t0, t1, ...

    With these aliases, many tasks have the same expression, which is parsed only once.
    """
    aliases: dict[str, str] = {}

    def to_alias(match: re.Match[str]) -> str:
        name, _, result = match[0].partition(".")
        alias = aliases.setdefault(name, f"t{len(aliases)}")
        if result:
            return f"{alias}.{result}"
        return _default_condition(alias, tasks.get(name, {}).get("continueOn") or {})

    depends = task.get("depends") or " && ".join(task.get("dependencies") or [])
    expression = NAME_OR_RESULT.sub(to_alias, depends)
    return list(aliases), expression


def _default_condition(name: str, continue_on: dict[str, Any]) -> str:
    results = ["Succeeded", "Skipped", "Daemoned"]
    results += ["Errored"] if continue_on.get("error") else []
    results += ["Failed"] if continue_on.get("failed") else []
    return "(" + " || ".join(f"{name}.{result}" for result in results) + ")"
