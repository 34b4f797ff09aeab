"""Reads `.metadata` of torch.distributed.checkpoint without torch, and without running its pickle.

Only dictionaries, texts, integers and the fields of objects are read from the pickle in
`.metadata`. No class is imported, nothing is called, and no value is compared or hashed, so reading
a malicious file takes time and memory only in proportion to the size of the file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from argolocal.common.checked_names import format_untrusted
from rekindle.program.checkpoints.paths import is_safe_path

METADATA_FILE = ".metadata"
MAX_METADATA_BYTES = 1 << 30
MAX_FILE_BYTES = 1 << 61
# maximum size of an integer in bytes
MAX_LONG_BYTES = 16
STOP_OPCODE = ord(".")


class InvalidMetadata(Exception):
    """Raised if a file is not the metadata of a checkpoint, or is an incomplete file."""


@dataclass(frozen=True)
class DcpMetadata:
    """`sizes`: the files of the checkpoint, by path relative to `.metadata`, and the size in bytes
    that each must have at least; `save_id`: the id of the save, "" in files of old versions."""

    sizes: dict[str, int]
    save_id: str


def parse_dcp_metadata(pickle_bytes: bytes) -> DcpMetadata:
    """Return the files that a checkpoint consists of. Raises InvalidMetadata."""
    try:
        metadata = _PickleReader(pickle_bytes).read()
    except (IndexError, KeyError, ValueError) as error:
        raise InvalidMetadata(f"it cannot be read ({type(error).__name__}: {error})") from None

    storage_data = _find_field(metadata, "storage_data")
    if not isinstance(storage_data, _PickledDictionary):
        raise InvalidMetadata("storage_data, which names the files, is missing")

    file_sizes: dict[str, int] = {}
    for storage_item in storage_data.values:
        path, end_offset = _parse_storage_item(storage_item)
        file_sizes[path] = max(file_sizes.get(path, 0), end_offset)

    save_id = _find_field(_find_field(metadata, "storage_meta"), "save_id")
    return DcpMetadata(file_sizes, save_id if isinstance(save_id, str) else "")


def _parse_storage_item(storage_item: Any) -> tuple[str, int]:
    """Return the path of the file that contains an item, and the offset at which the item ends in
    this file."""
    path = _find_field(storage_item, "relative_path")
    if not (isinstance(path, str) and is_safe_path(path)):
        shown_path = format_untrusted(path) if isinstance(path, str) else "an entry of storage_data"
        raise InvalidMetadata(f"{shown_path} is not a path below the checkpoint")

    offset_bytes, length_bytes = (
        _find_field(storage_item, field_name) for field_name in ("offset", "length")
    )
    if not (_is_size(offset_bytes) and _is_size(length_bytes)):
        raise InvalidMetadata(f"the place in {format_untrusted(path)} is not a range of bytes")
    return path, offset_bytes + length_bytes


def _is_size(candidate: Any) -> bool:
    return isinstance(candidate, int) and 0 <= candidate < MAX_FILE_BYTES


def _find_field(pickled_object: Any, field_name: str) -> Any:
    """Return the field of an object of the pickle; None if it does not exist."""
    object_state = pickled_object.state if isinstance(pickled_object, _PickledObject) else None
    if not isinstance(object_state, _PickledDictionary):
        return None

    field_value = None
    for key, value in zip(object_state.keys, object_state.values, strict=True):
        if isinstance(key, str) and key == field_name:
            field_value = value
    return field_value


class _PickledObject:
    """An object in the pickle, of any class. `state`: the fields of the object."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state: Any = None


class _PickledDictionary:
    """A dictionary as a list of pairs. The keys of the dictionary are not hashed, since hashing
    nested tuples can take forever."""

    __slots__ = ("keys", "values")

    def __init__(self) -> None:
        self.keys: list[Any] = []
        self.values: list[Any] = []


