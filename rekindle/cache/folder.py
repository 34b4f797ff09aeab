"""The local cache folder of this user, for data that can be downloaded or computed again."""

import os
import tempfile
from pathlib import Path

from argolocal.common.files import make_own
from rekindle.errors import RekindleError

# environment variable with the directory for datasets; its disk must have enough space
CACHE_VARIABLE = "REKINDLE_CACHE"


def cache_folder() -> Path:
    """Return the directory for datasets and results of checks. Raises RekindleError."""
    directory = os.environ.get(CACHE_VARIABLE)
    if directory:
        return Path(directory)
    return own_folder()


def own_folder() -> Path:
    """Return a temporary directory that only this user on this machine uses. Raises
    RekindleError."""
    directory = Path(tempfile.gettempdir()) / f"rekindle-{os.getuid()}"
    try:
        make_own(directory)
    except OSError as error:
        raise RekindleError(
            f"cannot store datasets in {directory} ({error.strerror}): set {CACHE_VARIABLE} to"
            " another directory."
        ) from error
    return directory
