"""A group whose members never change, that is, one process, or the processes that torchrun
started."""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from rekindle.training.group.process_group import (
    Collective,
    GroupView,
    join_torchrun_group,
    read_world_size,
    wait_for_collectives,
)
from rekindle.training.ledger.events import CLOSE_TIMEOUT_S, Ledger

# time limit for writing the last ledger events of a process that leaves; the checkpoint needs the
# rest of the grace period
LEAVE_TIMEOUT_S = 5.0
MIN_STEP_EVENT_INTERVAL_S = 1.0

ResultT = TypeVar("ResultT")


class StaticGroup:
    """A Membership with fixed members: if the group breaks, the process ends.

    `ledger` is None unless this process has rank 0.
    """

    can_shrink = False
    is_complete = False

    def __init__(self, device: torch.device, ledger: Ledger | None) -> None:
        self.device = device
        self._ledger = ledger
        self._step = -1
        self._step_event_time = 0.0
        # events that happen before the first step; `report_step` writes them, because until then
        # the prefix may belong to another run
        self._early_events: list[dict[str, Any]] | None = []

    def form(self, step: int, leaving_event: threading.Event) -> GroupView | None:
        is_alone = read_world_size() == 1
        group_view = GroupView(0, 1) if is_alone else join_torchrun_group(self.device)

        rank_names = [f"rank{rank}" for rank in range(group_view.size)]
        for rank_name in rank_names:
            self.note("join", worker=rank_name, name=rank_name, step=step)
        self.note("generation", generation=1, members=rank_names, step=step)
        return group_view

    def report_step(self, step: int) -> None:
        early_events = self._early_events or []
        self._early_events = None
        for event_fields in early_events:
            self.note(**event_fields)

        now_s = time.monotonic()
        if step > self._step and now_s - self._step_event_time >= MIN_STEP_EVENT_INTERVAL_S:
            self._step = step
            self._step_event_time = now_s
            self.note("step", step=step)

    def report_busy(self, is_busy: bool) -> None:
        # without a coordinator, no process waits for this report
        pass

    def regroup_pending(self) -> bool:
        return False

    def aborted(self) -> bool:
        return False

    def run(self, function: Callable[[], ResultT]) -> ResultT:
        return function()

    def wait(self, *collectives: Collective) -> None:
        wait_for_collectives(collectives)

    def report_failure(self, error: Exception) -> None:
        raise error

    def finish(self, sha256: str, step: int) -> bool:
        self.note("complete", sha256=sha256, step=step)
        self._close_ledger(CLOSE_TIMEOUT_S)
        return True

    def leave(self) -> None:
        """Record that this process leaves before the run is complete; torchrun learns from the exit
        code that the process has left."""
        self.note("drain", worker="rank0", name="rank0")
        self._close_ledger(LEAVE_TIMEOUT_S)

    def report_error(self, message: str, exit_code: int, *, is_temporary: bool = False) -> None:
        self.note("failed", name="rank0", message=message, code=exit_code)
        self._close_ledger(CLOSE_TIMEOUT_S)

    def note(self, event: str, **event_fields: Any) -> None:
        """Record an event in the ledger. The event `loss` is ignored, because only a coordinator
        has metrics."""
        if event == "loss":
            return

        if self._early_events is not None:
            age_s = event_fields.pop("age_s", 0.0)
            self._early_events.append({"event": event, "t": time.time() - age_s, **event_fields})
        elif self._ledger:
            self._ledger.note(event, **event_fields)

    def _close_ledger(self, timeout_s: float) -> None:
        """Write the remaining events of the ledger within `timeout_s`; no event may be recorded
        afterwards."""
        if self._ledger:
            self._ledger.close(timeout_s)
