"""The buffers of a model: tensors that its forward pass updates, such as BatchNorm's running
statistics.

In each step, all virtual workers start with the same values of a buffer, and the buffer changes by
the mean of their changes. The changes of buffers are summed like the gradients, along one fixed
tree, so the new values do not depend on the number of workers. An integer buffer (BatchNorm counts
its batches) must change by the same amount in all virtual workers. A buffer outside the state_dict
(`persistent=False`) is a cache: the model may assign another tensor to it, which is dropped after
each micro-batch.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rekindle.errors import ConfigError

# float32 elements in 64 bytes
ALIGNMENT_ELEMENTS = 16
INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def compute_padded_size(element_count: int, dtype: torch.dtype) -> int:
    """Return the number of float32 elements that hold `element_count` elements of `dtype`,
    rounded up to 64 bytes."""
    return math.ceil(element_count * dtype.itemsize / 4 / ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS


@dataclass
class BufferSegment:
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
        buffers, the squared changes are appended, because the sum of the squares shows whether all
        virtual workers have made the same change."""
        # compare the bits, because the difference inf - inf is NaN
        if self.values.dtype == torch.float32:
            is_value_unchanged = self.working_copy.view(torch.int32) == self.values.view(
                torch.int32
            )
            return (self.working_copy - self.values).masked_fill_(is_value_unchanged, 0.0)
        integer_change = (self.working_copy.long() - self.values.long()).float()
        return torch.cat([integer_change, integer_change.square()])

    def apply_summed_changes(self, summed_changes: Tensor, virtual_worker_count: int) -> None:
        """Update the values from the sum of the changes of all virtual workers. Raises
        ConfigError."""
        if self.values.dtype == torch.float32:
            is_finite_element = summed_changes.isfinite()
            mean_change = summed_changes / virtual_worker_count
            self.values.copy_(
                torch.where(summed_changes == 0, self.values, self.values + mean_change)
            )
        else:
            summed_change, summed_squares = summed_changes.double().chunk(2)
            is_finite_element = summed_squares * virtual_worker_count == summed_change.square()
            mean_change = summed_change / virtual_worker_count
            self.values.add_(mean_change.to(self.values.dtype))

        if not is_finite_element.all():
            raise _make_change_error(
                self.find_buffer_name(int(is_finite_element.int().argmin())),
                "by different or infinite amounts",
            )

    def find_buffer_name(self, element_index: int) -> str:
        """Return the name of the buffer that contains the given element."""
        for segment_buffer_name, buffer in self.named_buffers:
            if element_index < buffer.numel():
                return segment_buffer_name
            element_index -= buffer.numel()
        raise IndexError(element_index)


