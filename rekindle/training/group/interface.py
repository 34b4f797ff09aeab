"""The interface through which `TrainingGroup` joins other workers.

`ElasticGroup` has a coordinator, and its members may change. `StaticGroup` is a single process, or
the processes that torchrun has started. Call `form` first, then for each step `report_step`, and
`wait` to wait for the collective operations of the step. After a failed collective operation, call
`report_failure`, then `form` again. At the end of the training, call `finish` or `leave`.
"""

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from rekindle.training.group.process_group import Collective, GroupView

ResultT = TypeVar("ResultT")


class Membership(Protocol):
    """The connection of this process to the other workers."""

    # True if the remaining members can continue when a member leaves
    can_shrink: bool
    # True if the run is known to be complete
    is_complete: bool

    def form(self, step: int, leaving_event: threading.Event) -> GroupView | None:
        """Wait for the next group of workers and return the group; return None once `leaving_event`
        is set or the run is complete.

        `step`: number of updates in the state of this process, or -1 without a state.
        """
        ...

    def report_step(self, step: int) -> None:
        """Report that `step` updates are completed. Call `report_step` before each step, after
        `form`."""
        ...

    def report_busy(self, is_busy: bool) -> None:
        """Report that this process is alive but makes no steps (`is_busy`), or that this process
        makes steps again."""
        ...

    def regroup_pending(self) -> bool:
        """Return True if all members should stop after this step, because workers want to join or
        the run is complete."""
        ...

    def aborted(self) -> bool:
        """Return True if this process knows that its group is broken, or if it must exit with an
        error.

        `aborted` stays True until the next call of `form`.
        """
        ...

    def run(self, function: Callable[[], ResultT]) -> ResultT:
        """Return the result of `function`. Raises RuntimeError as soon as this process knows
        that its group is broken."""
        ...

    def wait(self, *collectives: Collective) -> None:
        """Wait for collective operations. Raises RuntimeError if an operation fails."""
        ...

    def report_failure(self, error: Exception) -> None:
        """Report that a collective operation has failed. Raises `error` if another group cannot be
        formed, or would fail in the same way."""
        ...

    def finish(self, sha256: str, step: int) -> bool:
        """Report that all `step` updates are done, and return True if the run is complete.

        `sha256`: hash of the weights that rank 0 has written, else "". `finish` may block for some
        seconds. Call `finish` again while it returns False, unless another group must be formed."""
        ...

    def leave(self) -> None:
        """Report that this process leaves before the run is complete. After `leave`, only `note`
        may be called."""
        ...

    def report_error(self, message: str, exit_code: int, *, is_temporary: bool = False) -> None:
        """Report that this process ends with an error. `is_temporary` is True if the cause is that
        a service is unavailable."""
        ...

    def note(self, event: str, **event_fields: object) -> None:
        """Record an event in the ledger without blocking."""
        ...
