"""Tests of the position in the training data, from which a program continues."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle import ConfigError
from rekindle.attached.data import (
    Progress,
    check_batch_sizes,
    check_dataset_length,
    order_samples,
    plan_batches,
    split_batches,
)


@given(st.data())
def test_each_sample_is_used_once_although_the_workers_change_at_any_batch(
    data: st.DataObject,
) -> None:
    samples = data.draw(st.integers(1, 200))
    batch_size = data.draw(st.integers(1, 50))
    order = order_samples(samples, 3, 0, shuffle=True)

    offset = 0
    used: list[int] = []
    while sizes := plan_batches(samples, offset, batch_size, False):
        world = data.draw(st.integers(1, min(sizes)))
        shares = [split_batches(order, offset, sizes, rank, world) for rank in range(world)]
        for _ in range(data.draw(st.integers(1, len(sizes)))):
            parts = [next(share) for share in shares]
            assert all(parts)
            used += [sample for part in parts for sample in part]
            offset = offset + sum(map(len, parts))

    assert used == order
    assert sorted(used) == list(range(samples))


@given(st.integers(1, 300), st.integers(1, 50))
def test_only_the_last_two_batches_are_smaller_and_have_at_least_half(
    samples: int, batch_size: int
) -> None:
    sizes = plan_batches(samples, 0, batch_size, False)
    assert sum(sizes) == samples
    assert all(batch_rows == batch_size for batch_rows in sizes[:-2])
    assert max(sizes) <= batch_size
    assert min(sizes) >= min(samples, batch_size // 2)


@pytest.mark.parametrize(
    ("samples", "batch_size", "sizes"), [(10, 3, [3, 3, 3]), (2, 3, []), (6, 3, [3, 3])]
)
def test_drop_last_leaves_out_the_incomplete_batch(
    samples: int, batch_size: int, sizes: list[int]
) -> None:
    assert plan_batches(samples, 0, batch_size, True) == sizes


def test_epochs_have_different_orders_unless_shuffle_is_false() -> None:
    first_order, second_order = (order_samples(50, 0, epoch, shuffle=True) for epoch in range(2))
    assert first_order != second_order
    assert order_samples(5, 0, 1, shuffle=False) == [0, 1, 2, 3, 4]


def test_a_batch_with_fewer_samples_than_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match="a batch of this dataset has 2 samples for 3 processes"):
        check_batch_sizes([4, 2], 4, 3)


def test_a_dataset_that_has_changed_is_refused() -> None:
    with pytest.raises(ConfigError, match="the dataset has 9 samples, and had 10"):
        check_dataset_length(Progress(samples=10), 9)
