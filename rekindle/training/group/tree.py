"""Gradients are added along a fixed balanced binary tree over the virtual workers 0…V-1.

Floating-point sums depend on their order. The order in this tree does not depend on the number of
processes: the node over the leaves [lo, hi) is the sum of its two children, whose boundary is at lo
+ the largest power of two below hi-lo. A process with contiguous leaves computes the sums of the
complete subtrees inside them.
"""

from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

T = TypeVar("T")
# the leaves [lo, hi) of a partial sum, which are one complete subtree
LeafRange = tuple[int, int]


@cache
def list_inner_nodes(leaves: int) -> frozenset[tuple[int, int, int]]:
    """Return the inner nodes of the tree over `leaves` leaves; a node (lo, middle, hi) is the sum
    of [lo, middle) and [middle, hi)."""
    nodes = set()
    pending_ranges = [(0, leaves)]
    while pending_ranges:
        lo, hi = pending_ranges.pop()
        if hi - lo > 1:
            middle = lo + (1 << (hi - lo - 1).bit_length() - 1)
            nodes.add((lo, middle, hi))
            pending_ranges += [(lo, middle), (middle, hi)]
    return frozenset(nodes)


def rank_leaves(leaves: int, size: int, rank: int) -> range:
    """Return the contiguous leaves of the process `rank` in a group of `size` processes."""
    return range(rank * leaves // size, (rank + 1) * leaves // size)


class TreeSum(Generic[T]):
    """Adds values along the tree, and computes each inner node as soon as both of its children are
    complete.

    `add(a, b)` returns a+b and may reuse the memory of a and b. For n contiguous leaves, at most
    2·log2(n)+1 partial sums exist at a time.
    """

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        self._joints = list_inner_nodes(leaves)
        self._add = add
        self.partial_sums: list[tuple[LeafRange, T]] = []

    def add_value(self, block: LeafRange, value: T) -> None:
        """Add the next value; its leaves must follow those of the previous value."""
        while sibling := self.pop_sibling(block):
            value = self._add(sibling[1], value)
            block = (sibling[0][0], block[1])
        self.partial_sums.append((block, value))

    def pop_sibling(self, block: LeafRange) -> tuple[LeafRange, T] | None:
        """If the newest partial sum and `block` are the two children of one node, remove and return
        this sum."""
        if self.partial_sums and (self.partial_sums[-1][0][0], *block) in self._joints:
            return self.partial_sums.pop()
        return None

    def take_partial_sums(self) -> list[tuple[LeafRange, T]]:
        """Remove and return the partial sums so far, in leaf order."""
        partial_sums = self.partial_sums
        self.partial_sums = []
        return partial_sums


@cache
def rank_subtrees(leaves: int, size: int, rank: int) -> tuple[LeafRange, ...]:
    """Return the largest complete subtrees in the leaves of process `rank`, in leaf order."""
    total = TreeSum[None](leaves, lambda _first, _second: None)
    for leaf in rank_leaves(leaves, size, rank):
        total.add_value((leaf, leaf + 1), None)
    return tuple(block for block, _ in total.take_partial_sums())
