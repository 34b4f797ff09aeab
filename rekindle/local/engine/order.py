"""The order in which the tasks of a DAG are looked at: as Argo looks at them, but each only while it can change.

    Order(targets, needs, eager).walk(visit, held)    # visit(task) → (dependents may start, completed); or HELD

Argo goes up from each target to what it waits for, first to last, on every pass. A task that is over, or that waits for
one that is not, cannot change, so a pass here costs what runs and not what there is.
"""

import re
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Mapping
from heapq import heappop, heappush
from typing import Any

NAMES = re.compile(r"[a-zA-Z0-9][-a-zA-Z0-9]*?\.[A-Z][a-zA-Z]+|[a-zA-Z0-9][-a-zA-Z0-9]*")
State = tuple[bool | None, bool]
HELD: State = (None, False)  # a limit holds up this task and all others that have not begun


class Order:
    """Of one DAG. `eager` tasks are looked at even where a limit holds up new ones: their `when` may skip them."""

    def __init__(self, targets: Iterable[str], needs: Mapping[str, Collection[str]], eager: Collection[str]) -> None:
        self.names = above(targets, needs)
        self.index = {name: index for index, name in enumerate(self.names)}
        self.eager, self.passed = eager, set[str]()
        self.waiting = {name: len(needs[name]) for name in self.names}
        self.after: dict[str, list[str]] = {name: [] for name in self.names}
        for name in self.names:
            for need in needs[name]:
                self.after[need].append(name)
        self.live: list[int] = []
        self.fresh: list[int] = []  # a heap
        self.unseen: list[int] = []
        for name in self.names:
            if not self.waiting[name]:
                self._push(name, self.live, 0)

    def walk(self, visit: Callable[[str], State], on_held: Callable[[str], object]) -> None:
        """One pass over all that can change, in order, what becomes possible in it included.

        `on_held` hears once of each task that is possible and held up with another.
        """
        live, self.live = self.live, []
        at, held = 0, False
        while True:
            if new := bool(self.fresh) and not held and (at == len(live) or self.fresh[0] < live[at]):
                index = heappop(self.fresh)
            elif at < len(live):
                index, at = live[at], at + 1
            else:
                break
            name = self.names[index]
            try:
                passed, over = visit(name)
            except Exception:  # the next pass looks at it again, and at those after it
                if new:
                    heappush(self.fresh, index)
                self.live += live[at - (not new) :]
                raise
            if new and passed is None:
                heappush(self.fresh, index)
                held = True
                continue
            if passed and name not in self.passed:
                self.passed.add(name)
                for dependent in self.after[name]:
                    self.waiting[dependent] -= 1
                    if not self.waiting[dependent]:
                        self._push(dependent, live, at)
            if not over:
                self.live.append(index)
        unseen, self.unseen = self.unseen, []
        for index in unseen if held else ():
            on_held(self.names[index])

    def _push(self, name: str, live: list[int], at: int) -> None:
        if name in self.eager:
            insort(live, self.index[name], at)
        else:
            heappush(self.fresh, self.index[name])
            self.unseen.append(self.index[name])


def above(names: Iterable[str], needs: Mapping[str, Collection[str]]) -> list[str]:
    """`names` and all that they wait for, each after what it waits for."""
    ordered: dict[str, None] = {}
    for target in names:
        opened = {target}
        stack = [(target, iter(needs[target]))] if target not in ordered else []
        while stack:
            rest = stack[-1][1]
            below = next((need for need in rest if need not in ordered and need not in opened), None)
            if below is None:
                ordered[stack.pop()[0]] = None
            else:
                opened.add(below)
                stack.append((below, iter(needs[below])))
    return list(ordered)


def dependencies(task: dict[str, Any], tasks: dict[str, dict[str, Any]]) -> tuple[list[str], str]:
    """The tasks that `task` waits for, and its `depends` as an expression over them, in which they are t0, t1, ...

    So that tasks that wait for others in the same way have the same expression, which is parsed once.
    """
    aliases: dict[str, str] = {}

    def spelled(match: re.Match[str]) -> str:
        name, _, result = match[0].partition(".")
        alias = aliases.setdefault(name, f"t{len(aliases)}")
        return f"{alias}.{result}" if result else _passes(alias, tasks.get(name, {}).get("continueOn") or {})

    depends = task.get("depends") or " && ".join(task.get("dependencies") or [])
    logic = NAMES.sub(spelled, depends)
    return list(aliases), logic


def _passes(name: str, continue_on: dict[str, Any]) -> str:
    results = ["Succeeded", "Skipped", "Daemoned"]
    results += ["Errored"] if continue_on.get("error") else []
    results += ["Failed"] if continue_on.get("failed") else []
    return "(" + " || ".join(f"{name}.{result}" for result in results) + ")"
