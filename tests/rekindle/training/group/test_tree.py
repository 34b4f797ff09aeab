from hypothesis import given
from hypothesis import strategies as st

from rekindle.training.group.tree import (
    TreeSum,
    list_inner_nodes,
    list_rank_leaves,
    list_rank_subtrees,
)

sizes = st.integers(1, 40).flatmap(
    lambda leaves: st.tuples(st.just(leaves), st.integers(1, leaves))
)


def format_sum(lo: int, hi: int) -> str:
    """Return the sum over the leaves [lo, hi) in the order of the summation tree, with
    parentheses."""
    if hi - lo == 1:
        return str(lo)
    power = 1
    while 2 * power < hi - lo:
        power *= 2
    return f"({format_sum(lo, lo + power)}+{format_sum(lo + power, hi)})"


@given(sizes)
def test_the_order_of_additions_does_not_depend_on_the_number_of_workers(
    case: tuple[int, int],
) -> None:
    leaves, workers = case
    total = TreeSum[str](leaves, lambda a, b: f"({a}+{b})")
    for rank in range(workers):
        local = TreeSum[str](leaves, lambda a, b: f"({a}+{b})")
        for leaf in list_rank_leaves(leaves, workers, rank):
            local.add_value((leaf, leaf + 1), str(leaf))
        partial_sums = local.take_partial_sums()
        assert tuple(block for block, _ in partial_sums) == list_rank_subtrees(
            leaves, workers, rank
        )
        for block, value in partial_sums:
            total.add_value(block, value)
    assert total.take_partial_sums() == [((0, leaves), format_sum(0, leaves))]


@given(sizes)
def test_every_leaf_belongs_to_one_worker_and_all_workers_have_leaves(
    case: tuple[int, int],
) -> None:
    leaves, workers = case
    runs = [list(list_rank_leaves(leaves, workers, rank)) for rank in range(workers)]
    assert [leaf for run in runs for leaf in run] == list(range(leaves))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


@given(st.integers(1, 4096), st.integers(1, 64))
def test_memory_grows_with_the_logarithm_of_the_leaves(leaves: int, workers: int) -> None:
    run = list_rank_leaves(leaves, workers, workers // 2)
    held = 0
    total = TreeSum[None](leaves, lambda a, b: None)
    for leaf in run:
        total.add_value((leaf, leaf + 1), None)
        held = max(held, len(total.partial_sums))
    assert held <= 2 * len(run).bit_length() + 1


def test_the_tree_of_additions_is_balanced() -> None:
    assert list_inner_nodes(5) == {(0, 1, 2), (2, 3, 4), (0, 2, 4), (0, 4, 5)}
