"""The group as the training loop sees it: steps to do, leaves that are ours, and one sum over all of them.

    for step in group.steps(end):
        for leaf in group.leaves():
            group.add(leaf, loss, gradients)
        if (total := group.reduced()) is not None:   # None: somebody was lost, whoever is left does the step again
            ...

Each process sums the whole subtrees of its leaves (see tree.py), sends each other process that one's slice of them,
finishes the tree for its own slice, and the slices are gathered: the traffic of an all-reduce, the bits of one process.
Four numbers ride on every gradient: the loss, whether anybody knows of a newcomer, whether anybody must leave, and
whether rank 0 wants a durable checkpoint of the state after this step.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from rekindle.errors import ConfigError
from rekindle.training.checkpoint.manager import Checkpoints
from rekindle.training.group.elastic import Formation, Peers
from rekindle.training.group.tree import Block, Sum, blocks, share
from rekindle.training.state import State

RIDERS = 4  # loss, join, leave, save
Buffer = tuple[Tensor, list[Tensor]]  # a flat tensor; its views: by parameter, the loss, the other riders
kernels: Any = torch  # whose stubs lack the fused operations


class Group:
    """The processes that train together now. `checkpoints` gives rank 0 its state when nobody has any."""

    def __init__(self, peers: Peers, state: State, checkpoints: Checkpoints, leaving: threading.Event) -> None:
        self.peers, self.state, self.checkpoints, self.leaving = peers, state, checkpoints, leaving
        self.leaves_total, self.exact = state.config.virtual_workers, state.config.reduction == "exact"
        self.rank = 0
        self.left = False  # told to go: the steps end before their end
        self.deserted = False  # nobody may be left to carry the state on
        self.awaited = False  # not all have agreed that we go: others may wait for us, to go on
        self.saving = False  # all make a durable checkpoint of the state after this step, each its share
        self.place = (0, 1)  # our rank and the size of the group that made the last step
        self.loss = 0.0
        self._flagged = False
        self._live = False  # our state is that of a group, not what a former process left behind
        self._before = b""  # the data loader's state before this step
        self._forget()

    def steps(self, end: int) -> Iterator[int]:
        """The step to do now, until `end` updates are made or we must leave."""
        while not self.left:
            if not self.size and not self._form():
                self.desert()
            elif self.state.step >= end:
                return
            else:
                self._before = self.checkpoints.cursor.dump()
                yield self.state.step

    def leaves(self) -> Iterator[int]:
        """The virtual workers that are ours in this step; ends early if the group turns out to be broken."""
        self._flagged = self.leaving.is_set()
        self.peers.progress(self.state.step)
        flags = (self.peers.stale(), self._flagged, self.rank == 0 and self.checkpoints.due())
        if flags != self._flags:
            self._flags, self._riders = flags, self._total.new_tensor(flags)
        for leaf in share(self.leaves_total, self.size, self.rank):
            if self.peers.dead():
                self._broken = True
                return
            yield leaf

    def add(self, leaf: int, loss: Tensor, gradients: list[Tensor]) -> None:
        """Count in one virtual worker's mean loss and gradients (one a parameter)."""
        values = [*gradients, loss.detach(), self._riders]
        if left := self._sum.half((leaf, leaf + 1)):
            (first, _), buffer = left
            kernels._foreach_add_(buffer[1], values)
        else:
            first, buffer = leaf, self._pool.pop() if self._pool else self._buffer()
            kernels._foreach_copy_(buffer[1], values)
        self._sum.push((first, leaf + 1), buffer)

    def reduced(self) -> Tensor | None:
        """The sum of all gradients, flat [state.size], valid until the next `add`; None if the group broke."""
        problem = RuntimeError("told that the group is broken")
        if not self._broken:
            try:
                total = self._reduce()
            except torch.OutOfMemoryError:
                raise  # no other group would cure it
            except RuntimeError as error:
                problem = error
            else:
                self._heed(total[self.state.size : self.state.size + RIDERS].tolist())
                return total[: self.state.size]
        self.peers.fault(problem)
        self._forget()
        self.checkpoints.cursor.load(self._before)
        self.checkpoints.interval.lost()
        return None

    def _heed(self, riders: list[float]) -> None:
        """What the others let us know: all stop after the same step."""
        loss, join, leave, save = riders
        self.loss, self.saving = loss / self.leaves_total, save > 0
        if leave and not self.peers.elastic:  # the others could not go on without the leaver
            leave = self.leaves_total
        self.deserted = leave == self.leaves_total
        self.left = self._flagged or self.deserted
        if join or leave:
            self.size = 0

    def desert(self) -> None:
        """Go, though the others do not know: they may go on, or nobody."""
        self.left = self.deserted = True
        self.awaited = self.place[1] > 1 or not self._live
        self.place = (0, 1)

    def finish(self, write: Callable[[], str]) -> bool:
        """After the last step: rank 0 writes the result. True: the run is over; False: form the next group."""
        self.peers.progress(self.state.step)
        self.peers.busy(True)
        sha256 = write() if self.rank == 0 else ""
        self.peers.busy(False)
        while not self.peers.finish(sha256, self.state.step):
            self.left = self.leaving.is_set()
            if self.left or self.peers.stale():
                self.size = 0
                return False
        return True

    def _form(self) -> bool:
        """Become part of the next group and take the newest state of all its members; False: told to leave."""
        while formation := self.peers.form(self.state.step, self.leaving):
            if formation.size > self.leaves_total:
                raise ConfigError(
                    f"the group has {formation.size} workers: it must have at most train.virtual_workers "
                    f"({self.leaves_total}). Start fewer, or raise train.virtual_workers (this changes the result)."
                )
            try:
                self._agree(formation)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.peers.fault(error)
                continue
            self.rank, self.size = self.place = formation.rank, formation.size
            return True
        return False

    def _agree(self, formation: Formation) -> None:
        """All take the newest state that anybody has, from training or from what lay on its node (of one run it is the
        same bits); if nobody was training, rank 0 also looks into the object store."""
        self._pg = pg = formation.pg
        state, checkpoints = self.state, self.checkpoints
        ours = torch.tensor([state.step, self._live, checkpoints.crc], device=state.device)
        each = [ours.clone() for _ in range(formation.size)]
        if pg:
            self.peers.wait(pg.allgather([each], [ours]))
        known = [tuple(found.tolist()) for found in each]
        giver = max(range(len(known)), key=lambda rank: (known[rank][:2], -rank))
        step = known[giver][0]
        if not any(live for _, live, _ in known):
            if formation.rank == 0:
                self.peers.busy(True)  # the state is large, or the store away
                try:
                    checkpoints.restore(step, self.peers.run, self.peers.stale)
                finally:
                    self.peers.busy(False)
            ours[0] = state.step
            if pg:
                self.peers.wait(pg.broadcast(ours, 0))
            if int(ours[0]) > step:
                known[0], giver = tuple(ours.tolist()), 0
        if pg and any(found != known[giver] for found in known):
            self._give(formation, giver)
        self._live, checkpoints.crc = True, 0

    def _give(self, formation: Formation, giver: int) -> None:
        """The state of rank `giver` to all."""
        state, cursor = self.state, self.checkpoints.cursor
        loader = cursor.dump() if formation.rank == giver else b""
        about = torch.tensor([state.step, len(loader)], device=state.device)
        self.peers.wait(formation.pg.broadcast(about, giver))
        step, length = about.tolist()
        memory = state.memory if formation.rank == giver else self._spare()
        self.peers.wait(formation.pg.broadcast(memory, giver))
        if length:
            data = torch.tensor(list(loader) or [0] * length, dtype=torch.uint8, device=state.device)
            self.peers.wait(formation.pg.broadcast(data, giver))
            cursor.load(bytes(data.tolist()))
        if memory is not state.memory:
            state.memory.copy_(memory)
        state.step = step

    def _spare(self) -> Tensor:
        """Where to receive a state. The giver may die meanwhile: ours is kept until all of the other is here, and a
        broadcast that was given up may still write."""
        state = self.state
        with suppress(RuntimeError):  # what the CPU's allocator raises, and CUDA's
            return torch.empty_like(state.memory)
        state.step, self._live = -1, False  # half a state must not be given to anybody
        return state.memory

    def _reduce(self) -> Tensor:
        parts = self._sum.take()
        self._pool += [buffer for _, buffer in parts]
        flats = [(block, flat) for block, (flat, _) in parts]
        width = self.state.size + RIDERS
        if not self._pg:
            return flats[0][1][:width]
        plan = [blocks(self.leaves_total, self.size, rank) for rank in range(self.size)]
        if not self.exact or (self.size == 2 and plan == [plan[0][:1], plan[1][:1]]):
            mine = flats[0][1][:width]  # of two addends, an all-reduce has only one order
            for _, other in flats[1:]:
                mine += other[:width]
            self.peers.wait(self._pg.allreduce([mine]))
            return mine
        return self._reduce_exactly(flats, plan, width)

    def _reduce_exactly(self, flats: list[tuple[Block, Tensor]], plan: list[tuple[Block, ...]], width: int) -> Tensor:
        """Everybody's partial sums of our slice to us, the tree finished there, and the slices to everybody."""
        part = -(-width // self.size)
        own = slice(self.rank * part, (self.rank + 1) * part)
        received = self._received(sum(len(found) for found in plan), part)
        inbox: list[tuple[Block, Tensor]] = []
        works = []
        with self._together():
            for peer, found in enumerate(plan):
                if peer == self.rank:
                    inbox += [(block, flat[own]) for block, flat in flats]
                    continue
                for tag, block in enumerate(found):
                    inbox.append((block, received[len(inbox)]))
                    works.append(self._pg.recv([inbox[-1][1]], peer, tag))
                for tag, (_, flat) in enumerate(flats):
                    works.append(self._pg.send([flat[peer * part : (peer + 1) * part]], peer, tag))
        self.peers.wait(*works)
        tree = Sum[Tensor](self.leaves_total, Tensor.add_)
        for block, piece in inbox:
            tree.push(block, piece)
        total = self._total[: part * self.size]
        self.peers.wait(self._pg._allgather_base(total, tree.take()[0][1]))
        return total

    @contextmanager
    def _together(self) -> Iterator[None]:
        """nccl must be told that sends and receives belong together, or they wait for each other."""
        if self.state.device.type == "cuda":
            self._pg._start_coalescing()
        yield
        if self.state.device.type == "cuda":
            self._pg._end_coalescing(self.state.device).wait()

    def _buffer(self) -> Buffer:
        flat, at = torch.zeros_like(self._total), self.state.size
        return flat, [*self.state.views(flat), flat[at], flat[at + 1 : at + RIDERS]]

    def _received(self, rows: int, part: int) -> Tensor:
        if self._inbox.numel() < rows * part:
            self._inbox = self._total.new_empty(rows * part)
        return self._inbox[: rows * part].view(rows, part)

    def _forget(self) -> None:
        """Be in no group, with fresh buffers: a broken one may still write into the old ones."""
        self.size, self._broken = 0, False
        self._pg: Any = None  # its end closes its connections, which wakes whoever still waits for us
        width = self.state.size + RIDERS + self.leaves_total  # slices of equal size reach beyond the end
        self._total = torch.zeros(width, device=self.state.device)
        self._inbox = self._total.new_empty(0)
        self._flags = (False, False, False)
        self._riders = self._total.new_tensor(self._flags)
        self._pool: list[Buffer] = []
        self._sum = Sum[Buffer](self.leaves_total, self._plus)

    def _plus(self, left: Buffer, right: Buffer) -> Buffer:
        left[0].add_(right[0])
        self._pool.append(right)
        return left
