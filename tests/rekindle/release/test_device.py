"""A model that is on another device than the CPU gets its inputs on that device."""

from typing import Any

import pytest
import torch

from rekindle.release.device import describe_numerics, move_model

CPU = torch.device("cpu")
# a device of torch that has no memory, which simulates an accelerator
META = torch.device("meta")


class Devices(torch.nn.Module):
    """A model that returns the devices of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, rows: list[torch.Tensor], *, mask: dict[str, Any]) -> list[str]:
        return [tensor.device.type for tensor in (self.weight, *rows, mask["seen"])]


def test_the_inputs_of_a_model_are_copied_to_its_device() -> None:
    inputs = [torch.ones(2), torch.ones(3, device=META)]
    assert (
        move_model(Devices(), META)(inputs, mask={"seen": torch.ones(1), "name": "a"})
        == ["meta"] * 4
    )
    assert move_model(Devices(), CPU)(inputs[:1], mask={"seen": torch.ones(1)}) == ["cpu"] * 3


def test_the_outputs_of_a_model_return_to_the_cpu() -> None:
    assert move_model(torch.nn.Linear(2, 1), CPU)(torch.ones(1, 2)).device == CPU
    with pytest.raises(NotImplementedError, match="copy out of meta tensor"):
        move_model(torch.nn.Linear(2, 1), META)(torch.ones(1, 2))


def test_the_numerics_of_a_server_include_the_number_of_threads() -> None:
    assert describe_numerics(CPU).endswith(
        f", {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"
    )
