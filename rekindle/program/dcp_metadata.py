"""Reads `.metadata` of torch.distributed.checkpoint without torch, and without running its pickle.

Every class and function in the pickle is replaced by a class without behaviour, so that a malicious
file can neither import nor call anything.
"""

import io
import pickle  # nosec B403
from dataclasses import dataclass
from typing import Any

from rekindle.program.paths import is_safe_path

METADATA = ".metadata"
MAX_METADATA_BYTES = 1 << 30


class InvalidMetadata(Exception):
    """The file is not the metadata of a checkpoint, or it is not complete."""


@dataclass(frozen=True)
class DcpMetadata:
    """`sizes`: the files of the checkpoint, by path relative to `.metadata`, and the size in bytes
    that each must have at least; `save_id`: the id of the save, "" in files of old versions."""

    sizes: dict[str, int]
    save_id: str


class _Inert:
    """An object of any class of the pickle: it records its state and does nothing."""

    state: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.arguments = args

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Inert":
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...

    def add(self, value: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> "_Inert":
        return _Inert()


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        return _Inert

    def persistent_load(self, pid: Any) -> Any:
        return _Inert()


def parse_dcp_metadata(data: bytes) -> DcpMetadata:
    """Return the files that a checkpoint consists of. Raises InvalidMetadata."""
    try:
        metadata = _InertUnpickler(io.BytesIO(data)).load()  # nosec B301
    # a pickle with errors can raise any exception
    except Exception as error:
        raise InvalidMetadata(f"it cannot be read ({type(error).__name__}: {error})") from None

    state = getattr(metadata, "state", None)
    fields: dict[str, Any] = state if isinstance(state, dict) else {}
    storage = fields.get("storage_data")
    if not isinstance(storage, dict):
        raise InvalidMetadata("storage_data, which names the files, is missing")

    sizes: dict[str, int] = {}
    for item in storage.values():
        path, end = _parse_storage_item(item)
        sizes[path] = max(sizes.get(path, 0), end)

    return DcpMetadata(sizes, _find_save_id(fields))


def _parse_storage_item(item: Any) -> tuple[str, int]:
    """Return the path of a file, and the offset of the end of the item."""
    state = getattr(item, "state", None)
    if not isinstance(state, dict):
        raise InvalidMetadata("an entry of storage_data is not a place in a file")

    path, offset, length = (state.get(key) for key in ("relative_path", "offset", "length"))
    if not (isinstance(path, str) and is_safe_path(path)):
        raise InvalidMetadata(f"{path!r:.100} is not a path below the checkpoint")
    if not (isinstance(offset, int) and isinstance(length, int) and offset >= 0 and length >= 0):
        raise InvalidMetadata(f"the place in {path!r:.100} is not a range of bytes")
    return path, offset + length


def _find_save_id(fields: dict[str, Any]) -> str:
    state = getattr(fields.get("storage_meta"), "state", None)
    save_id = state.get("save_id") if isinstance(state, dict) else None
    return save_id if isinstance(save_id, str) else ""
