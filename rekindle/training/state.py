"""All that training changes, in one flat tensor: weights, the optimizer's state, the average of the weights if there is
one, buffers, and the best weights so far with the record of validation.

One tensor means one broadcast and one copy for a checkpoint: nothing can be forgotten. Parameters are views of it, each
on a 64-byte boundary; so are tensors of other types than float32.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor, nn

from rekindle.errors import ConfigError, DataError, say
from rekindle.storage import NotFound, Store
from rekindle.training.buffers import ALIGN, Buffers
from rekindle.training.optimizers import FusedAdamW, Rate, TorchOptimizer
from rekindle.training.spec import TrainConfig

ROOM = 8  # measures of a workload, beside the loss
RECORD = 4  # best validation loss, its step, validations since then, whether training has ended: float64


class State:
    """A model and its optimizer. `step` counts the updates made; -1: not initialized yet.

    With validation, a last step without an update ends training. `make_optimizer` is the workload's; without it: AdamW.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        device: torch.device,
        make_optimizer: Callable[[nn.Module, TrainConfig], Any] | None = None,
    ) -> None:
        self.model, self.config, self.device, self.step = model.to(device), config, device, -1
        optimizer = make_optimizer(model, config) if make_optimizer else None  # it may freeze parameters
        if make_optimizer and not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"`optimizer` returned {optimizer!r}: it must return a torch.optim.Optimizer.")
        named = _trainable(model)
        self.parameters = [p for _, p in named]
        offsets = [0]
        for p in self.parameters:
            offsets.append(offsets[-1] + math.ceil(p.numel() / ALIGN) * ALIGN)
        self.size, self._offsets = offsets[-1], offsets[:-1]
        cut = offsets[sum(p.ndim >= 2 for p in self.parameters)]
        self.optimizer = TorchOptimizer(optimizer, named) if optimizer else FusedAdamW(config, self.size, cut)
        self.buffers = Buffers(model)
        self.layout = [[name, list(p.shape)] for name, p in named] + self.optimizer.layout + self.buffers.layout
        sizes = [self.size, self.optimizer.floats, self.size if config.average else 0, self.buffers.floats]
        sizes += [self.size + self.buffers.floats if config.keep_best else 0, ALIGN if config.validation else 0]
        self.memory = torch.zeros(sum(sizes), device=device)
        self.weights, moments, average, self._buffers, self._best, record = self.memory.split(sizes)
        self._average = average if config.average else self.weights
        self._record = record.view(torch.float64)[:RECORD] if config.validation else None
        for p, view in zip(self.parameters, self.views(self.weights), strict=True):
            view.copy_(p.data)
            p.data = view
        self._average.copy_(self.weights)
        self.optimizer.attach(self.weights, moments)
        self.buffers.attach(self._buffers)
        self._tails = [*self.buffers.widths, *([1 + ROOM] if config.validation else [])]
        self.width = self.size + sum(self._tails)  # numbers that are summed over the virtual workers

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat tensor, one per parameter."""
        return [flat[at : at + p.numel()].view(p.shape) for at, p in zip(self._offsets, self.parameters, strict=True)]

    def summands(self, flat: Tensor) -> list[Tensor]:
        """Views of what is summed, `flat` [width]: the gradients, the changes of the buffers, the validation."""
        return [*self.views(flat), *flat[self.size : self.width].split(self._tails)]

    def update(self, total: Tensor, scale: float, rate: Rate) -> float:
        """One update by the mean of `scale` virtual workers, whose sum is `total` [width]; returns the gradient's norm
        before clipping."""
        config = self.config
        gradient = total[: self.size] if self._tails else total
        norm = torch.linalg.vector_norm(gradient).item() / scale
        if not math.isfinite(norm):
            raise ConfigError(
                f"the gradient of step {self.step} is not finite: training has diverged, and would again. "
                f"Lower train.learning_rate ({config.learning_rate}) or train.clip ({config.clip})."
            )
        if self.buffers.widths:
            self.buffers.apply(total[self.size :][: sum(self.buffers.widths)], config.virtual_workers)
        divisor = scale * max(1.0, norm / config.clip) if config.clip else scale
        self.optimizer.update(gradient, divisor, self.step, rate)
        self.step += 1
        if config.average:  # decay faster at first: otherwise the initial weights would linger
            self._average.lerp_(self.weights, 1 - min(config.average, (1 + self.step) / (10 + self.step)))
        return norm

    def judge(self, loss: float, *, last: bool) -> bool:
        """Note the validation loss of the present weights. True: training ends here, instead of another update."""
        assert self._record is not None
        best, best_step, misses, _ = self._record.tolist()
        if math.isfinite(loss) and (not best_step or loss < best):
            best, best_step, misses = loss, self.step, 0
            if self.config.keep_best:
                self._best[: self.size].copy_(self._average)
                self._best[self.size :].copy_(self._buffers)
        else:
            misses += 1
        ends = last or 0 < self.config.patience <= misses
        self._record.copy_(torch.tensor([best, best_step, misses, ends], dtype=torch.float64))
        self.step += ends
        return ends

    def finished(self, total: int) -> bool:
        """Whether training has ended, after `total` updates at the latest."""
        return self.step >= total if self._record is None else self.step > 0 and self._record[3].item() > 0

    @property
    def updates(self) -> int:
        """The updates made."""
        return self.step - int(self._record is not None and self._record[3].item() > 0)

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and loss of the best validation so far."""
        loss, step = self._record[:2].tolist() if self._record is not None else (0.0, 0.0)
        return (int(step), loss) if step else None

    @contextmanager
    def released(self) -> Iterator[None]:
        """The model as it would be released now, in eval mode and without gradients."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.buffers.load()
        self._point_to(self._average)
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._point_to(self.weights)
            for module, mode in modes:
                module.training = mode

    def _point_to(self, flat: Tensor) -> None:
        if self.config.average:
            for p, view in zip(self.parameters, self.views(flat), strict=True):
                p.data = view

    def trained(self) -> dict[str, Tensor]:
        """The released model: its state_dict on the CPU, with the best weights if they are kept, or the average."""
        best = self._best if self.config.keep_best and self.best else None
        weights = self._average if best is None else best[: self.size]
        self.buffers.load(None if best is None else best[self.size :])
        released = {id(p): view for p, view in zip(self.parameters, self.views(weights), strict=True)}
        tensors: dict[str, Tensor] = self.model.state_dict(keep_vars=True)
        return {name: released.get(id(value), value).detach().cpu().clone() for name, value in tensors.items()}


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters to train, matrices first: only they decay. Raises ConfigError."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    named.sort(key=lambda item: item[1].ndim < 2)
    if unsupported := [name for name, p in named if p.dtype != torch.float32]:
        raise ConfigError(
            f"parameter {unsupported[0]} of the model is not float32: training supports float32 only. For bfloat16 "
            "arithmetic set train.precision to bf16."
        )
    if not named:
        raise ConfigError("the model has no parameter to train: all are frozen, or there is none.")
    return named


def load_weights(model: nn.Module, store: Store, prefix: str) -> None:
    """Copy into `model` those weights of the release at `prefix` that it has with the same shape.

    Raises DataError if there is no release, or it has none of them.
    """
    try:
        released = load(store.get(f"{prefix.rstrip('/')}/model.safetensors"))
    except NotFound as error:
        raise DataError(f"there are no weights to begin with: {error}") from error
    own = model.state_dict()
    taken = {name: value for name, value in released.items() if name in own and own[name].shape == value.shape}
    if not taken:
        raise DataError(f"the model has none of the weights of {store.uri(prefix)}, by name and shape: give another.")
    model.load_state_dict(taken, strict=False)
    fresh = ", ".join(own.keys() - taken.keys())
    say(f"{len(taken)} of {len(own)} tensors begin with those of {prefix}" + (f"; fresh: {fresh}" if fresh else ""))


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """The identity of a model: sha256 over name, dtype, shape and little-endian bytes of each tensor, by name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu()
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(raw(value))
    return digest.hexdigest()


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU; no copy if it is contiguous."""
    flat: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)
