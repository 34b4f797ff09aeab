"""Text files and symbolic links that name a checkpoint, such as `latest` and `last.ckpt`."""

import os
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from rekindle.program.checkpoints.folder import Pointer, Unit
from rekindle.program.checkpoints.paths import family_of, parse_step, resolve
from rekindle.program.checkpoints.records import PointerRecord


def describe_pointers(root: Path, pointers: Iterable[Pointer], unit: Unit) -> list[PointerRecord]:
    """Return the pointers to checkpoints of the unit's family, with a placeholder instead of the
    checkpoint's name."""
    records: list[PointerRecord] = []
    for pointer in pointers:
        pattern = _find_pattern(root, pointer, unit)
        if pattern:
            # ignore invalid names and texts: a pointer must not prevent the upload of the
            # checkpoint
            with suppress(ValidationError):
                records.append(
                    PointerRecord(path=pointer.path, text=pattern, is_link=pointer.is_link)
                )
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
    if family_of(relative) == unit.family and name == relative.rpartition("/")[2]:
        is_in_parent = os.path.dirname(relative) == parent and not os.path.isabs(text)
        if parent and not is_in_parent:
            return ""  # a pointer to a nested unit must name a sibling
        return text[: len(text) - len(name)] + "{name}" + rest
    if family_of(text) == unit.family:
        return "{path}" + rest
    is_sibling = os.path.dirname(pointer.path) == parent
    if text.isdigit() and unit.step is not None and is_sibling and not pointer.is_link:
        return "{step}" + rest
    return ""


def write_pointer(root: Path, pointer: PointerRecord, path: str) -> None:
    """Write a pointer to the unit `path`. Raises OSError."""
    name = path.rpartition("/")[2]
    values = {"{name}": name, "{path}": path, "{step}": str(parse_step(name) or 0)}
    text = pointer.text
    for key, value in values.items():
        text = text.replace(key, value)

    place = root / pointer.path
    if not _is_below(root, place.parent) or (place.is_dir() and not place.is_symlink()):
        return
    if pointer.is_link and not _stays_below(root, place, text):
        return

    draft = place.with_name(f".tmp-{uuid.uuid4().hex}")
    place.parent.mkdir(parents=True, exist_ok=True)
    if pointer.is_link:
        draft.symlink_to(text)
    else:
        draft.write_text(text)
    draft.replace(place)


def _is_below(root: Path, folder: Path) -> bool:
    """Return True if no part of the folder's path below `root` is a link."""
    return resolve(folder) == resolve(root) / folder.relative_to(root)


def _stays_below(root: Path, link: Path, text: str) -> bool:
    """Return True if the target of a link is below `root`."""
    names = text.split("/")
    while names and names[0] == "..":
        names.pop(0)
    # reject `..` after a folder name: if the folder is a link, `..` leads elsewhere
    if os.path.isabs(text) or ".." in names:
        return False
    return resolve(link.parent / text).is_relative_to(resolve(root))
