"""Reads `.metadata` of torch.distributed.checkpoint without torch, and without running its pickle.

Only dictionaries, texts, integers and the fields of objects are read from the pickle. No class is
imported, nothing is called, and no value is compared or hashed, so reading a malicious file takes
time and memory only in proportion to its size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from argolocal.common.checked_names import show
from rekindle.program.checkpoints.paths import is_safe_path

METADATA = ".metadata"
MAX_METADATA_BYTES = 1 << 30
MAX_FILE_BYTES = 1 << 61
MAX_LONG_BYTES = 16  # maximum size of an integer in bytes
STOP = ord(".")


class InvalidMetadata(Exception):
    """Raised if a file is not the metadata of a checkpoint, or is incomplete."""


@dataclass(frozen=True)
class DcpMetadata:
    """`sizes`: the files of the checkpoint, by path relative to `.metadata`, and the size in bytes
    that each must have at least; `save_id`: the id of the save, "" in files of old versions."""

    sizes: dict[str, int]
    save_id: str


def parse_dcp_metadata(data: bytes) -> DcpMetadata:
    """Return the files that a checkpoint consists of. Raises InvalidMetadata."""
    try:
        metadata = _Pickle(data).read()
    except (IndexError, KeyError, ValueError) as error:
        raise InvalidMetadata(f"it cannot be read ({type(error).__name__}: {error})") from None

    storage = _find_field(metadata, "storage_data")
    if not isinstance(storage, _Dictionary):
        raise InvalidMetadata("storage_data, which names the files, is missing")

    sizes: dict[str, int] = {}
    for item in storage.values:
        path, end = _parse_storage_item(item)
        sizes[path] = max(sizes.get(path, 0), end)

    save_id = _find_field(_find_field(metadata, "storage_meta"), "save_id")
    return DcpMetadata(sizes, save_id if isinstance(save_id, str) else "")


def _parse_storage_item(item: Any) -> tuple[str, int]:
    """Return the path of the file that contains an item, and the offset at which the item ends in
    this file."""
    path = _find_field(item, "relative_path")
    if not (isinstance(path, str) and is_safe_path(path)):
        shown = show(path) if isinstance(path, str) else "an entry of storage_data"
        raise InvalidMetadata(f"{shown} is not a path below the checkpoint")

    offset, length = (_find_field(item, name) for name in ("offset", "length"))
    if not (_is_size(offset) and _is_size(length)):
        raise InvalidMetadata(f"the place in {show(path)} is not a range of bytes")
    return path, offset + length


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < MAX_FILE_BYTES


def _find_field(item: Any, name: str) -> Any:
    """Return the field of an object of the pickle; None if it does not exist."""
    state = item.state if isinstance(item, _Object) else None
    if not isinstance(state, _Dictionary):
        return None

    found = None
    for key, value in zip(state.keys, state.values, strict=True):
        if isinstance(key, str) and key == name:
            found = value
    return found


class _Object:
    """An object in the pickle, of any class. `state`: the fields of the object."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state: Any = None


class _Dictionary:
    """A dictionary as a list of pairs. Its keys are not hashed, since hashing nested tuples can
    take forever."""

    __slots__ = ("keys", "values")

    def __init__(self) -> None:
        self.keys: list[Any] = []
        self.values: list[Any] = []


