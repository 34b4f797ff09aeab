"""The whole training state in one flat tensor: weights, optimizer state, average of the weights
(optional), buffers, and the best weights so far with the record of validation (optional).

A single broadcast or copy transfers the whole tensor, so no part can be forgotten. Parameters and
non-float32 tensors are views of this tensor, aligned to 64 bytes.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from rekindle.content.verified_release import read_verified
from rekindle.content.weights import REMEDY, WEIGHTS_FILE, parse_description, reject_other_weights
from rekindle.content.weights import tensor_bytes as tensor_bytes
from rekindle.content.weights import weights_sha256 as weights_sha256
from rekindle.documents import MODEL_FILE
from rekindle.errors import ConfigError, DataError, in_one_line, say
from rekindle.storage import NotFound, Store
from rekindle.training.buffers import ALIGNMENT, Buffers
from rekindle.training.optimizers import FusedAdamW, Rate, TorchOptimizer
from rekindle.training.spec import TrainConfig

MAX_MEASURES = 8  # maximum number of a workload's measures, in addition to the loss
# number of float64 values in the validation record: the best loss, its step, the number of
# validations since this step, and 1 if training has ended
RECORD_LENGTH = 4


class State:
    """A model and its optimizer. `step` is the number of updates made, or -1 before the state is
    initialized.

    If validation is configured, training ends with one step that only validates. `make_optimizer`
    is the workload's function `optimizer`; without it, the optimizer is AdamW.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        device: torch.device,
        make_optimizer: Callable[[nn.Module, TrainConfig], object] | None = None,
    ) -> None:
        self.model = model.to(device)
        self.config = config
        self.device = device
        self.step = -1

        optimizer = None
        if make_optimizer:
            # `make_optimizer` is called first, because it may freeze parameters
            optimizer = make_optimizer(model, config)
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise ConfigError(
                    f"`optimizer` returned {in_one_line(optimizer)}: it must return a"
                    " torch.optim.Optimizer."
                )

        named_parameters = _list_trainable_parameters(model)
        self.parameters = [p for _, p in named_parameters]
        offsets = [0]

        for p in self.parameters:
            offsets.append(offsets[-1] + math.ceil(p.numel() / ALIGNMENT) * ALIGNMENT)

        self.size = offsets[-1]
        self._offsets = offsets[:-1]
        decay_size = offsets[sum(p.ndim >= 2 for p in self.parameters)]

        self.optimizer = (
            TorchOptimizer(optimizer, named_parameters)
            if optimizer
            else FusedAdamW(config, self.size, decay_size)
        )

        self.buffers = Buffers(model)

        self.layout = (
            [[name, list(p.shape)] for name, p in named_parameters]
            + self.optimizer.layout
            + self.buffers.layout
        )

        sizes = [
            self.size,
            self.optimizer.floats,
            self.size if config.average else 0,
            self.buffers.floats,
            self.size + self.buffers.floats if config.keep_best else 0,
            ALIGNMENT if config.validation else 0,
        ]
        self.memory = torch.zeros(sum(sizes), device=device)
        self.weights, moments, average, self._buffers, self._best, record = self.memory.split(sizes)
        self._average = average if config.average else self.weights
        self._record = record.view(torch.float64)[:RECORD_LENGTH] if config.validation else None

        for p, view in zip(self.parameters, self.view_parameters(self.weights), strict=True):
            view.copy_(p.data)
            p.data = view

        self._average.copy_(self.weights)
        self.optimizer.attach(self.weights, moments)
        self.buffers.attach(self._buffers)
        self._extra_widths = [
            *self.buffers.widths,
            *([1 + MAX_MEASURES] if config.validation else []),
        ]
        # number of float32 elements that are summed over the virtual workers
        self.width = self.size + sum(self._extra_widths)

    def view_parameters(self, flat: Tensor) -> list[Tensor]:
        """Return views of a flat tensor, one per parameter."""
        pairs = zip(self._offsets, self.parameters, strict=True)
        return [flat[start : start + p.numel()].view(p.shape) for start, p in pairs]

    def view_summands(self, flat: Tensor) -> list[Tensor]:
        """Return views of `flat`, a tensor of `width` elements; one view per summand: gradients,
        changes of buffers, validation sums."""
        return [
            *self.view_parameters(flat),
            *flat[self.size : self.width].split(self._extra_widths),
        ]

    def update(self, total: Tensor, scale: float, rate: Rate) -> float:
        """Make one update from `total` [width], the sum of the summands of `scale` virtual workers.

        Returns the norm of the mean gradient before clipping. Raises ConfigError if the norm is not
        finite.
        """
        config = self.config
        gradient = total[: self.size] if self._extra_widths else total

        norm = torch.linalg.vector_norm(gradient).item() / scale
        if not math.isfinite(norm):
            raise ConfigError(
                f"the gradient of step {self.step} is not finite: training has diverged, and a"
                f" retry would, too. Lower train.learning_rate ({config.learning_rate}) or"
                f" train.clip ({config.clip})."
            )

        if self.buffers.widths:
            self.buffers.apply_totals(
                total[self.size :][: sum(self.buffers.widths)], config.virtual_workers
            )

        divisor = scale * max(1.0, norm / config.clip) if config.clip else scale
        self.optimizer.update(gradient, divisor, self.step, rate)
        self.step += 1

        # the factor of the previous average is smaller at first, so that the average soon forgets
        # the initial weights
        if config.average:
            self._average.lerp_(
                self.weights, 1 - min(config.average, (1 + self.step) / (10 + self.step))
            )

        return norm

    def record_validation(self, loss: float, *, is_last: bool) -> bool:
        """Record the validation loss of the current weights. Returns True if training ends with
        this validation."""
        assert self._record is not None

        best, best_step, misses, _ = self._record.tolist()
        if math.isfinite(loss) and (not best_step or loss < best):
            best = loss
            best_step = self.step
            misses = 0

            if self.config.keep_best:
                self._best[: self.size].copy_(self._average)
                self._best[self.size :].copy_(self._buffers)
        else:
            misses += 1

        ends = is_last or 0 < self.config.patience <= misses
        self._record.copy_(torch.tensor([best, best_step, misses, ends], dtype=torch.float64))
        if ends:
            self.step += 1

        return ends

    def is_finished(self, total: int) -> bool:
        """Return True if training has ended, either early or after `total_steps` updates."""
        if self._record is None:
            return self.step >= total
        return self.step > 0 and self._record[3].item() > 0

    @property
    def update_count(self) -> int:
        """Number of updates made; if validation is configured, the last step only validates and
        makes no update."""
        return self.step - int(self._record is not None and self._record[3].item() > 0)

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and loss of the best validation so far; None before the first one."""
        loss, step = self._record[:2].tolist() if self._record is not None else (0.0, 0.0)
        if step:
            return (int(step), loss)
        return None

    @contextmanager
    def use_released_weights(self) -> Iterator[None]:
        """Let the model use the weights that a release would contain now, in eval mode and without
        gradients, inside a `with` block."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.buffers.load_into_model()
        self._use_weights(self._average)
        self.model.eval()

        try:
            with torch.no_grad():
                yield
        finally:
            self._use_weights(self.weights)
            for module, mode in modes:
                module.training = mode

    def _use_weights(self, flat: Tensor) -> None:
        if self.config.average:
            for p, view in zip(self.parameters, self.view_parameters(flat), strict=True):
                p.data = view

    def copy_released_tensors(self) -> dict[str, Tensor]:
        """Return a copy of the state_dict on the CPU, with the weights to release: the best weights
        (train.keep_best), the average (train.average), or the current weights."""
        best = self._best if self.config.keep_best and self.best else None
        weights = self._average if best is None else best[: self.size]
        self.buffers.load_into_model(None if best is None else best[self.size :])
        released = {
            id(p): view
            for p, view in zip(self.parameters, self.view_parameters(weights), strict=True)
        }
        tensors: dict[str, Tensor] = self.model.state_dict(keep_vars=True)

        return {
            name: released.get(id(value), value).detach().cpu().clone()
            for name, value in tensors.items()
        }


