import hashlib
from typing import Any

import pytest
import torch
from torch import nn

from rekindle.errors import ConfigError
from rekindle.training.spec import TrainConfig
from rekindle.training.state import State, weights_sha256


def make(**settings: Any) -> State:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.ReLU(), nn.Linear(7, 1))
    return State(net, TrainConfig.model_validate({"clip": 0, "weight_decay": 0.1} | settings), torch.device("cpu"))


def flat(state: State, gradients: list[torch.Tensor]) -> torch.Tensor:
    result = torch.zeros(state.size)
    for view, gradient in zip(state.views(result), gradients, strict=True):
        view.copy_(gradient)
    return result


def test_updates_are_those_of_torchs_adamw() -> None:
    state, reference = make(), make()
    matrices = [p for p in reference.parameters if p.ndim > 1]
    others = [p for p in reference.parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, fused=True)
    for step in range(5):
        torch.manual_seed(step)
        gradients = [torch.randn_like(p) for p in state.parameters]
        state.step = max(state.step, 0)
        state.update(flat(state, gradients) * 4, 4, 0.01)
        for parameter, gradient in zip(reference.parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    for ours, theirs in zip(state.parameters, reference.parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_a_large_gradient_is_clipped_and_reported_unclipped() -> None:
    clipped, scaled = make(clip=1.0), make()
    gradient = flat(clipped, [torch.ones_like(p) for p in clipped.parameters])
    norm = float(gradient.norm())
    clipped.step = scaled.step = 0
    assert clipped.update(gradient.clone(), 1, 0.01) == pytest.approx(norm)
    scaled.update(gradient.clone(), norm, 0.01)
    torch.testing.assert_close(clipped.weights, scaled.weights)


def test_a_diverged_run_says_so_instead_of_releasing_nonsense() -> None:
    state = make()
    with pytest.raises(ConfigError, match="not finite: training has diverged"):
        state.update(torch.full((state.size,), float("nan")), 1, 0.01)


def test_the_average_is_what_is_released_while_training_goes_on_with_the_weights() -> None:
    state = make(average=0.9)
    state.step = 0
    first = {name: value.clone() for name, value in state.trained().items()}
    for _ in range(3):
        state.update(torch.randn(state.size), 1, 0.1)
    released = state.trained()
    assert set(released) == set(state.model.state_dict()) == set(first)
    for name, weights in state.model.state_dict().items():
        assert not torch.equal(released[name], first[name]) and not torch.equal(released[name], weights)


def test_the_hash_is_of_names_shapes_and_bytes_and_of_nothing_else() -> None:
    tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor(7)}
    expected = hashlib.sha256(b"a torch.int64 []\n" + (7).to_bytes(8, "little"))
    expected.update(b"b torch.float32 [2, 3]\n" + tensors["b"].numpy().tobytes())
    assert weights_sha256(tensors) == expected.hexdigest()
    assert weights_sha256(dict(reversed(tensors.items()))) == expected.hexdigest()
    assert weights_sha256(tensors | {"b": tensors["b"].t().contiguous().t()}) == expected.hexdigest()
    assert weights_sha256(tensors | {"b": tensors["b"].view(3, 2)}) != expected.hexdigest()


def test_models_that_would_not_give_the_same_bits_are_refused() -> None:
    config, cpu = TrainConfig.model_validate({}), torch.device("cpu")
    with pytest.raises(ConfigError, match="is not float32"):
        State(nn.Linear(2, 2).double(), config, cpu)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = State(model, config, cpu)
    state.check_buffers()
    model(torch.randn(4, 2))
    with pytest.raises(ConfigError, match="running statistics"):
        state.check_buffers()
