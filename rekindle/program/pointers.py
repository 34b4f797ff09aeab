"""Text files and symbolic links that name a checkpoint, such as `latest` and `last.ckpt`."""

import os
import uuid
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from rekindle.program.folder import Pointer, Unit
from rekindle.program.paths import parse_step, without_numbers
from rekindle.program.records import PointerRecord


def describe_pointers(root: Path, pointers: Iterable[Pointer], unit: Unit) -> list[PointerRecord]:
    """Return the pointers to checkpoints of the unit's family, with a pattern in place of the
    name."""
    records: list[PointerRecord] = []
    for pointer in pointers:
        pattern = _find_pattern(root, pointer, unit)
        if pattern:
            records.append(PointerRecord(path=pointer.path, text=pattern, is_link=pointer.is_link))
    return records


def _find_pattern(root: Path, pointer: Pointer, unit: Unit) -> str:
    text = pointer.text.strip()
    rest = pointer.text[len(pointer.text.rstrip()) :]
    if "{" in text or not text:
        return ""

    name = PurePosixPath(text).name
    parent = os.path.dirname(unit.path)
    target = os.path.normpath(os.path.join(root, os.path.dirname(pointer.path), text))
    relative = os.path.relpath(target, root)
    if without_numbers(relative) == unit.family and name == relative.rpartition("/")[2]:
        is_in_parent = os.path.dirname(relative) == parent and not os.path.isabs(text)
        if parent and not is_in_parent:
            return ""  # of a nested unit, only the last name may vary
        return text[: len(text) - len(name)] + "{name}" + rest
    if without_numbers(text) == unit.family:
        return "{path}" + rest
    is_sibling = os.path.dirname(pointer.path) == parent
    if text.isdigit() and unit.step is not None and is_sibling and not pointer.is_link:
        return "{step}" + rest
    return ""


def write_pointer(root: Path, pointer: PointerRecord, path: str) -> None:
    """Let a pointer name the unit `path`. Raises OSError."""
    name = path.rpartition("/")[2]
    values = {"{name}": name, "{path}": path, "{step}": str(parse_step(name) or 0)}
    text = pointer.text
    for key, value in values.items():
        text = text.replace(key, value)

    place = root / pointer.path
    if place.is_dir() and not place.is_symlink():
        return
    target = os.path.normpath(os.path.join(os.path.dirname(pointer.path), text.strip()))
    if pointer.is_link and (os.path.isabs(target) or target.startswith("..")):
        return

    draft = place.with_name(f".tmp-{uuid.uuid4().hex}")
    place.parent.mkdir(parents=True, exist_ok=True)
    if pointer.is_link:
        draft.symlink_to(text)
    else:
        draft.write_text(text)
    draft.replace(place)
