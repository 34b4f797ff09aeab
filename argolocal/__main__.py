"""The entry point of `argolocal` and `python -m argolocal`."""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # with `python -m`, the working directory, whose files must not shadow libraries
    del sys.path[0]

from collections.abc import Callable
from importlib import import_module

from argolocal.common import exit_codes

SIGNAL_EXIT_CODES = (exit_codes.HUNG_UP, exit_codes.INTERRUPTED, exit_codes.TERMINATED)


def main() -> None:
    """Run a command of argolocal."""
    exit_with(lambda: import_module("argolocal.cli").main)


def exit_with(load: Callable[[], Callable[[], int | None]]) -> None:
    """Run the command that `load` imports, and exit with its exit code; print no traceback after
    Ctrl-C."""
    code: int | None = exit_codes.INTERRUPTED

    try:
        import signal

        # a shell starts background commands with SIGINT ignored, and their children would inherit
        # this setting
        signal.signal(signal.SIGINT, _exit_at_once)
        run = load()

        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            code = run()
        finally:
            signal.signal(signal.SIGINT, _exit_at_once)
    except KeyboardInterrupt:
        pass

    # the run is already stopped, and the interpreter's shutdown takes half a second
    if code in SIGNAL_EXIT_CODES:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    sys.exit(code)


def _exit_at_once(*_: object) -> None:
    """Exit on SIGINT while Python imports modules or exits: an exception would print a traceback or
    be lost."""
    os._exit(exit_codes.INTERRUPTED)


if __name__ == "__main__":
    main()
