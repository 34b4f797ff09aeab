"""The connections of the server: deadlines and limits for requests, a maximum number of
connections, and graceful shutdown.

A connection that waits for its client is in one of three groups: `unfinished` (a request is
arriving), `idle` (between two requests) or `unread` (the client has not received an answer yet).
Each group is ordered by age, so that the server quickly finds the connections to close.
"""

import asyncio
import os
import resource
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from argolocal.common.json_text import to_json
from rekindle.errors import ConfigError

KEEP_ALIVE_S = 75.0  # time until an idle connection is closed: longer than in load balancers (60 s)
MAX_CONNECTIONS = 10_000  # maximum number of connections; each takes about 10 KB of memory
# descriptors for the object store while loading, for files, and for connections that are rejected
# or closing
RESERVED_DESCRIPTORS = 64
# descriptors per model process, for its pipe and the monitoring of the process
PROCESS_DESCRIPTORS = 4
# a new client may take this fraction of `request_seconds` until it sends its first bytes
FIRST_BYTES_SHARE = 0.1
MAX_CANDIDATES = 8  # number of connections per group to consider for closing
# received bytes are parsed in pieces, and the two limits below are tested after each piece
PIECE_BYTES = 1 << 12
# maximum size of a request's head, of its trailers, and of the extension of a chunk
MAX_HEAD_BYTES = 1 << 14
# maximum number of pipelined requests that wait on one connection
MAX_PIPELINED = 100


