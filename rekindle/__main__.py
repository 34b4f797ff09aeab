"""`rekindle` and `python -m rekindle`. `rekindle step` needs none of the packages of the other commands."""

import os
import sys

STOPPED = (129, 130, 143)  # by SIGHUP, Ctrl-C, SIGTERM


def main() -> None:
    """Run a command or a step and exit with its code: 130 after Ctrl-C, at any moment and without a traceback."""
    code: int | None = 130
    try:
        import signal

        # what is started in the background inherits SIGINT ignored, and so would its children
        signal.signal(signal.SIGINT, _exit_at_once)
        if sys.argv[1:2] == ["step"]:
            from rekindle import step
            from rekindle.cache.runner import execute

            run = lambda: step.main(sys.argv[2:], execute)  # noqa: E731
        else:
            from rekindle import cli

            run = cli.main
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            code = run()
        finally:
            signal.signal(signal.SIGINT, _exit_at_once)
    except KeyboardInterrupt:
        pass
    if code in STOPPED:  # everything is stopped and printed; interpreter shutdown would take another half second
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _exit_at_once(*_: object) -> None:
    """End this process while Python imports or exits: an exception would be a traceback there, or be lost."""
    os._exit(130)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the working directory, where `python -m` looks first: its files must not shadow a library
    main()
