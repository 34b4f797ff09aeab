"""Optimizers: fused AdamW, or an optimizer created by the workload.

Both keep their state in the flat memory of the training state, so that it is part of every snapshot and checkpoint, and
is sent to joining workers.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.errors import ConfigError
from rekindle.training.buffers import padded_size
from rekindle.training.spec import TrainConfig

kernels: Any = torch  # the type stubs lack the fused operations
Rate = Callable[[float], float]  # highest learning rate → learning rate of this update
Named = list[tuple[str, nn.Parameter]]


class FusedAdamW:
    """torch's fused kernel, called directly on the flat weights.

    It is 4 times faster than separate operations, and spares each worker the import of `torch.optim`, one second.
    `cut`: number of elements that decay (the matrices, which come first).
    """

    def __init__(self, config: TrainConfig, size: int, cut: int) -> None:
        self.config, self.floats = config, 2 * size
        self.layout: list[Any] = []
        self._slices = ((slice(0, cut), config.weight_decay), (slice(cut, size), 0.0))

    def attach(self, weights: Tensor, memory: Tensor) -> None:
        """Store the two moments in `memory`, float32 [floats]."""
        flats = (weights, *memory.split(weights.numel()))
        self._groups = [(span, decay, *([flat[span]] for flat in flats)) for span, decay in self._slices]
        self._count, self._divisor = weights.new_zeros(()), weights.new_zeros(())

    def update(self, gradient: Tensor, divisor: float, step: int, rate: Rate) -> None:
        """Make update number `step` (from 0) with `gradient` / `divisor`."""
        config, lr = self.config, rate(self.config.learning_rate)
        self._count.fill_(step + 1)
        self._divisor.fill_(divisor)
        for span, decay, weights, mean, square in self._groups:
            kernels._fused_adamw_(
                weights,
                [gradient[span]],
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
    """An optimizer of torch.optim, or a similar one, whose state consists of tensors.

    Optimizers create their state in their first step. To find these tensors, the constructor makes a step with zero
    gradients and undoes it; the real first step then starts with the state of a new optimizer.
    """

    def __init__(self, optimizer: Any, named: Named) -> None:
        self.optimizer, self._named = optimizer, named
        self._check_parameters()
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]
        self._new = {p: _tensors(name, optimizer.state[p], torch.clone) for name, p in named if p in optimizer.state}
        created = self._create_state()
        states = [(f"{name}.{key}", value) for name, state in created.items() for key, value in state.items()]
        self.layout = [(name, list(value.shape), str(value.dtype)) for name, value in states]
        tensors = [(p, key, value) for name, p in named for key, value in sorted(created[name].items())]
        on_device = [entry for entry in tensors if entry[2].device == entry[0].device]
        on_host = [entry for entry in tensors if entry[2].device != entry[0].device]  # step counters, on a GPU
        self._like = on_device + on_host
        self._sizes = [
            [padded_size(like.numel(), like.dtype) for *_, like in entries] for entries in (on_device, on_host)
        ]
        self.floats = sum(map(sum, self._sizes))

    def attach(self, weights: Tensor, memory: Tensor) -> None:
        """Store the state in `memory`, float32 [floats]. The parameters are views of `weights`."""
        on_device, self._on_host = memory.split([sum(sizes) for sizes in self._sizes])
        self._host = self._on_host.cpu()  # the copy that the optimizer uses
        chunks = [*on_device.split(self._sizes[0]), *self._host.split(self._sizes[1])]
        self._views: list[tuple[nn.Parameter, str, Tensor]] = []
        self.optimizer.state.clear()
        for (parameter, key, like), chunk in zip(self._like, chunks, strict=True):
            view = chunk.view(like.dtype)[: like.numel()].view(like.shape)
            self._views.append((parameter, key, view))
            self.optimizer.state[parameter][key] = view
        del self._like
        self._gradient = torch.zeros_like(weights)
        for _, parameter in self._named:
            start = parameter.storage_offset() - weights.storage_offset()
            parameter.grad = self._gradient[start : start + parameter.numel()].view(parameter.shape)

    def update(self, gradient: Tensor, divisor: float, step: int, rate: Rate) -> None:
        """Make update number `step` (from 0) with `gradient` / `divisor`. Raises ConfigError."""
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
        self._copy_state_back()

    def _copy_state_back(self) -> None:
        """Copy the state tensors that the step created or replaced to the attached memory."""
        for parameter, key, view in self._views:
            state = self.optimizer.state[parameter]
            if (value := state.get(key)) is not view:
                if not isinstance(value, Tensor) or (value.shape, value.dtype) != (view.shape, view.dtype):
                    raise ConfigError(
                        f"the optimizer changed the shape or type of its state {key}: both must stay the same."
                    )
                view.copy_(value)
                state[key] = view
        if len(self._host):
            self._on_host.copy_(self._host)

    def _check_parameters(self) -> None:
        groups = self.optimizer.param_groups
        optimized = {id(p) for group in groups for p in group["params"]}
        if missing := [name for name, p in self._named if id(p) not in optimized]:
            raise ConfigError(
                f'the workload\'s optimizer lacks the parameter "{missing[0]}": pass it all parameters of the model, '
                "or freeze the others with requires_grad_(False)."
            )
        if any(not isinstance(group.get("lr"), float | int) for group in groups):
            raise ConfigError(
                "each parameter group of the workload's optimizer must have a number as its learning rate `lr`."
            )

    def _create_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state tensors by parameter and key, after a step with zero gradients. Raises ConfigError."""
        optimizer, kind = self.optimizer, type(self.optimizer).__name__
        initial = [p.detach().clone() for _, p in self._named]
        settings = deepcopy(_settings(optimizer))
        for _, parameter in self._named:
            parameter.grad = torch.zeros_like(parameter)
        try:
            optimizer.step()
        except (TypeError, RuntimeError) as error:
            raise ConfigError(
                f"the workload's optimizer {kind} cannot make a step ({error}): optimizers that need a "
                "closure or sparse gradients are not supported."
            ) from error
        if _settings(optimizer) != settings:
            raise ConfigError(
                f"the workload's optimizer {kind} keeps state in its param_groups, which would be lost with a worker: "
                "its state must be tensors in `optimizer.state`."
            )
        for (_, parameter), weights in zip(self._named, initial, strict=True):
            parameter.grad = None
            parameter.data.copy_(weights)
        return {name: _tensors(name, optimizer.state[p], torch.Tensor.detach) for name, p in self._named}


def _settings(optimizer: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _tensors(name: str, state: dict[str, Any], take: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Apply `take` to the tensors of one parameter's state. Raises ConfigError if it contains anything else."""
    for key, value in state.items():
        if value is not None and not (isinstance(value, Tensor) and value.layout == torch.strided):
            raise ConfigError(
                f'the optimizer\'s state "{key}" of "{name}" is {type(value).__name__}: it must be a dense tensor, '
                "since every snapshot includes it."
            )
    return {key: take(value) for key, value in state.items() if value is not None}
