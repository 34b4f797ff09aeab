"""A group whose members never change: one process, or the processes that torchrun started."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from rekindle.training.group.process_group import TIMEOUT, GroupView, from_torchrun
from rekindle.training.ledger.events import CLOSE_TIMEOUT_S, Ledger
from rekindle.training.membership.completion import open_store
from rekindle.training.spec import TrainingSpec

T = TypeVar("T")


class StaticGroup:
    """A group with fixed members; if it breaks, the process ends. ElasticGroup overrides most methods."""

    elastic = False  # True if the other members can continue when a member leaves
    is_complete = False  # True if the run is known to be complete

    def __init__(self, spec: TrainingSpec, device: torch.device) -> None:
        self.device = device
        self._step, self._step_event_time = -1, 0.0
        self._ledger = Ledger(open_store, spec.ledger) if int(os.environ.get("RANK", 0)) == 0 else None
        # events that `progress` writes: before the first step, the prefix may belong to another run
        self._early_events: list[dict[str, Any]] | None = []

    def form(self, step: int, leaving: threading.Event) -> GroupView | None:
        """Return the next group; None if `leaving` was set while waiting, or the run is complete."""
        view = GroupView(0, 1) if int(os.environ.get("WORLD_SIZE", 1)) == 1 else from_torchrun(self.device)
        names = [f"rank{rank}" for rank in range(view.size)]
        for name in names:
            self.note("join", worker=name, name=name, step=step)
        self.note("generation", generation=1, members=names, step=step)
        return view

    def progress(self, step: int) -> None:
        """Report that `step` updates are completed."""
        early_events, self._early_events = self._early_events, None
        for fields in early_events or []:
            self.note(**fields)
        if step > self._step and time.monotonic() - self._step_event_time >= 1:
            self._step, self._step_event_time = step, time.monotonic()
            self.note("step", step=step)

    def busy(self, busy: bool) -> None:
        """Report that this healthy process does work other than steps, or that this work has ended."""

    def regroup_pending(self) -> bool:
        """Return True if all members should stop after this step: workers want to join, or the run is complete."""
        return False

    def aborted(self) -> bool:
        """Return True if this group is known to be broken, or this process must exit with an error."""
        return False

    def run(self, call: Callable[[], T]) -> T:
        """Return or raise the result of `call`. Raises RuntimeError once the group is known to be broken."""
        return call()

    def wait(self, *works: Any) -> None:
        """Wait for collectives. Raises RuntimeError if one fails."""
        for work in works:
            work.wait(TIMEOUT)

    def report_failure(self, error: Exception) -> None:
        """Report a failed collective. Raises the error if another group would fail, too, or cannot be formed."""
        raise error

    def leave(self) -> None:
        """Record that this process leaves before the end; torchrun learns it from the exit code."""
        self.note("drain", worker="rank0", name="rank0")
        self.close(5.0)  # the checkpoint gets the rest of the grace period

    def report_error(self, message: str, code: int, *, temporary: bool = False) -> None:
        """Report that this process ends with an error; `temporary`: because a service is unavailable."""
        self.note("failed", name="rank0", message=message, code=code)
        self.close()

    def note(self, event: str, **fields: Any) -> None:
        """Record an event in the ledger without blocking. Ignores the event `loss`: only a coordinator has metrics."""
        if event == "loss":
            return
        if self._early_events is not None:
            age_s = fields.pop("age_s", 0.0)
            self._early_events.append({"event": event, "t": time.time() - age_s} | fields)
        elif self._ledger:
            self._ledger.note(event, **fields)

    def finish(self, sha256: str, step: int) -> bool:
        """Report that all steps are done (rank 0 with the hash of its model). Return True once the run is complete;
        may block for some seconds."""
        self.note("complete", sha256=sha256, step=step)
        self.close()
        return True

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write the remaining events of the ledger within `timeout_s`; no event may follow."""
        if self._ledger:
            self._ledger.close(timeout_s)
