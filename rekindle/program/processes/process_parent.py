"""The process that forks a program's processes. The forking process has already imported torch, so
that a Python program starts within tenths of a second. A program that is not a Python program
replaces the forked process (exec).

    parent = ProcessParent(["torch"])            # forks the process, which imports the modules
    parent.request(ProcessStart(0, command, environment), output)
    parent.take_started()                        # (index, pid) of new processes

Each forked process becomes a child of the agent (training/launch/forkserver.py).
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

from rekindle.errors import write_stderr
from rekindle.program.processes.python_program import (
    find_python_arguments,
    make_executable_command,
    run_python,
)
from rekindle.training.launch.forkserver import fork_for_launcher, prepare_forkserver

# a command and its environment, which Linux limits to 2 MB
MAX_MESSAGE_BYTES = 4 << 20
# exit codes as in a shell
NOT_FOUND_EXIT_CODE = 127
NOT_EXECUTABLE_EXIT_CODE = 126


@dataclass(frozen=True)
class ProcessStart:
    """A request to start one process of the program. `environment`: all environment variables of
    the process."""

    index: int
    command: tuple[str, ...]
    environment: dict[str, str]


class ProcessParent:
    """The agent's connection to the process that forks the program's processes."""

    def __init__(self, module_names: Iterable[str], environment: Mapping[str, str]) -> None:
        """Start the forking process, which imports `module_names` with the variables of
        `environment`, since libraries read some variables when they are imported. Variables that
        Python reads only at its start are not set in the forking process, because programs with
        such variables run in a new interpreter."""
        import_variables = {
            variable_name: variable_value
            for variable_name, variable_value in environment.items()
            if not _is_python_variable(variable_name)
        }
        self.socket, remote_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for socket_end in (self.socket, remote_socket):
            socket_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_MESSAGE_BYTES)

        agent_pid = os.getpid()

        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.socket.close()
                os.environ.update(import_variables)
                _run_parent(remote_socket, module_names, agent_pid)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)

        remote_socket.close()
        self.socket.setblocking(False)

    def request(self, process_start: ProcessStart, output_descriptor: int) -> None:
        """Start a process whose output goes to the descriptor `output_descriptor`."""
        # an error is ignored, because the agent detects the death of the forking process
        with suppress(ConnectionError, BlockingIOError):
            socket.send_fds(self.socket, [pickle.dumps(process_start)], [output_descriptor])

    def take_started(self) -> list[tuple[int, int]]:
        """Return (index, pid) of the processes that have started since the last call."""
        started_processes = []
        with suppress(BlockingIOError, ConnectionError):
            while message := self.socket.recv(64):
                process_index, pid = map(int, message.split())
                started_processes.append((process_index, pid))
        return started_processes

    def end(self) -> None:
        """Kill the forking process, which the agent then reaps."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def _run_parent(agent_socket: socket.socket, module_names: Iterable[str], agent_pid: int) -> None:
    prepare_forkserver(agent_pid)
    _import_modules(module_names)
    gc.freeze()
    gc.enable()

    while True:
        start_message, descriptors, _, _ = socket.recv_fds(agent_socket, MAX_MESSAGE_BYTES, 1)
        if not start_message:
            return

        process_start: ProcessStart = pickle.loads(start_message)  # nosec B301  # our parent is the sender
        run_process = partial(_run_process, process_start, descriptors[0])
        fork_for_launcher(agent_socket, process_start.index, agent_pid, run_process)
        os.close(descriptors[0])


def _import_modules(module_names: Iterable[str]) -> None:
    for module_name in module_names:
        try:
            importlib.import_module(module_name)
        except Exception as error:
            # the program itself may not need the module
            write_stderr(f"program.preload: {module_name} cannot be imported ({error})")


def _run_process(process_start: ProcessStart, output_descriptor: int) -> NoReturn:
    """Run the program in this forked process."""
    os.setsid()
    null_descriptor = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_descriptor, 0)
    os.close(null_descriptor)
    os.dup2(output_descriptor, 1)
    os.dup2(output_descriptor, 2)
    os.close(output_descriptor)

    for signal_number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGCHLD,
        signal.SIGPIPE,
    ):
        signal.signal(signal_number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())

    arguments = find_python_arguments(process_start.command)
    if arguments is None or _needs_new_interpreter(process_start.environment):
        _execute_command(process_start)

    os.environ.clear()
    os.environ.update(process_start.environment)
    _restore_interpreter()
    run_python(arguments)


def _needs_new_interpreter(environment: Mapping[str, str]) -> bool:
    """Return True if the environment changes a variable that Python reads only at its start."""
    return any(
        environment.get(variable_name) != os.environ.get(variable_name)
        for variable_name in environment.keys() | os.environ.keys()
        if _is_python_variable(variable_name)
    )


def _is_python_variable(variable_name: str) -> bool:
    return variable_name.startswith("PYTHON") and variable_name != "PYTHONUNBUFFERED"


def _execute_command(process_start: ProcessStart) -> NoReturn:
    command = make_executable_command(process_start.command)
    try:
        os.execvpe(command[0], command, process_start.environment)  # nosec B606  # the program
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(
            NOT_FOUND_EXIT_CODE
            if isinstance(error, FileNotFoundError)
            else NOT_EXECUTABLE_EXIT_CODE
        )


def _restore_interpreter() -> None:
    """Make this forked interpreter look like a new interpreter, where a program could notice a
    difference."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]

    numpy_module = sys.modules.get("numpy")
    if numpy_module:
        # without a new seed, all processes would draw the same random numbers
        numpy_module.random.seed()
