"""Sums the gradients of all virtual workers, with the same bits for any number of processes.

Each process sums the complete subtrees of its virtual workers (see tree.py), sends to each other
process the slice of these sums that the receiver is responsible for, and finishes the tree for its
own slice. At the end, all processes gather the slices. Altogether, the exchange of slices sends as
much data as an all-reduce. The summed memory holds the gradients, then buffer changes and
validation sums, if any, then CONTROL_VALUE_COUNT numbers: the loss and three requests.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rekindle.training.group.process_group import GroupView
from rekindle.training.group.tree import LeafRange, TreeSum, list_rank_subtrees
from rekindle.training.training_state import TrainingState

# number of control values: the loss and the three MemberRequests
CONTROL_VALUE_COUNT = 4
# the type stubs lack the fused operations
kernels: Any = torch


class MemberRequests(NamedTuple):
    """The requests of a process to all members of its group. The requests are summed like the
    gradients of the process, once for each of its virtual workers."""

    # a worker wants to join
    join: bool = False
    # this process must leave
    leave: bool = False
    # a durable checkpoint is due after this step
    save: bool = False


class PartialSum(NamedTuple):
    """Memory for one partial sum of gradients."""

    flat: Tensor
    # parts of `flat`: the gradients and other values to sum, the loss, and the requests of workers
    views: list[Tensor]


class GradientReduction:
    """Computes the sums of gradients in one group of workers. Each group needs a new
    GradientReduction, because a broken group may still write to its buffers.

    `wait_for_collectives(*collectives)` raises RuntimeError if a collective fails.
    """

    def __init__(
        self, training_state: TrainingState, wait_for_collectives: Callable[..., None]
    ) -> None:
        self.state = training_state
        self.view = GroupView(0, 1)
        self.virtual_workers = training_state.config.virtual_workers
        self.exact = training_state.config.reduction == "exact"
        self._wait_for_collectives = wait_for_collectives

        # number of elements that are added so that the sum can be divided into slices of equal size
        padding_elements = self.virtual_workers
        self._total = torch.zeros(
            training_state.width + CONTROL_VALUE_COUNT + padding_elements,
            device=training_state.device,
        )
        self._receive_memory = self._total.new_empty(0)
        self._requests = MemberRequests()
        self._request_values = self._total.new_tensor(self._requests)
        free_partial_sums = list[PartialSum]()
        self._pool = free_partial_sums

        # use a local function without `self`, because a method would create a reference cycle that
        # keeps the process group alive
        def add_buffers(first: PartialSum, second: PartialSum) -> PartialSum:
            first.flat.add_(second.flat)
            free_partial_sums.append(second)
            return first

        self._sum = TreeSum[PartialSum](self.virtual_workers, add_buffers)

    def set_requests(self, member_requests: MemberRequests) -> None:
        """Set the requests of this process in this step."""
        if member_requests != self._requests:
            self._requests = member_requests
            self._request_values = self._total.new_tensor(member_requests)

    def add(self, virtual_worker: int, mean_loss: Tensor, summands: list[Tensor]) -> None:
        """Add one virtual worker's mean loss and summands (see `TrainingState.view_summands`)."""
        summed_tensors = [*summands, mean_loss.detach(), self._request_values]
        block_end = virtual_worker + 1

        sibling = self._sum.pop_sibling((virtual_worker, block_end))
        if sibling:
            (block_start, _), partial_sum = sibling
            kernels._foreach_add_(partial_sum.views, summed_tensors)
        else:
            block_start = virtual_worker
            partial_sum = self._pool.pop() if self._pool else self._allocate_partial_sum()
            kernels._foreach_copy_(partial_sum.views, summed_tensors)

        self._sum.add_value((block_start, block_end), partial_sum)

    def reduce(self) -> Tensor:
        """Return the sum over all virtual workers as a flat tensor [state.width +
        CONTROL_VALUE_COUNT]. The returned sum is valid until the next `add`."""
        partial_sums = self._sum.take_partial_sums()
        self._pool += [partial_sum for _, partial_sum in partial_sums]

        total_width = self.state.width + CONTROL_VALUE_COUNT
        group_size = self.view.size

        if not self.view.pg:
            return partial_sums[0][1].flat[:total_width]

        blocks_by_rank = [
            list_rank_subtrees(self.virtual_workers, group_size, rank) for rank in range(group_size)
        ]
        # use an all-reduce, which is exact for two addends, because their sum does not depend on
        # their order
        has_two_addends = group_size == 2 and all(
            len(rank_blocks) == 1 for rank_blocks in blocks_by_rank
        )
        if self.exact and not has_two_addends:
            sums_of_blocks = [(block, partial_sum.flat) for block, partial_sum in partial_sums]
            return self._reduce_exactly(sums_of_blocks, blocks_by_rank, total_width)

        summed_tensor = partial_sums[0][1].flat[:total_width]
        for _, partial_sum in partial_sums[1:]:
            summed_tensor += partial_sum.flat[:total_width]

        self._wait_for_collectives(self.view.pg.allreduce([summed_tensor]))
        return summed_tensor

    def _reduce_exactly(
        self,
        sums_of_blocks: list[tuple[LeafRange, Tensor]],
        blocks_by_rank: list[tuple[LeafRange, ...]],
        total_width: int,
    ) -> Tensor:
        """Exchange slices of the partial sums, finish the tree of sums for the slice of this rank,
        and gather the slices of all ranks."""
        rank = self.view.rank
        group_size = self.view.size
        process_group = self.view.pg
        slice_length = -(-total_width // group_size)
        own_slice = slice(rank * slice_length, (rank + 1) * slice_length)
        block_count = sum(len(peer_blocks) for peer_blocks in blocks_by_rank)
        receive_buffers = self._allocate_receive_buffers(block_count, slice_length)

        received_pieces: list[tuple[LeafRange, Tensor]] = []
        collectives = []

        with self._coalesce_transfers():
            for peer_rank, peer_blocks in enumerate(blocks_by_rank):
                if peer_rank == rank:
                    received_pieces += [
                        (block, partial_sum[own_slice]) for block, partial_sum in sums_of_blocks
                    ]
                    continue

                peer_slice = slice(peer_rank * slice_length, (peer_rank + 1) * slice_length)
                for message_tag, block in enumerate(peer_blocks):
                    receive_buffer = receive_buffers[len(received_pieces)]
                    received_pieces.append((block, receive_buffer))
                    collectives.append(process_group.recv([receive_buffer], peer_rank, message_tag))

                for message_tag, (_, partial_sum) in enumerate(sums_of_blocks):
                    collectives.append(
                        process_group.send([partial_sum[peer_slice]], peer_rank, message_tag)
                    )

        self._wait_for_collectives(*collectives)

        tree_sum = TreeSum[Tensor](self.virtual_workers, Tensor.add_)
        for block, received_piece in received_pieces:
            tree_sum.add_value(block, received_piece)

        ((_, own_total),) = tree_sum.take_partial_sums()

        gathered_total = self._total[: slice_length * group_size]
        self._wait_for_collectives(process_group._allgather_base(gathered_total, own_total))

        return gathered_total

    @contextmanager
    def _coalesce_transfers(self) -> Iterator[None]:
        """Start all sends and receives of a `with` block as one operation, because nccl would
        deadlock with separate operations."""
        if self.state.device.type == "cuda":
            self.view.pg._start_coalescing()
        yield
        if self.state.device.type == "cuda":
            self.view.pg._end_coalescing(self.state.device).wait()

    def _allocate_partial_sum(self) -> PartialSum:
        flat_sum = torch.zeros_like(self._total)
        state_width = self.state.width
        loss_view = flat_sum[state_width]
        request_view = flat_sum[state_width + 1 : state_width + CONTROL_VALUE_COUNT]
        return PartialSum(flat_sum, [*self.state.view_summands(flat_sum), loss_view, request_view])

    def _allocate_receive_buffers(self, buffer_count: int, slice_length: int) -> Tensor:
        if self._receive_memory.numel() < buffer_count * slice_length:
            self._receive_memory = self._total.new_empty(buffer_count * slice_length)
        return self._receive_memory[: buffer_count * slice_length].view(buffer_count, slice_length)
