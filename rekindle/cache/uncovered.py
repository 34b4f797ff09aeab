"""Store why the cache key of a task does not cover all code that the task has loaded, in the object
UNCOVERED_CODE of the task. No later run reuses the outputs of such a task."""

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from rekindle.errors import NotFound
from rekindle.keys import UNCOVERED_CODE

if TYPE_CHECKING:
    from rekindle.storage import Store


def write_uncovered_reason(store: "Store", task_reference: str, reason: str) -> None:
    """Store the reason for the task RUN/TASK. Raises StorageError."""
    store.put(f"{task_reference}/{UNCOVERED_CODE}", reason.encode())


def has_uncovered_reason(store: "Store", task_reference: str) -> bool:
    """Return True if a reason is stored for the task RUN/TASK. Raises StorageError."""
    return store.head(f"{task_reference}/{UNCOVERED_CODE}") is not None


def read_uncovered_reasons(
    store: "Store", run_name: str, task_names: Iterable[str]
) -> dict[str, str]:
    """Return the stored reasons by the names of the tasks. Raises StorageError."""
    reasons_by_task: dict[str, str] = {}
    for task_name in task_names:
        with suppress(NotFound):
            reason = store.get(f"{run_name}/{task_name}/{UNCOVERED_CODE}")
            reasons_by_task[task_name] = reason.decode()
    return reasons_by_task
