"""Serve many connections with few threads: clients that are idle or send a request's head slowly do
not occupy a thread.

A thread takes a connection once the complete head of a request has arrived (until then, the head is
only peeked at), answers that request, and gives the connection back. A client that sends a body or
reads an answer slowly occupies its thread; more threads are then started for waiting requests.
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

# number of permanent threads; if all of them wait for slow clients, temporary threads are added
THREADS = 32
# if no thread takes a waiting request within this time, all threads count as blocked
BLOCKED_AFTER_S = 0.05
IDLE_TIMEOUT_S = 300.0  # a connection without traffic is closed after this time
STALL_TIMEOUT_S = 60.0  # how long a thread waits for the rest of a body, or until a client reads
# time that a thread waits for the next request of its connection: a short wait costs less than
# giving the connection back
NEXT_REQUEST_TIMEOUT_S = 0.02
# maximum number of open connections; beyond it, the connection with the longest silence is closed
MAX_CONNECTIONS = 8192
# maximum size of a request's head in bytes, and the end of a head
MAX_HEAD_BYTES = 32 << 10
HEAD_END = b"\r\n\r\n"
WATCHED_EVENTS = select.EPOLLIN | select.EPOLLET
REQUEST_LINE = re.compile(rb"[A-Z]{1,20} [\x21-\x7e\x80-\xff]+ HTTP/1\.[01]")
HEADER_LINE = re.compile(rb"[-!#$%&'*+.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*")


class Connections:
    """The connections of a socket. `answer(connection, head)` answers one request; True keeps the
    connection open."""

    def __init__(
        self, listening: socket.socket, answer: Callable[[socket.socket, bytes], bool]
    ) -> None:
        self.listening = listening
        self.answer = answer
        # file descriptor → connection, and start time of its silence
        self.silent_connections: dict[int, tuple[socket.socket, float]] = {}
        self.ready_connections: SimpleQueue[socket.socket] = SimpleQueue()
        self.threads = 0
        self.taken_count = 0
        self.lock = threading.Lock()
        self.poll = select.epoll()
        _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        self.max_connections = min(MAX_CONNECTIONS, limit // 2) if limit > 0 else MAX_CONNECTIONS

    def serve_forever(self) -> None:
        self.listening.setblocking(False)
        self.poll.register(self.listening, select.EPOLLIN)
        self._start_threads(THREADS)
        last_cleanup = last_progress = time.monotonic()
        taken_count = 0

        while True:
            for descriptor, _ in self.poll.poll(
                IDLE_TIMEOUT_S / 10 if self.ready_connections.empty() else BLOCKED_AFTER_S
            ):
                if descriptor == self.listening.fileno():
                    self._accept()
                # connections that a thread serves are not in this dict
                elif entry := self.silent_connections.get(descriptor):
                    self._check(entry[0])

            if self.ready_connections.empty() or self.taken_count != taken_count:
                last_progress = time.monotonic()
                taken_count = self.taken_count
            elif time.monotonic() - last_progress > BLOCKED_AFTER_S:
                self._start_threads(self.ready_connections.qsize())
                last_progress = time.monotonic()

            if time.monotonic() - last_cleanup > IDLE_TIMEOUT_S / 10:
                last_cleanup = time.monotonic()
                start_limit = last_cleanup - IDLE_TIMEOUT_S
                self._close(
                    *(
                        connection
                        for connection, since in list(self.silent_connections.values())
                        if since < start_limit
                    )
                )

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

                continue  # the client has disconnected

            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.silent_connections[connection.fileno()] = connection, time.monotonic()
            self.poll.register(connection, WATCHED_EVENTS)

            if len(self.silent_connections) > self.max_connections:
                self._close_oldest()

    def _check(self, connection: socket.socket) -> None:
        """Pass a connection to a thread if the head of its request is complete; close the
        connection if the client has left or the head is too long."""
        try:
            data = connection.recv(MAX_HEAD_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            data = b""

        if HEAD_END in data:
            self.poll.modify(connection, 0)
            del self.silent_connections[connection.fileno()]
            self.ready_connections.put(connection)
        elif not data or len(data) == MAX_HEAD_BYTES:
            self._close(connection)

    def _start_threads(self, count: int) -> None:
        for _ in range(count):
            try:
                threading.Thread(target=self._work, daemon=True).start()
            except RuntimeError:  # the thread limit is reached: requests wait for running threads
                return
            with self.lock:
                self.threads += 1

    def _should_stay(self) -> bool:
        """Return True if this thread should wait for another request."""
        with self.lock:
            should_stay = self.threads <= THREADS or not self.ready_connections.empty()
            self.threads -= not should_stay
            return should_stay

    def _work(self) -> None:
        while self._should_stay():
            connection = self.ready_connections.get()
            self.taken_count += 1

            try:
                if self._serve(connection):
                    connection.setblocking(False)
                    self.silent_connections[connection.fileno()] = connection, time.monotonic()
                    self.poll.modify(connection, WATCHED_EVENTS)
                    continue
            except (ConnectionError, TimeoutError):
                pass
            except Exception:
                traceback.print_exc(file=sys.stderr)

            connection.close()

    def _serve(self, connection: socket.socket) -> bool:
        """Answer the requests that have arrived, or arrive within NEXT_REQUEST_TIMEOUT_S. Return
        False if the connection must be closed."""
        connection.settimeout(NEXT_REQUEST_TIMEOUT_S)

        while True:
            try:
                data = connection.recv(MAX_HEAD_BYTES, socket.MSG_PEEK)
            except TimeoutError:
                return True

            if HEAD_END not in data:
                return bool(data)

            head = connection.recv(data.index(HEAD_END) + len(HEAD_END), socket.MSG_WAITALL)
            connection.settimeout(STALL_TIMEOUT_S)

            fault = find_fault(head)
            if fault:
                connection.sendall(response(400, fault))
                return False

            if not self.answer(connection, head):
                return False
            if not self.ready_connections.empty():
                return True

            connection.settimeout(NEXT_REQUEST_TIMEOUT_S)

    def _close_oldest(self) -> None:
        self._close(*(connection for connection, _ in list(self.silent_connections.values())[:1]))

    def _close(self, *connections: socket.socket) -> None:
        for connection in connections:
            del self.silent_connections[connection.fileno()]
            connection.close()


def find_fault(head: bytes) -> str:
    """Return an error message if two parsers may interpret a line of the head in different ways,
    else "".

    Python's own parser ends the headers at such a line, and would read a body as another request.
    """
    first, *lines = head.removesuffix(HEAD_END).split(b"\r\n")
    if not REQUEST_LINE.fullmatch(first):
        return f"the request line is {first[:80]!r}: it must be METHOD TARGET HTTP/1.1."
    invalid_line = next((line for line in lines if not HEADER_LINE.fullmatch(line)), None)
    if invalid_line is None:
        return ""
    return f"a header line is {invalid_line[:80]!r}: it must be NAME: VALUE."


def response(status: int, body: str, headers: str = "", kind: str = "text/plain") -> bytes:
    """Return a complete answer that closes the connection; `headers`: additional lines."""
    head = (
        f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n{headers}Content-Type: {kind};"
        " charset=utf-8\r\n"
    )
    data = body.encode()
    return f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data
