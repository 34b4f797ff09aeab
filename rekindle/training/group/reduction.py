"""The sum of all virtual workers' gradients: bit for bit the sum that one process computes.

Each process sums the complete subtrees of its virtual workers (see tree.py), sends every other process its slice of
these sums, and finishes the tree for its own slice; then the slices are gathered. The exchange sends as much data as an
all-reduce. The gradients are followed by buffer changes and validation results, if any, and by CONTROLS numbers: the
loss and three control flags.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rekindle.training.group.process_group import GroupView
from rekindle.training.group.static import StaticGroup
from rekindle.training.group.tree import Block, Sum, blocks
from rekindle.training.state import State

CONTROLS = 4  # number of control values: loss, join, leave, save
Buffer = tuple[Tensor, list[Tensor]]  # a flat tensor, and its views: the state's summands, the loss and the flags
kernels: Any = torch  # the type stubs lack the fused operations


class Reduction:
    """Computes the sums of one group, in buffers of its own: a broken group may still write to old buffers."""

    def __init__(self, state: State, members: StaticGroup) -> None:
        self.state, self.members = state, members
        self.view = GroupView(0, 1)
        self.virtual_workers, self.exact = state.config.virtual_workers, state.config.reduction == "exact"
        width = state.width + CONTROLS + self.virtual_workers  # the padding makes slices of equal size possible
        self._total = torch.zeros(width, device=state.device)
        self._inbox = self._total.new_empty(0)
        self._flags = (False, False, False)
        self._flag_values = self._total.new_tensor(self._flags)
        self._pool = pool = list[Buffer]()

        # a function, not a method: a reference cycle would keep the process group alive
        def add_buffers(first: Buffer, second: Buffer) -> Buffer:
            first[0].add_(second[0])
            pool.append(second)
            return first

        self._sum = Sum[Buffer](self.virtual_workers, add_buffers)

    def set_flags(self, flags: tuple[bool, bool, bool]) -> None:
        """Set the flags that this process contributes in this step."""
        if flags != self._flags:
            self._flags, self._flag_values = flags, self._total.new_tensor(flags)

    def add(self, virtual_worker: int, loss: Tensor, summands: list[Tensor]) -> None:
        """Add one virtual worker's mean loss and summands (see `State.summands`)."""
        values = [*summands, loss.detach(), self._flag_values]
        if sibling := self._sum.pop_sibling((virtual_worker, virtual_worker + 1)):
            (first, _), buffer = sibling
            kernels._foreach_add_(buffer[1], values)
        else:
            first, buffer = virtual_worker, self._pool.pop() if self._pool else self._buffer()
            kernels._foreach_copy_(buffer[1], values)
        self._sum.push((first, virtual_worker + 1), buffer)

    def total(self) -> Tensor:
        """Return the sum over all virtual workers, flat [state.width + CONTROLS, ...], valid until the next `add`."""
        partial_sums = self._sum.take()
        self._pool += [buffer for _, buffer in partial_sums]
        sums_of_blocks = [(block, partial_sum) for block, (partial_sum, _) in partial_sums]
        width, size, pg = self.state.width + CONTROLS, self.view.size, self.view.pg
        if not pg:
            return sums_of_blocks[0][1][:width]
        blocks_by_rank = [blocks(self.virtual_workers, size, rank) for rank in range(size)]
        if not self.exact or (size == 2 and blocks_by_rank == [blocks_by_rank[0][:1], blocks_by_rank[1][:1]]):
            total = sums_of_blocks[0][1][:width]  # the sum of two addends does not depend on their order
            for _, addend in sums_of_blocks[1:]:
                total += addend[:width]
            self.members.wait(pg.allreduce([total]))
            return total
        return self._reduce_exactly(sums_of_blocks, blocks_by_rank, width)

    def _reduce_exactly(
        self, sums_of_blocks: list[tuple[Block, Tensor]], blocks_by_rank: list[tuple[Block, ...]], width: int
    ) -> Tensor:
        """Exchange the partial sums by slice, finish the tree for our slice, and gather the slices."""
        rank, size, pg = self.view.rank, self.view.size, self.view.pg
        length = -(-width // size)
        own_slice = slice(rank * length, (rank + 1) * length)
        receive_buffers = self._receive_buffers(sum(len(peer_blocks) for peer_blocks in blocks_by_rank), length)
        inbox: list[tuple[Block, Tensor]] = []
        works = []
        with self._coalesced():
            for peer, peer_blocks in enumerate(blocks_by_rank):
                if peer == rank:
                    inbox += [(block, flat[own_slice]) for block, flat in sums_of_blocks]
                    continue
                for tag, block in enumerate(peer_blocks):
                    inbox.append((block, receive_buffers[len(inbox)]))
                    works.append(pg.recv([inbox[-1][1]], peer, tag))
                for tag, (_, flat) in enumerate(sums_of_blocks):
                    works.append(pg.send([flat[peer * length : (peer + 1) * length]], peer, tag))
        self.members.wait(*works)
        tree = Sum[Tensor](self.virtual_workers, Tensor.add_)
        for block, piece in inbox:
            tree.push(block, piece)
        total = self._total[: length * size]
        self.members.wait(pg._allgather_base(total, tree.take()[0][1]))
        return total

    @contextmanager
    def _coalesced(self) -> Iterator[None]:
        """Coalesce sends and receives: otherwise they deadlock in nccl."""
        if self.state.device.type == "cuda":
            self.view.pg._start_coalescing()
        yield
        if self.state.device.type == "cuda":
            self.view.pg._end_coalescing(self.state.device).wait()

    def _buffer(self) -> Buffer:
        flat, width = torch.zeros_like(self._total), self.state.width
        return flat, [*self.state.summands(flat), flat[width], flat[width + 1 : width + CONTROLS]]

    def _receive_buffers(self, rows: int, length: int) -> Tensor:
        if self._inbox.numel() < rows * length:
            self._inbox = self._total.new_empty(rows * length)
        return self._inbox[: rows * length].view(rows, length)
