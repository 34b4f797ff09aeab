import hashlib
from typing import Any

import pytest
import torch
from torch import nn

from rekindle.errors import ConfigError
from rekindle.training.spec import TrainConfig
from rekindle.training.training_state import TrainingState, weights_sha256


def make_state(**settings: Any) -> TrainingState:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.ReLU(), nn.Linear(7, 1))
    return TrainingState(
        net,
        TrainConfig.model_validate({"clip": 0, "weight_decay": 0.1} | settings),
        torch.device("cpu"),
    )


def flatten_state(state: TrainingState, gradients: list[torch.Tensor]) -> torch.Tensor:
    result = torch.zeros(state.size)
    for view, gradient in zip(state.view_parameters(result), gradients, strict=True):
        view.copy_(gradient)
    return result


def test_updates_match_torch_adamw() -> None:
    state = make_state()
    reference = make_state()
    matrices = [p for p in reference.parameters if p.ndim > 1]
    vectors = [p for p in reference.parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, fused=True)

    for step in range(5):
        torch.manual_seed(step)
        gradients = [torch.randn_like(p) for p in state.parameters]
        state.step = max(state.step, 0)
        state.update(flatten_state(state, gradients) * 4, 4, lambda highest: 0.01)

        for parameter, gradient in zip(reference.parameters, gradients, strict=True):
            parameter.grad = gradient

        optimizer.step()

    for actual, expected in zip(state.parameters, reference.parameters, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


def test_a_large_gradient_is_clipped_and_reported_unclipped() -> None:
    clipped = make_state(clip=1.0)
    scaled = make_state()
    gradient = flatten_state(clipped, [torch.ones_like(p) for p in clipped.parameters])
    norm = float(gradient.norm())
    clipped.step = scaled.step = 0
    assert clipped.update(gradient.clone(), 1, lambda highest: 0.01) == pytest.approx(norm)
    scaled.update(gradient.clone(), norm, lambda highest: 0.01)
    torch.testing.assert_close(clipped.weights, scaled.weights)


def test_a_diverged_run_ends_with_an_error() -> None:
    state = make_state()
    with pytest.raises(ConfigError, match="not finite: training has diverged"):
        state.update(torch.full((state.size,), float("nan")), 1, lambda highest: 0.01)


def test_the_average_is_released_while_training_continues_with_the_weights() -> None:
    state = make_state(average=0.9)
    state.step = 0
    first_tensors = {name: value.clone() for name, value in state.copy_released_tensors().items()}
    for _ in range(3):
        state.update(torch.randn(state.size), 1, lambda highest: 0.1)
    released = state.copy_released_tensors()
    assert set(released) == set(state.model.state_dict()) == set(first_tensors)
    for name, weights in state.model.state_dict().items():
        assert not torch.equal(released[name], first_tensors[name])
        assert not torch.equal(released[name], weights)


def test_the_hash_depends_only_on_names_types_shapes_and_bytes() -> None:
    tensors = {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor(7)}
    expected = hashlib.sha256(b"a torch.int64 []\n" + (7).to_bytes(8, "little"))
    expected.update(b"b torch.float32 [2, 3]\n" + tensors["b"].numpy().tobytes())
    assert weights_sha256(tensors) == expected.hexdigest()
    assert weights_sha256(dict(reversed(tensors.items()))) == expected.hexdigest()
    assert (
        weights_sha256(tensors | {"b": tensors["b"].t().contiguous().t()}) == expected.hexdigest()
    )
    assert weights_sha256(tensors | {"b": tensors["b"].view(3, 2)}) != expected.hexdigest()


def test_models_that_cannot_be_trained_are_rejected() -> None:
    config = TrainConfig.model_validate({})
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match="is not float32"):
        TrainingState(nn.Linear(2, 2).double(), config, cpu)
    with pytest.raises(ConfigError, match="lacks a trainable parameter"):
        TrainingState(nn.Linear(2, 2).requires_grad_(False), config, cpu)


def test_frozen_parameters_need_no_memory_and_do_not_change() -> None:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(5, 700), nn.Linear(700, 1))
    net[0].requires_grad_(False)
    state = TrainingState(net, TrainConfig.model_validate({"average": 0.9}), torch.device("cpu"))
    frozen = net[0].weight.clone()
    assert state.size == 704 + 16
    assert len(state.memory) == 4 * state.size
    state.step = 0
    state.update(torch.ones(state.width), 1, lambda highest: 0.1)
    assert torch.equal(net[0].weight, frozen)
    assert torch.equal(state.copy_released_tensors()["0.weight"], frozen)


def test_the_best_weights_are_released_and_training_ends_when_patience_is_exhausted() -> None:
    state = make_state(validation=0.5, keep_best=True, patience=2)
    state.step = 0
    released = []
    for loss, ends in ((3.0, False), (2.0, False), (float("nan"), False), (2.0, True)):
        state.update(torch.randn(state.width), 1, lambda highest: 0.1)
        released.append({name: value.clone() for name, value in state.model.state_dict().items()})
        assert not state.is_finished(9)
        assert state.record_validation(loss, is_last=False) == ends
    assert state.is_finished(9)
    assert state.step == 5
    assert state.update_count == 4
    assert state.best == (2, 2.0)
    for name, value in state.copy_released_tensors().items():
        assert torch.equal(value, released[1][name])


def test_validation_uses_the_weights_to_release_and_restores_the_model() -> None:
    state = make_state(average=0.9)
    state.step = 0
    state.update(torch.randn(state.size), 1, lambda highest: 0.1)
    layers: Any = state.model
    layers[1].eval()
    trained = state.model.state_dict()["0.weight"].clone()
    averaged = state.copy_released_tensors()["0.weight"]

    with state.use_released_weights():
        assert torch.equal(state.model.state_dict()["0.weight"], averaged)
        assert not state.model.training

    assert torch.equal(state.model.state_dict()["0.weight"], trained)
    assert not torch.equal(trained, averaged)
    assert [module.training for module in layers] == [True, False, True, True]
