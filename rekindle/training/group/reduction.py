"""The sum of all virtual workers' gradients: the traffic of an all-reduce, the bits of one process.

Each process sums the whole subtrees of its virtual workers (see tree.py), sends each other process that one's slice of
them, finishes the tree for its own slice, and the slices are gathered. The changes of buffers and the results of a
validation follow the gradients, if there are any, and then CONTROLS numbers: the loss, and three control flags.
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

CONTROLS = 4  # loss, join, leave, save
Buffer = tuple[Tensor, list[Tensor]]  # a flat tensor; its views: the state's summands, the loss, the flags
kernels: Any = torch  # whose stubs lack the fused operations


class Reduction:
    """The sums of one group, and their buffers: a broken group may still write into them, so each needs its own."""

    def __init__(self, state: State, members: StaticGroup) -> None:
        self.state, self.members = state, members
        self.view = GroupView(0, 1)
        self.virtual_workers, self.exact = state.config.virtual_workers, state.config.reduction == "exact"
        width = state.width + CONTROLS + self.virtual_workers  # slices of equal size reach beyond the end
        self._total = torch.zeros(width, device=state.device)
        self._inbox = self._total.new_empty(0)
        self._flags = (False, False, False)
        self._flag_values = self._total.new_tensor(self._flags)
        self._pool = pool = list[Buffer]()

        def plus(left: Buffer, right: Buffer) -> Buffer:  # no method: a cycle would keep the process group alive
            left[0].add_(right[0])
            pool.append(right)
            return left

        self._sum = Sum[Buffer](self.virtual_workers, plus)

    def set_flags(self, flags: tuple[bool, bool, bool]) -> None:
        """What this process contributes as flags in this step."""
        if flags != self._flags:
            self._flags, self._flag_values = flags, self._total.new_tensor(flags)

    def add(self, virtual_worker: int, loss: Tensor, summands: list[Tensor]) -> None:
        """Add one virtual worker's mean loss and summands (see `State.summands`)."""
        values = [*summands, loss.detach(), self._flag_values]
        if sibling := self._sum.half((virtual_worker, virtual_worker + 1)):
            (first, _), buffer = sibling
            kernels._foreach_add_(buffer[1], values)
        else:
            first, buffer = virtual_worker, self._pool.pop() if self._pool else self._buffer()
            kernels._foreach_copy_(buffer[1], values)
        self._sum.push((first, virtual_worker + 1), buffer)

    def total(self) -> Tensor:
        """The sum over all virtual workers, flat [state.width + CONTROLS, ...], valid until the next `add`."""
        parts = self._sum.take()
        self._pool += [buffer for _, buffer in parts]
        flats = [(block, flat) for block, (flat, _) in parts]
        width, size, pg = self.state.width + CONTROLS, self.view.size, self.view.pg
        if not pg:
            return flats[0][1][:width]
        plan = [blocks(self.virtual_workers, size, rank) for rank in range(size)]
        if not self.exact or (size == 2 and plan == [plan[0][:1], plan[1][:1]]):
            ours = flats[0][1][:width]  # an all-reduce of two addends has only one order
            for _, other in flats[1:]:
                ours += other[:width]
            self.members.wait(pg.allreduce([ours]))
            return ours
        return self._reduce_exactly(flats, plan, width)

    def _reduce_exactly(self, flats: list[tuple[Block, Tensor]], plan: list[tuple[Block, ...]], width: int) -> Tensor:
        """Exchange the partial sums by slice, finish the tree for our slice, and gather the slices."""
        rank, size, pg = self.view.rank, self.view.size, self.view.pg
        part = -(-width // size)
        own = slice(rank * part, (rank + 1) * part)
        received = self._received(sum(len(partial_sums) for partial_sums in plan), part)
        inbox: list[tuple[Block, Tensor]] = []
        works = []
        with self._coalesced():
            for peer, partial_sums in enumerate(plan):
                if peer == rank:
                    inbox += [(block, flat[own]) for block, flat in flats]
                    continue
                for tag, block in enumerate(partial_sums):
                    inbox.append((block, received[len(inbox)]))
                    works.append(pg.recv([inbox[-1][1]], peer, tag))
                for tag, (_, flat) in enumerate(flats):
                    works.append(pg.send([flat[peer * part : (peer + 1) * part]], peer, tag))
        self.members.wait(*works)
        tree = Sum[Tensor](self.virtual_workers, Tensor.add_)
        for block, piece in inbox:
            tree.push(block, piece)
        total = self._total[: part * size]
        self.members.wait(pg._allgather_base(total, tree.take()[0][1]))
        return total

    @contextmanager
    def _coalesced(self) -> Iterator[None]:
        """nccl must know that sends and receives belong together, or they deadlock."""
        if self.state.device.type == "cuda":
            self.view.pg._start_coalescing()
        yield
        if self.state.device.type == "cuda":
            self.view.pg._end_coalescing(self.state.device).wait()

    def _buffer(self) -> Buffer:
        flat, at = torch.zeros_like(self._total), self.state.width
        return flat, [*self.state.summands(flat), flat[at], flat[at + 1 : at + CONTROLS]]

    def _received(self, rows: int, part: int) -> Tensor:
        if self._inbox.numel() < rows * part:
            self._inbox = self._total.new_empty(rows * part)
        return self._inbox[: rows * part].view(rows, part)
