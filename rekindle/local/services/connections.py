"""Many connections, few threads: one that is silent, or slow with its head, costs a socket and nothing else.

A thread takes a connection once the whole head of a request has arrived (it is only looked at until then), answers that
request, and gives the connection back.
"""

import errno
import resource
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from queue import SimpleQueue

THREADS = 32
IDLE = 300.0  # seconds after which a silent connection is closed
STUCK = 60.0  # seconds that a thread waits for the rest of a body, or for a reader
SOON = 0.02  # seconds for which a thread waits for the next request: handing a connection over costs more
MOST = 8192  # connections; beyond, the one that is silent for the longest is closed
HEAD, END = 32 << 10, b"\r\n\r\n"  # of a request: the most bytes, and how it ends
WATCHED = select.EPOLLIN | select.EPOLLET


class Connections:
    """The connections of a listening socket. `answer(connection, head)` answers one request: True to go on."""

    def __init__(self, listening: socket.socket, answer: Callable[[socket.socket, bytes], bool]) -> None:
        self.listening, self.answer = listening, answer
        self.silent: dict[int, tuple[socket.socket, float]] = {}  # by descriptor, since when
        self.ready: SimpleQueue[socket.socket] = SimpleQueue()
        self.poll = select.epoll()
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self.most = min(MOST, most // 2) if most > 0 else MOST

    def serve_forever(self) -> None:
        self.listening.setblocking(False)
        self.poll.register(self.listening, select.EPOLLIN)
        for _ in range(THREADS):
            threading.Thread(target=self._work, daemon=True).start()
        swept = time.monotonic()
        while True:
            for descriptor, _ in self.poll.poll(IDLE / 10):
                if descriptor == self.listening.fileno():
                    self._accept()
                elif entry := self.silent.get(descriptor):  # else a thread has it
                    self._look(*entry)
            if time.monotonic() - swept > IDLE / 10:
                swept = time.monotonic()
                self._close(*(entry[0] for entry in list(self.silent.values()) if entry[1] < swept - IDLE))

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._close_oldest()
                    return
                continue  # the client is gone
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.silent[connection.fileno()] = connection, time.monotonic()
            self.poll.register(connection, WATCHED)
            if len(self.silent) > self.most:
                self._close_oldest()

    def _look(self, connection: socket.socket, since: float) -> None:
        """Hand a connection to a thread if the head of a request is there; close it if none can come any more."""
        try:
            seen = connection.recv(HEAD, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            seen = b""
        if END in seen:
            self.poll.modify(connection, 0)
            del self.silent[connection.fileno()]
            self.ready.put(connection)
        elif not seen or len(seen) == HEAD:
            self._close(connection)

    def _work(self) -> None:
        while True:
            connection = self.ready.get()
            try:
                if self._serve(connection):
                    connection.setblocking(False)
                    self.silent[connection.fileno()] = connection, time.monotonic()
                    self.poll.modify(connection, WATCHED)
                    continue
            except (ConnectionError, TimeoutError):
                pass
            except Exception:
                traceback.print_exc(file=sys.stderr)
            connection.close()

    def _serve(self, connection: socket.socket) -> bool:
        """Answer the requests that are there or come at once. False: the connection cannot go on."""
        connection.settimeout(SOON)
        while True:
            try:
                seen = connection.recv(HEAD, socket.MSG_PEEK)
            except TimeoutError:
                return True
            if END not in seen:
                return bool(seen)
            head = connection.recv(seen.index(END) + len(END), socket.MSG_WAITALL)
            connection.settimeout(STUCK)
            if not self.answer(connection, head):
                return False
            if not self.ready.empty():
                return True
            connection.settimeout(SOON)

    def _close_oldest(self) -> None:
        self._close(*(connection for connection, _ in list(self.silent.values())[:1]))

    def _close(self, *connections: socket.socket) -> None:
        for connection in connections:
            del self.silent[connection.fileno()]
            connection.close()
