"""Explains for each task why it runs instead of reusing a cached result, or why it does not run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from argolocal.common.wording import truncate
from rekindle.cache import entries, lookup
from rekindle.cache.difference import MISSING_VALUE, Difference, list_differences
from rekindle.cache.key import NotReusable
from rekindle.cache.lookup import CacheResult
from rekindle.errors import RekindleError, StorageError
from rekindle.operations.plan.tasks import RUNS_STATUS, Task, TaskTree

if TYPE_CHECKING:
    from rekindle.storage import Store

# maximum number of cache entries to read for a comparison
MAX_CACHE_ENTRIES = 2000
# maximum number of characters of a value in a line of text
MAX_VALUE_LENGTH = 24


@dataclass(frozen=True)
class Reason:
    """The reason why a task runs or does not run, as text. `differences`: the differences of the
    task from the earlier result `earlier_result` (RUN/TASK)."""

    text: str
    earlier_result: str = ""
    differences: list[Difference] = field(default_factory=list)


class TaskReasons:
    """Explains for each task of a task tree why it runs or does not run. A task is compared with
    its newest earlier result, preferably from a run whose name starts with `run_name_prefix`."""

    def __init__(
        self,
        task_tree: TaskTree,
        cache_results: Mapping[str, CacheResult],
        object_store: "Store | None",
        run_name_prefix: str,
        is_on_cluster: bool,
    ) -> None:
        self.tree = task_tree
        self.results = cache_results
        self.store = object_store
        self.prefix = run_name_prefix
        self.on_cluster = is_on_cluster

    def explain(self, parent_task: Task, task: Task) -> Reason:
        """Return the reason why a task runs, does not run, or may not run."""
        if task.status != RUNS_STATUS:
            return Reason(task.reason)

        if task.template.get("memoize"):
            return Reason(
                "Argo may have memoized its result, which is known only when the task starts"
            )

        if not self.tree.find_cached_row(task):
            return Reason("never cached")

        cache_result = self.results.get(task.name)
        if not cache_result or not self.store:
            return Reason("the cache cannot be read")

        earlier_entry = None
        found_differences = []

        try:
            task_facts = cache_result.facts
            if not task_facts and cache_result.call:
                task_facts = lookup.facts_before_run(cache_result.call, self.on_cluster)
            if task_facts:
                earlier_entry = self._find_newest_entry(task_facts["step"], task.name)
            if task_facts and earlier_entry:
                found_differences = list_differences(self.store, earlier_entry.facts, task_facts)
        except NotReusable as error:
            return Reason(str(error))
        except RekindleError:
            found_differences = []

        upstream_name = (
            "" if cache_result.facts else self._find_running_dependency(parent_task, task)
        )
        if upstream_name:
            found_differences.append(Difference("upstream", upstream_name))

        if not found_differences and cache_result.facts and earlier_entry:
            return Reason(f"the result of {earlier_entry.at} is no longer valid", earlier_entry.at)
        if not found_differences and not cache_result.facts:
            return Reason(cache_result.reason)
        if not earlier_entry and not any(
            difference.kind == "upstream" for difference in found_differences
        ):
            return Reason("no earlier result")

        return Reason(
            describe_difference(found_differences[0]),
            earlier_entry.at if earlier_entry else "",
            found_differences,
        )

    def _find_running_dependency(self, parent_task: Task, task: Task) -> str:
        """Return the name of a task that will run and that `task` depends on, preferably a task
        that may be cached; "" if such a task does not exist."""
        seen_names = set()
        pending_names = list(parent_task.needs.get(task.name, ()))
        running_names = []

        while pending_names:
            task_name = pending_names.pop(0)
            if task_name in seen_names:
                continue

            seen_names.add(task_name)
            pending_names += parent_task.needs.get(task_name, ())
            if parent_task.children[task_name].status == RUNS_STATUS:
                running_names.append(task_name)

        reusable_names = [
            task_name
            for task_name in running_names
            if self.tree.find_cached_row(parent_task.children[task_name])
        ]
        return next(iter(reusable_names or running_names), "")

    def _find_newest_entry(self, step_name: str, task_name: str) -> entries.Entry | None:
        """Return the newest cache entry of a step. An entry of this task in this pipeline is
        preferred, then an entry of this pipeline, then an entry of any pipeline."""

        def rank(cache_entry: entries.Entry) -> tuple[bool, bool, float]:
            return (
                cache_entry.workflow.startswith(self.prefix),
                cache_entry.task == task_name,
                cache_entry.made,
            )

        return max(self._entries_by_step.get(step_name, ()), key=rank, default=None)

    @cached_property
    def _entries_by_step(self) -> dict[str, list[entries.Entry]]:
        """The newest cache entries of each step."""
        step_entries: dict[str, list[entries.Entry]] = {}
        for cache_entry in self._read_entries():
            step_entries.setdefault(str(cache_entry.facts.get("step")), []).append(cache_entry)
        return step_entries

    def _read_entries(self) -> Iterator[entries.Entry]:
        if not self.store:
            return
        try:
            stored_objects = sorted(
                self.store.list(entries.CACHE_FOLDER),
                key=lambda stored_object: -stored_object.modified,
            )
            for stored_object in stored_objects[:MAX_CACHE_ENTRIES]:
                cache_entry = entries.read_entry(
                    self.store, stored_object.key.removeprefix(entries.CACHE_FOLDER)
                )
                if cache_entry:
                    yield cache_entry
        except StorageError:
            return


def describe_difference(difference: Difference) -> str:
    """Describe a difference between two results in a few words, with shortened values."""
    if difference.kind == "upstream":
        return f"{difference.name} runs"

    if difference.kind == "image":
        difference_name = "image"
    else:
        difference_name = f"{difference.kind} {difference.name}"

    if difference.before == MISSING_VALUE:
        return f"{difference_name} is new ({_shorten_value(difference.now)})"
    if difference.now == MISSING_VALUE:
        return f"{difference_name} was removed"

    earlier_text, current_text = (
        " ".join(value.split()) for value in (difference.before, difference.now)
    )
    character_pairs = enumerate(zip(earlier_text, current_text, strict=False))
    if max(len(earlier_text), len(current_text)) > MAX_VALUE_LENGTH:
        common_length = next((index for index, (a, b) in character_pairs if a != b), 0)
    else:
        common_length = 0

    return (
        f"{difference_name}: {_shorten_value(earlier_text, common_length)} →"
        f" {_shorten_value(current_text, common_length)}"
    )


def _shorten_value(value: str, common_length: int = 0) -> str:
    """Shorten a value for display. The first `common_length` characters of the value are equal to
    those of the value with which it is compared."""
    if len(value) >= 40 and all(
        character in "0123456789abcdef" for character in value.removeprefix("sha256:")
    ):
        return value.removeprefix("sha256:")[:8]
    start_index = max(0, common_length - MAX_VALUE_LENGTH // 2)
    text = f"...{value[start_index:]}" if start_index else value
    return truncate(text, MAX_VALUE_LENGTH)
