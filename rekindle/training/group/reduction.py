"""Sums the gradients of all virtual workers, with the same bits for any number of processes.

Each process sums the complete subtrees of its virtual workers (see tree.py), sends every other
process that process's slice of these sums, and finishes the tree for its own slice; then all
processes gather the slices. Altogether, this exchange sends as much data as an all-reduce. The
summed memory holds the gradients, then buffer changes and validation sums, if any, then
CONTROL_COUNT numbers: the loss and three requests.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rekindle.training.group.process_group import GroupView
from rekindle.training.group.tree import LeafRange, TreeSum, rank_subtrees
from rekindle.training.training_state import State

CONTROL_COUNT = 4  # number of control values: the loss and the three MemberRequests
kernels: Any = torch  # the type stubs lack the fused operations


class MemberRequests(NamedTuple):
    """The requests of a process to all members. The requests are summed like the gradients of the
    process, once for each of its virtual workers."""

    join: bool = False  # a worker wants to join
    leave: bool = False  # this process must leave
    save: bool = False  # a durable checkpoint is due after this step


class PartialSum(NamedTuple):
    """Memory for one partial sum."""

    flat: Tensor
    views: list[Tensor]  # views of `flat`: the state's summands, the loss and the requests


class Reduction:
    """Computes the sums of one group. Each group needs a new Reduction, because a broken group may
    still write to its buffers.

    `wait(*works)` waits for collectives, and raises RuntimeError if one fails.
    """

    def __init__(self, state: State, wait: Callable[..., None]) -> None:
        self.state = state
        self.view = GroupView(0, 1)
        self.virtual_workers = state.config.virtual_workers
        self.exact = state.config.reduction == "exact"
        self._wait = wait

        # padding, so that the sum can be divided into slices of equal size
        padding = self.virtual_workers
        self._total = torch.zeros(state.width + CONTROL_COUNT + padding, device=state.device)
        self._inbox = self._total.new_empty(0)
        self._flags = MemberRequests()
        self._flag_values = self._total.new_tensor(self._flags)
        self._pool = pool = list[PartialSum]()

        # this is a local function, because a method would create a reference cycle that keeps the
        # process group alive
        def add_buffers(first: PartialSum, second: PartialSum) -> PartialSum:
            first.flat.add_(second.flat)
            pool.append(second)
            return first

        self._sum = TreeSum[PartialSum](self.virtual_workers, add_buffers)

    def set_flags(self, flags: MemberRequests) -> None:
        """Set the requests of this process in this step."""
        if flags != self._flags:
            self._flags = flags
            self._flag_values = self._total.new_tensor(flags)

    def add(self, virtual_worker: int, loss: Tensor, summands: list[Tensor]) -> None:
        """Add one virtual worker's mean loss and summands (see `State.view_summands`)."""
        values = [*summands, loss.detach(), self._flag_values]
        end = virtual_worker + 1

        sibling = self._sum.pop_sibling((virtual_worker, end))
        if sibling:
            (start, _), buffer = sibling
            kernels._foreach_add_(buffer.views, values)
        else:
            start = virtual_worker
            buffer = self._pool.pop() if self._pool else self._allocate_partial_sum()
            kernels._foreach_copy_(buffer.views, values)

        self._sum.add_value((start, end), buffer)

    def reduce(self) -> Tensor:
        """Return the sum over all virtual workers as a flat tensor [state.width + CONTROL_COUNT].
        The returned sum is valid until the next `add`."""
        partial_sums = self._sum.take_partial_sums()
        self._pool += [buffer for _, buffer in partial_sums]

        width = self.state.width + CONTROL_COUNT
        size = self.view.size

        if not self.view.pg:
            return partial_sums[0][1].flat[:width]

        blocks_by_rank = [rank_subtrees(self.virtual_workers, size, rank) for rank in range(size)]
        # an all-reduce is exact here: the sum of two addends does not depend on their order
        has_two_addends = size == 2 and all(len(rank_blocks) == 1 for rank_blocks in blocks_by_rank)
        if self.exact and not has_two_addends:
            sums_of_blocks = [(block, buffer.flat) for block, buffer in partial_sums]
            return self._reduce_exactly(sums_of_blocks, blocks_by_rank, width)

        total = partial_sums[0][1].flat[:width]
        for _, buffer in partial_sums[1:]:
            total += buffer.flat[:width]

        self._wait(self.view.pg.allreduce([total]))
        return total

    def _reduce_exactly(
        self,
        sums_of_blocks: list[tuple[LeafRange, Tensor]],
        blocks_by_rank: list[tuple[LeafRange, ...]],
        width: int,
    ) -> Tensor:
        """Exchange slices of the partial sums, finish the tree for the slice of this rank, and
        gather the slices of all ranks."""
        rank = self.view.rank
        size = self.view.size
        pg = self.view.pg
        length = -(-width // size)
        own_slice = slice(rank * length, (rank + 1) * length)
        block_count = sum(len(peer_blocks) for peer_blocks in blocks_by_rank)
        receive_buffers = self._allocate_receive_buffers(block_count, length)

        inbox: list[tuple[LeafRange, Tensor]] = []
        works = []

        with self._coalesce_transfers():
            for peer, peer_blocks in enumerate(blocks_by_rank):
                if peer == rank:
                    inbox += [(block, flat[own_slice]) for block, flat in sums_of_blocks]
                    continue

                peer_slice = slice(peer * length, (peer + 1) * length)
                for tag, block in enumerate(peer_blocks):
                    receive_buffer = receive_buffers[len(inbox)]
                    inbox.append((block, receive_buffer))
                    works.append(pg.recv([receive_buffer], peer, tag))

                for tag, (_, flat) in enumerate(sums_of_blocks):
                    works.append(pg.send([flat[peer_slice]], peer, tag))

        self._wait(*works)

        tree = TreeSum[Tensor](self.virtual_workers, Tensor.add_)
        for block, piece in inbox:
            tree.add_value(block, piece)

        ((_, own_total),) = tree.take_partial_sums()

        total = self._total[: length * size]
        self._wait(pg._allgather_base(total, own_total))

        return total

    @contextmanager
    def _coalesce_transfers(self) -> Iterator[None]:
        """Start all sends and receives as one coalesced operation, because separate ones deadlock
        in nccl."""
        if self.state.device.type == "cuda":
            self.view.pg._start_coalescing()
        yield
        if self.state.device.type == "cuda":
            self.view.pg._end_coalescing(self.state.device).wait()

    def _allocate_partial_sum(self) -> PartialSum:
        flat = torch.zeros_like(self._total)
        width = self.state.width
        loss = flat[width]
        flags = flat[width + 1 : width + CONTROL_COUNT]
        return PartialSum(flat, [*self.state.view_summands(flat), loss, flags])

    def _allocate_receive_buffers(self, rows: int, length: int) -> Tensor:
        if self._inbox.numel() < rows * length:
            self._inbox = self._total.new_empty(rows * length)
        return self._inbox[: rows * length].view(rows, length)
