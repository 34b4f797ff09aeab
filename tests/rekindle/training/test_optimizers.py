"""The workload's own optimizer gives the same bits as torch, and its state survives the loss of a
worker."""

from typing import Any

import pytest
import torch
from torch import nn

from rekindle.errors import ConfigError
from rekindle.training.spec import TrainConfig
from rekindle.training.training_state import TrainingState

CPU = torch.device("cpu")
OPTIMIZERS: dict[str, Any] = {
    "SGD without state": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD with a special first step": lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1
    ),
    "Adafactor with states of other shapes": lambda parameters: torch.optim.Adafactor(
        parameters, lr=0.1
    ),
    "NAdam with initial ones": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "Adagrad with an initial value": lambda parameters: torch.optim.Adagrad(
        parameters, lr=0.1, initial_accumulator_value=0.3
    ),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
    "RMSprop": lambda parameters: torch.optim.RMSprop(
        parameters, lr=0.1, centered=True, momentum=0.5
    ),
    "AMSGrad, fused": lambda parameters: torch.optim.AdamW(
        parameters, lr=0.1, amsgrad=True, fused=True
    ),
}


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.ReLU(), nn.Linear(7, 1))


def make_state(optimizer: Any) -> TrainingState:
    config = TrainConfig.model_validate({"clip": 0})
    state = TrainingState(
        make_net(), config, CPU, lambda model, train: optimizer(model.parameters())
    )
    state.step = 0
    return state


def make_gradients(state: TrainingState, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    flat = torch.zeros(state.width)
    for view in state.view_parameters(flat):
        view.copy_(torch.randn(view.shape, generator=generator))
    return flat


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_gives_the_bits_of_torch_even_if_another_worker_takes_over(name: str) -> None:
    state = make_state(OPTIMIZERS[name])
    reference = make_net()
    optimizer = OPTIMIZERS[name](reference.parameters())
    names = {id(parameter): name for name, parameter in state.model.named_parameters()}

    for step in range(6):
        if step in (1, 4):  # a worker that joins receives this state
            joined = make_state(OPTIMIZERS[name])
            joined.memory.copy_(state.memory)
            joined.step = state.step
            state = joined
            names = {id(parameter): name for name, parameter in state.model.named_parameters()}

        flat = make_gradients(state, step)
        parameters = dict(reference.named_parameters())
        for parameter, view in zip(state.parameters, state.view_parameters(flat), strict=True):
            parameters[names[id(parameter)]].grad = view / 4

        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)

        optimizer.step()
        state.update(flat.clone(), 4, lambda highest, step=step: highest / (step + 1))

    for key, value in reference.state_dict().items():
        assert torch.equal(value, state.copy_released_tensors()[key]), key


def test_optimizers_whose_state_could_be_lost_are_rejected() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["count"] = 1

    class Grouping(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["count"] = 1

    with pytest.raises(
        ConfigError, match=r'"count" of "0\.weight" is int: it must be a dense tensor'
    ):
        make_state(lambda parameters: Counting(parameters, lr=0.1))

    with pytest.raises(ConfigError, match="Grouping keeps state in its param_groups"):
        make_state(lambda parameters: Grouping(parameters, lr=0.1))

    with pytest.raises(ConfigError, match="LBFGS cannot make a step"):
        make_state(lambda parameters: torch.optim.LBFGS(parameters, lr=0.1))

    for kind in (Replacing, Adding):
        with pytest.raises(
            ConfigError, match=f"{kind.__name__} makes sparse gradients, which are not supported"
        ):
            make_state(lambda parameters, kind=kind: kind(parameters, lr=0.1))

    with pytest.raises(ConfigError, match=r'lacks the parameter "0\.weight"'):
        make_state(lambda parameters: torch.optim.SGD(list(parameters)[1:], lr=0.1))


def test_the_optimizer_may_freeze_parameters() -> None:
    def optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.Optimizer:
        model[0].requires_grad_(False)  # type: ignore[operator]
        return torch.optim.Adam(model.parameters(), lr=train.learning_rate)

    state = TrainingState(make_net(), TrainConfig.model_validate({}), CPU, optimizer)
    assert state.size == 16 * 4
    assert not any(name.startswith("0.") for name, *_ in state.layout)


class Forgetful(torch.optim.SGD):
    """An optimizer that drops the gradients after its step, as some training loops do."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.zero_grad()


class Scaling(torch.optim.SGD):
    """An optimizer that replaces the gradients by tensors of its own."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad * 1.0
        super().step(closure)


class Replacing(torch.optim.SGD):
    """An optimizer that replaces the dense gradients by sparse gradients."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad.to_sparse()
        super().step(closure)


class Adding(torch.optim.SGD):
    """An optimizer that adds sparse gradients to the parameters, and keeps the dense gradients."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad.to_sparse(), alpha=-group["lr"])


@pytest.mark.parametrize("kind", [Forgetful, Scaling])
def test_an_optimizer_may_drop_or_replace_the_gradients(kind: Any) -> None:
    states = [
        make_state(lambda parameters, kind=kind: kind(parameters, lr=0.1))
        for kind in (kind, torch.optim.SGD)
    ]
    for step in range(3):
        for state in states:
            state.update(make_gradients(state, step), 1, lambda highest: 0.1)
    assert torch.equal(states[0].weights, states[1].weights)
