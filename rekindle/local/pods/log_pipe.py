"""What containers say, on its way to their logs: by pipes, as from a container, so `> /dev/stdout` empties nothing.

    with Said(log) as said:
        process = Popen(..., stdout=said.out, stderr=said.err)
    process.wait(); said.over()

One thread of this process reads them all.
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

CHUNK = 1 << 16
FILES = 1 << 16
ONE = threading.Lock()


class Said:
    """What one process says goes to `log`; its stdout alone to the file `copy` as well.

    `out` and `err` are the process's ends, open until `with` is left. `error`: why some of it is not there.
    """

    def __init__(self, log: Path, copy: Path | None = None) -> None:
        self.error: OSError | None = None
        with contextlib.ExitStack() as opened:
            files = [opened.enter_context(open(path, "ab", buffering=0)) for path in (log, copy) if path]
            pipes = list[tuple[int, int]]()
            for _ in files:
                pipes.append(os.pipe2(os.O_CLOEXEC))
                for end in pipes[-1]:
                    opened.callback(os.close, end)
            opened.pop_all()
        self.files, self.out, self.err = files, pipes[-1][1], pipes[0][1]
        self.sinks = {ours: files if theirs == self.out else files[:1] for ours, theirs in pipes}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for end in {self.out, self.err}:
            os.close(end)
        for ours in self.sinks:
            os.set_blocking(ours, False)
            _reader().add(ours, self)
        if kind:
            self.over()

    def read(self, ours: int) -> int:
        """Takes what is there, at most a chunk, and gives its size: -1 if nothing is there yet, 0 at the end."""
        try:
            chunk = os.read(ours, CHUNK)
        except BlockingIOError:
            return -1
        try:
            for file in self.sinks[ours] if not self.error else []:
                rest = memoryview(chunk)
                while rest:
                    rest = rest[file.write(rest) or 0 :]
        except OSError as error:  # a full disk; the process may go on, as it may when nobody reads a container's log
            self.error = error
        return len(chunk)

    def over(self) -> None:
        """Takes what the process has said, and hears no more: what it left behind may have its ends still."""
        _reader().end(self)

    def rest(self, ours: int) -> None:
        """Takes what is there now, however much follows."""
        (there,) = struct.unpack("i", fcntl.ioctl(ours, termios.FIONREAD, bytes(4)))
        while there > 0 and (size := self.read(ours)) > 0:
            there -= size


class _Reader(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="logs", daemon=True)
        self.lock, self.ready, self.reads = threading.Lock(), select.epoll(), dict[int, Said]()
        self.start()

    def add(self, ours: int, said: Said) -> None:
        with self.lock:
            self.reads[ours] = said
            self.ready.register(ours, select.EPOLLIN)

    def end(self, said: Said) -> None:
        """Several threads may ask for it; whoever goes on has all that was said."""
        with self.lock:
            for ours in [ours for ours in said.sinks if self.reads.get(ours) is said]:
                said.rest(ours)
                self._close(ours)
            for file in said.files:
                file.close()

    def _close(self, ours: int) -> None:
        self.ready.unregister(ours)
        del self.reads[ours]
        os.close(ours)

    def run(self) -> None:
        while True:
            for ours, _ in self.ready.poll():
                with self.lock:
                    if (said := self.reads.get(ours)) and not said.read(ours):
                        self._close(ours)


def _reader() -> _Reader:
    with ONE:
        return _made()


@cache
def _made() -> _Reader:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if 0 <= soft < most:  # a pod takes a few, and a container of a cluster has as many
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return _Reader()
