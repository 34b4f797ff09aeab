"""Records that this program keeps as JSON files: a file that something else changed is an error with its name."""

import json
from pathlib import Path
from typing import Any

from argolocal.common.files import read_regular
from argolocal.errors import InvalidDocument

MAX_BYTES = 256 << 20


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises OSError, InvalidDocument."""
    try:
        value = json.loads(read_regular(path, MAX_BYTES))
        if not isinstance(value, dict):
            raise ValueError(f"it is a {type(value).__name__}, and must be an object")
    except (ValueError, RecursionError) as error:
        raise malformed(path, error) from None
    return value


def malformed(path: Path, error: Exception) -> InvalidDocument:
    """Return the error for a file whose content has another structure than expected."""
    reason = f"{error} is missing" if isinstance(error, KeyError) else error
    return InvalidDocument(f"{path} is malformed ({reason}): restore the file, or remove it.")
