"""Visit the tasks of a DAG in Argo's order, but skip tasks that cannot change.

    order = TaskOrder(targets, dependencies_by_task, eager_tasks)
    order.walk(visit, on_blocked)    # `visit` returns a VisitResult

In every pass, Argo visits the ancestors of each target, then the target. `walk` does not visit
completed tasks and tasks with unfinished dependencies. Because other tasks are not visited, the
time of a pass is proportional to the number of running tasks, not of all tasks.
"""

import re
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Mapping
from heapq import heappop, heappush
from typing import Any

from argolocal.manifest.types import Task

NAME_OR_RESULT = re.compile(r"[a-zA-Z0-9][-a-zA-Z0-9]*?\.[A-Z][a-zA-Z]+|[a-zA-Z0-9][-a-zA-Z0-9]*")
# (True if tasks that depend on this task may start, True if this task need not be visited again)
VisitResult = tuple[bool | None, bool]
# the VisitResult if a limit prevents this task and all other new tasks from starting
BLOCKED_BY_LIMIT: VisitResult = (None, False)


class TaskOrder:
    """The order of the tasks of one DAG. `eager_tasks`: tasks that are visited even if a limit
    prevents new tasks from starting, because a task whose `when` is false does not need a pod."""

    def __init__(
        self,
        targets: Iterable[str],
        dependencies_by_task: Mapping[str, Collection[str]],
        eager_tasks: Collection[str],
    ) -> None:
        self.names = list_with_ancestors(targets, dependencies_by_task)
        self.index = {name: index for index, name in enumerate(self.names)}
        self.eager_tasks = eager_tasks
        # names of the tasks whose dependents may start
        self.passed_tasks = set[str]()
        self.unfinished_counts = {name: len(dependencies_by_task[name]) for name in self.names}
        self.dependents: dict[str, list[str]] = {name: [] for name in self.names}

        for name in self.names:
            for dependency in dependencies_by_task[name]:
                self.dependents[dependency].append(name)

        # the tasks that the next pass visits, identified by their index in `names`
        self.live_indexes: list[int] = []
        # heap of the tasks that have not started but could
        self.ready_heap: list[int] = []
        # tasks that became ready in this pass
        self.new_indexes: list[int] = []

        for name in self.names:
            if not self.unfinished_counts[name]:
                self._push(name, self.live_indexes, 0)

    def walk(
        self, visit: Callable[[str], VisitResult], on_blocked: Callable[[str], object]
    ) -> None:
        """Visit all tasks that can change, in order, including tasks that become ready during the
        pass. Call `on_blocked` once for each ready task that cannot start because of a limit."""
        live_indexes = self.live_indexes
        self.live_indexes = []
        position = 0
        is_blocked = False

        while True:
            is_newly_ready = (
                bool(self.ready_heap)
                and not is_blocked
                and (position == len(live_indexes) or self.ready_heap[0] < live_indexes[position])
            )
            if is_newly_ready:
                index = heappop(self.ready_heap)
            elif position < len(live_indexes):
                index = live_indexes[position]
                position = position + 1
            else:
                break

            name = self.names[index]
            try:
                may_continue, is_complete = visit(name)
            except Exception:
                # let the next pass visit this task and the following tasks
                if is_newly_ready:
                    heappush(self.ready_heap, index)

                self.live_indexes += live_indexes[position - (not is_newly_ready) :]
                raise

            if is_newly_ready and may_continue is None:
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
        """Add a task that has become ready: an eager task to `live_indexes` after `position`, and
        any other task to the heap."""
        if name in self.eager_tasks:
            insort(live_indexes, self.index[name], position)
        else:
            heappush(self.ready_heap, self.index[name])
            self.new_indexes.append(self.index[name])


def list_with_ancestors(
    names: Iterable[str], dependencies_by_task: Mapping[str, Collection[str]]
) -> list[str]:
    """Return `names` and their ancestors in topological order."""
    ordered_names: dict[str, None] = {}

    for target_name in names:
        entered_names = {target_name}
        if target_name not in ordered_names:
            stack = [(target_name, iter(dependencies_by_task[target_name]))]
        else:
            stack = []

        while stack:
            unvisited_names = stack[-1][1]
            ancestor = next(
                (
                    dependency
                    for dependency in unvisited_names
                    if dependency not in ordered_names and dependency not in entered_names
                ),
                None,
            )
            if ancestor is None:
                ordered_names[stack.pop()[0]] = None
            else:
                entered_names.add(ancestor)
                stack.append((ancestor, iter(dependencies_by_task[ancestor])))

    return list(ordered_names)


def parse_dependencies(task: Task, tasks: dict[str, dict[str, Any]]) -> tuple[list[str], str]:
    """Return the names of a task's dependencies, and its `depends` as an expression that calls them
    t0, t1, ...

    With the aliases t0, t1, ..., many tasks have the same expression, which is parsed only once.
    """
    aliases: dict[str, str] = {}

    def to_alias(match: re.Match[str]) -> str:
        name, _, task_result = match[0].partition(".")
        alias = aliases.setdefault(name, f"t{len(aliases)}")
        if task_result:
            return f"{alias}.{task_result}"
        return _default_condition(alias, tasks.get(name, {}).get("continueOn") or {})

    depends_text = task.get("depends") or " && ".join(task.get("dependencies") or [])
    expression = NAME_OR_RESULT.sub(to_alias, depends_text)
    return list(aliases), expression


def _default_condition(name: str, continue_on: dict[str, Any]) -> str:
    """Return the expression for a task name without a result in `depends`. `continue_on`: the field
    `continueOn` of the task."""
    accepted_results = ["Succeeded", "Skipped", "Daemoned"]
    accepted_results += ["Errored"] if continue_on.get("error") else []
    accepted_results += ["Failed"] if continue_on.get("failed") else []
    return "(" + " || ".join(f"{name}.{task_result}" for task_result in accepted_results) + ")"