class _PickleReader:
    """Reads a pickle of protocol 2 or later. Values of types other than dictionary, text, integer
    and object are replaced by None."""

    def __init__(self, pickle_bytes: bytes) -> None:
        self._data = pickle_bytes
        self._position = 0
        self._stack: list[Any] = []
        # size of the pickle's stack at each mark
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def read(self) -> Any:
        """Return the value that the pickle contains. Raises IndexError, KeyError or ValueError if
        the pickle is malformed."""
        while True:
            opcode = self._data[self._position]
            self._position += 1
            if opcode == STOP_OPCODE:
                return self._stack.pop()
            OPERATION_BY_OPCODE[opcode](self)

    def _take(self, byte_count: int) -> bytes:
        end_position = self._position + byte_count
        if end_position > len(self._data):
            raise ValueError("it ends early")
        taken_bytes = self._data[self._position : end_position]
        self._position = end_position
        return taken_bytes

    def _take_number(self, size_bytes: int) -> int:
        return int.from_bytes(self._take(size_bytes), "little")

    def _take_line(self) -> None:
        self._position = self._data.index(b"\n", self._position) + 1

    def _pop_to_mark(self) -> list[Any]:
        mark_position = self._marks.pop()
        popped_values = self._stack[mark_position:]
        del self._stack[mark_position:]
        return popped_values

    def skip(self, size_bytes: int) -> None:
        """Skip bytes of the pickle that do not contribute to the value."""
        self._take(size_bytes)

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def pop(self) -> None:
        self._stack.pop()

    def drop_marked(self) -> None:
        """Remove the items after the last mark from the stack."""
        self._pop_to_mark()

    def push_none(self, size_bytes: int = 0) -> None:
        """Skip a value of `size_bytes` bytes, and push None in its place."""
        self._take(size_bytes)
        self._stack.append(None)

    def push_none_for(self, value_count: int) -> None:
        """Replace the last `value_count` values on the stack by None."""
        for _ in range(value_count):
            self._stack.pop()
        self._stack.append(None)

    def push_none_for_marked(self) -> None:
        self._pop_to_mark()
        self._stack.append(None)

    def push_none_of_length(self, length_bytes: int) -> None:
        """Skip a value whose length is stored in `length_bytes` bytes, and push None in its
        place."""
        self.push_none(self._take_number(length_bytes))

    def push_number(self, size_bytes: int) -> None:
        self._stack.append(self._take_number(size_bytes))

    def push_signed(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def push_long(self, length_bytes: int) -> None:
        """Push an integer whose length is stored in `length_bytes` bytes."""
        long_bytes = self._take_number(length_bytes)
        if long_bytes > MAX_LONG_BYTES:
            raise ValueError(f"an integer has {long_bytes} bytes")
        self._stack.append(int.from_bytes(self._take(long_bytes), "little", signed=True))

    def push_text(self, length_bytes: int) -> None:
        """Push a text whose length is stored in `length_bytes` bytes."""
        text = self._take(self._take_number(length_bytes))
        self._stack.append(text.decode(errors="surrogatepass"))

    def push_dictionary(self) -> None:
        self._stack.append(_PickledDictionary())

    def set_item(self) -> None:
        value = self._stack.pop()
        key = self._stack.pop()
        self._add([key], [value])

    def set_marked_items(self) -> None:
        marked_items = self._pop_to_mark()
        self._add(marked_items[::2], marked_items[1::2])

    def _add(self, added_keys: list[Any], added_values: list[Any]) -> None:
        if len(added_keys) != len(added_values):
            raise ValueError("a key has no value")
        target_dictionary = self._stack[-1]
        if isinstance(target_dictionary, _PickledDictionary):
            target_dictionary.keys += added_keys
            target_dictionary.values += added_values

    def push_class_of_lines(self) -> None:
        self._take_line()
        self._take_line()
        self._stack.append(None)

    def push_object_for(self, value_count: int) -> None:
        """Push an object on the stack in place of `value_count` values, which are the class and the
        arguments of the object."""
        for _ in range(value_count):
            self._stack.pop()
        self._stack.append(_PickledObject())

    def set_state(self) -> None:
        object_state = self._stack.pop()
        target_object = self._stack[-1]
        if isinstance(target_object, _PickledObject):
            target_object.state = object_state

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def put(self, index_bytes: int) -> None:
        self._memo[self._take_number(index_bytes)] = self._stack[-1]

    def get(self, index_bytes: int) -> None:
        self._stack.append(self._memo[self._take_number(index_bytes)])


# Source: the list of operations in CPython's Lib/pickletools.py
OPERATION_BY_OPCODE: dict[int, Callable[[_PickleReader], None]] = {
    0x80: lambda pickle: pickle.skip(1),  # PROTO
    0x95: lambda pickle: pickle.skip(8),  # FRAME
    ord("("): _PickleReader.mark,
    ord("0"): _PickleReader.pop,
    ord("1"): _PickleReader.drop_marked,  # POP_MARK
    ord("N"): _PickleReader.push_none,
    0x88: lambda pickle: pickle.push_none(),  # NEWTRUE
    0x89: lambda pickle: pickle.push_none(),  # NEWFALSE
    ord("K"): lambda pickle: pickle.push_number(1),
    ord("M"): lambda pickle: pickle.push_number(2),
    ord("J"): _PickleReader.push_signed,
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
    ord("}"): _PickleReader.push_dictionary,
    ord("s"): _PickleReader.set_item,
    ord("u"): _PickleReader.set_marked_items,
    ord("]"): _PickleReader.push_none,
    ord("a"): _PickleReader.pop,  # APPEND
    ord("e"): _PickleReader.drop_marked,  # APPENDS
    0x8F: lambda pickle: pickle.push_none(),  # EMPTY_SET
    0x90: _PickleReader.drop_marked,  # ADDITEMS
    0x91: _PickleReader.push_none_for_marked,  # FROZENSET
    ord(")"): _PickleReader.push_none,
    0x85: lambda pickle: pickle.push_none_for(1),  # TUPLE1
    0x86: lambda pickle: pickle.push_none_for(2),  # TUPLE2
    0x87: lambda pickle: pickle.push_none_for(3),  # TUPLE3
    ord("t"): _PickleReader.push_none_for_marked,
    ord("c"): _PickleReader.push_class_of_lines,
    0x93: lambda pickle: pickle.push_none_for(2),  # STACK_GLOBAL
    ord("Q"): lambda pickle: pickle.push_object_for(1),  # BINPERSID
    ord("R"): lambda pickle: pickle.push_object_for(2),
    0x81: lambda pickle: pickle.push_object_for(2),  # NEWOBJ
    0x92: lambda pickle: pickle.push_object_for(3),  # NEWOBJ_EX
    ord("b"): _PickleReader.set_state,
    0x94: _PickleReader.memoize,
    ord("q"): lambda pickle: pickle.put(1),
    ord("r"): lambda pickle: pickle.put(4),
    ord("h"): lambda pickle: pickle.get(1),
    ord("j"): lambda pickle: pickle.get(4),
}
