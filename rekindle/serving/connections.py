"""Connections of the server: a deadline for each request, no more of them than descriptors allow, and a gentle end.

A connection that waits for its client is in one of three groups, each oldest first: so neither the sweep nor the choice
of the connection that makes room for a new one looks at more than a few.
"""

import asyncio
import json
import os
import resource
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rekindle.errors import ConfigError

KEEP_ALIVE_S = 75.0  # longer than load balancers keep idle connections (60)
MAX_CONNECTIONS = 10_000  # each takes about 10 KB
RESERVED_DESCRIPTORS = 64  # for the store while loading, files, and connections that are refused or being closed
PROCESS_DESCRIPTORS = 4  # of each process with the model: its pipe and what watches it
CANDIDATES = 8  # connections that are looked at to find one that can make room
BODY = json.dumps({"error": "too many connections: try again soon."}).encode()
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
)


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, in the group of what it waits for."""

    if TYPE_CHECKING:
        connections: Any  # uvicorn's set of all open connections
    registry: "Connections"
    group: "dict[Connection, float] | None" = None  # None: the server works on a request
    arriving = ""  # part of a request that has begun to arrive: head or body

    @property
    def busy(self) -> bool:
        """True if a request waits for its answer."""
        return bool(self.cycle) and not self.cycle.response_complete

    @property
    def descriptor(self) -> int:
        """Its file descriptor."""
        return self.transport.get_extra_info("socket").fileno()

    def enter(self, group: "dict[Connection, float] | None") -> None:
        """Wait in `group` from now on; the time in it goes on if that is where it waits already."""
        if group is not self.group:
            if self.group is not None:
                del self.group[self]
            if group is not None:
                group[self] = self.loop.time()
            self.group = group

    def settle(self) -> None:
        """Enter the group of what has to happen next."""
        registry = self.registry
        if self.transport.is_closing() or self.flow.write_paused:
            self.enter(registry.unread)
        elif self.busy:
            self.enter(None)
        else:
            self.enter(registry.unfinished if self.arriving else registry.idle)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.enter(self.registry.unfinished)
        if (excess := len(self.connections) - self.registry.limit) > 0:
            self.registry.make_room(self, urgent=excess > RESERVED_DESCRIPTORS // 4)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.enter(None)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.registry.draining and self.busy:
            super().shutdown()  # the answer says `Connection: close`
        if self.transport.is_closing():
            self.settle()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.arriving = "head"
        self.settle()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.arriving = "body"
        self.settle()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.arriving = ""
        self.settle()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.settle()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.settle()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.settle()

    def shutdown(self) -> None:
        """The server accepts no more connections; idle ones may send a request until the registry closes them."""
        if self.busy:
            super().shutdown()
        elif self.registry.over:
            self.close()

    def has_bytes(self) -> bool:
        """True if bytes have arrived, or an end, that were not read yet."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def refuse(self) -> None:
        """Close, and say why to a client that waits for an answer, or will."""
        if self.arriving == "head" or self.cycle is None:
            self.transport.write(REFUSAL)
        else:
            self.send_end()
        self.transport.close()
        self.settle()

    def close(self) -> None:
        """Close, unless a request is there: it is answered first."""
        if not self.has_bytes():
            self.send_end()
            self.transport.close()
            self.settle()

    def send_end(self) -> None:
        """Tell the client now: `transport.close` does so an iteration of the loop later, which a request may use."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.descriptor)) as duplicate:
            duplicate.shutdown(socket.SHUT_WR)

    def expire(self) -> None:
        """End a connection whose time is over, and drop an answer that nobody reads."""
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            self.transport.abort()
        elif self.group is self.registry.idle:
            self.close()
        else:
            self.transport.close()
            self.settle()


class Connections:
    """All connections of a server that allows `request_seconds` for a request and at most `limit` connections."""

    def __init__(self, request_seconds: float, limit: int) -> None:
        self.request_seconds, self.limit = request_seconds, limit
        self.unfinished: dict[Connection, float] = {}  # without a whole head, or with the rest of an answered request
        self.idle: dict[Connection, float] = {}  # between two requests
        self.unread: dict[Connection, float] = {}  # whose client has not taken its answer yet
        self.drop_body: Callable[[str], bool] = lambda reason: False  # ends one of the requests that are arriving
        self.draining = False  # answers say `Connection: close`
        self.over = False  # idle connections are closed
        self.protocol = type("Protocol", (Connection,), {"registry": self})

    def make_room(self, newcomer: Connection, urgent: bool) -> None:
        """End the connection that loses the least; `urgent`: even if its request has arrived in this moment."""
        # the one that waits longest: a client that has just come is about to send its request
        waiting = [pair for group in (self.unfinished, self.idle) for pair in islice(group.items(), CANDIDATES)]
        for connection, _ in sorted(waiting, key=lambda pair: pair[1]):
            if connection is not newcomer and (urgent or not connection.has_bytes()):
                return connection.refuse()
        if not self.drop_body("too many connections") and urgent and self.unread:
            next(iter(self.unread)).transport.abort()

    async def sweep(self) -> None:
        """End connections whose time is over, for ever."""
        limits = (
            (self.unfinished, self.request_seconds),
            (self.idle, KEEP_ALIVE_S),
            (self.unread, self.request_seconds),
        )
        while True:
            await asyncio.sleep(min(1.0, self.request_seconds / 4))
            now = asyncio.get_running_loop().time()
            for group, seconds in limits:
                for connection in [connection for connection, since in group.items() if now - since > seconds]:
                    connection.expire()

    def drain(self, connections: Any) -> None:
        """From now on every answer says `Connection: close`, those to requests in flight included."""
        self.draining = True
        for connection in connections:
            connection.shutdown()

    def close_idle(self) -> None:
        """Close the connections on which no request is there."""
        self.draining = self.over = True
        for connection in [*self.unfinished, *self.idle]:
            connection.close()


def raise_descriptor_limit(processes: int) -> int:
    """Raise the limit of open files as far as allowed; return how many connections it leaves. Raises ConfigError."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    needed = len(os.listdir("/proc/self/fd")) + RESERVED_DESCRIPTORS + PROCESS_DESCRIPTORS * processes
    if 0 <= most <= needed:
        raise ConfigError(
            f"the limit of open files is {most}: a server with processes={processes} needs more than {needed}. "
            "Raise it (ulimit -n), or lower serve.processes."
        )
    return MAX_CONNECTIONS if most < 0 else min(MAX_CONNECTIONS, most - needed)
