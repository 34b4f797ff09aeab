"""All that training changes, in one flat tensor: weights, AdamW's two moments, and the average if there is one.

One tensor means one broadcast, one copy for a checkpoint and one update: nothing can be forgotten. Parameters are views
of it, each on a 64-byte boundary. AdamW is torch's own fused kernel, called directly: 4 times faster than
separate operations, and `torch.optim` would cost every worker a second of imports.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.errors import ConfigError
from rekindle.training.spec import TrainConfig

kernels: Any = torch  # whose stubs lack the fused operations
ALIGN = 16  # float32 elements in 64 bytes


class State:
    """A model and its optimizer. `step` counts the updates made; -1: not initialized yet."""

    def __init__(self, model: nn.Module, config: TrainConfig, device: torch.device) -> None:
        self.model, self.config, self.device, self.step = model.to(device), config, device, -1
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        named.sort(key=lambda item: item[1].ndim < 2)  # matrices first: only they decay
        if unsupported := [name for name, p in named if p.dtype != torch.float32]:
            raise ConfigError(
                f"parameter {unsupported[0]} of the model is not float32: training supports float32 only."
            )
        self.parameters = [p for _, p in named]
        self.layout = [(name, list(p.shape)) for name, p in named]
        offsets = [0]
        for p in self.parameters:
            offsets.append(offsets[-1] + math.ceil(p.numel() / ALIGN) * ALIGN)
        self.size, self._offsets = offsets[-1], offsets[:-1]
        self.memory = torch.zeros((4 if config.average else 3) * self.size, device=device)
        self.weights, self._mean, self._square, *average = self.memory.split(self.size)
        self._average = average[0] if average else self.weights
        for p, view in zip(self.parameters, self.views(self.weights), strict=True):
            view.copy_(p.data)
            p.data = view
        self._average.copy_(self.weights)
        cut = offsets[sum(p.ndim >= 2 for p in self.parameters)]
        flats = (self.weights, self._mean, self._square)
        self._parts = [
            (part, decay, *([flat[part]] for flat in flats))
            for part, decay in ((slice(0, cut), config.weight_decay), (slice(cut, self.size), 0.0))
        ]
        self._count, self._divisor = torch.zeros((), device=device), torch.zeros((), device=device)
        self._buffers = {name: (b, b._version) for name, b in model.named_buffers()}

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat tensor, one per parameter."""
        return [flat[at : at + p.numel()].view(p.shape) for at, p in zip(self._offsets, self.parameters, strict=True)]

    def update(self, gradient: Tensor, scale: float, rate: float) -> float:
        """One AdamW update by `gradient` / `scale` (flat [size]); returns the gradient's norm before clipping."""
        config = self.config
        norm = torch.linalg.vector_norm(gradient).item() / scale
        if not math.isfinite(norm):
            raise ConfigError(
                f"the gradient of step {self.step} is not finite: training has diverged, and would again. "
                f"Lower train.learning_rate ({config.learning_rate}) or train.clip ({config.clip})."
            )
        self.step += 1
        self._count.fill_(self.step)
        self._divisor.fill_(scale * max(1.0, norm / config.clip) if config.clip else scale)
        for part, decay, weights, mean, square in self._parts:
            kernels._fused_adamw_(
                weights,
                [gradient[part]],
                mean,
                square,
                [],
                [self._count],
                lr=rate,
                beta1=config.beta1,
                beta2=config.beta2,
                weight_decay=decay,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
                grad_scale=self._divisor,
            )
        if config.average:  # decay faster at first: otherwise the initial weights would linger
            self._average.lerp_(self.weights, 1 - min(config.average, (1 + self.step) / (10 + self.step)))
        return norm

    def check_buffers(self) -> None:
        """Raise ConfigError if a forward pass changed a buffer: its value would depend on the workers."""
        for name, (buffer, version) in self._buffers.items():
            if buffer._version != version:
                raise ConfigError(
                    f'the model changes its buffer "{name}" in its forward pass: running statistics (BatchNorm) would '
                    "depend on the number of workers. Use LayerNorm or GroupNorm."
                )

    def trained(self) -> dict[str, Tensor]:
        """The released model: its state_dict on the CPU, with the averaged weights if an average is kept."""
        averaged = {id(p): view for p, view in zip(self.parameters, self.views(self._average), strict=True)}
        tensors: dict[str, Tensor] = self.model.state_dict(keep_vars=True)
        return {name: averaged.get(id(value), value).detach().cpu().clone() for name, value in tensors.items()}


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
