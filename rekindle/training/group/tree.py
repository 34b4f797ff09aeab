"""The order in which gradients are added: one fixed balanced binary tree over the virtual workers 0…V-1.

Floating-point sums depend on their order, so the order is part of the result's definition and never of the number of
processes: a node over [lo, hi) is the sum of its two children, which meet at lo + the largest power of two below hi-lo.
A process that holds contiguous leaves can finish the whole subtrees inside them, and nothing else.
"""

from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

T = TypeVar("T")
Block = tuple[int, int]  # the leaves [lo, hi) that a partial sum covers: always one whole subtree


@cache
def joints(leaves: int) -> frozenset[tuple[int, int, int]]:
    """Every inner node of the tree over `leaves` leaves as (lo, middle, hi): [lo, middle) + [middle, hi)."""
    nodes, todo = set(), [(0, leaves)]
    while todo:
        lo, hi = todo.pop()
        if hi - lo > 1:
            middle = lo + (1 << (hi - lo - 1).bit_length() - 1)
            nodes.add((lo, middle, hi))
            todo += [(lo, middle), (middle, hi)]
    return frozenset(nodes)


def share(leaves: int, size: int, rank: int) -> range:
    """The contiguous leaves of process `rank` of `size`."""
    return range(rank * leaves // size, (rank + 1) * leaves // size)


class Sum(Generic[T]):
    """Adds values that arrive in leaf order, each pair as soon as it is complete: a binary counter.

    `add(a, b)` returns a+b and may reuse either. Holds at most 2·log2(n)+1 values for n leaves of any run.
    """

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        self._joints = joints(leaves)
        self._add = add
        self.parts: list[tuple[Block, T]] = []

    def push(self, block: Block, value: T) -> None:
        """Add the next value: its block must begin where the previous one ended."""
        while left := self.half(block):
            value, block = self._add(left[1], value), (left[0][0], block[1])
        self.parts.append((block, value))

    def half(self, block: Block) -> tuple[Block, T] | None:
        """Remove and return the last part, if it and `block` form a whole subtree."""
        if self.parts and (self.parts[-1][0][0], *block) in self._joints:
            return self.parts.pop()
        return None

    def take(self) -> list[tuple[Block, T]]:
        """The partial sums so far, in leaf order; the sum is empty afterwards."""
        parts, self.parts = self.parts, []
        return parts


@cache
def blocks(leaves: int, size: int, rank: int) -> tuple[Block, ...]:
    """The largest whole subtrees of process `rank`: what it sends, in leaf order."""
    total = Sum[None](leaves, lambda left, right: None)
    for leaf in share(leaves, size, rank):
        total.push((leaf, leaf + 1), None)
    return tuple(block for block, _ in total.take())
