"""The local cache folder of this user, for data that can be downloaded or computed again."""

import os
import tempfile
from pathlib import Path

from argolocal.common.files import make_owned_directory
from rekindle.errors import RekindleError
from rekindle.kubernetes_names import REKINDLE_CACHE


def cache_folder() -> Path:
    """Return this user's cache directory, for datasets and results of checks. Raises
    RekindleError."""
    directory = os.environ.get(REKINDLE_CACHE)
    if directory:
        return Path(directory)
    return user_temporary_folder()


def user_temporary_folder() -> Path:
    """Return a temporary directory that only this user on this machine uses. Raises
    RekindleError."""
    directory = Path(tempfile.gettempdir()) / f"rekindle-{os.getuid()}"
    try:
        make_owned_directory(directory)
    except OSError as error:
        raise RekindleError(
            f"cannot store datasets in {directory} ({error.strerror}): set {REKINDLE_CACHE} to"
            " another directory."
        ) from error
    return directory
