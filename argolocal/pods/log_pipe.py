"""Copy container output to log files through pipes, as container runtimes do. If stdout were the
log file itself, `echo > /dev/stdout` would truncate the log.

    with LogPipe(log) as log_pipe:
        process = Popen(..., stdout=log_pipe.out, stderr=log_pipe.err)
    process.wait()
    log_pipe.finish()

One thread reads the pipes of all containers of this process.
"""

import contextlib
import fcntl
import os
import resource
import select
import struct
import termios
import threading
from functools import cache
from pathlib import Path
from typing import Self

CHUNK_BYTES = 1 << 16
MAX_OPEN_FILES = 1 << 16
READER_LOCK = threading.Lock()


class LogPipe:
    """Copies stdout and stderr of one process to the file `log_path`, and stdout also to the file
    `copy_path`.

    `out` and `err`: write ends of the pipes. The write ends of the pipes are closed at the end of
    the `with` block. `sinks`: read end of each pipe → files to which its output is copied. `error`:
    the reason why the log is incomplete, or None.
    """

    def __init__(self, log_path: Path, copy_path: Path | None = None) -> None:
        self.error: OSError | None = None
        with contextlib.ExitStack() as exit_stack:
            log_files = [
                exit_stack.enter_context(open(path, "ab", buffering=0))
                for path in (log_path, copy_path)
                if path
            ]
            pipes = list[tuple[int, int]]()
            for _ in log_files:
                pipes.append(os.pipe2(os.O_CLOEXEC))
                for pipe_end in pipes[-1]:
                    exit_stack.callback(os.close, pipe_end)

            exit_stack.pop_all()

        self.files = log_files
        self.out = pipes[-1][1]
        self.err = pipes[0][1]
        self.sinks = {
            read_end: log_files if write_end == self.out else log_files[:1]
            for read_end, write_end in pipes
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        for pipe_end in {self.out, self.err}:
            os.close(pipe_end)
        for read_end in self.sinks:
            os.set_blocking(read_end, False)
            _get_reader().add(read_end, self)
        if exception_type:
            self.finish()

    def read(self, read_end: int) -> int:
        """Copy at most one chunk of output. Return the number of copied bytes, 0 at the end of the
        pipe, or -1 if no output is available yet."""
        try:
            chunk = os.read(read_end, CHUNK_BYTES)
        except BlockingIOError:
            return -1

        try:
            for log_file in self.sinks[read_end] if not self.error else []:
                remaining_bytes = memoryview(chunk)
                while remaining_bytes:
                    remaining_bytes = remaining_bytes[log_file.write(remaining_bytes) or 0 :]
        # as in a container runtime, a full disk does not stop the container's process
        except OSError as error:
            self.error = error

        return len(chunk)

    def finish(self) -> None:
        """Copy the remaining output and close the pipes and the files, even if orphaned processes
        could still write to the pipes."""
        _get_reader().end(self)

    def drain(self, read_end: int) -> None:
        """Copy the bytes that are available now, but not bytes that are written during the copy."""
        (available_bytes,) = struct.unpack("i", fcntl.ioctl(read_end, termios.FIONREAD, bytes(4)))
        while available_bytes > 0:
            copied_bytes = self.read(read_end)
            if copied_bytes <= 0:
                return

            available_bytes -= copied_bytes


class _Reader(threading.Thread):
    """The thread that copies the output of all containers. `pipes`: read end of a pipe → LogPipe of
    the container."""

    def __init__(self) -> None:
        super().__init__(name="logs", daemon=True)
        self.lock = threading.Lock()
        self.ready = select.epoll()
        self.pipes: dict[int, LogPipe] = {}
        self.start()

    def add(self, read_end: int, log_pipe: LogPipe) -> None:
        with self.lock:
            self.pipes[read_end] = log_pipe
            self.ready.register(read_end, select.EPOLLIN)

    def end(self, log_pipe: LogPipe) -> None:
        """Copy the available output of `log_pipe` and close `log_pipe`. Several threads may call
        this method at the same time."""
        with self.lock:
            for read_end in [
                read_end for read_end in log_pipe.sinks if self.pipes.get(read_end) is log_pipe
            ]:
                log_pipe.drain(read_end)
                self._close(read_end)
            for log_file in log_pipe.files:
                log_file.close()

    def _close(self, read_end: int) -> None:
        self.ready.unregister(read_end)
        del self.pipes[read_end]
        os.close(read_end)

    def run(self) -> None:
        while True:
            for read_end, _ in self.ready.poll():
                with self.lock:
                    log_pipe = self.pipes.get(read_end)
                    if log_pipe and not log_pipe.read(read_end):
                        self._close(read_end)


def _get_reader() -> _Reader:
    with READER_LOCK:
        return _create_reader()


@cache
def _create_reader() -> _Reader:
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard_limit == resource.RLIM_INFINITY:
        max_open_files = MAX_OPEN_FILES
    else:
        max_open_files = min(MAX_OPEN_FILES, hard_limit)
    # each pod needs a few file descriptors
    if 0 <= soft_limit < max_open_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_open_files, hard_limit))
    return _Reader()
