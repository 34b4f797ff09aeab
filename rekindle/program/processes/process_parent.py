"""The process that forks a program's processes. It has already imported torch, so that a Python
program starts within tenths of a second; any other program is executed.

    parent = ProcessParent(["torch"])            # forks the process, which imports the modules
    parent.request(ProcessStart(0, command, environment), output)
    parent.take_started()                        # (index, pid) of new processes

Each process becomes a child of the agent (training/launch/forkserver.py).
"""

import gc
import importlib
import os
import pickle  # nosec B403  # used between a parent process and its child
import signal
import socket
import sys
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from rekindle.errors import say
from rekindle.program.processes.python_program import (
    executable_command,
    python_arguments,
    run_python,
)
from rekindle.training.launch.forkserver import fork_for_launcher, prepare_forkserver

MAX_MESSAGE_BYTES = 4 << 20  # a command and its environment, which Linux limits to 2 MB
NOT_FOUND = 127  # exit codes as in a shell
NOT_EXECUTABLE = 126


@dataclass(frozen=True)
class ProcessStart:
    """A request to start one process. `environment`: all environment variables of the process."""

    index: int
    command: tuple[str, ...]
    environment: dict[str, str]


class ProcessParent:
    """The agent's connection to the process that forks the program's processes."""

    def __init__(self, modules: Iterable[str], environment: Mapping[str, str]) -> None:
        """Fork the process, which imports `modules` with the variables of `environment`, since
        libraries read some variables when they are imported. Variables that Python reads only at
        its start are not set here: programs with such variables run in a new interpreter."""
        early = {name: value for name, value in environment.items() if not _is_of_python(name)}
        self.socket, remote_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self.socket, remote_socket):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_MESSAGE_BYTES)

        agent_pid = os.getpid()

        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.socket.close()
                os.environ.update(early)
                _run_parent(remote_socket, modules, agent_pid)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)

        remote_socket.close()
        self.socket.setblocking(False)

    def request(self, start: ProcessStart, output: int) -> None:
        """Start a process whose output goes to the descriptor `output`."""
        with suppress(ConnectionError, BlockingIOError):  # the agent detects the parent's death
            socket.send_fds(self.socket, [pickle.dumps(start)], [output])

    def take_started(self) -> list[tuple[int, int]]:
        """Return (index, pid) of the processes that have started since the last call."""
        started = []
        with suppress(BlockingIOError, ConnectionError):
            while message := self.socket.recv(64):
                index, pid = map(int, message.split())
                started.append((index, pid))
        return started

    def end(self) -> None:
        """Kill the parent; the agent reaps it."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def _run_parent(connection: socket.socket, modules: Iterable[str], agent_pid: int) -> None:
    prepare_forkserver(agent_pid)
    _import_modules(modules)
    gc.freeze()
    gc.enable()

    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 1)
        if not message:
            return

        start: ProcessStart = pickle.loads(message)  # nosec B301  # our parent is the sender
        run = partial(_run_process, start, descriptors[0])
        fork_for_launcher(connection, start.index, agent_pid, run)
        os.close(descriptors[0])


def _import_modules(modules: Iterable[str]) -> None:
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # the program itself may not need the module
            say(f"program.preload: {name} cannot be imported ({error})")


def _run_process(start: ProcessStart, output: int) -> NoReturn:
    """Turn this forked process into a process of the program."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())

    arguments = python_arguments(start.command)
    if arguments is None or _needs_new_interpreter(start.environment):
        _execute(start)

    os.environ.clear()
    os.environ.update(start.environment)
    _restore_interpreter()
    run_python(arguments)


def _needs_new_interpreter(environment: Mapping[str, str]) -> bool:
    """Return True if the environment changes a variable that Python reads only at its start."""
    return any(
        environment.get(name) != os.environ.get(name)
        for name in environment.keys() | os.environ.keys()
        if _is_of_python(name)
    )


def _is_of_python(name: str) -> bool:
    return name.startswith("PYTHON") and name != "PYTHONUNBUFFERED"


def _execute(start: ProcessStart) -> NoReturn:
    command = executable_command(start.command)
    try:
        os.execvpe(command[0], command, start.environment)  # nosec B606  # the program
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)


def _restore_interpreter() -> None:
    """Restore the state of a new interpreter where a program could notice a difference."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]

    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed()  # otherwise all processes would draw the same random numbers
