"""The buffers of a model: tensors that its forward pass updates, such as BatchNorm's running
statistics.

In each step, all virtual workers start from the same values, and a buffer changes by the mean of
their changes. The changes are summed like the gradients, along one fixed tree, so the new values do
not depend on the number of workers. An integer buffer (BatchNorm counts its batches) must change by
the same amount in all virtual workers. A buffer outside the state_dict (`persistent=False`) is a
cache: the model may assign another tensor to it, which is dropped after each micro-batch.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rekindle.errors import ConfigError

ALIGNMENT = 16  # float32 elements in 64 bytes
INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def padded_size(numel: int, dtype: torch.dtype) -> int:
    """Return the number of float32 elements that hold `numel` elements of `dtype`, rounded up to 64
    bytes."""
    return math.ceil(numel * dtype.itemsize / 4 / ALIGNMENT) * ALIGNMENT


@dataclass
class Segment:
    """All buffers of one dtype in one tensor: their values in the training state, and a working
    copy that forward passes change."""

    named_buffers: list[tuple[str, Tensor]]
    values: Tensor
    working_copy: Tensor

    @property
    def width(self) -> int:
        """Number of elements that are summed over the virtual workers."""
        return self.values.numel() * (1 if self.values.dtype == torch.float32 else 2)

    def compute_change(self) -> Tensor:
        """Return the changes as float32, to be summed over the virtual workers. For integer
        buffers, the squared changes are appended: their sum shows whether all virtual workers have
        made the same change."""
        # compare the bits, because the difference inf - inf is NaN
        if self.values.dtype == torch.float32:
            is_unchanged = self.working_copy.view(torch.int32) == self.values.view(torch.int32)
            return (self.working_copy - self.values).masked_fill_(is_unchanged, 0.0)
        change = (self.working_copy.long() - self.values.long()).float()
        return torch.cat([change, change.square()])

    def apply_total(self, total: Tensor, virtual_workers: int) -> None:
        """Update the values from the sum of the changes of all virtual workers. Raises
        ConfigError."""
        if self.values.dtype == torch.float32:
            is_valid = total.isfinite()
            mean = total / virtual_workers
            self.values.copy_(torch.where(total == 0, self.values, self.values + mean))
        else:
            change, squares = total.double().chunk(2)
            is_valid = squares * virtual_workers == change.square()
            mean = change / virtual_workers
            self.values.add_(mean.to(self.values.dtype))

        if not is_valid.all():
            raise _unsupported_change_error(
                self.buffer_name(int(is_valid.int().argmin())), "by different or infinite amounts"
            )

    def buffer_name(self, element: int) -> str:
        """Return the name of the buffer that contains the given element."""
        for name, buffer in self.named_buffers:
            if element < buffer.numel():
                return name
            element -= buffer.numel()
        raise IndexError(element)


class Buffers:
    """The buffers of one model. Call `attach` before any other method."""

    def __init__(self, model: nn.Module) -> None:
        self._registered_buffers: list[tuple[nn.Module, str, str, Tensor | None]] = []
        buffers_by_dtype: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
        seen_ids: set[int] = set()
        self._fixed_buffers: list[tuple[str, Tensor, int]] = []
        self._averaged_ids: set[int] = set()

        for prefix, module in model.named_modules():
            for key, buffer in module._buffers.items():
                name = f"{prefix}.{key}".lstrip(".")
                self._registered_buffers.append((module, key, name, buffer))
                if buffer is None or id(buffer) in seen_ids:
                    continue

                seen_ids.add(id(buffer))
                is_averaged = buffer.dtype == torch.float32 or buffer.dtype in INTEGER_DTYPES
                if is_averaged and key not in module._non_persistent_buffers_set:
                    buffers_by_dtype.setdefault(buffer.dtype, []).append((name, buffer))
                    self._averaged_ids.add(id(buffer))
                else:
                    self._fixed_buffers.append((name, buffer, buffer._version))

        self._buffers_by_dtype = sorted(buffers_by_dtype.items(), key=lambda item: str(item[0]))
        self.layout = [
            (name, list(b.shape), str(b.dtype))
            for _, named_buffers in self._buffers_by_dtype
            for name, b in named_buffers
        ]

        self._sizes = [
            sum(buffer.numel() for _, buffer in named_buffers)
            for _, named_buffers in self._buffers_by_dtype
        ]
        self._padded_sizes = [
            padded_size(n, dtype)
            for n, (dtype, _) in zip(self._sizes, self._buffers_by_dtype, strict=True)
        ]
        # number of float32 elements that all buffers occupy in the training state
        self.floats = sum(self._padded_sizes)
        self._segments: list[Segment] = []

    def attach(self, memory: Tensor) -> None:
        """Move the values to `memory` (float32 [floats]), and make the model's buffers views of
        working copies."""
        for (dtype, named_buffers), size, chunk in zip(
            self._buffers_by_dtype, self._sizes, memory.split(self._padded_sizes), strict=True
        ):
            values = chunk.view(dtype)[:size]
            torch.cat([buffer.flatten() for _, buffer in named_buffers], out=values)

            working_copy = values.clone()
            for (_, buffer), view in zip(
                named_buffers,
                working_copy.split([buffer.numel() for _, buffer in named_buffers]),
                strict=True,
            ):
                buffer.data = view.view(buffer.shape)

            self._segments.append(Segment(named_buffers, values, working_copy))

        self._zeros = [
            segment.values.new_zeros(segment.width, dtype=torch.float32)
            for segment in self._segments
        ]
        # number of elements to sum in each segment
        self.widths = [segment.width for segment in self._segments]

    def load_into_model(self, memory: Tensor | None = None) -> None:
        """Copy the values in the training state, or in another `memory`, to the model. Call before
        each forward pass."""
        if memory is None:
            for segment in self._segments:
                segment.working_copy.copy_(segment.values)
        else:
            for segment, chunk in zip(
                self._segments, memory.split(self._padded_sizes), strict=True
            ):
                segment.working_copy.copy_(
                    chunk.view(segment.working_copy.dtype)[: len(segment.working_copy)]
                )

    def collect_changes(self) -> list[Tensor]:
        """Return the changes since `load_into_model`, to be summed over all virtual workers. Raises
        ConfigError."""
        for module, key, name, buffer in self._registered_buffers:
            assigned = module._buffers[key]
            if assigned is not buffer:
                self._copy_assigned_tensor(name, buffer, assigned)
                module._buffers[key] = buffer

        for name, buffer, version in self._fixed_buffers:
            if buffer._version != version:
                raise _unsupported_change_error(
                    name, f"in place, but its type is {buffer.dtype} or it is not in the state_dict"
                )

        return [
            zeros
            if segment.working_copy.is_cpu and _is_unchanged(segment)
            else segment.compute_change()
            for segment, zeros in zip(self._segments, self._zeros, strict=True)
        ]

    def _copy_assigned_tensor(
        self, name: str, buffer: Tensor | None, assigned: Tensor | None
    ) -> None:
        """Copy a tensor that the forward pass assigned to the buffer's name into the buffer
        itself."""
        if id(buffer) in self._averaged_ids:
            assert buffer is not None
            if assigned is None or (assigned.shape, assigned.dtype) != (buffer.shape, buffer.dtype):
                raise _unsupported_change_error(name, "to a tensor of another shape or type")
            buffer.copy_(assigned.detach())

    def apply_totals(self, totals: Tensor, virtual_workers: int) -> None:
        """Update the training state from the summed changes, a float32 tensor of shape [sum of
        widths]. Raises ConfigError."""
        if totals.any():
            for segment, total in zip(self._segments, totals.split(self.widths), strict=True):
                segment.apply_total(total, virtual_workers)


def _is_unchanged(segment: Segment) -> bool:
    return torch.equal(segment.working_copy.view(torch.uint8), segment.values.view(torch.uint8))


def _unsupported_change_error(name: str, description: str) -> ConfigError:
    return ConfigError(
        f'the model changes its buffer "{name}" in its forward pass {description}: the change'
        " cannot be averaged over the virtual workers, so the result would depend on the number of"
        " workers. Keep the buffer constant, register it with persistent=False and assign a new"
        " tensor in each forward pass, or use another layer."
    )
