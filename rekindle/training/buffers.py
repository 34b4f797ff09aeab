"""The buffers of a model, first of all BatchNorm's running statistics: what its forward pass changes beside no weights.

Each virtual worker begins with the same old values. The new ones are old + the mean of the virtual workers' changes,
added like the gradients by one fixed tree: they do not depend on the number of workers. Integers (BatchNorm counts its
batches) must change by the same number in all. A buffer that is not in the state_dict (`persistent=False`) is a cache:
it may be replaced by another tensor, which is dropped after each micro-batch.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rekindle.errors import ConfigError

ALIGN = 16  # float32 elements in 64 bytes
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
WAY_OUT = "Keep it constant, register it with persistent=False and assign it anew, or use another layer"


def floats(numel: int, dtype: torch.dtype) -> int:
    """Elements of a float32 tensor that hold `numel` elements of `dtype`, up to the next 64-byte boundary."""
    return math.ceil(numel * dtype.itemsize / 4 / ALIGN) * ALIGN


@dataclass
class Segment:
    """All buffers of one dtype, packed: the state's values, and the working copy that forward passes change."""

    named: list[tuple[str, Tensor]]
    values: Tensor
    work: Tensor

    @property
    def width(self) -> int:
        """Numbers that are summed over the virtual workers."""
        return self.values.numel() * (1 if self.values.dtype == torch.float32 else 2)

    def change(self) -> Tensor:
        """What is summed: float32 changes; of integers the changes and their squares, which tell whether all agree."""
        if self.values.dtype == torch.float32:  # by bits: infinite minus infinite is no change
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
            raise _unsupported(self.name(int(good.int().argmin())), "by numbers that have no mean")

    def name(self, element: int) -> str:
        """The buffer that holds an element."""
        for name, buffer in self.named:
            if element < buffer.numel():
                return name
            element -= buffer.numel()
        raise IndexError(element)


class Buffers:
    """The buffers of one model. `attach` them to the state's memory before any use."""

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[nn.Module, str, str, Tensor | None]] = []
        by_dtype: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
        known: set[int] = set()
        self._fixed: list[tuple[str, Tensor, int]] = []
        self._averaged: set[int] = set()
        for prefix, module in model.named_modules():
            for key, buffer in module._buffers.items():
                name = f"{prefix}.{key}".lstrip(".")
                self._places.append((module, key, name, buffer))
                if buffer is None or id(buffer) in known:
                    continue
                known.add(id(buffer))
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
        self.floats = sum(self._floats)  # of the state's memory
        self._segments: list[Segment] = []

    def attach(self, memory: Tensor) -> None:
        """Copy the values to `memory` (float32 [floats]), and make the model's buffers views of a working copy."""
        for (dtype, named), size, part in zip(self._by_dtype, self._sizes, memory.split(self._floats), strict=True):
            values = part.view(dtype)[:size]
            torch.cat([buffer.flatten() for _, buffer in named], out=values)
            work = values.clone()
            for (_, buffer), view in zip(named, work.split([buffer.numel() for _, buffer in named]), strict=True):
                buffer.data = view.view(buffer.shape)
            self._segments.append(Segment(named, values, work))
        self._zeros = [segment.values.new_zeros(segment.width, dtype=torch.float32) for segment in self._segments]
        self.widths = [segment.width for segment in self._segments]  # of what is summed

    def load(self, memory: Tensor | None = None) -> None:
        """Set the model's buffers to the state's, or to those in another `memory`: before each forward pass."""
        if memory is None:
            for segment in self._segments:
                segment.work.copy_(segment.values)
        else:
            for segment, part in zip(self._segments, memory.split(self._floats), strict=True):
                segment.work.copy_(part.view(segment.work.dtype)[: len(segment.work)])

    def changes(self) -> list[Tensor]:
        """What the forward pass since `load` changed, to be summed over all virtual workers. Raises ConfigError."""
        if not self._places:
            return self._zeros
        for module, key, name, buffer in self._places:
            if (current := module._buffers[key]) is not buffer:
                self._take(name, buffer, current)
                module._buffers[key] = buffer
        for name, buffer, version in self._fixed:
            if buffer._version != version:
                raise _unsupported(name, f"in place, and it is {buffer.dtype} or not in the state_dict")
        return [
            zeros if segment.work.is_cpu and _equal(segment) else segment.change()
            for segment, zeros in zip(self._segments, self._zeros, strict=True)
        ]

    def _take(self, name: str, buffer: Tensor | None, current: Tensor | None) -> None:
        """Take over what the forward pass assigned to a buffer's name."""
        if id(buffer) in self._averaged:
            assert buffer is not None
            if current is None or (current.shape, current.dtype) != (buffer.shape, buffer.dtype):
                raise _unsupported(name, "to a tensor of another shape or type")
            buffer.copy_(current.detach())

    def apply(self, totals: Tensor, virtual_workers: int) -> None:
        """Set the state's values from the sums of all changes, float32 [sum of widths]. Raises ConfigError."""
        if totals.any():
            for segment, total in zip(self._segments, totals.split(self.widths), strict=True):
                segment.apply(total, virtual_workers)


def _equal(segment: Segment) -> bool:
    """Whether no bit was changed."""
    return torch.equal(segment.work.view(torch.uint8), segment.values.view(torch.uint8))


def _unsupported(name: str, how: str) -> ConfigError:
    return ConfigError(
        f'the model changes its buffer "{name}" in its forward pass {how}: it has no mean over the virtual workers, so '
        f"the result would depend on the number of workers. {WAY_OUT}."
    )