class _Pickle:
    """Reads a pickle of protocol 2 or later. Values of types other than dictionary, text, integer
    and object are replaced by None."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []  # size of the stack at each mark
        self._memo: dict[int, Any] = {}

    def read(self) -> Any:
        """Return the value that the pickle contains. Raises IndexError, KeyError or ValueError if
        the pickle is malformed."""
        while True:
            code = self._data[self._position]
            self._position += 1
            if code == STOP:
                return self._stack.pop()
            OPERATIONS[code](self)

    def _take(self, count: int) -> bytes:
        end = self._position + count
        if end > len(self._data):
            raise ValueError("it ends early")
        data = self._data[self._position : end]
        self._position = end
        return data

    def _take_number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _take_line(self) -> None:
        self._position = self._data.index(b"\n", self._position) + 1

    def _pop_to_mark(self) -> list[Any]:
        size = self._marks.pop()
        items = self._stack[size:]
        del self._stack[size:]
        return items

    def skip(self, size: int) -> None:
        """Skip bytes that do not contribute to the value."""
        self._take(size)

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def pop(self) -> None:
        self._stack.pop()

    def drop_marked(self) -> None:
        """Remove the items after the last mark from the stack."""
        self._pop_to_mark()

    def push_none(self, size: int = 0) -> None:
        """Skip a value of `size` bytes, and push None in its place."""
        self._take(size)
        self._stack.append(None)

    def push_none_for(self, count: int) -> None:
        """Replace the last `count` values on the stack by None."""
        for _ in range(count):
            self._stack.pop()
        self._stack.append(None)

    def push_none_for_marked(self) -> None:
        self._pop_to_mark()
        self._stack.append(None)

    def push_none_of_length(self, size: int) -> None:
        """Skip a value whose length is stored in `size` bytes, and push None in its place."""
        self.push_none(self._take_number(size))

    def push_number(self, size: int) -> None:
        self._stack.append(self._take_number(size))

    def push_signed(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def push_long(self, size: int) -> None:
        """Push an integer whose length is stored in `size` bytes."""
        length = self._take_number(size)
        if length > MAX_LONG_BYTES:
            raise ValueError(f"an integer has {length} bytes")
        self._stack.append(int.from_bytes(self._take(length), "little", signed=True))

    def push_text(self, size: int) -> None:
        """Push a text whose length is stored in `size` bytes."""
        text = self._take(self._take_number(size))
        self._stack.append(text.decode(errors="surrogatepass"))

    def push_dictionary(self) -> None:
        self._stack.append(_Dictionary())

    def set_item(self) -> None:
        value = self._stack.pop()
        key = self._stack.pop()
        self._add([key], [value])

    def set_marked_items(self) -> None:
        items = self._pop_to_mark()
        self._add(items[::2], items[1::2])

    def _add(self, keys: list[Any], values: list[Any]) -> None:
        if len(keys) != len(values):
            raise ValueError("a key has no value")
        target = self._stack[-1]
        if isinstance(target, _Dictionary):
            target.keys += keys
            target.values += values

    def push_class_of_lines(self) -> None:
        self._take_line()
        self._take_line()
        self._stack.append(None)

    def push_object_for(self, count: int) -> None:
        """Push an object in place of `count` values: its class and arguments."""
        for _ in range(count):
            self._stack.pop()
        self._stack.append(_Object())

    def set_state(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if isinstance(target, _Object):
            target.state = state

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def put(self, size: int) -> None:
        self._memo[self._take_number(size)] = self._stack[-1]

    def get(self, size: int) -> None:
        self._stack.append(self._memo[self._take_number(size)])


# Source: the list of operations in CPython's Lib/pickletools.py
OPERATIONS: dict[int, Callable[[_Pickle], None]] = {
    0x80: lambda pickle: pickle.skip(1),  # PROTO
    0x95: lambda pickle: pickle.skip(8),  # FRAME
    ord("("): _Pickle.mark,
    ord("0"): _Pickle.pop,
    ord("1"): _Pickle.drop_marked,  # POP_MARK
    ord("N"): _Pickle.push_none,
    0x88: lambda pickle: pickle.push_none(),  # NEWTRUE
    0x89: lambda pickle: pickle.push_none(),  # NEWFALSE
    ord("K"): lambda pickle: pickle.push_number(1),
    ord("M"): lambda pickle: pickle.push_number(2),
    ord("J"): _Pickle.push_signed,
    0x8A: lambda pickle: pickle.push_long(1),  # LONG1
    0x8B: lambda pickle: pickle.push_long(4),  # LONG4
    ord("G"): lambda pickle: pickle.push_none(8),  # BINFLOAT
    0x8C: lambda pickle: pickle.push_text(1),  # SHORT_BINUNICODE
    ord("X"): lambda pickle: pickle.push_text(4),
    0x8D: lambda pickle: pickle.push_text(8),  # BINUNICODE8
    ord("C"): lambda pickle: pickle.push_none_of_length(1),  # SHORT_BINBYTES
    ord("B"): lambda pickle: pickle.push_none_of_length(4),  # BINBYTES
    0x8E: lambda pickle: pickle.push_none_of_length(8),  # BINBYTES8
    0x96: lambda pickle: pickle.push_none_of_length(8),  # BYTEARRAY8
    ord("}"): _Pickle.push_dictionary,
    ord("s"): _Pickle.set_item,
    ord("u"): _Pickle.set_marked_items,
    ord("]"): _Pickle.push_none,
    ord("a"): _Pickle.pop,  # APPEND
    ord("e"): _Pickle.drop_marked,  # APPENDS
    0x8F: lambda pickle: pickle.push_none(),  # EMPTY_SET
    0x90: _Pickle.drop_marked,  # ADDITEMS
    0x91: _Pickle.push_none_for_marked,  # FROZENSET
    ord(")"): _Pickle.push_none,
    0x85: lambda pickle: pickle.push_none_for(1),  # TUPLE1
    0x86: lambda pickle: pickle.push_none_for(2),  # TUPLE2
    0x87: lambda pickle: pickle.push_none_for(3),  # TUPLE3
    ord("t"): _Pickle.push_none_for_marked,
    ord("c"): _Pickle.push_class_of_lines,
    0x93: lambda pickle: pickle.push_none_for(2),  # STACK_GLOBAL
    ord("Q"): lambda pickle: pickle.push_object_for(1),  # BINPERSID
    ord("R"): lambda pickle: pickle.push_object_for(2),
    0x81: lambda pickle: pickle.push_object_for(2),  # NEWOBJ
    0x92: lambda pickle: pickle.push_object_for(3),  # NEWOBJ_EX
    ord("b"): _Pickle.set_state,
    0x94: _Pickle.memoize,
    ord("q"): lambda pickle: pickle.put(1),
    ord("r"): lambda pickle: pickle.put(4),
    ord("h"): lambda pickle: pickle.get(1),
    ord("j"): lambda pickle: pickle.get(4),
}
