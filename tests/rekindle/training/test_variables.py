"""Numbers in the environment of a training are parsed where they are read."""

import pytest
import torch

from rekindle.errors import ConfigError
from rekindle.training.group.process_group import join_torchrun_group, read_world_size
from rekindle.training.membership.protocol import read_coordinator_address

INVALID_VALUES = "soon", "-1", "1.5", "9" * 5000


@pytest.mark.parametrize("text", [*INVALID_VALUES, "0", "65536"])
def test_an_invalid_port_of_the_coordinator_is_one_error(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", text)
    with pytest.raises(ConfigError, match="MASTER_PORT is"):
        read_coordinator_address()


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "GROUP_WORLD_SIZE", "MASTER_PORT"])
@pytest.mark.parametrize("text", INVALID_VALUES)
def test_an_invalid_variable_of_torchrun_is_one_error(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert read_world_size() == 2
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"{name} is"):
        join_torchrun_group(torch.device("cpu"))


def test_a_rank_is_below_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match=r"RANK is .* from 0 to 1"):
        join_torchrun_group(torch.device("cpu"))
