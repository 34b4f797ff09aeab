"""Entry point of `rekindle` and `python -m rekindle`.

`rekindle step` does not import the packages of the other commands.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` searches the working directory first, and its files must not shadow libraries
    del sys.path[0]

from collections.abc import Callable

from argolocal.__main__ import exit_with


def main() -> None:
    """Run a command or a step."""
    exit_with(_import_main)


def _import_main() -> Callable[[], int | None]:
    if sys.argv[1:2] == ["step"]:
        from rekindle.cache import loaded

        loaded.record_loaded_files()
        from rekindle import step
        from rekindle.cache.runner import execute

        return lambda: step.main(sys.argv[2:], execute)
    from rekindle import cli

    return cli.main


if __name__ == "__main__":
    main()
