"""Runs the coordinator of a training program: the server in training/membership/server.py with the
inputs of a program.

python -m rekindle.program.coordinator <the same flags as `rekindle step steps.program`>
"""

import signal

# block SIGTERM until a handler is installed: the kernel would discard the signal for PID 1
if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

import sys

from rekindle.program.spec import ProgramSpec
from rekindle.training.membership import server


def main(argv: list[str]) -> int:
    return server.main(argv, ProgramSpec)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