class ModelBuffers:
    """The buffers of one model. Call `attach` before any other method."""

    def __init__(self, model: nn.Module) -> None:
        self._registered_buffers: list[tuple[nn.Module, str, str, Tensor | None]] = []
        buffers_by_dtype: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
        seen_ids: set[int] = set()
        self._fixed_buffers: list[tuple[str, Tensor, int]] = []
        self._averaged_ids: set[int] = set()

        for module_name, module in model.named_modules():
            for buffer_key, buffer in module._buffers.items():
                buffer_name = f"{module_name}.{buffer_key}".lstrip(".")
                self._registered_buffers.append((module, buffer_key, buffer_name, buffer))
                if buffer is None or id(buffer) in seen_ids:
                    continue

                seen_ids.add(id(buffer))
                is_averaged = buffer.dtype == torch.float32 or buffer.dtype in INTEGER_DTYPES
                if is_averaged and buffer_key not in module._non_persistent_buffers_set:
                    buffers_by_dtype.setdefault(buffer.dtype, []).append((buffer_name, buffer))
                    self._averaged_ids.add(id(buffer))
                else:
                    self._fixed_buffers.append((buffer_name, buffer, buffer._version))

        self._buffers_by_dtype = sorted(
            buffers_by_dtype.items(), key=lambda dtype_buffers: str(dtype_buffers[0])
        )
        self.layout = [
            (buffer_name, list(buffer_tensor.shape), str(buffer_tensor.dtype))
            for _, named_buffers in self._buffers_by_dtype
            for buffer_name, buffer_tensor in named_buffers
        ]

        self._sizes = [
            sum(buffer.numel() for _, buffer in named_buffers)
            for _, named_buffers in self._buffers_by_dtype
        ]
        self._padded_sizes = [
            compute_padded_size(element_count, dtype)
            for element_count, (dtype, _) in zip(self._sizes, self._buffers_by_dtype, strict=True)
        ]
        # number of float32 elements that all buffers occupy in the training state
        self.floats = sum(self._padded_sizes)
        self._segments: list[BufferSegment] = []

    def attach(self, state_memory: Tensor) -> None:
        """Move the values of the buffers to `state_memory` (float32 [floats]), and make the model's
        buffers views of working copies."""
        for (dtype, named_buffers), element_count, memory_chunk in zip(
            self._buffers_by_dtype, self._sizes, state_memory.split(self._padded_sizes), strict=True
        ):
            buffer_values = memory_chunk.view(dtype)[:element_count]
            torch.cat([buffer.flatten() for _, buffer in named_buffers], out=buffer_values)

            working_copy = buffer_values.clone()
            for (_, buffer), buffer_view in zip(
                named_buffers,
                working_copy.split([buffer.numel() for _, buffer in named_buffers]),
                strict=True,
            ):
                buffer.data = buffer_view.view(buffer.shape)

            self._segments.append(BufferSegment(named_buffers, buffer_values, working_copy))

        self._zeros = [
            segment.values.new_zeros(segment.width, dtype=torch.float32)
            for segment in self._segments
        ]
        # number of elements to sum in each segment
        self.widths = [segment.width for segment in self._segments]

    def load_into_model(self, state_memory: Tensor | None = None) -> None:
        """Copy the values in the training state, or in another `state_memory`, to the model. Call
        this method before each forward pass."""
        if state_memory is None:
            for segment in self._segments:
                segment.working_copy.copy_(segment.values)
        else:
            for segment, memory_chunk in zip(
                self._segments, state_memory.split(self._padded_sizes), strict=True
            ):
                segment.working_copy.copy_(
                    memory_chunk.view(segment.working_copy.dtype)[: len(segment.working_copy)]
                )

    def collect_changes(self) -> list[Tensor]:
        """Return the changes since `load_into_model`, to be summed over all virtual workers. Raises
        ConfigError."""
        for module, buffer_key, buffer_name, buffer in self._registered_buffers:
            assigned_tensor = module._buffers[buffer_key]
            if assigned_tensor is not buffer:
                self._copy_assigned_tensor(buffer_name, buffer, assigned_tensor)
                module._buffers[buffer_key] = buffer

        for buffer_name, buffer, tensor_version in self._fixed_buffers:
            if buffer._version != tensor_version:
                raise _make_change_error(
                    buffer_name,
                    f"in place, but its type is {buffer.dtype} or it is not in the state_dict",
                )

        return [
            zero_change
            if segment.working_copy.is_cpu and _is_segment_unchanged(segment)
            else segment.compute_change()
            for segment, zero_change in zip(self._segments, self._zeros, strict=True)
        ]

    def _copy_assigned_tensor(
        self, buffer_name: str, buffer: Tensor | None, assigned_tensor: Tensor | None
    ) -> None:
        """Copy a tensor that the forward pass assigned to the buffer's name into the buffer
        itself."""
        if id(buffer) in self._averaged_ids:
            assert buffer is not None
            if assigned_tensor is None or (assigned_tensor.shape, assigned_tensor.dtype) != (
                buffer.shape,
                buffer.dtype,
            ):
                raise _make_change_error(buffer_name, "to a tensor of another shape or type")
            buffer.copy_(assigned_tensor.detach())

    def apply_summed_changes(self, summed_changes: Tensor, virtual_worker_count: int) -> None:
        """Update the training state from the summed changes, a float32 tensor of shape [sum of
        widths]. Raises ConfigError."""
        if summed_changes.any():
            for segment, segment_total in zip(
                self._segments, summed_changes.split(self.widths), strict=True
            ):
                segment.apply_summed_changes(segment_total, virtual_worker_count)


def _is_segment_unchanged(segment: BufferSegment) -> bool:
    return torch.equal(segment.working_copy.view(torch.uint8), segment.values.view(torch.uint8))


def _make_change_error(buffer_name: str, change_description: str) -> ConfigError:
    return ConfigError(
        f'the model changes its buffer "{buffer_name}" in its forward pass {change_description}:'
        " the change cannot be averaged over the virtual workers, so the result would depend on"
        " the number of workers. Keep the buffer constant, register it with persistent=False and"
        " assign a new tensor in each forward pass, or use another layer."
    )
