"""The folder of this user on this machine for data that can be created again."""

import os
import tempfile
from pathlib import Path

from argolocal.common.files import make_owned
from rekindle.errors import RekindleError
from rekindle.kubernetes_names import REKINDLE_CACHE


def cache_folder() -> Path:
    """Return the directory for datasets and results of checks. Raises RekindleError."""
    directory = os.environ.get(REKINDLE_CACHE)
    if directory:
        return Path(directory)
    return own_folder()


def own_folder() -> Path:
    """Return the directory of this user on this machine, which no other machine shares. Raises
    RekindleError."""
    directory = Path(tempfile.gettempdir()) / f"rekindle-{os.getuid()}"
    try:
        make_owned(directory)
    except OSError as error:
        raise RekindleError(
            f"cannot store datasets in {directory} ({error.strerror}): set {REKINDLE_CACHE} to"
            " another directory."
        ) from error
    return directory
