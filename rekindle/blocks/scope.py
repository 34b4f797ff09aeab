"""A DAG while blocks are put into it: which of them come after which."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from hera.workflows import DAG, Task


@dataclass
class Scope:
    """A DAG in which blocks stand, and for a group its task in the DAG around it."""

    dag: DAG
    outer: "Scope | None" = None
    task: Task | None = None
    guarded: list[str] = field(default_factory=list)  # tasks whose failure is the DAG's, whatever comes after them
    before: dict[str, list[str]] = field(default_factory=dict)  # block → the tasks that it comes after
    order: dict[str, int] = field(default_factory=dict)  # block → its number

    def path(self) -> Iterator["Scope"]:
        """This DAG, and those around it."""
        scope: Scope | None = self
        while scope:
            yield scope
            scope = scope.outer

    def after(self, task: str, needed: Iterable[str]) -> str | None:
        """Note that `task` comes after `needed`; gives what Argo's `depends` must say, without what follows from it."""
        names = list(dict.fromkeys(needed))
        direct = [name for name in names if not any(self._leads(name, other) for other in names if other != name)]
        self.before[task] = direct
        self.order.setdefault(task, len(self.order))
        return " && ".join(direct) or None

    def _leads(self, name: str, to: str) -> bool:
        """Whether `to` comes after `name`. Blocks only come after those that were made before them."""
        least, seen, left = self.order.get(name, 0), {to}, [to]
        while left:
            for earlier in self.before.get(left.pop(), ()):
                if earlier == name:
                    return True
                if earlier not in seen and self.order.get(earlier, 0) > least:
                    seen.add(earlier)
                    left.append(earlier)
        return False
