"""Files that a reader never sees half-written."""

import os
import uuid
from pathlib import Path


def write_atomically(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace the file's content in one step: readers see the old or the new text, also with concurrent writers."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
            file.write(text)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_once(path: Path, text: str, mode: int = 0o666) -> str:
    """Write a file unless it exists; returns its content. Of several writers the first wins."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
    try:
        os.link(draft, path)
    except FileExistsError:
        return path.read_text()
    finally:
        draft.unlink()
    return text
