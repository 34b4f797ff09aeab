"""The optimizers: torch's fused AdamW, or the optimizer that the workload creates.

Both optimizers store their state in the flat memory of the training state, so every snapshot and
checkpoint contains it, and joining workers receive it.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.errors import ConfigError
from rekindle.training.buffers import padded_size
from rekindle.training.spec import TrainConfig

kernels: Any = torch  # torch's type stubs lack the fused operations
# function that computes the learning rate of the current update from the highest learning rate
Rate = Callable[[float], float]
NamedParameters = list[tuple[str, nn.Parameter]]


class FusedAdamW:
    """AdamW by torch's fused kernel, called directly on the flat weights.

    The kernel is 4 times faster than separate operations, and without `torch.optim` each worker
    starts a second earlier. `decay_size`: number of elements with weight decay (the matrices, which
    come first).
    """

    def __init__(self, config: TrainConfig, size: int, decay_size: int) -> None:
        self.config = config
        self.floats = 2 * size
        self.layout: list[Any] = []
        self._slices = ((slice(0, decay_size), config.weight_decay), (slice(decay_size, size), 0.0))

    def attach(self, weights: Tensor, memory: Tensor) -> None:
        """Store the means of the gradients and of their squares in `memory`, float32 [floats]."""
        flats = (weights, *memory.split(weights.numel()))
        self._groups = [
            (span, decay, *([flat[span]] for flat in flats)) for span, decay in self._slices
        ]
        self._count, self._divisor = weights.new_zeros(()), weights.new_zeros(())

    def update(self, gradient: Tensor, divisor: float, step: int, rate: Rate) -> None:
        """Make update `step`, counted from 0, with the gradient `gradient` / `divisor`."""
        config = self.config
        lr = rate(self.config.learning_rate)
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


class SparseTensorDetector(TorchDispatchMode):
    """Detects whether an operation in its `with` block returns a sparse tensor."""

    has_sparse_tensors = False

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.layout != torch.strided:
            self.has_sparse_tensors = True
        return result


class TorchOptimizer:
    """An optimizer with the interface of torch.optim, whose state consists of tensors.

    An optimizer creates its state in its first step. To find these tensors, the constructor makes
    one step with zero gradients and undoes it, so that training starts with a new optimizer.
    """

    def __init__(
        self, optimizer: "torch.optim.Optimizer", named_parameters: NamedParameters
    ) -> None:
        self.optimizer = optimizer
        self._named_parameters = named_parameters
        self._check_parameters()
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]

        self._initial_state = {
            p: _convert_tensors(name, optimizer.state[p], torch.clone)
            for name, p in named_parameters
            if p in optimizer.state
        }

        created_state = self._create_state()

        states = [
            (f"{name}.{key}", value)
            for name, state in created_state.items()
            for key, value in state.items()
        ]

        self.layout = [(name, list(value.shape), str(value.dtype)) for name, value in states]

        tensors = [
            (p, key, value)
            for name, p in named_parameters
            for key, value in sorted(created_state[name].items())
        ]

        device_entries = [entry for entry in tensors if entry[2].device == entry[0].device]
        # step counters stay on the CPU if the parameters are on a GPU
        host_entries = [entry for entry in tensors if entry[2].device != entry[0].device]
        self._templates = device_entries + host_entries
        self._sizes = [
            [padded_size(template.numel(), template.dtype) for *_, template in entries]
            for entries in (device_entries, host_entries)
        ]
        self.floats = sum(map(sum, self._sizes))

    def attach(self, weights: Tensor, memory: Tensor) -> None:
        """Store the state in `memory`, float32 [floats]. The parameters are views of `weights`."""
        device_memory, self._host_state = memory.split([sum(sizes) for sizes in self._sizes])
        self._host_copy = self._host_state.cpu()  # the optimizer works on this copy of the gradient
        chunks = [*device_memory.split(self._sizes[0]), *self._host_copy.split(self._sizes[1])]
        self._views: list[tuple[nn.Parameter, str, Tensor]] = []
        self.optimizer.state.clear()

        for (parameter, key, template), chunk in zip(self._templates, chunks, strict=True):
            view = chunk.view(template.dtype)[: template.numel()].view(template.shape)
            self._views.append((parameter, key, view))
            self.optimizer.state[parameter][key] = view

        del self._templates
        self._gradient = torch.zeros_like(weights)
        self._gradient_views: list[Tensor] = []

        for _, parameter in self._named_parameters:
            start = parameter.storage_offset() - weights.storage_offset()
            self._gradient_views.append(
                self._gradient[start : start + parameter.numel()].view(parameter.shape)
            )

    def update(self, gradient: Tensor, divisor: float, step: int, rate: Rate) -> None:
        """Make update `step`, counted from 0, with the gradient `gradient` / `divisor`. Raises
        ConfigError."""
        torch.div(gradient, divisor, out=self._gradient)
        # the gradients are set again for each step, because an optimizer may drop or replace them
        for (_, parameter), view in zip(self._named_parameters, self._gradient_views, strict=True):
            parameter.grad = view

        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = rate(peak)

        if step == 0:
            self.optimizer.state.clear()
            for parameter, tensors in self._initial_state.items():
                self.optimizer.state[parameter] = {
                    key: value.clone() for key, value in tensors.items()
                }
        elif len(self._host_copy):
            self._host_copy.copy_(self._host_state)

        self.optimizer.step()
        self._copy_state_back()

    def _copy_state_back(self) -> None:
        """Copy to the attached memory each state tensor that the optimizer's step has created or
        replaced."""
        for parameter, key, view in self._views:
            state = self.optimizer.state[parameter]
            value = state.get(key)
            if value is not view:
                if not isinstance(value, Tensor) or (value.shape, value.dtype) != (
                    view.shape,
                    view.dtype,
                ):
                    raise ConfigError(
                        f"the optimizer changed the shape or type of its state {key}, which must"
                        " stay the same."
                    )

                view.copy_(value)
                state[key] = view

        if len(self._host_copy):
            self._host_state.copy_(self._host_copy)

    def _check_parameters(self) -> None:
        groups = self.optimizer.param_groups
        optimized_ids = {id(p) for group in groups for p in group["params"]}

        missing_names = [name for name, p in self._named_parameters if id(p) not in optimized_ids]
        if missing_names:
            raise ConfigError(
                f'the workload\'s optimizer lacks the parameter "{missing_names[0]}": pass it all'
                " parameters of the model, or freeze the other parameters with"
                " requires_grad_(False)."
            )

        if any(not isinstance(group.get("lr"), float | int) for group in groups):
            raise ConfigError(
                "each parameter group of the workload's optimizer must have a number as its"
                " learning rate `lr`."
            )

    def _create_state(self) -> dict[str, dict[str, Tensor]]:
        """Make a step with zero gradients, undo it, and return the state tensors that it created,
        by parameter name and key. Raises ConfigError."""
        optimizer = self.optimizer
        kind = type(self.optimizer).__name__
        initial_weights = [p.detach().clone() for _, p in self._named_parameters]
        earlier_settings = deepcopy(_group_settings(optimizer))

        for _, parameter in self._named_parameters:
            parameter.grad = torch.zeros_like(parameter)

        watch = SparseTensorDetector()
        try:
            with watch:
                optimizer.step()
        except (TypeError, RuntimeError, ValueError, AttributeError, AssertionError) as error:
            raise ConfigError(
                f"the workload's optimizer {kind} cannot make a step ({error}): optimizers that"
                " need a closure or sparse gradients are not supported."
            ) from error

        if watch.has_sparse_tensors:
            # torch adds sparse tensors to the wrong elements of parameters that are views
            raise ConfigError(
                f"the workload's optimizer {kind} makes sparse gradients, which are not supported:"
                " use the dense gradients that it gets."
            )

        if _group_settings(optimizer) != earlier_settings:
            raise ConfigError(
                f"the workload's optimizer {kind} keeps state in its param_groups, which would be"
                " lost with a worker: its state must be tensors in `optimizer.state`."
            )

        for (_, parameter), weights in zip(self._named_parameters, initial_weights, strict=True):
            parameter.grad = None
            parameter.data.copy_(weights)

        return {
            name: _convert_tensors(name, optimizer.state[p], torch.Tensor.detach)
            for name, p in self._named_parameters
        }


def _group_settings(optimizer: "torch.optim.Optimizer") -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _convert_tensors(
    name: str, state: dict[str, Any], convert: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Return the state of the parameter `name` with `convert` applied to each tensor.

    Raises ConfigError if a value is not a dense tensor.
    """
    for key, value in state.items():
        if value is not None and not (isinstance(value, Tensor) and value.layout == torch.strided):
            raise ConfigError(
                f'the optimizer\'s state "{key}" of "{name}" is {type(value).__name__}: it must be'
                " a dense tensor, since every snapshot includes it."
            )
    return {key: convert(value) for key, value in state.items() if value is not None}
