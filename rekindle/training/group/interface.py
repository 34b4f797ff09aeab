"""A process's membership of the workers that train together, as `TrainingGroup` sees it.

`ElasticGroup` follows a coordinator, and its members come and go. `StaticGroup` is a single
process, or the processes that torchrun has started. The order of calls: `form`, then for each step
`report_step` and the collectives with `wait`. After a failed collective: `report_failure`, then
`form` again. At the end: `finish` or `leave`.
"""

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from rekindle.training.group.process_group import GroupView

T = TypeVar("T")


class Membership(Protocol):
    """The connection of this process to the other workers."""

    can_shrink: bool  # True if the other members can continue when a member leaves
    is_complete: bool  # True if the run is known to be complete

    def form(self, step: int, leaving: threading.Event) -> GroupView | None:
        """Return the next group; None if `leaving` was set while waiting, or the run is complete.

        `step`: number of updates in this process's state; -1 if it has no state.
        """
        ...

    def report_step(self, step: int) -> None:
        """Report that `step` updates are completed. Call before each step, after `form`."""
        ...

    def report_busy(self, busy: bool) -> None:
        """Report that this healthy process does work other than steps, or that this work has
        ended."""
        ...

    def regroup_pending(self) -> bool:
        """Return True if all members should stop after this step: workers want to join, or the run
        is complete."""
        ...

    def aborted(self) -> bool:
        """Return True if the group is known to be broken, or this process must exit with an error.

        Stays True until the next `form`.
        """
        ...

    def run(self, call: Callable[[], T]) -> T:
        """Return or raise the result of `call`. Raises RuntimeError once the group is known to be
        broken."""
        ...

    def wait(self, *works: Any) -> None:
        """Wait for collectives. Raises RuntimeError if one fails."""
        ...

    def report_failure(self, error: Exception) -> None:
        """Report a failed collective. Raises the error if another group would fail, too, or cannot
        be formed."""
        ...

    def finish(self, sha256: str, step: int) -> bool:
        """Report that all steps are done (rank 0 with the hash of its model). Return True once the
        run is complete.

        May block for some seconds. Call again while the result is False and no other group must be
        formed.
        """
        ...

    def leave(self) -> None:
        """Report that this process leaves before the end. No other call may follow, except
        `note`."""
        ...

    def report_error(self, message: str, code: int, *, temporary: bool = False) -> None:
        """Report that this process ends with an error; `temporary`: because a service is
        unavailable."""
        ...

    def note(self, event: str, **fields: Any) -> None:
        """Record an event in the ledger without blocking."""
        ...
