"""The connections of a model server, with deadlines and limits for requests, a maximum number of
connections, and graceful shutdown.

A connection that waits for its client is in one of three groups, which are called `unfinished` (a
request is arriving), `idle` (between two requests) and `unread` (the client has not received an
answer yet). Each group of connections is ordered by age, so that the server quickly finds the
connections to close.
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

# seconds until an idle connection is closed, which is longer than in load balancers (60 s)
KEEP_ALIVE_S = 75.0
# maximum number of connections; each takes about 10 KB of memory
MAX_CONNECTIONS = 10_000
# descriptors for the object store while loading, for files, and for connections that are rejected
# or closing
RESERVED_DESCRIPTORS = 64
# descriptors per model process, for its pipe and the monitoring of the process
PROCESS_DESCRIPTORS = 4
# a new client may take this fraction of `request_seconds` until it sends its first bytes
FIRST_BYTES_SHARE = 0.1
# number of connections in each group that are considered for closing
MAX_CANDIDATES = 8
# received bytes are parsed in pieces of this size; MAX_HEAD_BYTES and MAX_PIPELINED are tested
# after each piece
PIECE_BYTES = 1 << 12
# maximum size of a request's head, of its trailers, and of the extension of a chunk
MAX_HEAD_BYTES = 1 << 14
# maximum number of pipelined requests that wait on one connection
MAX_PIPELINED = 100


class Connection(HttpToolsProtocol):
    """uvicorn's protocol for one connection. The group of a connection (see the module's docstring)
    shows what the connection expects from its client."""

    if TYPE_CHECKING:
        # the set of all open connections, in uvicorn
        connections: Any
        parser: Any  # httptools.HttpRequestParser
    registry: "ConnectionRegistry"
    # group of the connection; None while a request is being answered
    group: "dict[Connection, float] | None" = None
    # time of the first byte of the request that arrived last
    start_time = 0.0
    # arriving part of a request: "head", "body" or ""
    arriving_part = ""
    # number of bytes received since the start of a request's head, or since the last byte of its
    # body
    head_bytes = 0
    # False if the client asked to close the connection after its last request
    keep_alive = True
    # True if received bytes are discarded, and the connection is closed after its answers
    is_finished = False

    @property
    def is_busy(self) -> bool:
        """True if a request waits for its answer."""
        return bool(self.cycle) and not self.cycle.response_complete

    @property
    def descriptor(self) -> int:
        """File descriptor of the connection."""
        return self.transport.get_extra_info("socket").fileno()

    def enter(self, connection_group: "dict[Connection, float] | None") -> None:
        """Move the connection to `connection_group`, unless the connection is already in this
        group."""
        if connection_group is not self.group:
            if self.group is not None:
                del self.group[self]
            if connection_group is not None:
                connection_group[self] = self.loop.time()
            self.group = connection_group

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
        excess_count = len(self.connections) - self.registry.limit
        if excess_count > 0:
            self.registry.make_room(self, is_urgent=excess_count > RESERVED_DESCRIPTORS // 4)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.enter(None)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        start_offset = 0
        while start_offset < len(data) and not (self.is_finished or self.transport.is_closing()):
            data_piece = data[start_offset : start_offset + PIECE_BYTES]
            start_offset += len(data_piece)
            self.head_bytes += len(data_piece)

            try:
                self.parser.feed_data(data_piece)
            except httptools.HttpParserUpgrade as upgrade_error:
                data = (
                    self.make_head_without_upgrade()
                    + data[start_offset - len(data_piece) + upgrade_error.args[0] :]
                )
                start_offset = 0
            except httptools.HttpParserError as error:
                if isinstance(error, httptools.HttpParserCallbackError):
                    error_reason = "invalid URL"
                else:
                    error_reason = error

                return self.reject(400, f"the request is not valid HTTP/1.1: {error_reason}.")

            if self.arriving_part and self.head_bytes > MAX_HEAD_BYTES:
                return self.reject(
                    431,
                    f"the head of the request is larger than {MAX_HEAD_BYTES:,} bytes: shorten it.",
                )

            if len(self.pipeline) > MAX_PIPELINED:
                return self.finish()

        if self.registry.draining and self.is_busy:
            # the answer says `Connection: close`
            super().shutdown()

    def make_head_without_upgrade(self) -> bytes:
        """Return the head of the request without its `Upgrade` header, because this header would
        make the parser skip the body."""
        head_lines = [
            b"%b %b HTTP/%b"
            % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        ]
        head_lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*head_lines, b"", b""])

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the end of the client's data. If the data ends after a complete request, return
        True, which keeps the connection open for answers."""
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
        # trailers are not passed on, because a trailer is not a header
        if self.arriving_part == "head":
            super().on_header(name, value)

    @property
    def offers_upgrade(self) -> bool:
        """True if the client offers another protocol, such as HTTP/2. If True, the head of the
        request is parsed again without the `Upgrade` header."""
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
        poller = select.poll()
        poller.register(self.descriptor, select.POLLIN)
        return bool(poller.poll(0))

    def evict(self) -> None:
        """Close the connection, with a 503 if the client has not received an answer yet."""
        if self.arriving_part == "head" or self.cycle is None:
            self.reject(503, "too many connections: try again soon.")
        else:
            self.shut_down_sending()
            self.transport.close()
            self.update_group()

    def reject(self, http_status: int, reason: str) -> None:
        """Answer the arriving request and close the connection, after the answers to earlier
        requests."""
        if self.pipeline or (
            self.is_busy and (self.arriving_part != "body" or self.cycle.response_started)
        ):
            return self.finish()

        # a request that was answered before its body arrived does not get a second answer
        if self.is_busy or self.arriving_part != "body":
            retry_header = b"retry-after: 1\r\n" if http_status == 503 else b""
            answer_body = to_json({"error": reason}).encode()
            self.transport.write(
                b"%bcontent-type: application/json\r\n%bconnection: close\r\ncontent-length:"
                b" %d\r\n\r\n%b"
                % (STATUS_LINE[http_status], retry_header, len(answer_body), answer_body)
            )

        self.transport.close()
        self.update_group()

    def close(self) -> None:
        """Close the connection, unless at least the beginning of a request has arrived, because
        such a request must be answered first."""
        if not self.has_bytes() and self.arriving_part != "head":
            self.shut_down_sending()
            self.transport.close()
            self.update_group()

    def shut_down_sending(self) -> None:
        """Shut down the sending side at once, because a request could still arrive before
        `transport.close` does this."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.descriptor)) as duplicate_socket:
            duplicate_socket.shutdown(socket.SHUT_WR)

    def expire(self) -> None:
        """Close a connection whose deadline has passed. An answer that the client has not read is
        discarded."""
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            self.transport.abort()
        elif self.group is self.registry.idle:
            self.close()
        else:
            self.transport.close()
            self.update_group()


class ConnectionRegistry:
    """The connections of a server, at most `limit`.

    A client has `request_seconds` to send the head of a request, and the same time to read an
    answer. `ArrivingBodies` limits the time for the arrival of both head and body.
    """

    def __init__(self, request_seconds: float, max_connections: int) -> None:
        self.request_seconds = request_seconds
        self.limit = max_connections
        # connections on which the head of a request, or the body of an already answered request,
        # arrives
        self.unfinished: dict[Connection, float] = {}
        # connections between two requests
        self.idle: dict[Connection, float] = {}
        # connections whose client has not received the answer yet
        self.unread: dict[Connection, float] = {}
        # function that rejects one of the arriving requests
        self.drop_body: Callable[[str], bool] = lambda reason: False
        # True if answers have the header `Connection` with the value `close`
        self.draining = False
        # True if idle connections are closed
        self.closing_idle = False
        self.protocol = type("Protocol", (Connection,), {"registry": self})

    def make_room(self, new_connection: Connection, is_urgent: bool) -> None:
        """Close a connection to make room for `new_connection`. `is_urgent`: also close a
        connection whose socket has unread data, such as a request."""
        oldest_pairs = [
            connection_pair
            for connection_group in (self.unfinished, self.idle)
            for connection_pair in islice(connection_group.items(), MAX_CANDIDATES)
        ]

        oldest_pairs.sort(key=lambda connection_pair: connection_pair[1])
        # connections newer than this are closed last, because a new client is about to send its
        # request
        deadline_seconds = (
            asyncio.get_running_loop().time() - FIRST_BYTES_SHARE * self.request_seconds
        )

        late_connections = [
            connection
            for connection, waiting_since in oldest_pairs
            if waiting_since < deadline_seconds
        ]
        if self.evict_one(late_connections, new_connection, is_urgent) or self.drop_body(
            "too many connections"
        ):
            return

        recent_connections = [
            connection
            for connection, waiting_since in oldest_pairs
            if waiting_since >= deadline_seconds
        ]
        if (
            not self.evict_one(recent_connections, new_connection, is_urgent)
            and is_urgent
            and self.unread
        ):
            next(iter(self.unread)).transport.abort()

    def evict_one(
        self, candidate_connections: "list[Connection]", new_connection: Connection, is_urgent: bool
    ) -> bool:
        """Close the first of the given connections that may be closed. Return False if no
        connection may be closed."""
        for connection in candidate_connections:
            if connection is not new_connection and (is_urgent or not connection.has_bytes()):
                connection.evict()
                return True
        return False

    async def sweep(self) -> None:
        """Close connections whose deadline has passed, until the task is cancelled."""
        group_deadlines = (
            (self.unfinished, self.request_seconds),
            (self.idle, KEEP_ALIVE_S),
            (self.unread, self.request_seconds),
        )

        while True:
            await asyncio.sleep(min(1.0, self.request_seconds / 4))
            now_seconds = asyncio.get_running_loop().time()
            for connection_group, max_seconds in group_deadlines:
                for connection in [
                    connection
                    for connection, waiting_since in connection_group.items()
                    if now_seconds - waiting_since > max_seconds
                ]:
                    connection.expire()

    def drain(self, connections: Any) -> None:
        """Send `Connection: close` with all further answers, including the answers to requests in
        flight."""
        self.draining = True
        for connection in connections:
            connection.shutdown()

    def close_idle_connections(self) -> None:
        """Close the connections on which no request is arriving or being answered."""
        self.draining = True
        self.closing_idle = True
        for connection in [*self.unfinished, *self.idle]:
            connection.close()


def raise_descriptor_limit(process_count: int) -> int:
    """Raise this process's limit of open files to its maximum. Return the number of connections
    that the limit allows. Raises ConfigError."""
    _, descriptor_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor_limit, descriptor_limit))

    needed_descriptors = (
        len(os.listdir("/proc/self/fd"))
        + RESERVED_DESCRIPTORS
        + PROCESS_DESCRIPTORS * process_count
    )
    if 0 <= descriptor_limit <= needed_descriptors:
        raise ConfigError(
            f"the limit of open files is {descriptor_limit}: a server with"
            f" processes={process_count} needs more than {needed_descriptors}. Raise the limit"
            " (ulimit -n), or lower serve.processes."
        )

    if descriptor_limit < 0:
        return MAX_CONNECTIONS

    return min(MAX_CONNECTIONS, descriptor_limit - needed_descriptors)
