"""The optimizers of a training, either torch's fused AdamW or the optimizer that the workload
creates.

FusedAdamW and TorchOptimizer store their state in the flat memory of the training state, so every
snapshot and checkpoint contains the optimizer's state, and joining workers receive it.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.errors import ConfigError
from rekindle.training.buffers import compute_padded_size
from rekindle.training.spec import TrainConfig

# torch's type stubs lack the fused operations
kernels: Any = torch
# function that computes the learning rate of the current update from the highest learning rate
LearningRateFunction = Callable[[float], float]
NamedParameters = list[tuple[str, nn.Parameter]]


class FusedAdamW:
    """AdamW by torch's fused kernel, called directly on the flat weights.

    The kernel is 4 times faster than separate operations, and without `torch.optim` each worker
    starts a second earlier. `decayed_elements`: number of elements with weight decay (the matrices,
    which come first).
    """

    def __init__(
        self, train_config: TrainConfig, parameter_elements: int, decayed_elements: int
    ) -> None:
        self.config = train_config
        self.floats = 2 * parameter_elements
        self.layout: list[Any] = []
        self._slices = (
            (slice(0, decayed_elements), train_config.weight_decay),
            (slice(decayed_elements, parameter_elements), 0.0),
        )

    def attach(self, weights: Tensor, state_memory: Tensor) -> None:
        """Store the means of the gradients and of their squares in `state_memory`, float32
        [floats]."""
        flat_tensors = (weights, *state_memory.split(weights.numel()))
        self._groups = [
            (
                element_slice,
                weight_decay,
                *([flat_tensor[element_slice]] for flat_tensor in flat_tensors),
            )
            for element_slice, weight_decay in self._slices
        ]
        self._update_count = weights.new_zeros(())
        self._divisor = weights.new_zeros(())

    def update(
        self,
        gradient: Tensor,
        divisor: float,
        step: int,
        learning_rate_function: LearningRateFunction,
    ) -> None:
        """Make update `step`, counted from 0, with the gradient `gradient` / `divisor`."""
        train_config = self.config
        learning_rate = learning_rate_function(self.config.learning_rate)
        self._update_count.fill_(step + 1)
        self._divisor.fill_(divisor)

        for (
            element_slice,
            weight_decay,
            weights,
            gradient_mean,
            squared_gradient_mean,
        ) in self._groups:
            kernels._fused_adamw_(
                weights,
                [gradient[element_slice]],
                gradient_mean,
                squared_gradient_mean,
                [],
                [self._update_count],
                lr=learning_rate,
                beta1=train_config.beta1,
                beta2=train_config.beta2,
                weight_decay=weight_decay,
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
        operation_result = func(*args, **(kwargs or {}))
        if isinstance(operation_result, Tensor) and operation_result.layout != torch.strided:
            self.has_sparse_tensors = True
        return operation_result


class TorchOptimizer:
    """An optimizer with the interface of torch.optim, whose state consists of tensors.

    An optimizer creates the tensors of its state in its first step. To find these tensors, the
    constructor makes one step with zero gradients and undoes the step, so that training starts with
    a new optimizer.
    """

    def __init__(
        self, optimizer: "torch.optim.Optimizer", named_parameters: NamedParameters
    ) -> None:
        self.optimizer = optimizer
        self._named_parameters = named_parameters
        self._check_parameters()
        self._peak_learning_rates = [
            float(parameter_group["lr"]) for parameter_group in optimizer.param_groups
        ]

        self._initial_state = {
            parameter: _convert_tensors(parameter_name, optimizer.state[parameter], torch.clone)
            for parameter_name, parameter in named_parameters
            if parameter in optimizer.state
        }

        created_state = self._create_state()

        named_state_tensors = [
            (f"{parameter_name}.{state_key}", state_value)
            for parameter_name, parameter_state in created_state.items()
            for state_key, state_value in parameter_state.items()
        ]

        self.layout = [
            (parameter_name, list(state_value.shape), str(state_value.dtype))
            for parameter_name, state_value in named_state_tensors
        ]

        state_entries = [
            (parameter, state_key, state_value)
            for parameter_name, parameter in named_parameters
            for state_key, state_value in sorted(created_state[parameter_name].items())
        ]

        device_entries = [
            state_entry
            for state_entry in state_entries
            if state_entry[2].device == state_entry[0].device
        ]
        # step counters stay on the CPU if the parameters are on a GPU
        host_entries = [
            state_entry
            for state_entry in state_entries
            if state_entry[2].device != state_entry[0].device
        ]
        self._templates = device_entries + host_entries
        self._sizes = [
            [
                compute_padded_size(template_tensor.numel(), template_tensor.dtype)
                for *_, template_tensor in placed_entries
            ]
            for placed_entries in (device_entries, host_entries)
        ]
        self.floats = sum(map(sum, self._sizes))

    def attach(self, weights: Tensor, state_memory: Tensor) -> None:
        """Store the state of the optimizer in `state_memory`, float32 [floats]. The parameters are
        views of `weights`."""
        device_memory, self._host_state = state_memory.split(
            [sum(element_counts) for element_counts in self._sizes]
        )
        # the optimizer works on a copy of the state
        self._host_copy = self._host_state.cpu()
        memory_chunks = [
            *device_memory.split(self._sizes[0]),
            *self._host_copy.split(self._sizes[1]),
        ]
        self._views: list[tuple[nn.Parameter, str, Tensor]] = []
        self.optimizer.state.clear()

        for (parameter, state_key, template_tensor), memory_chunk in zip(
            self._templates, memory_chunks, strict=True
        ):
            state_view = memory_chunk.view(template_tensor.dtype)[: template_tensor.numel()].view(
                template_tensor.shape
            )
            self._views.append((parameter, state_key, state_view))
            self.optimizer.state[parameter][state_key] = state_view

        del self._templates
        self._gradient = torch.zeros_like(weights)
        self._gradient_views: list[Tensor] = []

        for _, parameter in self._named_parameters:
            start_offset = parameter.storage_offset() - weights.storage_offset()
            self._gradient_views.append(
                self._gradient[start_offset : start_offset + parameter.numel()].view(
                    parameter.shape
                )
            )

    def update(
        self,
        gradient: Tensor,
        divisor: float,
        step: int,
        learning_rate_function: LearningRateFunction,
    ) -> None:
        """Make update `step`, counted from 0, with the gradient `gradient` / `divisor`. Raises
        ConfigError."""
        torch.div(gradient, divisor, out=self._gradient)
        # set the gradients again for each step, because an optimizer may drop or replace them
        for (_, parameter), gradient_view in zip(
            self._named_parameters, self._gradient_views, strict=True
        ):
            parameter.grad = gradient_view

        for parameter_group, peak_learning_rate in zip(
            self.optimizer.param_groups, self._peak_learning_rates, strict=True
        ):
            parameter_group["lr"] = learning_rate_function(peak_learning_rate)

        if step == 0:
            self.optimizer.state.clear()
            for parameter, initial_tensors in self._initial_state.items():
                self.optimizer.state[parameter] = {
                    state_key: initial_value.clone()
                    for state_key, initial_value in initial_tensors.items()
                }
        elif len(self._host_copy):
            self._host_copy.copy_(self._host_state)

        self.optimizer.step()
        self._copy_state_back()

    def _copy_state_back(self) -> None:
        """Copy to the attached memory each state tensor that the optimizer's step has created or
        replaced."""
        for parameter, state_key, state_view in self._views:
            parameter_state = self.optimizer.state[parameter]
            state_value = parameter_state.get(state_key)
            if state_value is not state_view:
                if not isinstance(state_value, Tensor) or (
                    state_value.shape,
                    state_value.dtype,
                ) != (
                    state_view.shape,
                    state_view.dtype,
                ):
                    raise ConfigError(
                        f"the optimizer changed the shape or type of its state {state_key}, which"
                        " must stay the same."
                    )

                state_view.copy_(state_value)
                parameter_state[state_key] = state_view

        if len(self._host_copy):
            self._host_state.copy_(self._host_copy)

    def _check_parameters(self) -> None:
        parameter_groups = self.optimizer.param_groups
        optimized_ids = {
            id(parameter)
            for parameter_group in parameter_groups
            for parameter in parameter_group["params"]
        }

        missing_names = [
            parameter_name
            for parameter_name, parameter in self._named_parameters
            if id(parameter) not in optimized_ids
        ]
        if missing_names:
            raise ConfigError(
                f'the workload\'s optimizer lacks the parameter "{missing_names[0]}": pass it all'
                " parameters of the model, or freeze the other parameters with"
                " requires_grad_(False)."
            )

        if any(
            not isinstance(parameter_group.get("lr"), float | int)
            for parameter_group in parameter_groups
        ):
            raise ConfigError(
                "each parameter group of the workload's optimizer must have a number as its"
                " learning rate `lr`."
            )

    def _create_state(self) -> dict[str, dict[str, Tensor]]:
        """Make a step with zero gradients, undo the step, and return the state tensors that the
        step created, by parameter name and key. Raises ConfigError."""
        optimizer = self.optimizer
        optimizer_name = type(self.optimizer).__name__
        initial_weights = [
            named_parameter.detach().clone() for _, named_parameter in self._named_parameters
        ]
        earlier_settings = deepcopy(_copy_group_settings(optimizer))

        for _, parameter in self._named_parameters:
            parameter.grad = torch.zeros_like(parameter)

        sparse_detector = SparseTensorDetector()
        try:
            with sparse_detector:
                optimizer.step()
        except (TypeError, RuntimeError, ValueError, AttributeError, AssertionError) as error:
            raise ConfigError(
                f"the workload's optimizer {optimizer_name} cannot make a step ({error}):"
                " optimizers that need a closure or sparse gradients are not supported."
            ) from error

        if sparse_detector.has_sparse_tensors:
            # torch adds sparse tensors to the wrong elements of parameters that are views
            raise ConfigError(
                f"the workload's optimizer {optimizer_name} makes sparse gradients, which are not"
                " supported: use the dense gradients that it gets."
            )

        if _copy_group_settings(optimizer) != earlier_settings:
            raise ConfigError(
                f"the workload's optimizer {optimizer_name} keeps state in its param_groups, which"
                " would be lost with a worker: its state must be tensors in `optimizer.state`."
            )

        for (_, parameter), initial_weight in zip(
            self._named_parameters, initial_weights, strict=True
        ):
            parameter.grad = None
            parameter.data.copy_(initial_weight)

        return {
            parameter_name: _convert_tensors(
                parameter_name, optimizer.state[named_parameter], torch.Tensor.detach
            )
            for parameter_name, named_parameter in self._named_parameters
        }


def _copy_group_settings(optimizer: "torch.optim.Optimizer") -> list[dict[str, Any]]:
    return [
        {
            setting_name: setting_value
            for setting_name, setting_value in parameter_group.items()
            if setting_name != "params"
        }
        for parameter_group in optimizer.param_groups
    ]


def _convert_tensors(
    parameter_name: str, parameter_state: dict[str, Any], convert_tensor: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Return the state of the parameter `parameter_name` with `convert_tensor` applied to each
    tensor.

    Raises ConfigError if a value is not a dense tensor.
    """
    for state_key, state_value in parameter_state.items():
        if state_value is not None and not (
            isinstance(state_value, Tensor) and state_value.layout == torch.strided
        ):
            raise ConfigError(
                f'the optimizer\'s state "{state_key}" of "{parameter_name}" is'
                f" {type(state_value).__name__}: it must be"
                " a dense tensor, since every snapshot includes it."
            )
    return {
        state_key: convert_tensor(state_value)
        for state_key, state_value in parameter_state.items()
        if state_value is not None
    }
