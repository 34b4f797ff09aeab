"""Serve many connections with few threads: clients that are idle or send a request's head slowly do
not occupy a thread.

A thread takes a connection once the complete head of a request has arrived, answers that request,
and gives the connection back. Until the head of a request is complete, the head stays in the
receive buffer of the socket (MSG_PEEK). A client that sends a body or reads an answer slowly
occupies its thread. If waiting requests find no free thread, more threads are started.
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
THREAD_COUNT = 32
# if no thread takes a waiting request within this time, all threads count as blocked
BLOCKED_THRESHOLD_S = 0.05
# a connection without traffic is closed after this time
IDLE_TIMEOUT_S = 300.0
# time that a thread waits for the next bytes of a body, or for a client to read the answer
STALL_TIMEOUT_S = 60.0
# time that a thread waits for the next request of its connection: a short wait costs less than
# giving the connection back
NEXT_REQUEST_TIMEOUT_S = 0.02
# maximum number of open connections; if more are open, the connection with the longest silence is
# closed
MAX_CONNECTIONS = 8192
# maximum size of a request's head in bytes, and the end of a head
MAX_HEAD_BYTES = 32 << 10
HEAD_END = b"\r\n\r\n"
WATCHED_EVENTS = select.EPOLLIN | select.EPOLLET
REQUEST_LINE = re.compile(rb"[A-Z]{1,20} [\x21-\x7e\x80-\xff]+ HTTP/1\.[01]")
HEADER_LINE = re.compile(rb"[-!#$%&'*+.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*")


class ConnectionServer:
    """Serves the connections of a listening socket. `answer_request(connection, head)` answers one
    request, and returns True to keep the connection open."""

    def __init__(
        self,
        listening_socket: socket.socket,
        answer_request: Callable[[socket.socket, bytes], bool],
    ) -> None:
        self.listening = listening_socket
        self.answer = answer_request
        # file descriptor → connection, and start time of its silence
        self.silent_connections: dict[int, tuple[socket.socket, float]] = {}
        self.ready_connections: SimpleQueue[socket.socket] = SimpleQueue()
        self.threads = 0
        # number of connections that threads have taken so far
        self.taken_count = 0
        self.lock = threading.Lock()
        self.poll = select.epoll()
        _, descriptor_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor_limit, descriptor_limit))
        self.max_connections = (
            min(MAX_CONNECTIONS, descriptor_limit // 2) if descriptor_limit > 0 else MAX_CONNECTIONS
        )

    def serve_forever(self) -> None:
        self.listening.setblocking(False)
        self.poll.register(self.listening, select.EPOLLIN)
        self._start_threads(THREAD_COUNT)
        last_cleanup_seconds = time.monotonic()
        last_progress_seconds = last_cleanup_seconds
        last_taken_count = 0

        while True:
            for descriptor, _ in self.poll.poll(
                IDLE_TIMEOUT_S / 10 if self.ready_connections.empty() else BLOCKED_THRESHOLD_S
            ):
                if descriptor == self.listening.fileno():
                    self._accept()
                    continue

                # connections that a thread serves are not in this dict
                silent_connection = self.silent_connections.get(descriptor)
                if silent_connection:
                    self._check(silent_connection[0])

            if self.ready_connections.empty() or self.taken_count != last_taken_count:
                last_progress_seconds = time.monotonic()
                last_taken_count = self.taken_count
            elif time.monotonic() - last_progress_seconds > BLOCKED_THRESHOLD_S:
                self._start_threads(self.ready_connections.qsize())
                last_progress_seconds = time.monotonic()

            if time.monotonic() - last_cleanup_seconds > IDLE_TIMEOUT_S / 10:
                last_cleanup_seconds = time.monotonic()
                oldest_start_seconds = last_cleanup_seconds - IDLE_TIMEOUT_S
                self._close(
                    *(
                        connection
                        for connection, silent_since in list(self.silent_connections.values())
                        if silent_since < oldest_start_seconds
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
                    self._close_oldest_connection()
                    return

                # the client has disconnected
                continue

            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.silent_connections[connection.fileno()] = connection, time.monotonic()
            self.poll.register(connection, WATCHED_EVENTS)

            if len(self.silent_connections) > self.max_connections:
                self._close_oldest_connection()

    def _check(self, connection: socket.socket) -> None:
        """Pass a connection to a thread if the head of its request is complete; close the
        connection if the client has left or the head is too long."""
        try:
            received_bytes = connection.recv(MAX_HEAD_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            received_bytes = b""

        if HEAD_END in received_bytes:
            self.poll.modify(connection, 0)
            del self.silent_connections[connection.fileno()]
            self.ready_connections.put(connection)
        elif not received_bytes or len(received_bytes) == MAX_HEAD_BYTES:
            self._close(connection)

    def _start_threads(self, thread_count: int) -> None:
        for _ in range(thread_count):
            try:
                threading.Thread(target=self._work, daemon=True).start()
            except RuntimeError:
                # the maximum number of threads is reached, so the requests wait for the running
                # threads
                return
            with self.lock:
                self.threads += 1

    def _should_keep_thread(self) -> bool:
        """Return True if this thread should wait for another request. If the result is False, the
        thread is no longer counted, and must end."""
        with self.lock:
            should_keep_thread = self.threads <= THREAD_COUNT or not self.ready_connections.empty()
            if not should_keep_thread:
                self.threads -= 1
            return should_keep_thread

    def _work(self) -> None:
        while self._should_keep_thread():
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
        """Answer the requests that have arrived on a connection, or arrive within
        NEXT_REQUEST_TIMEOUT_S. Return False if the connection must be closed."""
        connection.settimeout(NEXT_REQUEST_TIMEOUT_S)

        while True:
            try:
                received_bytes = connection.recv(MAX_HEAD_BYTES, socket.MSG_PEEK)
            except TimeoutError:
                return True

            if HEAD_END not in received_bytes:
                return bool(received_bytes)

            request_head = connection.recv(
                received_bytes.index(HEAD_END) + len(HEAD_END), socket.MSG_WAITALL
            )
            connection.settimeout(STALL_TIMEOUT_S)

            head_fault = find_head_fault(request_head)
            if head_fault:
                connection.sendall(make_response(400, head_fault))
                return False

            if not self.answer(connection, request_head):
                return False
            if not self.ready_connections.empty():
                return True

            connection.settimeout(NEXT_REQUEST_TIMEOUT_S)

    def _close_oldest_connection(self) -> None:
        self._close(*(connection for connection, _ in list(self.silent_connections.values())[:1]))

    def _close(self, *connections: socket.socket) -> None:
        for connection in connections:
            del self.silent_connections[connection.fileno()]
            connection.close()


def find_head_fault(request_head: bytes) -> str:
    """Return an error message if the head has a line that two parsers may interpret in different
    ways, else "".

    Python's own HTTP parser ends the headers at an ambiguous line, and would then read the body as
    another request.
    """
    request_line, *header_lines = request_head.removesuffix(HEAD_END).split(b"\r\n")
    if not REQUEST_LINE.fullmatch(request_line):
        return f"the request line is {request_line[:80]!r}: it must be METHOD TARGET HTTP/1.1."
    invalid_header_line = next(
        (header_line for header_line in header_lines if not HEADER_LINE.fullmatch(header_line)),
        None,
    )
    if invalid_header_line is None:
        return ""
    return f"a header line is {invalid_header_line[:80]!r}: it must be NAME: VALUE."


def make_response(
    http_status: int, body_text: str, header_lines: str = "", content_type: str = "text/plain"
) -> bytes:
    """Return a complete answer that closes the connection; `header_lines`: additional lines."""
    response_head = (
        f"HTTP/1.1 {http_status}"
        f" {http.HTTPStatus(http_status).phrase}\r\n{header_lines}Content-Type: {content_type};"
        " charset=utf-8\r\n"
    )
    body_bytes = body_text.encode()
    return (
        f"{response_head}Content-Length: {len(body_bytes)}\r\nConnection: close\r\n\r\n".encode()
        + body_bytes
    )
