"""The process that forks a process for each queued run. The fork server has imported all modules
that a run needs, so that a run starts within milliseconds. Unlike the server, the fork server has
only one thread, so that it can fork safely.

    python -m argolocal.server.fork_server --home .argolocal --program argolocal \\
        --cluster MODULE:CLASS --execute MODULE:FUNCTION

The stdin of the fork server is a socket. For each line on stdin, which is the name of a run, the
fork server starts a process that calls FUNCTION(home, name), and sends the pid of this process
back. The fork server ends when the server closes the socket. The runs continue after the end of the
fork server.
"""

import argparse
import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType

from argolocal.common import exit_codes, program
from argolocal.common.checked_names import RunName
from argolocal.errors import ArgolocalError, write_stderr
from argolocal.state.journal import RunFiles

MAX_DESCRIPTORS = 1024
# exit code of a process with an error
FAILED = 1
# function that runs the queued run with this name to its end, and returns its exit code
Execute = Callable[[Path, str], int]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m argolocal.server.fork_server")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--program", required=True)
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--execute", required=True)
    arguments = parser.parse_args()

    program.set_program(arguments.program, arguments.cluster)
    execute = load_function(arguments.execute)
    # Ctrl-C in the terminal of the server also reaches this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, _reap_children)
    # exclude the objects of all imported modules from garbage collection, so that the children
    # continue to share their memory
    gc.collect()
    gc.freeze()

    server = socket.socket(fileno=os.dup(0))
    with server, server.makefile("r") as lines:
        for line in lines:
            pid = _fork(arguments.home, RunName(line.strip()), execute)
            server.sendall(f"{pid}\n".encode())


def load_function(reference: str) -> Execute:
    """Import a module and return one of its functions. `reference`: MODULE:NAME."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def _fork(home: Path, name: str, execute: Execute) -> int:
    """Start a process that runs a queued run, and return its pid."""
    pid = os.fork()
    if pid == 0:
        code = FAILED
        try:
            _prepare_child(home, name)
            code = execute(home, name)
        except KeyboardInterrupt:
            code = exit_codes.INTERRUPTED
        except ArgolocalError as error:
            write_stderr(f"error: {error}")
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def _prepare_child(home: Path, name: str) -> None:
    """Make this process independent of the server: give it its own session, output file and signal
    handlers, and close the descriptors of the fork server."""
    os.setsid()
    path = RunFiles(home, name).read_path()
    if path:
        os.environ[program.environment_variable("PATH")] = path
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    output = os.open(
        RunFiles(home, name).root / "output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # all other descriptors belong to the fork server
    os.closerange(3, MAX_DESCRIPTORS)


def _reap_children(number: int, frame: FrameType | None) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


if __name__ == "__main__":
    main()
