"""Tests of buffers that a training changes: the same result for any number of workers, or a clear
error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rekindle.errors import ConfigError
from rekindle.training.spec import TrainConfig
from rekindle.training.training_state import TrainingState, view_tensor_bytes

VIRTUAL = 3


class Net(nn.Module):
    """A layer with buffers; `forward` changes these buffers."""

    def __init__(
        self, buffers: dict[str, Tensor], forward: Callable[[Any, Tensor], None], persistent: bool
    ) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.act = forward
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=persistent)

    def forward(self, rows: Tensor) -> Tensor:
        self.act(self, rows)
        return self.layer(rows)


def make_state(model: nn.Module) -> TrainingState:
    state = TrainingState(
        model, TrainConfig.model_validate({"virtual_workers": VIRTUAL}), torch.device("cpu")
    )
    state.step = 0
    return state


def make_step(state: TrainingState, batches: list[Tensor]) -> None:
    """Make one update; the virtual workers compute one after the other in this process."""
    total = torch.zeros(state.width)
    for batch in batches:
        state.buffers.load_into_model()
        state.model(batch)
        for view, value in zip(
            state.view_summands(total)[len(state.parameters) :],
            state.buffers.collect_changes(),
            strict=True,
        ):
            view += value
    state.update(total, len(batches), lambda highest: highest)


def make_batches(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(8, 4, generator=generator) for _ in range(VIRTUAL)]


def test_running_statistics_are_the_mean_of_the_updates_of_all_virtual_workers() -> None:
    state = make_state(nn.BatchNorm1d(4))
    plain = [nn.BatchNorm1d(4) for _ in range(VIRTUAL)]

    for number in range(3):
        make_step(state, make_batches(number))
        for norm, batch in zip(plain, make_batches(number), strict=True):
            norm(batch)

        mean = torch.stack([norm.running_mean for norm in plain]).mean(0)  # type: ignore[arg-type]
        var = torch.stack([norm.running_var for norm in plain]).mean(0)  # type: ignore[arg-type]
        for norm in plain:
            norm.running_mean, norm.running_var = mean.clone(), var.clone()

    released = state.copy_released_tensors()
    torch.testing.assert_close(released["running_mean"], plain[0].running_mean)
    torch.testing.assert_close(released["running_var"], plain[0].running_var)
    assert released["num_batches_tracked"] == 3
    joined = make_state(nn.BatchNorm1d(4))
    joined.memory.copy_(state.memory)
    assert all(
        torch.equal(value, joined.copy_released_tensors()[name]) for name, value in released.items()
    )


def test_an_assigned_buffer_is_averaged_like_a_buffer_changed_in_place() -> None:
    def assign(net: Any, rows: Tensor) -> None:
        net.seen = net.seen * 0.5 + rows.mean()

    state = make_state(Net({"seen": torch.zeros(())}, assign, persistent=True))
    make_step(state, make_batches(1))
    torch.testing.assert_close(
        state.copy_released_tensors()["seen"], torch.stack(make_batches(1)).mean()
    )


def test_constant_buffers_keep_their_bits_and_cached_values_are_recreated() -> None:
    constants = {
        "mask": torch.full((2, 2), float("-inf")).triu(1),
        "hole": torch.tensor(float("nan")),
        "third": torch.tensor([1 / 3, -0.0]),
        "flags": torch.tensor([True]),
        "exact": torch.ones(2).double(),
        "small": torch.tensor([250], dtype=torch.uint8),
    }

    state = make_state(
        Net(
            {name: value.clone() for name, value in constants.items()}, lambda net, rows: None, True
        )
    )

    make_step(state, make_batches(1))

    for name, value in constants.items():
        assert bytes(view_tensor_bytes(state.copy_released_tensors()[name])) == bytes(
            view_tensor_bytes(value)
        ), name

    def cache(net: Any, rows: Tensor) -> None:
        assert net.table is None
        net.table = torch.zeros(len(rows), 3)

    network_with_cache = Net({}, cache, persistent=False)
    network_with_cache.register_buffer("table", None, persistent=False)
    make_step(make_state(network_with_cache), make_batches(1))


def grow(net: Any, rows: Tensor) -> None:
    net.seen = torch.cat([net.seen.reshape(-1), rows[:, 0]])


def count(net: Any, rows: Tensor) -> None:
    net.seen += (rows > 0).sum().to(net.seen.dtype)


def once(net: Any, rows: Tensor) -> None:
    net.seen.fill_(0)


@pytest.mark.parametrize(
    ("start", "forward", "persistent"),
    [
        (torch.zeros(()), grow, True),
        (torch.zeros((), dtype=torch.int64), count, True),
        (torch.zeros((), dtype=torch.float64), count, True),
        (torch.zeros(()), count, False),
        (torch.tensor(float("inf")), once, True),
    ],
    ids=["grows", "differs", "float64", "a cache changed in place", "infinite"],
)
def test_a_buffer_that_cannot_be_averaged_is_rejected_by_name(
    start: Tensor, forward: Any, persistent: bool
) -> None:
    state = make_state(Net({"seen": start}, forward, persistent))
    with pytest.raises(
        ConfigError, match=r'changes its buffer "seen" .*: the change cannot be averaged'
    ):
        make_step(state, make_batches(1))
