"""The order of gradient additions: one fixed balanced binary tree over the virtual workers 0…V-1.

Floating-point sums depend on their order. The order defined here is part of the result's
definition, and does not depend on the number of processes: a node over [lo, hi) is the sum of its
two children, which meet at lo + the largest power of two below hi-lo. A process with contiguous
leaves can compute exactly the complete subtrees inside them.
"""

from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

T = TypeVar("T")
# the leaves [lo, hi) that a partial sum covers: always one complete subtree
Block = tuple[int, int]


@cache
def joints(leaves: int) -> frozenset[tuple[int, int, int]]:
    """Return every inner node of the tree over `leaves` leaves as (lo, middle, hi): [lo, middle) +
    [middle, hi)."""
    nodes = set()
    pending_ranges = [(0, leaves)]
    while pending_ranges:
        lo, hi = pending_ranges.pop()
        if hi - lo > 1:
            middle = lo + (1 << (hi - lo - 1).bit_length() - 1)
            nodes.add((lo, middle, hi))
            pending_ranges += [(lo, middle), (middle, hi)]
    return frozenset(nodes)


def share(leaves: int, size: int, rank: int) -> range:
    """Return the contiguous leaves of process `rank` of `size` processes."""
    return range(rank * leaves // size, (rank + 1) * leaves // size)


class Sum(Generic[T]):
    """Adds values in leaf order, each pair of sums as soon as both sums are complete, like a binary
    counter.

    `add(a, b)` returns a+b and may reuse the memory of either. Holds at most 2·log2(n)+1 values for
    any n contiguous leaves.
    """

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        self._joints = joints(leaves)
        self._add = add
        self.partial_sums: list[tuple[Block, T]] = []

    def push(self, block: Block, value: T) -> None:
        """Add the next value, whose block must start at the end of the previous block."""
        while sibling := self.pop_sibling(block):
            value = self._add(sibling[1], value)
            block = (sibling[0][0], block[1])
        self.partial_sums.append((block, value))

    def pop_sibling(self, block: Block) -> tuple[Block, T] | None:
        """Remove and return the last partial sum, if it and `block` form a complete subtree."""
        if self.partial_sums and (self.partial_sums[-1][0][0], *block) in self._joints:
            return self.partial_sums.pop()
        return None

    def take(self) -> list[tuple[Block, T]]:
        """Remove and return the partial sums so far, in leaf order."""
        partial_sums = self.partial_sums
        self.partial_sums = []
        return partial_sums


@cache
def blocks(leaves: int, size: int, rank: int) -> tuple[Block, ...]:
    """Return the largest complete subtrees of process `rank` (which it sends), in leaf order."""
    total = Sum[None](leaves, lambda _first, _second: None)
    for leaf in share(leaves, size, rank):
        total.push((leaf, leaf + 1), None)
    return tuple(block for block, _ in total.take())
