"""What turns gradients into new weights: fused AdamW, or the optimizer that the workload made.

Both keep their state in the flat memory of the training state, so that it is part of every snapshot and checkpoint, and
of what a joining worker is sent.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.errors import ConfigError
from rekindle.training.buffers import floats
from rekindle.training.spec import TrainConfig

kernels: Any = torch  # whose stubs lack the fused operations
Rate = Callable[[float], float]  # highest learning rate → that of this update
Named = list[tuple[str, nn.Parameter]]


class FusedAdamW:
    """torch's own fused kernel, called directly on the flat weights: 4 times faster than separate operations, and
    `torch.optim` would cost every worker a second of imports. `cut`: elements that decay, the matrices."""

    def __init__(self, config: TrainConfig, size: int, cut: int) -> None:
        self.config, self.floats = config, 2 * size
        self.layout: list[Any] = []
        self._slices = ((slice(0, cut), config.weight_decay), (slice(cut, size), 0.0))

    def attach(self, weights: Tensor, memory: Tensor) -> None:
        """Keep the two moments in `memory`, float32 [floats]."""
        flats = (weights, *memory.split(weights.numel()))
        self._parts = [(part, decay, *([flat[part]] for flat in flats)) for part, decay in self._slices]
        self._count, self._divisor = weights.new_zeros(()), weights.new_zeros(())

    def update(self, gradient: Tensor, divisor: float, step: int, rate: Rate) -> None:
        """Update number `step` (from 0) by `gradient` / `divisor`."""
        config, lr = self.config, rate(self.config.learning_rate)
        self._count.fill_(step + 1)
        self._divisor.fill_(divisor)
        for part, decay, weights, mean, square in self._parts:
            kernels._fused_adamw_(
                weights,
                [gradient[part]],
                mean,
                square,
                [],
                [self._count],
                lr=lr,
                beta1=config.beta1,
                beta2=config.beta2,
                weight_decay=decay,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
                grad_scale=self._divisor,
            )


class TorchOptimizer:
    """An optimizer of torch.optim, or one like it, whose state is tensors.

    Optimizers create their state in their first step. Which tensors that are is found by a step on zero gradients, and
    undone; the real first step then begins with the state of a new optimizer.
    """

    def __init__(self, optimizer: Any, named: Named) -> None:
        self.optimizer, self._named = optimizer, named
        self._check_parameters()
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]
        self._new = {p: _tensors(name, optimizer.state[p], torch.clone) for name, p in named if p in optimizer.state}
        created = self._created()
        states = [(f"{name}.{key}", value) for name, state in created.items() for key, value in state.items()]
        self.layout = [(name, list(value.shape), str(value.dtype)) for name, value in states]
        tensors = [(p, key, value) for name, p in named for key, value in sorted(created[name].items())]
        at_home = [entry for entry in tensors if entry[2].device == entry[0].device]
        on_host = [entry for entry in tensors if entry[2].device != entry[0].device]  # counts of steps, with a GPU
        self._like = at_home + on_host
        self._sizes = [[floats(like.numel(), like.dtype) for *_, like in part] for part in (at_home, on_host)]
        self.floats = sum(map(sum, self._sizes))

    def attach(self, weights: Tensor, memory: Tensor) -> None:
        """Keep the state in `memory`, float32 [floats]. The parameters are views of `weights`."""
        at_home, self._on_host = memory.split([sum(sizes) for sizes in self._sizes])
        self._host = self._on_host.cpu()  # what the optimizer works with
        parts = [*at_home.split(self._sizes[0]), *self._host.split(self._sizes[1])]
        self._views: list[tuple[nn.Parameter, str, Tensor]] = []
        self.optimizer.state.clear()
        for (parameter, key, like), part in zip(self._like, parts, strict=True):
            view = part.view(like.dtype)[: like.numel()].view(like.shape)
            self._views.append((parameter, key, view))
            self.optimizer.state[parameter][key] = view
        del self._like
        self._gradient = torch.zeros_like(weights)
        for _, parameter in self._named:
            at = parameter.storage_offset() - weights.storage_offset()
            parameter.grad = self._gradient[at : at + parameter.numel()].view(parameter.shape)

    def update(self, gradient: Tensor, divisor: float, step: int, rate: Rate) -> None:
        """Update number `step` (from 0) by `gradient` / `divisor`. Raises ConfigError if the state's tensors change."""
        torch.div(gradient, divisor, out=self._gradient)
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = rate(peak)
        if step == 0:
            self.optimizer.state.clear()
            for parameter, tensors in self._new.items():
                self.optimizer.state[parameter] = {key: value.clone() for key, value in tensors.items()}
        elif len(self._host):
            self._host.copy_(self._on_host)
        self.optimizer.step()
        self._keep()

    def _keep(self) -> None:
        """Copy the tensors that the step created or replaced to where they belong."""
        for parameter, key, view in self._views:
            state = self.optimizer.state[parameter]
            if (value := state.get(key)) is not view:
                if not isinstance(value, Tensor) or (value.shape, value.dtype) != (view.shape, view.dtype):
                    raise ConfigError(f"the optimizer changed the shape or type of its state {key}: it must not.")
                view.copy_(value)
                state[key] = view
        if len(self._host):
            self._on_host.copy_(self._host)

    def _check_parameters(self) -> None:
        groups = self.optimizer.param_groups
        optimized = {id(p) for group in groups for p in group["params"]}
        if missing := [name for name, p in self._named if id(p) not in optimized]:
            raise ConfigError(
                f'the workload\'s optimizer does not have the parameter "{missing[0]}": give it all parameters of the '
                "model, or freeze those that it must not change with requires_grad_(False)."
            )
        if any(not isinstance(group.get("lr"), float | int) for group in groups):
            raise ConfigError("each group of the workload's optimizer must have a learning rate `lr`, a number.")

    def _created(self) -> dict[str, dict[str, Tensor]]:
        """The state's tensors by parameter and name, as a step on zero gradients leaves them. Raises ConfigError."""
        optimizer, kind = self.optimizer, type(self.optimizer).__name__
        before = [p.detach().clone() for _, p in self._named]
        settings = deepcopy(_settings(optimizer))
        for _, parameter in self._named:
            parameter.grad = torch.zeros_like(parameter)
        try:
            optimizer.step()
        except (TypeError, RuntimeError) as error:
            raise ConfigError(
                f"the workload's optimizer {kind} cannot make a step ({error}): it must need neither a closure nor "
                "sparse gradients."
            ) from error
        if _settings(optimizer) != settings:
            raise ConfigError(
                f"the workload's optimizer {kind} keeps state in its param_groups, which would be lost with a worker: "
                "its state must be tensors in `optimizer.state`."
            )
        for (_, parameter), weights in zip(self._named, before, strict=True):
            parameter.grad = None
            parameter.data.copy_(weights)
        return {name: _tensors(name, optimizer.state[p], torch.Tensor.detach) for name, p in self._named}


def _settings(optimizer: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _tensors(name: str, state: dict[str, Any], take: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The tensors of one parameter's state. Raises ConfigError if it holds anything else."""
    for key, value in state.items():
        if value is not None and not (isinstance(value, Tensor) and value.layout == torch.strided):
            raise ConfigError(
                f'the optimizer\'s state "{key}" of "{name}" is {type(value).__name__}: it must be a dense tensor, '
                "since it travels with every snapshot."
            )
    return {key: take(value) for key, value in state.items() if value is not None}
