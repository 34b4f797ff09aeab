"""What a process adds up on its own; groups of several are tested as processes in tests/steps/test_train.py."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rekindle.training.group.training_group import TrainingGroup
from rekindle.training.spec import TrainConfig
from rekindle.training.state import State

CPU = torch.device("cpu")


def tree(values: list[Tensor]) -> Tensor:
    """The sum as its definition says it."""
    if len(values) == 1:
        return values[0]
    half = 1
    while 2 * half < len(values):
        half *= 2
    return tree(values[:half]) + tree(values[half:])


@pytest.mark.parametrize("leaves", range(1, 14))
def test_the_sum_is_bit_for_bit_the_trees_and_leaves_the_gradients_alone(leaves: int) -> None:
    torch.manual_seed(leaves)
    state = State(nn.Linear(37, 5), TrainConfig.model_validate({"virtual_workers": leaves, "workers": 1}), CPU)
    unused: Any = None  # nobody is met, nothing is saved or restored here
    group = TrainingGroup(unused, state, unused, threading.Event())
    for _ in range(2):  # the second time in used buffers
        scales = torch.logspace(-6, 6, leaves)
        gradients = [[torch.randn_like(p) * scale for p in state.parameters] for scale in scales]
        losses = list(torch.randn(leaves))
        before = [[gradient.clone() for gradient in leaf_gradients] for leaf_gradients in gradients]
        for leaf in range(leaves):
            group.add(leaf, losses[leaf], gradients[leaf])
        total = group.reduced()
        assert total is not None
        for number, view in enumerate(state.views(total)):
            assert torch.equal(view, tree([copies[number] for copies in before]))
        assert group.loss == float(tree(losses)) / leaves
        assert all(
            torch.equal(a, b)
            for kept, copied in zip(gradients, before, strict=True)
            for a, b in zip(kept, copied, strict=True)
        )
