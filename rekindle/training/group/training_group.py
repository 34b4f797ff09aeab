"""The group as the training loop sees it: steps to do, our virtual workers, and one sum over all
virtual workers.

    while group.start_step(end):
        for virtual_worker in group.virtual_workers:
            if group.is_broken:
                break
            group.add(virtual_worker, loss, summands)
        total = group.reduce()
        if total is None:  # a member was lost: the survivors repeat the step
            continue
        ...

What happens when a worker is killed:

1. The kernel closes the killed process's connections. The coordinator (`membership/server.py`) sees
   this, removes the
   member (`membership/state_machine.py`), and tells the others that the generation is aborted.
2. The client's thread (`membership/client.py`) receives the message and calls
   `ElasticGroup._abort`, which shuts down
   the group's sockets. The collective in which this process waits fails within milliseconds.
3. `reduce` returns None: the failure is reported, the data loader goes back to the start of the
   step, and the
   reduction is replaced, which destroys the process group. The state is untouched: it changes only
   after a sum.
4. The loop calls `start_step` for the same step. `_form` joins the next generation, which the
   coordinator publishes
   when all survivors have reported, and `_agree` gives all members the newest state. The survivors
   have equal states,
   so nothing is sent, and the step is repeated with more virtual workers per process.

Four numbers are summed together with every gradient: the loss, and the flags "a worker wants to
join", "a worker must leave" and "make a durable checkpoint after this step" (set by rank 0).
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from rekindle.errors import ConfigError
from rekindle.training.checkpoint.durable import RankSize
from rekindle.training.checkpoint.manager import Checkpoints
from rekindle.training.group.interface import Membership
from rekindle.training.group.process_group import GroupView
from rekindle.training.group.reduction import CONTROLS, Flags, Reduction
from rekindle.training.group.tree import share
from rekindle.training.local_dataset import LoaderState
from rekindle.training.training_state import State

ALONE = RankSize(rank=0, size=1)


@dataclass(frozen=True)
class Position:
    """The state that one member has when a group is formed."""

    step: int  # number of updates; -1 without a state
    is_from_group: bool  # False: the state is the snapshot of a previous process
    crc: int  # checksum of the snapshot; 0 if the state comes from a group


class TrainingGroup:
    """The processes that train together now. Rank 0 restores from `checkpoints` when no member has
    a state."""

    def __init__(
        self,
        membership: Membership,
        state: State,
        loader: LoaderState,
        checkpoints: Checkpoints,
        leaving: threading.Event,
    ) -> None:
        self.membership = membership
        self.state = state
        self.loader = loader
        self.checkpoints = checkpoints
        self.leaving = leaving
        self.total_virtual_workers = state.config.virtual_workers

        # the current group; size 0: a group must be formed
        self.rank = 0
        self.size = 0
        self._reduction = Reduction(state, membership.wait)
        self.last_place = ALONE  # in the group that completed the last step

        # results of the last step
        self.loss = 0.0
        self.saving = False  # True if each member must upload its share of a durable checkpoint
        self.stopped = False  # True if this process leaves before the last step

        # how this process leaves
        self.last_copy = False  # True if perhaps no surviving member holds the state
        # True if the other members, without knowing that this process leaves, may wait for it
        self.others_may_wait = False
        self._wants_to_leave = False

        # the state of this process
        self._is_from_group = False  # False: the state is the snapshot of a previous process
        self._loader_state = b""  # state of the data loader before this step

    def start_step(self, end: int) -> bool:
        """Join a group if there is none, and announce the next step, which is `state.step`.

        Return False if `end` updates are completed, or this process must leave (`stopped`).
        """
        if self.size == 0 and not self.stopped and not self._form():
            self.abandon()
        if self.stopped or self.state.finished(end):
            return False

        self._loader_state = self.loader.dump()
        self._wants_to_leave = self.leaving.is_set()
        self.membership.report_step(self.state.step)

        self._reduction.set_flags(
            Flags(
                join=self.membership.regroup_pending(),
                leave=self._wants_to_leave,
                save=self.rank == 0 and self.checkpoints.due(),
            )
        )

        return True

    @property
    def virtual_workers(self) -> range:
        """The virtual workers of this process in this step."""
        return share(self.total_virtual_workers, self.size, self.rank)

    @property
    def is_broken(self) -> bool:
        """True if the sum of this step will not be complete: `reduce` will return None."""
        return self.membership.aborted()

    def add(self, virtual_worker: int, loss: Tensor, summands: list[Tensor]) -> None:
        """Add one virtual worker's mean loss and summands (see `State.summands`)."""
        self._reduction.add(virtual_worker, loss, summands)

    def reduce(self) -> Tensor | None:
        """Return the sum of all summands, flat [state.width], valid until the next `add`; None if
        the group broke.

        Call once per step, after `add` for each of `virtual_workers`.
        """
        try:
            if self.is_broken:
                raise RuntimeError("the group is broken")

            total = self._reduction.total()
        except torch.OutOfMemoryError:
            raise  # another group would run out of memory, too
        except RuntimeError as error:
            self.membership.report_failure(error)
            self._reset()
            self.undo()
            self.checkpoints.record_loss()

            return None

        width = self.state.width
        self._apply_controls(total[width : width + CONTROLS].tolist())
        return total[:width]

    def undo(self) -> None:
        """Restore the data loader's state from before this step, which will be repeated."""
        self.loader.load(self._loader_state)

    def abandon(self) -> None:
        """Leave without the agreement of the other members, which may or may not continue."""
        self.stopped = True
        self.last_copy = True
        self.others_may_wait = self.last_place.size > 1 or not self._is_from_group
        self.last_place = ALONE

    def finish(self, write: Callable[[], str]) -> bool:
        """Write the result (rank 0) after the last step. Return False if another group must be
        formed."""
        self.membership.report_step(self.state.updates)
        self.membership.report_busy(True)
        sha256 = write() if self.rank == 0 else ""
        self.membership.report_busy(False)

        while not self.membership.finish(sha256, self.state.updates):
            self.stopped = self.leaving.is_set()
            if self.stopped or self.membership.regroup_pending():
                self.size = 0
                return False

        return True

    def _apply_controls(self, controls: list[float]) -> None:
        """Apply the summed controls. All members see the same sums, so they stop after the same
        step."""
        loss, join, leave, save = controls
        self.loss = loss / self.total_virtual_workers
        self.saving = save > 0

        all_leave = leave == self.total_virtual_workers

        if leave and not self.membership.can_shrink:
            all_leave = True  # the other members cannot continue without the leaving member

        self.last_copy = all_leave
        self.stopped = self._wants_to_leave or all_leave
        if join or leave:
            self.size = 0

    def _form(self) -> bool:
        """Join the next group and adopt the newest state of its members.

        Return False if this process must leave instead.
        """
        while view := self.membership.form(self.state.step, self.leaving):
            if view.size > self.total_virtual_workers:
                raise ConfigError(
                    f"the group has {view.size} workers: it must have at most train.virtual_workers"
                    f" ({self.total_virtual_workers}). Start fewer, or raise train.virtual_workers"
                    " (this changes the result)."
                )

            self.checkpoints.report()
            try:
                self._agree(view)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.membership.report_failure(error)
                continue

            self.rank = view.rank
            self.size = view.size
            self.last_place = RankSize(view.rank, view.size)

            return True

        return False

    def _agree(self, view: GroupView) -> None:
        """Give all members the newest state that any member has, from training or from a snapshot
        on its node.

        Within one run, equal steps have equal bits. If no member was training, rank 0 also checks
        the object store.
        """
        self._reduction.view = view
        positions = self._exchange_positions(view)
        source = max(
            range(view.size),
            key=lambda rank: (positions[rank].step, positions[rank].is_from_group, -rank),
        )

        if not any(position.is_from_group for position in positions):
            snapshot_step = positions[source].step
            restored = self._restore(view, snapshot_step)
            if restored.step > snapshot_step:
                source = 0
                positions[0] = restored

        if any(position != positions[source] for position in positions):
            self._broadcast_state(view, source)

        self._is_from_group = True
        self.checkpoints.snapshot_crc = 0

    def _exchange_positions(self, view: GroupView) -> list[Position]:
        """Return the positions of all members, by rank."""
        own_values = self._position_tensor()
        if not view.pg:
            return [_position(own_values)]

        all_values = [own_values.clone() for _ in range(view.size)]
        self.membership.wait(view.pg.allgather([all_values], [own_values]))
        return [_position(values) for values in all_values]

    def _restore(self, view: GroupView, snapshot_step: int) -> Position:
        """Let rank 0 load a durable checkpoint that is newer than `snapshot_step`; return rank 0's
        position."""
        if view.rank == 0:
            # the state may be large, or the object store unavailable
            self.membership.report_busy(True)
            try:
                self.checkpoints.restore(
                    snapshot_step, self.membership.run, self.membership.regroup_pending
                )
            finally:
                self.membership.report_busy(False)

        values = self._position_tensor()
        if view.pg:
            self.membership.wait(view.pg.broadcast(values, 0))

        return _position(values)

    def _position_tensor(self) -> Tensor:
        values = [self.state.step, self._is_from_group, self.checkpoints.snapshot_crc]
        return torch.tensor(values, device=self.state.device)

    def _broadcast_state(self, view: GroupView, source: int) -> None:
        """Send the state and the data loader's state of rank `source` to all other members."""
        state = self.state
        is_source = view.rank == source

        loader_state = self.loader.dump() if is_source else b""
        header = torch.tensor([state.step, len(loader_state)], device=state.device)
        self.membership.wait(view.pg.broadcast(header, source))
        step, loader_length = header.tolist()

        memory = state.memory if is_source else self._receive_buffer()
        self.membership.wait(view.pg.broadcast(memory, source))

        if loader_length:
            values = list(loader_state) or [0] * loader_length
            loader_bytes = torch.tensor(values, dtype=torch.uint8, device=state.device)
            self.membership.wait(view.pg.broadcast(loader_bytes, source))
            self.loader.load(bytes(loader_bytes.tolist()))

        if memory is not state.memory:
            state.memory.copy_(memory)

        state.step = step

    def _receive_buffer(self) -> Tensor:
        """Return memory to receive a state.

        Our own state is kept until the new one is complete: the source may die, and an abandoned
        broadcast may still write.
        """
        state = self.state
        with suppress(RuntimeError):  # out of memory, on the CPU or on CUDA
            return torch.empty_like(state.memory)

        # a partial state must not be sent to other members
        state.step = -1
        self._is_from_group = False
        return state.memory

    def _reset(self) -> None:
        """Leave the group and replace the buffers: a broken group may still write into the old
        buffers."""
        self.size = 0
        # dropping the old reduction destroys the process group, which closes its connections and
        # wakes our peers
        self._reduction = Reduction(self.state, self.membership.wait)


def _position(values: Tensor) -> Position:
    step, is_from_group, crc = values.tolist()
    return Position(step, bool(is_from_group), crc)
