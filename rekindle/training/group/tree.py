"""Gradients are added along a fixed balanced binary tree over the virtual workers 0…V-1.

Floating-point sums depend on their order. The order of the sums in the tree does not depend on the
number of processes: the node over the leaves [lo, hi) is the sum of its two children, whose
boundary is at lo + the largest power of two below hi-lo. A process with contiguous leaves computes
the sums of the complete subtrees inside its leaves.
"""

from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")
# the leaves [lo, hi) of a partial sum, which are one complete subtree
LeafRange = tuple[int, int]


@cache
def list_inner_nodes(leaf_count: int) -> frozenset[tuple[int, int, int]]:
    """Return the inner nodes of the tree over `leaf_count` leaves; a node (lo, middle, hi) is
    the sum of [lo, middle) and [middle, hi)."""
    inner_nodes = set()
    pending_ranges = [(0, leaf_count)]
    while pending_ranges:
        range_start, range_end = pending_ranges.pop()
        if range_end - range_start > 1:
            range_middle = range_start + (1 << (range_end - range_start - 1).bit_length() - 1)
            inner_nodes.add((range_start, range_middle, range_end))
            pending_ranges += [(range_start, range_middle), (range_middle, range_end)]
    return frozenset(inner_nodes)


def list_rank_leaves(leaf_count: int, group_size: int, rank: int) -> range:
    """Return the contiguous leaves of the process `rank` in a group of `group_size` processes."""
    return range(rank * leaf_count // group_size, (rank + 1) * leaf_count // group_size)


class TreeSum(Generic[ValueT]):
    """Adds values along the tree of sums, and computes each inner node as soon as its two children
    are complete.

    `add_function(a, b)` returns a+b and may reuse the memory of a and b. For n contiguous leaves,
    at most
    2·log2(n)+1 partial sums exist at a time.
    """

    def __init__(self, leaf_count: int, add_function: Callable[[ValueT, ValueT], ValueT]) -> None:
        self._inner_nodes = list_inner_nodes(leaf_count)
        self._add = add_function
        self.partial_sums: list[tuple[LeafRange, ValueT]] = []

    def add_value(self, leaf_range: LeafRange, value: ValueT) -> None:
        """Add the next value; the leaves of the value must follow the leaves of the previous
        value."""
        while sibling_sum := self.pop_sibling(leaf_range):
            value = self._add(sibling_sum[1], value)
            leaf_range = (sibling_sum[0][0], leaf_range[1])
        self.partial_sums.append((leaf_range, value))

    def pop_sibling(self, leaf_range: LeafRange) -> tuple[LeafRange, ValueT] | None:
        """If the newest partial sum and `leaf_range` are the two children of one node, remove
        and return this sum."""
        if self.partial_sums and (self.partial_sums[-1][0][0], *leaf_range) in self._inner_nodes:
            return self.partial_sums.pop()
        return None

    def take_partial_sums(self) -> list[tuple[LeafRange, ValueT]]:
        """Remove and return the partial sums so far, in leaf order."""
        partial_sums = self.partial_sums
        self.partial_sums = []
        return partial_sums


@cache
def list_rank_subtrees(leaf_count: int, group_size: int, rank: int) -> tuple[LeafRange, ...]:
    """Return the largest complete subtrees in the leaves of process `rank`, in leaf order."""
    leaf_tree = TreeSum[None](leaf_count, lambda _first, _second: None)
    for leaf in list_rank_leaves(leaf_count, group_size, rank):
        leaf_tree.add_value((leaf, leaf + 1), None)
    return tuple(leaf_range for leaf_range, _ in leaf_tree.take_partial_sums())
