"""Many connections, few threads: one that is silent, or slow with its head, costs a socket and nothing else.

A thread takes a connection once the whole head of a request has arrived (it is only looked at until then), answers that
request, and gives the connection back. A client that is slow with a body, or reads an answer slowly, keeps its thread:
another one is started for those that wait.
"""

import errno
import http
import re
import resource
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from queue import SimpleQueue

THREADS = 32  # that stay; more are started only while all of them wait for slow clients
NO_PROGRESS = 0.05  # seconds in which no thread took a request that was ready: all of them wait
IDLE = 300.0  # seconds after which a silent connection is closed
STUCK = 60.0  # seconds that a thread waits for the rest of a body, or for a reader
SOON = 0.02  # seconds for which a thread waits for the next request: handing a connection over costs more
MOST = 8192  # connections; beyond, the one that is silent for the longest is closed
HEAD, END = 32 << 10, b"\r\n\r\n"  # of a request: the most bytes, and how it ends
WATCHED = select.EPOLLIN | select.EPOLLET
REQUEST_LINE = re.compile(rb"[A-Z]{1,20} [\x21-\x7e\x80-\xff]+ HTTP/1\.[01]")
HEADER_LINE = re.compile(rb"[-!#$%&'*+.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*")


class Connections:
    """The connections of a listening socket. `answer(connection, head)` answers one request: True to go on."""

    def __init__(self, listening: socket.socket, answer: Callable[[socket.socket, bytes], bool]) -> None:
        self.listening, self.answer = listening, answer
        self.silent: dict[int, tuple[socket.socket, float]] = {}  # by descriptor, since when
        self.ready: SimpleQueue[socket.socket] = SimpleQueue()
        self.threads, self.taken, self.lock = 0, 0, threading.Lock()
        self.poll = select.epoll()
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self.most = min(MOST, most // 2) if most > 0 else MOST

    def serve_forever(self) -> None:
        self.listening.setblocking(False)
        self.poll.register(self.listening, select.EPOLLIN)
        self._start_threads(THREADS)
        swept = seen = time.monotonic()
        taken = 0
        while True:
            for descriptor, _ in self.poll.poll(IDLE / 10 if self.ready.empty() else NO_PROGRESS):
                if descriptor == self.listening.fileno():
                    self._accept()
                elif entry := self.silent.get(descriptor):  # else a thread has it
                    self._look(*entry)
            if self.ready.empty() or self.taken != taken:
                seen, taken = time.monotonic(), self.taken
            elif time.monotonic() - seen > NO_PROGRESS:
                self._start_threads(self.ready.qsize())
                seen = time.monotonic()
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

    def _start_threads(self, number: int) -> None:
        for _ in range(number):
            try:
                threading.Thread(target=self._work, daemon=True).start()
            except RuntimeError:  # the machine has no more: what is ready waits for those that run
                return
            with self.lock:
                self.threads += 1

    def _stay(self) -> bool:
        """True if this thread is to wait for another request."""
        with self.lock:
            stays = self.threads <= THREADS or not self.ready.empty()
            self.threads -= not stays
            return stays

    def _work(self) -> None:
        while self._stay():
            connection = self.ready.get()
            self.taken += 1
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
            if fault := find_fault(head):
                connection.sendall(response(400, fault))
                return False
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


def find_fault(head: bytes) -> str:
    """The line of a request's head that parsers may read differently, in words; "" if there is none.

    Python's own parser ends the headers at such a line, so that a body would be read as another request.
    """
    first, *lines = head.removesuffix(END).split(b"\r\n")
    if not REQUEST_LINE.fullmatch(first):
        return f"the request line is {first[:80]!r}: it must be METHOD TARGET HTTP/1.1."
    wrong = next((line for line in lines if not HEADER_LINE.fullmatch(line)), None)
    return "" if wrong is None else f"a header line is {wrong[:80]!r}: it must be NAME: VALUE."


def response(status: int, body: str, headers: str = "", kind: str = "text/plain") -> bytes:
    """A whole answer that closes the connection; `headers`: further lines."""
    head = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n{headers}Content-Type: {kind}; charset=utf-8\r\n"
    data = body.encode()
    return f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data
