"""A training state as bytes: a pickle of its structure, followed by the data of its tensors.

The tensors of the state are copied once, from their device to the final memory. Like torch.save,
this module replaces the tensors in the pickle by persistent ids.
"""

import io
import pickle  # nosec B403  # of this user's own processes, see memory.py
import struct
from typing import Any, NamedTuple

import torch

# a payload begins with the length of its pickle in bytes
LENGTH_STRUCT = struct.Struct("<Q")
ALIGNMENT_BYTES = 64


class _TensorSpan(NamedTuple):
    """The location of a tensor's data in a payload; `offset`: number of bytes after the end of the
    pickle."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Payload:
    """A training state that is ready to be copied. The tensors of a Payload share memory with the
    program's tensors."""

    def __init__(self, state_tree: Any) -> None:
        self._tensors: list[tuple[_TensorSpan, torch.Tensor]] = []
        self._end = 0

        pickle_buffer = io.BytesIO()
        pickler = pickle.Pickler(pickle_buffer, pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = self._take_tensor  # type: ignore[method-assign]
        pickler.dump(state_tree)

        self._structure = pickle_buffer.getvalue()
        self._data_offset = _round_up_to_alignment(LENGTH_STRUCT.size + len(self._structure))
        self.size = self._data_offset + self._end

    def _take_tensor(self, state_value: Any) -> _TensorSpan | None:
        if not isinstance(state_value, torch.Tensor) or not _is_plain_tensor(state_value):
            return None

        tensor = state_value.detach()
        tensor_span = _TensorSpan(self._end, tensor.dtype, tuple(tensor.shape))
        self._tensors.append((tensor_span, tensor))
        self._end = _round_up_to_alignment(self._end + tensor.numel() * tensor.element_size())
        return tensor_span

    def write(self, target_bytes: torch.Tensor) -> None:
        """Copy the training state to `target_bytes`, uint8 [at least `size`]. Waits until the
        copies from GPUs are complete."""
        structure_bytes = torch.frombuffer(bytearray(self._structure), dtype=torch.uint8)
        target_bytes[: LENGTH_STRUCT.size] = torch.frombuffer(
            bytearray(LENGTH_STRUCT.pack(len(structure_bytes))), dtype=torch.uint8
        )
        target_bytes[LENGTH_STRUCT.size : LENGTH_STRUCT.size + len(structure_bytes)] = (
            structure_bytes
        )

        cuda_devices = set()
        for tensor_span, tensor in self._tensors:
            _view_tensor(target_bytes, self._data_offset, tensor_span).copy_(
                tensor, non_blocking=True
            )
            cuda_devices.add(tensor.device)
        for device in cuda_devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def to_bytes(self) -> torch.Tensor:
        """Return a copy of the training state as bytes, uint8 [size]."""
        target_bytes = torch.empty(self.size, dtype=torch.uint8)
        self.write(target_bytes)
        return target_bytes


def decode_payload(payload_bytes: torch.Tensor) -> Any:
    """Return the training state in `payload_bytes`, uint8 [size or more]. The tensors of the
    returned state share the memory of `payload_bytes`."""
    (structure_length,) = LENGTH_STRUCT.unpack(
        payload_bytes[: LENGTH_STRUCT.size].numpy().tobytes()
    )
    pickled_structure = (
        payload_bytes[LENGTH_STRUCT.size : LENGTH_STRUCT.size + structure_length].numpy().tobytes()
    )
    data_offset = _round_up_to_alignment(LENGTH_STRUCT.size + structure_length)

    unpickler = pickle.Unpickler(io.BytesIO(pickled_structure))  # nosec B301
    unpickler.persistent_load = lambda tensor_span: _view_in_own_storage(
        payload_bytes, data_offset, tensor_span
    )  # type: ignore[method-assign]
    return unpickler.load()


def _view_tensor(
    payload_bytes: torch.Tensor, data_offset: int, tensor_span: _TensorSpan
) -> torch.Tensor:
    start_byte = data_offset + tensor_span.offset
    element_count = 1
    for dimension_size in tensor_span.shape:
        element_count = element_count * dimension_size
    end_byte = start_byte + element_count * tensor_span.dtype.itemsize
    return payload_bytes[start_byte:end_byte].view(tensor_span.dtype).view(tensor_span.shape)


def _view_in_own_storage(
    payload_bytes: torch.Tensor, data_offset: int, tensor_span: _TensorSpan
) -> torch.Tensor:
    """Return a view of one tensor's data, with its own storage: torch.save writes the whole storage
    of a tensor, which otherwise would be all of `payload_bytes`."""
    shared_view = _view_tensor(payload_bytes, data_offset, tensor_span)
    if not shared_view.numel():
        return torch.empty(tensor_span.shape, dtype=tensor_span.dtype)
    tensor_elements = torch.frombuffer(
        payload_bytes.numpy(),
        dtype=tensor_span.dtype,
        count=shared_view.numel(),
        offset=data_offset + tensor_span.offset,
    )
    return tensor_elements.view(tensor_span.shape)


def _is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Return True if the raw elements of a tensor describe it completely: a strided tensor of a
    plain class, not quantized."""
    is_plain_class = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_plain_class and tensor.layout is torch.strided and not tensor.is_quantized


def _round_up_to_alignment(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
