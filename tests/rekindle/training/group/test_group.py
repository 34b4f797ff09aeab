"""Tests of the sum in a single process; groups of several processes are tested in
tests/steps/test_train.py."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rekindle.training.group.static import StaticGroup
from rekindle.training.group.training_group import TrainingGroup
from rekindle.training.spec import TrainConfig
from rekindle.training.training_state import TrainingState

CPU = torch.device("cpu")


def sum_tree(values: list[Tensor]) -> Tensor:
    """Return the sum of numbers in the order of a binary tree, computed by the recursive
    definition."""
    if len(values) == 1:
        return values[0]
    half = 1
    while 2 * half < len(values):
        half *= 2
    return sum_tree(values[:half]) + sum_tree(values[half:])


@pytest.mark.parametrize("leaves", range(1, 14))
def test_the_sum_equals_the_tree_sum_bit_for_bit_and_keeps_the_gradients(leaves: int) -> None:
    torch.manual_seed(leaves)
    state = TrainingState(
        nn.Linear(37, 5), TrainConfig.model_validate({"virtual_workers": leaves, "workers": 1}), CPU
    )
    # the group needs neither data nor checkpoints in this test
    unused: Any = None
    group = TrainingGroup(StaticGroup(CPU, ledger=None), state, unused, unused, threading.Event())

    for _ in range(2):  # the second iteration reuses the buffers of the first iteration
        scales = torch.logspace(-6, 6, leaves)
        gradients = [[torch.randn_like(p) * scale for p in state.parameters] for scale in scales]
        losses = list(torch.randn(leaves))
        copies = [[gradient.clone() for gradient in leaf_gradients] for leaf_gradients in gradients]

        for leaf in range(leaves):
            group.add(leaf, losses[leaf], gradients[leaf])

        total = group.reduce()
        assert total is not None
        for number, view in enumerate(state.view_parameters(total)):
            assert torch.equal(view, sum_tree([leaf_copies[number] for leaf_copies in copies]))

        assert group.loss == float(sum_tree(losses)) / leaves
        assert all(
            torch.equal(a, b)
            for kept, copied in zip(gradients, copies, strict=True)
            for a, b in zip(kept, copied, strict=True)
        )
