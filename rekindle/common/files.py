"""Files that a reader never sees half-written."""

from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace the file's content in one step: a reader sees the old or the new text."""
    draft = path.with_name(path.name + ".new")
    draft.write_text(text)
    draft.replace(path)
