"""The command line of every Python process that we start."""

import sys


def python(*arguments: str) -> list[str]:
    """A command of this interpreter that imports nothing from the working directory, whose files may be anybody's."""
    return [sys.executable, "-P", *arguments]
