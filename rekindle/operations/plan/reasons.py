"""Explains for each task why it runs instead of reusing a cached result, or why it does not run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from argolocal.common.wording import cut
from rekindle.cache import entries, lookup
from rekindle.cache.difference import MISSING, Difference, list_differences
from rekindle.cache.key import NotReusable
from rekindle.cache.lookup import CacheResult
from rekindle.errors import RekindleError, StorageError
from rekindle.operations.plan.tasks import RUNS, Task, Tree

if TYPE_CHECKING:
    from rekindle.storage import Store

MAX_ENTRIES = 2000  # maximum number of cache entries to read for a comparison
MAX_VALUE_LENGTH = 24  # maximum number of characters of a value in a line of text


@dataclass(frozen=True)
class Reason:
    """The reason as text, and the differences from `earlier_result` (RUN/TASK)."""

    text: str
    earlier_result: str = ""
    differences: list[Difference] = field(default_factory=list)


class Reasons:
    """Explains for each task of `tree` why it runs or does not run. A task is compared with its
    newest earlier result, preferably from a run whose name starts with `prefix`."""

    def __init__(
        self,
        tree: Tree,
        results: Mapping[str, CacheResult],
        store: "Store | None",
        prefix: str,
        on_cluster: bool,
    ) -> None:
        self.tree = tree
        self.results = results
        self.store = store
        self.prefix = prefix
        self.on_cluster = on_cluster

    def explain(self, parent: Task, task: Task) -> Reason:
        """Return the reason why a task runs, does not run, or may not run."""
        if task.status != RUNS:
            return Reason(task.reason)

        if task.template.get("memoize"):
            return Reason(
                "Argo may have memoized its result, which is known only when the task starts"
            )

        if not self.tree.cache_row(task):
            return Reason("never cached")

        result = self.results.get(task.name)
        if not result or not self.store:
            return Reason("the cache cannot be read")

        earlier = None
        found = []

        try:
            facts = result.facts
            if not facts and result.call:
                facts = lookup.facts_before_run(result.call, self.on_cluster)
            if facts:
                earlier = self._newest_entry(facts["step"], task.name)
            if facts and earlier:
                found = list_differences(self.store, earlier.facts, facts)
        except NotReusable as error:
            return Reason(str(error))
        except RekindleError:
            found = []

        upstream = "" if result.facts else self._running_dependency(parent, task)
        if upstream:
            found.append(Difference("upstream", upstream))

        if not found and result.facts and earlier:
            return Reason(f"the result of {earlier.at} is no longer valid", earlier.at)
        if not found and not result.facts:
            return Reason(result.reason)
        if not earlier and not any(difference.kind == "upstream" for difference in found):
            return Reason("no earlier result")

        return Reason(describe(found[0]), earlier.at if earlier else "", found)

    def _running_dependency(self, parent: Task, task: Task) -> str:
        """Return the name of a task that will run and that `task` depends on, preferably a task
        that may be cached; "" if such a task does not exist."""
        seen = set()
        pending = list(parent.needs.get(task.name, ()))
        running = []

        while pending:
            name = pending.pop(0)
            if name in seen:
                continue

            seen.add(name)
            pending += parent.needs.get(name, ())
            if parent.children[name].status == RUNS:
                running.append(name)

        reusable = [name for name in running if self.tree.cache_row(parent.children[name])]
        return next(iter(reusable or running), "")

    def _newest_entry(self, step: str, task: str) -> entries.Entry | None:
        """Return the newest cache entry of a step: preferably of this task in this pipeline, then
        of this pipeline, then of any pipeline."""

        def rank(entry: entries.Entry) -> tuple[bool, bool, float]:
            return entry.workflow.startswith(self.prefix), entry.task == task, entry.made

        return max(self._entries_by_step.get(step, ()), key=rank, default=None)

    @cached_property
    def _entries_by_step(self) -> dict[str, list[entries.Entry]]:
        """The newest cache entries of each step."""
        result: dict[str, list[entries.Entry]] = {}
        for entry in self._read_entries():
            result.setdefault(str(entry.facts.get("step")), []).append(entry)
        return result

    def _read_entries(self) -> Iterator[entries.Entry]:
        if not self.store:
            return
        try:
            items = sorted(self.store.list(entries.CACHE_FOLDER), key=lambda item: -item.modified)
            for item in items[:MAX_ENTRIES]:
                entry = entries.read_entry(self.store, item.key.removeprefix(entries.CACHE_FOLDER))
                if entry:
                    yield entry
        except StorageError:
            return


def describe(difference: Difference) -> str:
    """Describe a difference in a few words, with short values."""
    if difference.kind == "upstream":
        return f"{difference.name} runs"

    if difference.kind == "image":
        name = "image"
    else:
        name = f"{difference.kind} {difference.name}"

    if difference.before == MISSING:
        return f"{name} is new ({_short(difference.now)})"
    if difference.now == MISSING:
        return f"{name} was removed"

    before, now = (" ".join(value.split()) for value in (difference.before, difference.now))
    pairs = enumerate(zip(before, now, strict=False))
    if max(len(before), len(now)) > MAX_VALUE_LENGTH:
        common = next((index for index, (a, b) in pairs if a != b), 0)
    else:
        common = 0

    return f"{name}: {_short(before, common)} → {_short(now, common)}"


def _short(value: str, common: int = 0) -> str:
    """Shorten a value for display. Its first `common` characters are equal to those of the value
    with which it is compared."""
    if len(value) >= 40 and all(c in "0123456789abcdef" for c in value.removeprefix("sha256:")):
        return value.removeprefix("sha256:")[:8]
    start = max(0, common - MAX_VALUE_LENGTH // 2)
    text = f"...{value[start:]}" if start else value
    return cut(text, MAX_VALUE_LENGTH)
