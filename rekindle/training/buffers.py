"""The buffers of a model: non-parameter state that its forward pass updates, such as BatchNorm's running statistics.

Each virtual worker starts from the same old values. The new values are the old ones plus the mean of the virtual
workers' changes, summed like the gradients by one fixed tree, so they do not depend on the number of workers. Integers
(BatchNorm counts its batches) must change by the same number in all virtual workers. A buffer that is not in the
state_dict (`persistent=False`) is a cache: the model may replace it by another tensor, which is dropped after each
micro-batch.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rekindle.errors import ConfigError

ALIGN = 16  # float32 elements in 64 bytes
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def floats(numel: int, dtype: torch.dtype) -> int:
    """Return the number of float32 elements that hold `numel` elements of `dtype`, rounded up to 64 bytes."""
    return math.ceil(numel * dtype.itemsize / 4 / ALIGN) * ALIGN


@dataclass
class Segment:
    """All buffers of one dtype, packed: the values in the state, and the working copy that forward passes change."""

    named: list[tuple[str, Tensor]]
    values: Tensor
    work: Tensor

    @property
    def width(self) -> int:
        """Number of elements that are summed over the virtual workers."""
        return self.values.numel() * (1 if self.values.dtype == torch.float32 else 2)

    def change(self) -> Tensor:
        """Return the summands: float32 changes; for integers the changes and their squares, which show if all agree."""
        if self.values.dtype == torch.float32:  # compared by bits, because inf - inf is NaN
            same = self.work.view(torch.int32) == self.values.view(torch.int32)
            return (self.work - self.values).masked_fill_(same, 0.0)
        change = (self.work.long() - self.values.long()).float()
        return torch.cat([change, change.square()])

    def apply(self, total: Tensor, virtual_workers: int) -> None:
        """Set the new values from the sum of all changes. Raises ConfigError."""
        if self.values.dtype == torch.float32:
            good, mean = total.isfinite(), total / virtual_workers
            self.values.copy_(torch.where(total == 0, self.values, self.values + mean))
        else:
            change, squares = total.double().chunk(2)
            good, mean = squares * virtual_workers == change.square(), change / virtual_workers
            self.values.add_(mean.to(self.values.dtype))
        if not good.all():
            raise _unsupported(self.name(int(good.int().argmin())), "by different or infinite amounts")

    def name(self, element: int) -> str:
        """Return the name of the buffer that contains the given element."""
        for name, buffer in self.named:
            if element < buffer.numel():
                return name
            element -= buffer.numel()
        raise IndexError(element)


class Buffers:
    """The buffers of one model. Call `attach` before any other method."""

    def __init__(self, model: nn.Module) -> None:
        self._registered: list[tuple[nn.Module, str, str, Tensor | None]] = []
        by_dtype: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
        seen: set[int] = set()
        self._fixed: list[tuple[str, Tensor, int]] = []
        self._averaged: set[int] = set()
        for prefix, module in model.named_modules():
            for key, buffer in module._buffers.items():
                name = f"{prefix}.{key}".lstrip(".")
                self._registered.append((module, key, name, buffer))
                if buffer is None or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                averaged = buffer.dtype == torch.float32 or buffer.dtype in INTEGERS
                if averaged and key not in module._non_persistent_buffers_set:
                    by_dtype.setdefault(buffer.dtype, []).append((name, buffer))
                    self._averaged.add(id(buffer))
                else:
                    self._fixed.append((name, buffer, buffer._version))
        self._by_dtype = sorted(by_dtype.items(), key=lambda item: str(item[0]))
        self.layout = [(name, list(b.shape), str(b.dtype)) for _, named in self._by_dtype for name, b in named]
        self._sizes = [sum(buffer.numel() for _, buffer in named) for _, named in self._by_dtype]
        self._floats = [floats(n, dtype) for n, (dtype, _) in zip(self._sizes, self._by_dtype, strict=True)]
        self.floats = sum(self._floats)  # in the memory of the state
        self._segments: list[Segment] = []

    def attach(self, memory: Tensor) -> None:
        """Copy the values to `memory` (float32 [floats]), and make the model's buffers views of a working copy."""
        for (dtype, named), size, chunk in zip(self._by_dtype, self._sizes, memory.split(self._floats), strict=True):
            values = chunk.view(dtype)[:size]
            torch.cat([buffer.flatten() for _, buffer in named], out=values)
            work = values.clone()
            for (_, buffer), view in zip(named, work.split([buffer.numel() for _, buffer in named]), strict=True):
                buffer.data = view.view(buffer.shape)
            self._segments.append(Segment(named, values, work))
        self._zeros = [segment.values.new_zeros(segment.width, dtype=torch.float32) for segment in self._segments]
        self.widths = [segment.width for segment in self._segments]  # of the summands

    def load(self, memory: Tensor | None = None) -> None:
        """Copy the values of the state, or of another `memory`, to the model. Call it before each forward pass."""
        if memory is None:
            for segment in self._segments:
                segment.work.copy_(segment.values)
        else:
            for segment, chunk in zip(self._segments, memory.split(self._floats), strict=True):
                segment.work.copy_(chunk.view(segment.work.dtype)[: len(segment.work)])

    def changes(self) -> list[Tensor]:
        """Return the changes since `load`, to be summed over all virtual workers. Raises ConfigError."""
        for module, key, name, buffer in self._registered:
            if (current := module._buffers[key]) is not buffer:
                self._copy_assigned(name, buffer, current)
                module._buffers[key] = buffer
        for name, buffer, version in self._fixed:
            if buffer._version != version:
                raise _unsupported(name, f"in place, but its type is {buffer.dtype} or it is not in the state_dict")
        return [
            zeros if segment.work.is_cpu and _is_unchanged(segment) else segment.change()
            for segment, zeros in zip(self._segments, self._zeros, strict=True)
        ]

    def _copy_assigned(self, name: str, buffer: Tensor | None, current: Tensor | None) -> None:
        """Copy a tensor that the forward pass assigned to a buffer's name into the buffer."""
        if id(buffer) in self._averaged:
            assert buffer is not None
            if current is None or (current.shape, current.dtype) != (buffer.shape, buffer.dtype):
                raise _unsupported(name, "to a tensor of another shape or type")
            buffer.copy_(current.detach())

    def apply(self, totals: Tensor, virtual_workers: int) -> None:
        """Update the state from the summed changes, float32 [sum of widths]. Raises ConfigError."""
        if totals.any():
            for segment, total in zip(self._segments, totals.split(self.widths), strict=True):
                segment.apply(total, virtual_workers)


def _is_unchanged(segment: Segment) -> bool:
    return torch.equal(segment.work.view(torch.uint8), segment.values.view(torch.uint8))


def _unsupported(name: str, how: str) -> ConfigError:
    return ConfigError(
        f'the model changes its buffer "{name}" in its forward pass {how}: the change cannot be averaged over the '
        "virtual workers, so the result would depend on the number of workers. Keep the buffer constant, register it "
        "with persistent=False and assign a new tensor in each forward pass, or use another layer."
    )
