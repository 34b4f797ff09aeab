"""A state as bytes: a pickle of its structure, followed by the data of its tensors.

The tensors are copied once, from their device into the target. Like torch.save, this module
replaces the tensors in the pickle by persistent ids.
"""

import io
import pickle  # nosec B403  # of this user's own processes, see memory.py
import struct
from typing import Any, NamedTuple

import torch

START = struct.Struct("<Q")  # length of the pickle in bytes
ALIGNMENT = 64


class _Span(NamedTuple):
    """The place of a tensor's data: `offset` in bytes, after the pickle."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Payload:
    """A state that is ready to be copied. Its tensors share memory with the program's tensors."""

    def __init__(self, tree: Any) -> None:
        self._tensors: list[tuple[_Span, torch.Tensor]] = []
        self._end = 0

        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = self._take_tensor  # type: ignore[method-assign]
        pickler.dump(tree)

        self._structure = buffer.getvalue()
        self._data_offset = _align(START.size + len(self._structure))
        self.size = self._data_offset + self._end

    def _take_tensor(self, value: Any) -> _Span | None:
        if not isinstance(value, torch.Tensor) or not _is_plain(value):
            return None

        tensor = value.detach()
        span = _Span(self._end, tensor.dtype, tuple(tensor.shape))
        self._tensors.append((span, tensor))
        self._end = _align(self._end + tensor.numel() * tensor.element_size())
        return span

    def write(self, target: torch.Tensor) -> None:
        """Copy the state to `target`, uint8 [at least `size`]. Waits until the copies from GPUs are
        complete."""
        structure = torch.frombuffer(bytearray(self._structure), dtype=torch.uint8)
        target[: START.size] = torch.frombuffer(
            bytearray(START.pack(len(structure))), dtype=torch.uint8
        )
        target[START.size : START.size + len(structure)] = structure

        devices = set()
        for span, tensor in self._tensors:
            _view(target, self._data_offset, span).copy_(tensor, non_blocking=True)
            devices.add(tensor.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def to_bytes(self) -> torch.Tensor:
        """Return a copy of the state, uint8 [size]."""
        target = torch.empty(self.size, dtype=torch.uint8)
        self.write(target)
        return target


def decode(source: torch.Tensor) -> Any:
    """Return the state in the bytes `source`, uint8 [size or more]. Its tensors share the memory of
    `source`."""
    (length,) = START.unpack(source[: START.size].numpy().tobytes())
    structure = source[START.size : START.size + length].numpy().tobytes()
    data_offset = _align(START.size + length)

    unpickler = pickle.Unpickler(io.BytesIO(structure))  # nosec B301
    unpickler.persistent_load = lambda span: _own_view(source, data_offset, span)  # type: ignore[method-assign]
    return unpickler.load()


def _view(data: torch.Tensor, data_offset: int, span: _Span) -> torch.Tensor:
    start = data_offset + span.offset
    count = 1
    for length in span.shape:
        count = count * length
    end = start + count * span.dtype.itemsize
    return data[start:end].view(span.dtype).view(span.shape)


def _own_view(data: torch.Tensor, data_offset: int, span: _Span) -> torch.Tensor:
    """Return a view with its own storage, because torch.save writes the whole storage of a
    tensor."""
    view = _view(data, data_offset, span)
    if not view.numel():
        return torch.empty(span.shape, dtype=span.dtype)
    content = torch.frombuffer(
        data.numpy(),
        dtype=span.dtype,
        count=view.numel(),
        offset=data_offset + span.offset,
    )
    return content.view(span.shape)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return True if the raw elements of a tensor describe it completely: a strided tensor of a
    plain class, not quantized."""
    is_plain_class = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_plain_class and tensor.layout is torch.strided and not tensor.is_quantized


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
