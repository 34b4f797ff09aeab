"""The entry point of `argolocal` and `python -m argolocal`."""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` puts the working directory first in sys.path; a file of the working directory must
    # not shadow libraries
    del sys.path[0]

from collections.abc import Callable
from importlib import import_module

from argolocal.common import exit_codes

SIGNAL_EXIT_CODES = (exit_codes.HUNG_UP, exit_codes.INTERRUPTED, exit_codes.TERMINATED)


def main() -> None:
    """Run the argolocal command that the command line names."""
    exit_with(lambda: import_module("argolocal.cli").main)


def exit_with(load_command: Callable[[], Callable[[], int | None]]) -> None:
    """Call `load_command`, run the function that it returns, and exit with the function's exit
    code. After Ctrl-C, exit with code 130 and without a traceback."""
    exit_code: int | None = exit_codes.INTERRUPTED

    try:
        import signal

        # A shell makes its background commands ignore SIGINT, and child processes inherit this
        # setting.
        signal.signal(signal.SIGINT, _exit_at_once)
        run_command = load_command()

        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            exit_code = run_command()
        finally:
            signal.signal(signal.SIGINT, _exit_at_once)
    except KeyboardInterrupt:
        pass

    # The command has already stopped its run, so it exits with `os._exit`, which skips Python's
    # shutdown, which takes half a second.
    if exit_code in SIGNAL_EXIT_CODES:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)

    sys.exit(exit_code)


def _exit_at_once(*_: object) -> None:
    """Exit at once if SIGINT arrives while Python imports modules or shuts down: a
    KeyboardInterrupt would then print a traceback or be lost."""
    os._exit(exit_codes.INTERRUPTED)


if __name__ == "__main__":
    main()