def _list_trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the trainable parameters by name, matrices first, since weight decay applies only to
    matrices. Raises ConfigError."""
    named_parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    shapeless = [
        name for name, p in named_parameters if isinstance(p, nn.parameter.UninitializedParameter)
    ]
    if shapeless:
        raise ConfigError(
            f"parameter {shapeless[0]} of the model has no shape yet: call its lazy module in"
            " `model`, or give the module the size of its input."
        )

    named_parameters.sort(key=lambda item: item[1].ndim < 2)
    unsupported = [name for name, p in named_parameters if p.dtype != torch.float32]
    if unsupported:
        raise ConfigError(
            f"parameter {unsupported[0]} of the model is not float32: training supports float32"
            " only. For bfloat16 arithmetic set train.precision to bf16."
        )

    if not named_parameters:
        raise ConfigError(
            "the model lacks a trainable parameter: at least one must have requires_grad=True. A"
            " model without training steps, such as boosted trees, must be a rekindle.Fitted in"
            " `families`."
        )

    return named_parameters


def load_weights(model: nn.Module, store: Store, prefix: str) -> None:
    """Copy to `model` the weights of the release at `prefix` whose names and shapes match.

    Raises DataError if the release does not exist, if its weights were changed, or if nothing
    matches.
    """
    key = prefix.rstrip("/")
    names = (MODEL_FILE, WEIGHTS_FILE)

    try:
        if key.startswith("releases/"):
            files = read_verified(store, key, names, max_bytes=None)
        else:
            files = {name: store.get(f"{key}/{name}", max_bytes=None) for name in names}
    except NotFound as error:
        raise DataError(f"the initial weights do not exist: {error}") from error

    description = parse_description(files[MODEL_FILE], store.uri(f"{key}/{MODEL_FILE}"))
    content = files[WEIGHTS_FILE]

    try:
        released = load(content)
    except SafetensorError as error:
        raise DataError(
            f"{store.uri(key)}/{WEIGHTS_FILE} does not contain tensors ({error}). {REMEDY}"
        ) from error

    reject_other_weights(
        description.sha256,
        weights_sha256(released),
        lambda: hashlib.sha256(content).hexdigest(),
        store.uri(f"{key}/{WEIGHTS_FILE}"),
    )

    initial = model.state_dict()

    copied = {
        name: value
        for name, value in released.items()
        if name in initial and initial[name].shape == value.shape
    }
    if not copied:
        raise DataError(
            f"{store.uri(prefix)} does not have a tensor with the name and shape of a tensor of the"
            " model: choose another release."
        )

    model.load_state_dict(copied, strict=False)
    others = ", ".join(initial.keys() - copied.keys())
    say(
        f"{len(copied)} of {len(initial)} tensors copied from {prefix}"
        + (f"; random: {others}" if others else "")
    )
