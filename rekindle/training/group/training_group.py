"""The interface of the training loop to its group: the next step, the virtual workers of this
process, and the sum over all virtual workers.

    while group.start_step(end):
        for virtual_worker in group.virtual_workers:
            if group.is_broken:
                break
            group.add(virtual_worker, loss, summands)
        total = group.reduce()
        if total is None:  # a member was lost: the survivors repeat the step
            continue
        ...

The following steps happen when a worker is killed:

1. The kernel closes the connections of the killed process. The coordinator notices the closed
connections (`membership/server.py`), removes the member (`membership/state_machine.py`), and tells
the other members that the generation is aborted. 2. The client's thread (`membership/client.py`)
receives the message and calls
   `ElasticGroup._abort_collective`, which shuts down the group's sockets. The collective in which
   this process waits fails within milliseconds.
3. `TrainingGroup.reduce` reports the failure, restores the data loader to the start of the step,
destroys the
   process group by replacing the `GradientReduction` that holds it, and returns None. The training
   state is unchanged: it changes only after a complete sum.
4. The training loop calls `start_step` for the same step. `_join_group` joins the next generation,
which the
   coordinator publishes when all survivors have reported, and `_adopt_newest_state` gives all
   members the newest state. The survivors have equal states, so no state is sent, and they repeat
   the step with more virtual workers per process.

Four numbers are summed together with every gradient: the loss, and the requests "a worker wants to
join", "a worker must leave" and "make a durable checkpoint after this step" (set by rank 0).
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from rekindle.errors import ConfigError
from rekindle.training.checkpoint.durable import RankAndGroupSize
from rekindle.training.checkpoint.manager import WorkerCheckpoints
from rekindle.training.group.interface import Membership
from rekindle.training.group.process_group import GroupView
from rekindle.training.group.reduction import CONTROL_VALUE_COUNT, GradientReduction, MemberRequests
from rekindle.training.group.tree import list_rank_leaves
from rekindle.training.local_dataset import LoaderState
from rekindle.training.training_state import TrainingState

SINGLE_PROCESS = RankAndGroupSize(rank=0, size=1)


@dataclass(frozen=True)
class MemberState:
    """The step and the origin of the training state that a member has when a group is formed."""

    # number of updates; -1 without a state
    step: int
    # False if the state is a snapshot that a previous process has left
    is_from_group: bool
    # checksum of the snapshot; 0 if the state comes from a group
    crc: int


class TrainingGroup:
    """The processes that train one model together. If no member was training, rank 0 restores the
    state from `checkpoints`."""

    def __init__(
        self,
        membership: Membership,
        training_state: TrainingState,
        loader_state: LoaderState,
        checkpoints: WorkerCheckpoints,
        leaving_event: threading.Event,
    ) -> None:
        self.membership = membership
        self.state = training_state
        self.loader = loader_state
        self.checkpoints = checkpoints
        self.leaving = leaving_event
        self.total_virtual_workers = training_state.config.virtual_workers

        # rank of this process and size of the current group; size 0 means that a group must be
        # formed
        self.rank = 0
        self.size = 0
        self._reduction = GradientReduction(training_state, membership.wait)
        # rank of this process and size of its group at the last completed step
        self.last_rank_and_size = SINGLE_PROCESS

        # loss and other results of the newest step
        self.loss = 0.0
        # True if each member must upload its part of a durable checkpoint after this step
        self.saving = False
        # True if this process leaves before the last step
        self.stopped = False

        # circumstances of the departure, if this process leaves
        self.last_copy = False  # True if this process may hold the only copy of the state
        # True if other members may wait for this process, because they do not know that it leaves
        self.others_may_wait = False
        self._wants_to_leave = False

        # training state of this process
        self._is_from_group = False  # False: the state is the snapshot of a previous process
        # state of the data loader before this step
        self._loader_state = b""

    def start_step(self, last_step: int) -> bool:
        """Join a group of workers unless this process is in a group, and announce the next step,
        `state.step`.

        Return False if training has ended, after `last_step` updates at the latest, or if this
        process must leave (`stopped`).
        """
        if self.size == 0 and not self.stopped and not self._join_group():
            self.leave_without_agreement()
        if self.stopped or self.state.is_finished(last_step):
            return False

        self._loader_state = self.loader.dump()
        self._wants_to_leave = self.leaving.is_set()
        self.membership.report_step(self.state.step)

        self._reduction.set_requests(
            MemberRequests(
                join=self.membership.regroup_pending(),
                leave=self._wants_to_leave,
                save=self.rank == 0 and self.checkpoints.is_due(),
            )
        )

        return True

    @property
    def virtual_workers(self) -> range:
        """The virtual workers of this process in this step."""
        return list_rank_leaves(self.total_virtual_workers, self.size, self.rank)

    @property
    def is_broken(self) -> bool:
        """True if the sum of this step will not be complete, so that `reduce` will return None."""
        return self.membership.aborted()

    def add(self, virtual_worker: int, mean_loss: Tensor, summands: list[Tensor]) -> None:
        """Add one virtual worker's mean loss and summands (see `TrainingState.view_summands`)."""
        self._reduction.add(virtual_worker, mean_loss, summands)

    def reduce(self) -> Tensor | None:
        """Return the sum over all virtual workers as a flat tensor of `state.width` elements; None
        if the group broke.

        The sum is valid until the next `add`. Call `reduce` once per step, after calling `add` for
        each of `virtual_workers`.
        """
        try:
            if self.is_broken:
                raise RuntimeError("the group is broken")

            summed_tensor = self._reduction.reduce()
        except torch.OutOfMemoryError:
            # an out-of-memory error is raised, because another group would also run out of memory
            raise
        except RuntimeError as error:
            self.membership.report_failure(error)
            self._leave_group()
            self.restore_loader()
            self.checkpoints.record_loss()

            return None

        state_width = self.state.width
        self._apply_controls(
            summed_tensor[state_width : state_width + CONTROL_VALUE_COUNT].tolist()
        )
        return summed_tensor[:state_width]

    def restore_loader(self) -> None:
        """Restore the data loader to its state before this step, which will be repeated."""
        self.loader.load(self._loader_state)

    def leave_without_agreement(self) -> None:
        """Leave the group without the agreement of the other members."""
        self.stopped = True
        self.last_copy = True
        self.others_may_wait = self.last_rank_and_size.size > 1 or not self._is_from_group
        self.last_rank_and_size = SINGLE_PROCESS

    def finish(self, write_result: Callable[[], str]) -> bool:
        """After the last step, let rank 0 write the result and wait until the run is complete.

        Return False if another group must be formed first, or if this process must leave.
        """
        self.membership.report_step(self.state.update_count)
        self.membership.report_busy(True)
        sha256 = write_result() if self.rank == 0 else ""
        self.membership.report_busy(False)

        while not self.membership.finish(sha256, self.state.update_count):
            self.stopped = self.leaving.is_set()
            if self.stopped or self.membership.regroup_pending():
                self.size = 0
                return False

        return True

    def _apply_controls(self, control_sums: list[float]) -> None:
        """Act on the sums of the four control values, which are described at the top of this
        module. All members get the same sums, so they stop after the same step."""
        loss_sum, join_requests, leave_requests, save_requests = control_sums
        self.loss = loss_sum / self.total_virtual_workers
        self.saving = save_requests > 0

        are_all_leaving = leave_requests == self.total_virtual_workers

        if leave_requests and not self.membership.can_shrink:
            # the other members cannot continue without the leaving member
            are_all_leaving = True

        self.last_copy = are_all_leaving
        self.stopped = self._wants_to_leave or are_all_leaving
        if join_requests or leave_requests:
            self.size = 0

    def _join_group(self) -> bool:
        """Join the next group and adopt the newest state of its members. Return False if this
        process must leave instead of joining a group.
        """
        while group_view := self.membership.form(self.state.step, self.leaving):
            if group_view.size > self.total_virtual_workers:
                raise ConfigError(
                    f"the group has {group_view.size} workers: it must have at most"
                    f" train.virtual_workers ({self.total_virtual_workers}). Start fewer, or raise"
                    " train.virtual_workers (this changes the result)."
                )

            self.checkpoints.send_early_events()
            try:
                self._adopt_newest_state(group_view)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.membership.report_failure(error)
                continue

            self.rank = group_view.rank
            self.size = group_view.size
            self.last_rank_and_size = RankAndGroupSize(group_view.rank, group_view.size)

            return True

        return False

    def _adopt_newest_state(self, group_view: GroupView) -> None:
        """Give all members the newest state of any member: a state from training, or the snapshot
        of a previous process.

        Within one run, states of equal steps have equal bits. If no member was training, rank 0
        looks for a newer checkpoint in the object store.
        """
        self._reduction.view = group_view
        member_states = self._exchange_member_states(group_view)
        source_rank = max(
            range(group_view.size),
            key=lambda rank: (member_states[rank].step, member_states[rank].is_from_group, -rank),
        )

        if not any(member_state.is_from_group for member_state in member_states):
            snapshot_step = member_states[source_rank].step
            restored_state = self._restore(group_view, snapshot_step)
            if restored_state.step > snapshot_step:
                source_rank = 0
                member_states[0] = restored_state

        if any(member_state != member_states[source_rank] for member_state in member_states):
            self._broadcast_state(group_view, source_rank)

        self._is_from_group = True
        self.checkpoints.snapshot_crc = 0

    def _exchange_member_states(self, group_view: GroupView) -> list[MemberState]:
        """Return the MemberState of each member, by rank."""
        own_state_tensor = self._make_member_state_tensor()
        if not group_view.pg:
            return [_parse_member_state(own_state_tensor)]

        state_tensors = [own_state_tensor.clone() for _ in range(group_view.size)]
        self.membership.wait(group_view.pg.allgather([state_tensors], [own_state_tensor]))
        return [_parse_member_state(state_tensor) for state_tensor in state_tensors]

    def _restore(self, group_view: GroupView, snapshot_step: int) -> MemberState:
        """Let rank 0 load a durable checkpoint if a checkpoint is newer than `snapshot_step`;
        return the MemberState of rank 0."""
        if group_view.rank == 0:
            # report this process as busy, because loading takes long if the state is large or the
            # object store is unavailable
            self.membership.report_busy(True)
            try:
                self.checkpoints.restore(
                    snapshot_step, self.membership.run, self.membership.regroup_pending
                )
            finally:
                self.membership.report_busy(False)

        state_tensor = self._make_member_state_tensor()
        if group_view.pg:
            self.membership.wait(group_view.pg.broadcast(state_tensor, 0))

        return _parse_member_state(state_tensor)

    def _make_member_state_tensor(self) -> Tensor:
        state_fields = [self.state.step, self._is_from_group, self.checkpoints.snapshot_crc]
        return torch.tensor(state_fields, device=self.state.device)

    def _broadcast_state(self, group_view: GroupView, source_rank: int) -> None:
        """Send the state and the data loader's state of rank `source_rank` to all other members."""
        training_state = self.state
        is_source_rank = group_view.rank == source_rank

        loader_state = self.loader.dump() if is_source_rank else b""
        state_header = torch.tensor(
            [training_state.step, len(loader_state)], device=training_state.device
        )
        self.membership.wait(group_view.pg.broadcast(state_header, source_rank))
        step, loader_length = state_header.tolist()

        state_memory = training_state.memory if is_source_rank else self._choose_receive_buffer()
        self.membership.wait(group_view.pg.broadcast(state_memory, source_rank))

        if loader_length:
            loader_byte_values = list(loader_state) or [0] * loader_length
            loader_bytes = torch.tensor(
                loader_byte_values, dtype=torch.uint8, device=training_state.device
            )
            self.membership.wait(group_view.pg.broadcast(loader_bytes, source_rank))
            self.loader.load(bytes(loader_bytes.tolist()))

        if state_memory is not training_state.memory:
            training_state.memory.copy_(state_memory)

        training_state.step = step

    def _choose_receive_buffer(self) -> Tensor:
        """Return memory to receive a training state in, which is separate memory if enough memory
        is free.

        With separate memory, the current state stays intact if the sender dies, or if an aborted
        broadcast still writes to the memory.
        """
        training_state = self.state
        # torch raises RuntimeError if memory is insufficient, on the CPU or on CUDA
        with suppress(RuntimeError):
            return torch.empty_like(training_state.memory)

        # the step -1 marks a partial state, which must not be sent to other members
        training_state.step = -1
        self._is_from_group = False
        return training_state.memory

    def _leave_group(self) -> None:
        """Leave a broken group and replace the buffers, because the collectives of the group may
        still write to them."""
        self.size = 0
        # this assignment drops the last reference to the process group, which closes its
        # connections and wakes the peers
        self._reduction = GradientReduction(self.state, self.membership.wait)


def _parse_member_state(state_tensor: Tensor) -> MemberState:
    step, is_from_group, checksum = state_tensor.tolist()
    return MemberState(step, bool(is_from_group), checksum)
