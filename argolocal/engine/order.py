"""Order of the visits of a pass to the tasks of a DAG: Argo's order, restricted to tasks that can change.

    Order(targets, needs, eager).walk(visit, held)    # visit(task) → (dependents may start, completed) or HELD

On every pass Argo visits the ancestors of each target, then the target. A completed task, or a task with unfinished
dependencies, cannot change, so a pass here costs O(running tasks), not O(tasks).
"""

import re
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Mapping
from heapq import heappop, heappush
from typing import Any

from argolocal.manifest.types import Task

NAMES = re.compile(r"[a-zA-Z0-9][-a-zA-Z0-9]*?\.[A-Z][a-zA-Z]+|[a-zA-Z0-9][-a-zA-Z0-9]*")
State = tuple[bool | None, bool]
HELD: State = (None, False)  # a limit blocks this task and all others not started


class Order:
    """The order of one DAG. `eager` tasks are visited even while a limit blocks new ones: `when` may skip them."""

    def __init__(self, targets: Iterable[str], needs: Mapping[str, Collection[str]], eager: Collection[str]) -> None:
        self.names = with_ancestors(targets, needs)
        self.index = {name: index for index, name in enumerate(self.names)}
        self.eager, self.passed = eager, set[str]()
        self.waiting = {name: len(needs[name]) for name in self.names}
        self.after: dict[str, list[str]] = {name: [] for name in self.names}
        for name in self.names:
            for need in needs[name]:
                self.after[need].append(name)
        self.live: list[int] = []
        self.fresh: list[int] = []  # a heap of ready tasks
        self.unseen: list[int] = []
        for name in self.names:
            if not self.waiting[name]:
                self._push(name, self.live, 0)

    def walk(self, visit: Callable[[str], State], on_held: Callable[[str], object]) -> None:
        """Visit all tasks that can change, in order, including tasks that become ready during the pass.

        Calls `on_held` once for each ready task that a limit blocks.
        """
        live, self.live = self.live, []
        position, is_held = 0, False
        while True:
            if new := bool(self.fresh) and not is_held and (position == len(live) or self.fresh[0] < live[position]):
                index = heappop(self.fresh)
            elif position < len(live):
                index, position = live[position], position + 1
            else:
                break
            name = self.names[index]
            try:
                passed, completed = visit(name)
            except Exception:  # the next pass visits it and the tasks after it
                if new:
                    heappush(self.fresh, index)
                self.live += live[position - (not new) :]
                raise
            if new and passed is None:
                heappush(self.fresh, index)
                is_held = True
                continue
            if passed and name not in self.passed:
                self.passed.add(name)
                for dependent in self.after[name]:
                    self.waiting[dependent] -= 1
                    if not self.waiting[dependent]:
                        self._push(dependent, live, position)
            if not completed:
                self.live.append(index)
        unseen, self.unseen = self.unseen, []
        for index in unseen if is_held else ():
            on_held(self.names[index])

    def _push(self, name: str, live: list[int], position: int) -> None:
        if name in self.eager:
            insort(live, self.index[name], position)
        else:
            heappush(self.fresh, self.index[name])
            self.unseen.append(self.index[name])


def with_ancestors(names: Iterable[str], needs: Mapping[str, Collection[str]]) -> list[str]:
    """Return `names` and their ancestors, dependencies first."""
    ordered: dict[str, None] = {}
    for target in names:
        entered = {target}
        stack = [(target, iter(needs[target]))] if target not in ordered else []
        while stack:
            rest = stack[-1][1]
            ancestor = next((need for need in rest if need not in ordered and need not in entered), None)
            if ancestor is None:
                ordered[stack.pop()[0]] = None
            else:
                entered.add(ancestor)
                stack.append((ancestor, iter(needs[ancestor])))
    return list(ordered)


def dependencies(task: Task, tasks: dict[str, dict[str, Any]]) -> tuple[list[str], str]:
    """Return the dependencies of `task`, and its `depends` as an expression that calls them t0, t1, ...

    Tasks with dependencies of the same form thus share one expression, which is parsed once.
    """
    aliases: dict[str, str] = {}

    def to_alias(match: re.Match[str]) -> str:
        name, _, result = match[0].partition(".")
        alias = aliases.setdefault(name, f"t{len(aliases)}")
        return f"{alias}.{result}" if result else _default_condition(alias, tasks.get(name, {}).get("continueOn") or {})

    depends = task.get("depends") or " && ".join(task.get("dependencies") or [])
    logic = NAMES.sub(to_alias, depends)
    return list(aliases), logic


def _default_condition(name: str, continue_on: dict[str, Any]) -> str:
    results = ["Succeeded", "Skipped", "Daemoned"]
    results += ["Errored"] if continue_on.get("error") else []
    results += ["Failed"] if continue_on.get("failed") else []
    return "(" + " || ".join(f"{name}.{result}" for result in results) + ")"