class Connection(HttpToolsProtocol):
    """uvicorn's protocol for one connection. The group of a connection (see the module's docstring)
    shows what the connection expects from its client."""

    if TYPE_CHECKING:
        connections: Any  # uvicorn's set of all open connections
        parser: Any  # httptools.HttpRequestParser
    registry: "Connections"
    group: "dict[Connection, float] | None" = None  # None while a request is being answered
    start_time = 0.0  # time of the first byte of the request that arrived last
    arriving_part = ""  # arriving part of a request: "head", "body" or ""
    # number of bytes received since the start of a request's head, or since the last byte of its
    # body
    head_bytes = 0
    # False: the client asked to close the connection after its last request
    keep_alive = True
    # True: received bytes are discarded, and the connection is closed after its answers
    is_finished = False

    @property
    def is_busy(self) -> bool:
        """True if a request waits for its answer."""
        return bool(self.cycle) and not self.cycle.response_complete

    @property
    def descriptor(self) -> int:
        """File descriptor of the connection."""
        return self.transport.get_extra_info("socket").fileno()

    def enter(self, group: "dict[Connection, float] | None") -> None:
        """Move the connection to `group`, unless it is in that group already."""
        if group is not self.group:
            if self.group is not None:
                del self.group[self]
            if group is not None:
                group[self] = self.loop.time()
            self.group = group

    def update_group(self) -> None:
        """Move the connection to the group that matches its current state."""
        registry = self.registry
        if self.transport.is_closing() or self.flow.write_paused:
            self.enter(registry.unread)
        elif self.is_busy:
            self.enter(None)
        else:
            self.enter(registry.unfinished if self.arriving_part else registry.idle)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.enter(self.registry.unfinished)
        excess = len(self.connections) - self.registry.limit
        if excess > 0:
            self.registry.make_room(self, urgent=excess > RESERVED_DESCRIPTORS // 4)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.enter(None)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        start = 0
        while start < len(data) and not (self.is_finished or self.transport.is_closing()):
            piece = data[start : start + PIECE_BYTES]
            start += len(piece)
            self.head_bytes += len(piece)

            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                data = self.head_without_upgrade() + data[start - len(piece) + upgrade.args[0] :]
                start = 0
            except httptools.HttpParserError as error:
                if isinstance(error, httptools.HttpParserCallbackError):
                    reason = "invalid URL"
                else:
                    reason = error

                return self.reject(400, f"the request is not valid HTTP/1.1: {reason}.")

            if self.arriving_part and self.head_bytes > MAX_HEAD_BYTES:
                return self.reject(
                    431,
                    f"the head of the request is larger than {MAX_HEAD_BYTES:,} bytes: shorten it.",
                )

            if len(self.pipeline) > MAX_PIPELINED:
                return self.finish()

        if self.registry.draining and self.is_busy:
            super().shutdown()  # the answer says `Connection: close`

    def head_without_upgrade(self) -> bytes:
        """Return the head of the request without its `Upgrade` header, because this header would
        make the parser skip the body."""
        lines = [
            b"%b %b HTTP/%b"
            % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        ]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the end of the client's data. Return True, which keeps the connection open for
        answers, if the data ends after a complete request."""
        is_answered = self.is_busy and self.arriving_part != "body"
        if is_answered:
            self.finish()
        return is_answered

    def finish(self) -> None:
        """Close the connection after the answers to all requests that have arrived."""
        self.is_finished = True
        super().shutdown()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # keep the time if the same head is parsed a second time without its Upgrade header
        if self.arriving_part != "head":
            self.start_time = self.loop.time()
        self.arriving_part = "head"
        self.head_bytes = 0
        self.update_group()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.arriving_part == "head":  # a trailer is not a header
            super().on_header(name, value)

    @property
    def offers_upgrade(self) -> bool:
        """True if the client offers another protocol, such as HTTP/2. The head is then parsed again
        without the `Upgrade` header."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def on_headers_complete(self) -> None:
        if self.offers_upgrade:
            return
        # while an earlier request is being answered, the body of this request is not read yet
        if not self.is_busy:
            self.scope["state"]["start_time"] = self.start_time
        super().on_headers_complete()
        self.arriving_part = "body"
        self.keep_alive = self.cycle.keep_alive
        # a client that gets the final answer instead of 100 Continue does not send its body
        if self.expect_100_continue:
            self.cycle.keep_alive = False
        self.update_group()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self.head_bytes = 0

    def on_message_complete(self) -> None:
        if self.offers_upgrade:
            return
        super().on_message_complete()
        self.arriving_part = ""
        self.cycle.keep_alive = self.keep_alive
        self.update_group()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.update_group()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.update_group()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.update_group()

    def shutdown(self) -> None:
        """Close the connection after the current request. An idle connection is closed only if
        `registry.closing_idle` is True."""
        if self.is_busy:
            super().shutdown()
        elif self.registry.closing_idle:
            self.close()

    def has_bytes(self) -> bool:
        """Return True if the socket has data, or the end of the stream, that was not read yet."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def evict(self) -> None:
        """Close the connection, with a 503 if the client has not received an answer yet."""
        if self.arriving_part == "head" or self.cycle is None:
            self.reject(503, "too many connections: try again soon.")
        else:
            self.send_end()
            self.transport.close()
            self.update_group()

    def reject(self, status: int, reason: str) -> None:
        """Answer the arriving request and close the connection, after the answers to earlier
        requests."""
        if self.pipeline or (
            self.is_busy and (self.arriving_part != "body" or self.cycle.response_started)
        ):
            return self.finish()

        # a request that was answered before its body arrived does not get a second answer
        if self.is_busy or self.arriving_part != "body":
            retry = b"retry-after: 1\r\n" if status == 503 else b""
            body = to_json({"error": reason}).encode()
            self.transport.write(
                b"%bcontent-type: application/json\r\n%bconnection: close\r\ncontent-length:"
                b" %d\r\n\r\n%b" % (STATUS_LINE[status], retry, len(body), body)
            )

        self.transport.close()
        self.update_group()

    def close(self) -> None:
        """Close the connection, unless at least the beginning of a request has arrived: this
        request must be answered first."""
        if not self.has_bytes() and self.arriving_part != "head":
            self.send_end()
            self.transport.close()
            self.update_group()

    def send_end(self) -> None:
        """Shut down the sending side at once, because a request could still arrive before
        `transport.close` does this."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.descriptor)) as duplicate:
            duplicate.shutdown(socket.SHUT_WR)

    def expire(self) -> None:
        """Close a connection whose deadline is over. An answer that the client has not read is
        discarded."""
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            self.transport.abort()
        elif self.group is self.registry.idle:
            self.close()
        else:
            self.transport.close()
            self.update_group()


class Connections:
    """The connections of a server, at most `limit`.

    A client has `request_seconds` to send the head of a request, and the same time to read an
    answer. `Bodies` limits the time for the arrival of both head and body.
    """

    def __init__(self, request_seconds: float, limit: int) -> None:
        self.request_seconds = request_seconds
        self.limit = limit
        # connections on which the head of a request, or the body of an already answered request,
        # arrives
        self.unfinished: dict[Connection, float] = {}
        self.idle: dict[Connection, float] = {}  # connections between two requests
        # connections whose client has not received the answer yet
        self.unread: dict[Connection, float] = {}
        # function that rejects one of the arriving requests
        self.drop_body: Callable[[str], bool] = lambda reason: False
        self.draining = False  # True: answers have `Connection: close`
        self.closing_idle = False  # True: idle connections are closed
        self.protocol = type("Protocol", (Connection,), {"registry": self})

    def make_room(self, newcomer: Connection, urgent: bool) -> None:
        """Close a connection to make room for `newcomer`. `urgent`: also close a connection whose
        socket has unread data, such as a request."""
        oldest = [
            pair
            for group in (self.unfinished, self.idle)
            for pair in islice(group.items(), MAX_CANDIDATES)
        ]

        oldest.sort(key=lambda pair: pair[1])
        # connections newer than this are closed last: a new client is about to send its request
        deadline = asyncio.get_running_loop().time() - FIRST_BYTES_SHARE * self.request_seconds

        late_connections = [connection for connection, since in oldest if since < deadline]
        if self.evict_one(late_connections, newcomer, urgent) or self.drop_body(
            "too many connections"
        ):
            return

        recent_connections = [connection for connection, since in oldest if since >= deadline]
        if not self.evict_one(recent_connections, newcomer, urgent) and urgent and self.unread:
            next(iter(self.unread)).transport.abort()

    def evict_one(self, candidates: "list[Connection]", newcomer: Connection, urgent: bool) -> bool:
        """Close the first of the given connections that may be closed. Return False if none may be
        closed."""
        for connection in candidates:
            if connection is not newcomer and (urgent or not connection.has_bytes()):
                connection.evict()
                return True
        return False

    async def sweep(self) -> None:
        """Close connections whose deadline is over, until cancelled."""
        group_deadlines = (
            (self.unfinished, self.request_seconds),
            (self.idle, KEEP_ALIVE_S),
            (self.unread, self.request_seconds),
        )

        while True:
            await asyncio.sleep(min(1.0, self.request_seconds / 4))
            now = asyncio.get_running_loop().time()
            for group, seconds in group_deadlines:
                for connection in [
                    connection for connection, since in group.items() if now - since > seconds
                ]:
                    connection.expire()

    def drain(self, connections: Any) -> None:
        """Send `Connection: close` with all further answers, including the answers to requests in
        flight."""
        self.draining = True
        for connection in connections:
            connection.shutdown()

    def close_idle(self) -> None:
        """Close the connections without a request."""
        self.draining = self.closing_idle = True
        for connection in [*self.unfinished, *self.idle]:
            connection.close()


def raise_descriptor_limit(processes: int) -> int:
    """Raise the limit of open files to its maximum. Return the number of connections that it
    allows. Raises ConfigError."""
    _, descriptor_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor_limit, descriptor_limit))

    needed_descriptors = (
        len(os.listdir("/proc/self/fd")) + RESERVED_DESCRIPTORS + PROCESS_DESCRIPTORS * processes
    )
    if 0 <= descriptor_limit <= needed_descriptors:
        raise ConfigError(
            f"the limit of open files is {descriptor_limit}: a server with processes={processes}"
            f" needs more than {needed_descriptors}. Raise the limit (ulimit -n), or lower"
            " serve.processes."
        )

    if descriptor_limit < 0:
        return MAX_CONNECTIONS

    return min(MAX_CONNECTIONS, descriptor_limit - needed_descriptors)
