"""Reads checkpoints of torch.distributed.checkpoint without running code that their files contain.

torch's own reader of distributed checkpoints unpickles `.metadata` and other values without
restrictions, so that a malicious file could run code.
"""

import io
import pickle  # nosec B403
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

# module → names of the classes and functions that `.metadata` may contain; all of them only store
# values
ALLOWED_NAMES_BY_MODULE = {
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "torch": {"Size", "device"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}


class SafeReader(FileSystemReader):
    """A reader of a checkpoint whose `.metadata` may be malicious."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the checkpoint. Raises UnpicklingError if the metadata contains a
        class that is not allowed."""
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as file:
            metadata = _Unpickler(file).load()

        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """A planner that loads values other than tensors with the restrictions of torch.load."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded_value = torch.load(value, map_location="cpu", weights_only=True)
        value_buffer = io.BytesIO()
        torch.save(loaded_value, value_buffer)
        super().load_bytes(read_item, io.BytesIO(value_buffer.getvalue()))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if global_name in ALLOWED_NAMES_BY_MODULE.get(module_name, ()):
            return super().find_class(module_name, global_name)
        if module_name == "torch":
            dtype = getattr(torch, global_name, None)
            if isinstance(dtype, torch.dtype):
                return dtype
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not a part of metadata")


def encode_named_values(named_values: dict[str, Any]) -> bytes:
    """Return values by name as bytes, which `decode_named_values` converts back."""
    buffer = io.BytesIO()
    torch.save(named_values, buffer)
    return buffer.getvalue()


def decode_named_values(encoded_values: bytes) -> dict[str, Any]:
    """Return the values that `encode_named_values` has encoded. Raises an exception of torch.load
    if the bytes are damaged, or contain a class that torch.serialization.add_safe_globals has not
    allowed."""
    return torch.load(io.BytesIO(encoded_values), map_location="cpu", weights_only=True)
