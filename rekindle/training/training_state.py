"""The whole training state in one flat tensor: weights, optimizer state, average of the weights
(optional), buffers, and the best weights so far with the record of validation (optional).

A single broadcast or copy transfers the whole flat tensor, so no part of the state can be
forgotten. Parameters and non-float32 tensors are views of the flat tensor, aligned to 64 bytes.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from rekindle.content.verified_release import read_verified_files
from rekindle.content.weights import REMEDY, WEIGHTS_FILE, parse_description, reject_wrong_weights
from rekindle.content.weights import view_tensor_bytes as view_tensor_bytes
from rekindle.content.weights import weights_sha256 as weights_sha256
from rekindle.documents import MODEL_FILE
from rekindle.errors import ConfigError, DataError, format_in_one_line, write_stderr
from rekindle.storage import NotFound, Store
from rekindle.training.buffers import ALIGNMENT_ELEMENTS, ModelBuffers
from rekindle.training.optimizers import FusedAdamW, LearningRateFunction, TorchOptimizer
from rekindle.training.spec import TrainConfig

# maximum number of a workload's measures, in addition to the loss
MAX_MEASURES = 8
# number of float64 values in the validation record: the best loss, its step, the number of
# validations since this step, and 1 if training has ended
RECORD_ELEMENTS = 4


class TrainingState:
    """A model and its optimizer. `step` is the number of updates made, or -1 before the state is
    initialized.

    If validation is configured, training ends with one step that only validates. `make_optimizer`
    is the workload's function `optimizer`; if it is None, the optimizer is AdamW.
    """

    def __init__(
        self,
        model: nn.Module,
        train_config: TrainConfig,
        device: torch.device,
        make_optimizer: Callable[[nn.Module, TrainConfig], object] | None = None,
    ) -> None:
        self.model = model.to(device)
        self.config = train_config
        self.device = device
        self.step = -1

        # make the optimizer first, because `make_optimizer` may freeze parameters
        optimizer = None
        if make_optimizer:
            optimizer = _check_optimizer(make_optimizer(model, train_config))

        named_parameters = _list_trainable_parameters(model)
        self.parameters = [parameter for _, parameter in named_parameters]
        parameter_offsets = _compute_offsets(self.parameters)
        self.size = parameter_offsets[-1]
        self._offsets = parameter_offsets[:-1]
        decayed_elements = parameter_offsets[
            sum(parameter.ndim >= 2 for parameter in self.parameters)
        ]

        self.optimizer = (
            TorchOptimizer(optimizer, named_parameters)
            if optimizer
            else FusedAdamW(train_config, self.size, decayed_elements)
        )

        self.buffers = ModelBuffers(model)

        self.layout = (
            [
                [parameter_name, list(parameter.shape)]
                for parameter_name, parameter in named_parameters
            ]
            + self.optimizer.layout
            + self.buffers.layout
        )

        part_sizes = [
            self.size,
            self.optimizer.floats,
            self.size if train_config.average else 0,
            self.buffers.floats,
            self.size + self.buffers.floats if train_config.keep_best else 0,
            ALIGNMENT_ELEMENTS if train_config.validation else 0,
        ]
        self.memory = torch.zeros(sum(part_sizes), device=device)
        self.weights, moments, weight_average, self._buffers, self._best, validation_record = (
            self.memory.split(part_sizes)
        )
        self._average = weight_average if train_config.average else self.weights
        self._record = (
            validation_record.view(torch.float64)[:RECORD_ELEMENTS]
            if train_config.validation
            else None
        )

        self._move_parameters()
        self._average.copy_(self.weights)
        self.optimizer.attach(self.weights, moments)
        self.buffers.attach(self._buffers)
        self._extra_widths = [
            *self.buffers.widths,
            *([1 + MAX_MEASURES] if train_config.validation else []),
        ]
        # number of float32 elements that are summed over the virtual workers
        self.width = self.size + sum(self._extra_widths)

    def _move_parameters(self) -> None:
        """Copy the values of the parameters into `weights`, and make each parameter a view of
        its elements there."""
        parameter_views = self.view_parameters(self.weights)
        for parameter, parameter_view in zip(self.parameters, parameter_views, strict=True):
            parameter_view.copy_(parameter.data)
            parameter.data = parameter_view

    def view_parameters(self, flat_tensor: Tensor) -> list[Tensor]:
        """Return views of a flat tensor, one per parameter."""
        offset_parameter_pairs = zip(self._offsets, self.parameters, strict=True)
        return [
            flat_tensor[start_offset : start_offset + parameter.numel()].view(parameter.shape)
            for start_offset, parameter in offset_parameter_pairs
        ]

    def view_summands(self, flat_tensor: Tensor) -> list[Tensor]:
        """Return views of `flat_tensor`, a tensor of `width` elements; one view per summand:
        gradients, changes of buffers, validation sums."""
        return [
            *self.view_parameters(flat_tensor),
            *flat_tensor[self.size : self.width].split(self._extra_widths),
        ]

    def update(
        self,
        summed_summands: Tensor,
        virtual_worker_count: float,
        learning_rate_function: LearningRateFunction,
    ) -> float:
        """Make one update from `summed_summands` [width], the sum of the summands of
        `virtual_worker_count` virtual workers.

        Returns the norm of the mean gradient before clipping. Raises ConfigError if the norm of the
        gradient is not finite.
        """
        train_config = self.config
        summed_gradient = summed_summands[: self.size] if self._extra_widths else summed_summands

        gradient_norm = torch.linalg.vector_norm(summed_gradient).item() / virtual_worker_count
        if not math.isfinite(gradient_norm):
            raise ConfigError(
                f"the gradient of step {self.step} is not finite: training has diverged, and a"
                f" retry would, too. Lower train.learning_rate ({train_config.learning_rate}) or"
                f" train.clip ({train_config.clip})."
            )

        if self.buffers.widths:
            self.buffers.apply_summed_changes(
                summed_summands[self.size :][: sum(self.buffers.widths)],
                train_config.virtual_workers,
            )

        divisor = (
            virtual_worker_count * max(1.0, gradient_norm / train_config.clip)
            if train_config.clip
            else virtual_worker_count
        )
        self.optimizer.update(summed_gradient, divisor, self.step, learning_rate_function)
        self.step += 1

        # the factor of the previous average is smaller at first, so that the average soon forgets
        # the initial weights
        if train_config.average:
            self._average.lerp_(
                self.weights, 1 - min(train_config.average, (1 + self.step) / (10 + self.step))
            )

        return gradient_norm

    def record_validation(self, validation_loss: float, *, is_last: bool) -> bool:
        """Record the validation loss of the current weights. Returns True if training ends with
        this validation."""
        assert self._record is not None

        best_loss, best_step, validations_without_gain, _ = self._record.tolist()
        if math.isfinite(validation_loss) and (not best_step or validation_loss < best_loss):
            best_loss = validation_loss
            best_step = self.step
            validations_without_gain = 0

            if self.config.keep_best:
                self._best[: self.size].copy_(self._average)
                self._best[self.size :].copy_(self._buffers)
        else:
            validations_without_gain += 1

        is_training_ended = is_last or 0 < self.config.patience <= validations_without_gain
        self._record.copy_(
            torch.tensor(
                [best_loss, best_step, validations_without_gain, is_training_ended],
                dtype=torch.float64,
            )
        )
        if is_training_ended:
            self.step += 1

        return is_training_ended

    def is_finished(self, total_steps: int) -> bool:
        """Return True if training has ended, either early or after `total_steps` updates."""
        if self._record is None:
            return self.step >= total_steps
        return self.step > 0 and self._record[3].item() > 0

    @property
    def update_count(self) -> int:
        """Number of updates made; if validation is configured, the last step only validates and
        makes no update."""
        return self.step - int(self._record is not None and self._record[3].item() > 0)

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and loss of the best validation so far; None before the first validation."""
        best_loss, best_step = self._record[:2].tolist() if self._record is not None else (0.0, 0.0)
        if best_step:
            return (int(best_step), best_loss)
        return None

    @contextmanager
    def use_released_weights(self) -> Iterator[None]:
        """Let the model use the weights that a release would contain now, in eval mode and without
        gradients, inside a `with` block."""
        training_modes = [(module, module.training) for module in self.model.modules()]
        self.buffers.load_into_model()
        self._use_weights(self._average)
        self.model.eval()

        try:
            with torch.no_grad():
                yield
        finally:
            self._use_weights(self.weights)
            for module, training_mode in training_modes:
                module.training = training_mode

    def _use_weights(self, flat_weights: Tensor) -> None:
        if self.config.average:
            for parameter, weight_view in zip(
                self.parameters, self.view_parameters(flat_weights), strict=True
            ):
                parameter.data = weight_view

    def copy_released_tensors(self) -> dict[str, Tensor]:
        """Return a copy of the state_dict on the CPU, with the weights to release: the best weights
        (train.keep_best), the average (train.average), or the current weights."""
        best_weights = self._best if self.config.keep_best and self.best else None
        released_weights = self._average if best_weights is None else best_weights[: self.size]
        self.buffers.load_into_model(None if best_weights is None else best_weights[self.size :])
        released_by_id = {
            id(parameter): weight_view
            for parameter, weight_view in zip(
                self.parameters, self.view_parameters(released_weights), strict=True
            )
        }
        tensor_by_name: dict[str, Tensor] = self.model.state_dict(keep_vars=True)

        return {
            tensor_name: released_by_id.get(id(state_tensor), state_tensor).detach().cpu().clone()
            for tensor_name, state_tensor in tensor_by_name.items()
        }


