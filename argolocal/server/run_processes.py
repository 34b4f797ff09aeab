"""The processes of queued runs, which a fork server starts.

with RunProcesses(home, "argolocal.view.foreground:execute_queued") as processes:
    process = processes.start("hello-4k2xp")    # a RunProcess
    process.has_ended()
"""

import os
import select
import socket
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Self

from argolocal.common import program
from argolocal.common.processes import make_python_command
from argolocal.errors import ArgolocalError

START_TIMEOUT_S = 120.0
MAX_ANSWER_BYTES = 32


def wait_for_end(descriptors: Iterable[int], seconds: float) -> bool:
    """Wait until a process has ended, but at most `seconds`. Return False if no process has ended.
    `descriptors`: pidfds of the processes."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


class RunProcess:
    """A process that this server has started. The process is identified by a pidfd, because its pid
    may be reused after its end."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.descriptor = -1
        # the process has already ended
        with suppress(ProcessLookupError):
            self.descriptor = os.pidfd_open(pid)

    def has_ended(self) -> bool:
        """Return True once the process has ended."""
        if self.descriptor >= 0:
            if not wait_for_end([self.descriptor], 0.0):
                return False
            os.close(self.descriptor)
            self.descriptor = -1
        return True


class RunProcesses:
    """Starts processes through a fork server, and replaces a fork server that has died.

    `execute` is the function, as MODULE:FUNCTION that each process calls with the home and the name
    of its run.
    """

    def __init__(self, home: Path, execute: str) -> None:
        self.home = home.resolve()
        self.execute = execute
        self.lock = Lock()
        self.socket: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.started: list[RunProcess] = []

    def __enter__(self) -> Self:
        # start the fork server now, so that the first run, which may be a scheduled run, does not
        # wait for the fork server
        self._start_fork_server()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_fork_server()

    def start(self, name: str) -> RunProcess:
        """Start the process of a queued run. Raises ArgolocalError."""
        with self.lock:
            for _ in range(2):
                with suppress(OSError, ValueError):
                    process = RunProcess(self._request_process(name))
                    self.started.append(process)
                    return process
                # the fork server has died, for example because memory was short
                self._end_fork_server()
        raise ArgolocalError(
            "the process that starts runs ends at once: see the errors above, which are its own."
        )

    def wait(self, seconds: float) -> None:
        """Wait until one of the processes that `start` has started ends, but at most `seconds`."""
        self.started = [process for process in self.started if process.descriptor >= 0]
        wait_for_end([process.descriptor for process in self.started], seconds)

    def _request_process(self, name: str) -> int:
        """Let the fork server start a process for a run, and return its pid."""
        connection = self.socket or self._start_fork_server()
        connection.sendall(f"{name}\n".encode())
        return int(connection.recv(MAX_ANSWER_BYTES))

    def _start_fork_server(self) -> socket.socket:
        own_socket, child_socket = socket.socketpair()
        own_socket.settimeout(START_TIMEOUT_S)
        arguments = [
            *("--home", str(self.home)),
            *("--program", program.name),
            *("--cluster", program.cluster),
            *("--execute", self.execute),
        ]
        with child_socket:
            self.process = subprocess.Popen(
                make_python_command("-m", "argolocal.server.fork_server", *arguments),
                stdin=child_socket.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, program.environment_variable("HOME"): str(self.home)},
            )
        self.socket = own_socket
        return own_socket

    def _end_fork_server(self) -> None:
        if self.socket:
            self.socket.close()
            self.socket = None
        if self.process:
            self.process.wait()
            self.process = None
