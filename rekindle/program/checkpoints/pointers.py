"""Text files and symbolic links that name a checkpoint, such as `latest` and `last.ckpt`."""

import os
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from rekindle.program.checkpoints.folder import CheckpointPointer, CheckpointUnit
from rekindle.program.checkpoints.paths import make_family_path, parse_step, resolve
from rekindle.program.checkpoints.records import PointerRecord


def describe_pointers(
    root: Path, pointers: Iterable[CheckpointPointer], checkpoint_unit: CheckpointUnit
) -> list[PointerRecord]:
    """Return the pointers to checkpoints of the unit's family, with a placeholder instead of the
    checkpoint's name."""
    pointer_records: list[PointerRecord] = []
    for pointer in pointers:
        text_pattern = _find_text_pattern(root, pointer, checkpoint_unit)
        if text_pattern:
            # ignore invalid names and texts: a pointer must not prevent the upload of the
            # checkpoint
            with suppress(ValidationError):
                pointer_records.append(
                    PointerRecord(path=pointer.path, text=text_pattern, is_link=pointer.is_link)
                )
    return pointer_records


def _find_text_pattern(
    root: Path, pointer: CheckpointPointer, checkpoint_unit: CheckpointUnit
) -> str:
    """Return the text of a pointer with a placeholder instead of the checkpoint's name; "" if the
    pointer does not name a checkpoint of the unit's family."""
    stripped_text = pointer.text.strip()
    trailing_whitespace = pointer.text[len(pointer.text.rstrip()) :]
    if "{" in stripped_text or not stripped_text:
        return ""

    target_name = PurePosixPath(stripped_text).name
    unit_parent = os.path.dirname(checkpoint_unit.path)
    target_path = os.path.normpath(os.path.join(root, os.path.dirname(pointer.path), stripped_text))
    relative_target = os.path.relpath(target_path, root)
    if (
        make_family_path(relative_target) == checkpoint_unit.family
        and target_name == relative_target.rpartition("/")[2]
    ):
        is_in_parent = os.path.dirname(relative_target) == unit_parent and not os.path.isabs(
            stripped_text
        )
        if unit_parent and not is_in_parent:
            # a pointer to a nested unit must name a unit in the same folder
            return ""
        return (
            stripped_text[: len(stripped_text) - len(target_name)] + "{name}" + trailing_whitespace
        )
    if make_family_path(stripped_text) == checkpoint_unit.family:
        return "{path}" + trailing_whitespace
    is_sibling = os.path.dirname(pointer.path) == unit_parent
    if (
        stripped_text.isdigit()
        and checkpoint_unit.step is not None
        and is_sibling
        and not pointer.is_link
    ):
        return "{step}" + trailing_whitespace
    return ""


def write_pointer(root: Path, pointer: PointerRecord, unit_path: str) -> None:
    """Write a pointer to the unit `unit_path`, unless the pointer would lead out of the folder
    `root`. Raises OSError."""
    unit_name = unit_path.rpartition("/")[2]
    placeholder_values = {
        "{name}": unit_name,
        "{path}": unit_path,
        "{step}": str(parse_step(unit_name) or 0),
    }
    pointer_text = pointer.text
    for placeholder, replacement in placeholder_values.items():
        pointer_text = pointer_text.replace(placeholder, replacement)

    pointer_path = root / pointer.path
    if not _is_folder_below(root, pointer_path.parent) or (
        pointer_path.is_dir() and not pointer_path.is_symlink()
    ):
        return
    if pointer.is_link and not _link_stays_below(root, pointer_path, pointer_text):
        return

    temporary_path = pointer_path.with_name(f".tmp-{uuid.uuid4().hex}")
    pointer_path.parent.mkdir(parents=True, exist_ok=True)
    if pointer.is_link:
        temporary_path.symlink_to(pointer_text)
    else:
        temporary_path.write_text(pointer_text)
    temporary_path.replace(pointer_path)


def _is_folder_below(root: Path, folder: Path) -> bool:
    """Return True if no part of the folder's path below `root` is a link."""
    return resolve(folder) == resolve(root) / folder.relative_to(root)


def _link_stays_below(root: Path, link: Path, target_text: str) -> bool:
    """Return True if the target of a link is below `root`."""
    path_parts = target_text.split("/")
    while path_parts and path_parts[0] == "..":
        path_parts.pop(0)
    # reject `..` after a folder name: if the folder is a link, `..` leads elsewhere
    if os.path.isabs(target_text) or ".." in path_parts:
        return False
    return resolve(link.parent / target_text).is_relative_to(resolve(root))