def _check_optimizer(made_optimizer: object) -> torch.optim.Optimizer:
    """Return the result of a workload's function `optimizer`. Raises ConfigError if the result is
    not an optimizer of torch."""
    if not isinstance(made_optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"`optimizer` returned {format_in_one_line(made_optimizer)}: it must return a"
            " torch.optim.Optimizer."
        )
    return made_optimizer


def _compute_offsets(parameters: list[nn.Parameter]) -> list[int]:
    """Return the offset of each parameter in the flat tensor, in elements, and then the offset of
    the end. All offsets are multiples of ALIGNMENT_ELEMENTS."""
    offsets = [0]
    for parameter in parameters:
        block_count = math.ceil(parameter.numel() / ALIGNMENT_ELEMENTS)
        offsets.append(offsets[-1] + block_count * ALIGNMENT_ELEMENTS)
    return offsets


def _list_trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the trainable parameters by name, matrices first, since weight decay applies only to
    matrices. Raises ConfigError."""
    named_parameters = [
        (parameter_name, parameter)
        for parameter_name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]

    shapeless_names = [
        parameter_name
        for parameter_name, parameter in named_parameters
        if isinstance(parameter, nn.parameter.UninitializedParameter)
    ]
    if shapeless_names:
        raise ConfigError(
            f"parameter {shapeless_names[0]} of the model has no shape yet: call its lazy module in"
            " `model`, or give the module the size of its input."
        )

    named_parameters.sort(key=lambda named_parameter: named_parameter[1].ndim < 2)
    unsupported_names = [
        parameter_name
        for parameter_name, parameter in named_parameters
        if parameter.dtype != torch.float32
    ]
    if unsupported_names:
        raise ConfigError(
            f"parameter {unsupported_names[0]} of the model is not float32: training supports"
            " float32 only. For bfloat16 arithmetic set train.precision to bf16."
        )

    if not named_parameters:
        raise ConfigError(
            "the model lacks a trainable parameter: at least one must have requires_grad=True. A"
            " model without training steps, such as boosted trees, must be a rekindle.Fitted in"
            " `families`."
        )

    return named_parameters


def load_weights(model: nn.Module, store: Store, release_prefix: str) -> None:
    """Copy to `model` the weights of the release at `release_prefix` whose names and shapes match.

    Raises DataError if the release does not exist, if its weights were changed, or if no weights
    match.
    """
    release_key = release_prefix.rstrip("/")
    file_names = (MODEL_FILE, WEIGHTS_FILE)

    try:
        if release_key.startswith("releases/"):
            file_bytes_by_name = read_verified_files(store, release_key, file_names, max_bytes=None)
        else:
            file_bytes_by_name = {
                file_name: store.get(f"{release_key}/{file_name}", max_bytes=None)
                for file_name in file_names
            }
    except NotFound as error:
        raise DataError(f"the initial weights do not exist: {error}") from error

    model_description = parse_description(
        file_bytes_by_name[MODEL_FILE], store.uri(f"{release_key}/{MODEL_FILE}")
    )
    weights_bytes = file_bytes_by_name[WEIGHTS_FILE]

    try:
        released_tensors = load(weights_bytes)
    except SafetensorError as error:
        raise DataError(
            f"{store.uri(release_key)}/{WEIGHTS_FILE} does not contain tensors ({error}). {REMEDY}"
        ) from error

    reject_wrong_weights(
        model_description.sha256,
        weights_sha256(released_tensors),
        lambda: hashlib.sha256(weights_bytes).hexdigest(),
        store.uri(f"{release_key}/{WEIGHTS_FILE}"),
    )

    initial_tensors = model.state_dict()

    copied_tensors = {
        tensor_name: released_tensor
        for tensor_name, released_tensor in released_tensors.items()
        if tensor_name in initial_tensors
        and initial_tensors[tensor_name].shape == released_tensor.shape
    }
    if not copied_tensors:
        raise DataError(
            f"{store.uri(release_prefix)} does not have a tensor with the name and shape of a"
            " tensor of the model: choose another release."
        )

    model.load_state_dict(copied_tensors, strict=False)
    other_names = ", ".join(initial_tensors.keys() - copied_tensors.keys())
    write_stderr(
        f"{len(copied_tensors)} of {len(initial_tensors)} tensors copied from {release_prefix}"
        + (f"; random: {other_names}" if other_names else "")
    )
