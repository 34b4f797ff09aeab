"""The group as the training loop sees it: steps to do, our virtual workers, and one sum over all virtual workers.

    for step in group.steps(end):
        for virtual_worker in group.virtual_workers():
            group.add(virtual_worker, loss, summands)
        if (total := group.reduced()) is not None:   # None: a member was lost, the survivors repeat the step
            ...

Four numbers are summed together with every gradient: the loss, and the flags "a worker wants to join", "a worker must
leave" and "make a durable checkpoint after this step" (set by rank 0).
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
from torch import Tensor

from rekindle.errors import ConfigError
from rekindle.training.checkpoint.manager import Checkpoints
from rekindle.training.group.process_group import GroupView
from rekindle.training.group.reduction import CONTROLS, Reduction
from rekindle.training.group.static import StaticGroup
from rekindle.training.group.tree import share
from rekindle.training.state import State


class TrainingGroup:
    """The processes that train together now. Rank 0 restores from `checkpoints` when no member has a state."""

    def __init__(self, members: StaticGroup, state: State, checkpoints: Checkpoints, leaving: threading.Event) -> None:
        self.members, self.state, self.checkpoints, self.leaving = members, state, checkpoints, leaving
        self.total_virtual_workers = state.config.virtual_workers
        self.rank = 0
        self.stopped = False  # True if this process leaves before the last step
        self.last_copy = False  # True if perhaps no surviving member holds the state
        self.others_may_wait = (
            False  # True if this process leaves while the other members, without knowing, may wait for it
        )
        self.saving = (
            False  # True if the group makes a durable checkpoint after this step; each member uploads its share
        )
        self.rank_size = (0, 1)  # rank in the group that completed the last step, and the size of this group
        self.loss = 0.0
        self._wants_to_leave = False
        self._has_group_state = False  # True if the state comes from a group, not from a previous process's snapshot
        self._loader_state = b""  # state of the data loader before this step
        self._reset()

    def steps(self, end: int) -> Iterator[int]:
        """Yield the step to do now, until `end` updates are completed or this process must leave."""
        while not self.stopped:
            if not self.size and not self._form():
                self.abandon()
            elif self.state.finished(end):
                return
            else:
                self._loader_state = self.checkpoints.loader.dump()
                yield self.state.step

    def virtual_workers(self) -> Iterator[int]:
        """Yield our virtual workers in this step; end early if the group turns out to be broken."""
        self._wants_to_leave = self.leaving.is_set()
        self.members.progress(self.state.step)
        save_due = self.rank == 0 and self.checkpoints.due()
        self._reduction.set_flags((self.members.regroup_pending(), self._wants_to_leave, save_due))
        for virtual_worker in share(self.total_virtual_workers, self.size, self.rank):
            if self.members.aborted():
                break
            yield virtual_worker
        # checked again at this point: if the group broke during the last virtual worker, the sum may be incomplete
        self._is_broken = self.members.aborted()

    def add(self, virtual_worker: int, loss: Tensor, summands: list[Tensor]) -> None:
        """Add one virtual worker's mean loss and summands (see `State.summands`)."""
        self._reduction.add(virtual_worker, loss, summands)

    def reduced(self) -> Tensor | None:
        """Return the sum of all summands, flat [state.width], valid until the next `add`; None if the group broke."""
        problem = RuntimeError("the group is broken")
        if not self._is_broken:
            try:
                total = self._reduction.total()
            except torch.OutOfMemoryError:
                raise  # another group would run out of memory, too
            except RuntimeError as error:
                problem = error
            else:
                width = self.state.width
                self._apply_flags(total[width : width + CONTROLS].tolist())
                return total[:width]
        self.members.report_failure(problem)
        self._reset()
        self.undo()
        self.checkpoints.interval.record_loss()
        return None

    def _apply_flags(self, control_flags: list[float]) -> None:
        """Apply the summed flags. All members see the same sums, so they stop after the same step."""
        loss, join, leave, save = control_flags
        self.loss, self.saving = loss / self.total_virtual_workers, save > 0
        if leave and not self.members.elastic:  # the other members cannot continue without the leaving member
            leave = self.total_virtual_workers
        self.last_copy = leave == self.total_virtual_workers
        self.stopped = self._wants_to_leave or self.last_copy
        if join or leave:
            self.size = 0

    def undo(self) -> None:
        """Restore the data loader's state from before this step, which will be repeated."""
        self.checkpoints.loader.load(self._loader_state)

    def abandon(self) -> None:
        """Leave without the agreement of the other members, which may or may not continue."""
        self.stopped = self.last_copy = True
        self.others_may_wait = self.rank_size[1] > 1 or not self._has_group_state
        self.rank_size = (0, 1)

    def finish(self, write: Callable[[], str]) -> bool:
        """Write the result (rank 0) after the last step. Return False if another group must be formed."""
        self.members.progress(self.state.updates)
        self.members.busy(True)
        sha256 = write() if self.rank == 0 else ""
        self.members.busy(False)
        while not self.members.finish(sha256, self.state.updates):
            self.stopped = self.leaving.is_set()
            if self.stopped or self.members.regroup_pending():
                self.size = 0
                return False
        return True

    def _form(self) -> bool:
        """Join the next group and adopt the newest state of its members.

        Return False if this process must leave instead.
        """
        while view := self.members.form(self.state.step, self.leaving):
            if view.size > self.total_virtual_workers:
                raise ConfigError(
                    f"the group has {view.size} workers: it must have at most train.virtual_workers "
                    f"({self.total_virtual_workers}). Start fewer, or raise train.virtual_workers (this changes the "
                    "result)."
                )
            self.checkpoints.report()
            try:
                self._agree(view)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.members.report_failure(error)
                continue
            self.rank, self.size = self.rank_size = view.rank, view.size
            return True
        return False

    def _agree(self, view: GroupView) -> None:
        """Give all members the newest state that any member has, from training or from a snapshot on its node. (Within
        one run, equal steps have equal bits.) If no member was training, rank 0 also checks the object store."""
        self._reduction.view, pg = view, view.pg
        state, checkpoints = self.state, self.checkpoints
        position = torch.tensor([state.step, self._has_group_state, checkpoints.crc], device=state.device)
        all_positions = [position.clone() for _ in range(view.size)]
        if pg:
            self.members.wait(pg.allgather([all_positions], [position]))
        positions = [tuple(values.tolist()) for values in all_positions]
        source = max(range(len(positions)), key=lambda rank: (positions[rank][:2], -rank))
        step = positions[source][0]
        if not any(has_group_state for _, has_group_state, _ in positions):
            if view.rank == 0:
                self.members.busy(True)  # the state may be large, or the object store unavailable
                try:
                    checkpoints.restore(step, self.members.run, self.members.regroup_pending)
                finally:
                    self.members.busy(False)
            position[0] = state.step
            if pg:
                self.members.wait(pg.broadcast(position, 0))
            if int(position[0]) > step:
                positions[0], source = tuple(position.tolist()), 0
        if pg and any(values != positions[source] for values in positions):
            self._broadcast_state(view, source)
        self._has_group_state, checkpoints.crc = True, 0

    def _broadcast_state(self, view: GroupView, source: int) -> None:
        state, loader = self.state, self.checkpoints.loader
        loader_state = loader.dump() if view.rank == source else b""
        header = torch.tensor([state.step, len(loader_state)], device=state.device)
        self.members.wait(view.pg.broadcast(header, source))
        step, length = header.tolist()
        memory = state.memory if view.rank == source else self._receive_buffer()
        self.members.wait(view.pg.broadcast(memory, source))
        if length:
            data = torch.tensor(list(loader_state) or [0] * length, dtype=torch.uint8, device=state.device)
            self.members.wait(view.pg.broadcast(data, source))
            loader.load(bytes(data.tolist()))
        if memory is not state.memory:
            state.memory.copy_(memory)
        state.step = step

    def _receive_buffer(self) -> Tensor:
        """Return memory to receive a state. Our own state is kept until the new one is complete: the source may die,
        and an abandoned broadcast may still write."""
        state = self.state
        with suppress(RuntimeError):  # out of memory, on the CPU or on CUDA
            return torch.empty_like(state.memory)
        state.step, self._has_group_state = -1, False  # a partial state must not be sent to other members
        return state.memory

    def _reset(self) -> None:
        """Leave the group and replace the buffers: a broken group may still write into the old buffers."""
        self.size, self._is_broken = 0, False
        # dropping the old reduction destroys the process group, which closes its connections and wakes our peers
        self._reduction = Reduction(self.state, self.members)
