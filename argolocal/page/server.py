"""Serve the page: one uvicorn server on the loopback interface."""

import asyncio
import contextlib
import resource
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from argolocal.common import homes
from argolocal.common.files import write_if_missing
from argolocal.errors import ConfigError
from argolocal.page.access import Access

FIRST_PORT = 7070
PORTS_TO_TRY = 100
# a connection without a request is closed after this time
REQUEST_TIMEOUT_S = 10.0
MAX_WAITING_CONNECTIONS = 256
MAX_DESCRIPTORS = 8192
TOKEN_FILE = "page-token"  # name of the file in the home  # nosec B105


def read_token(home: Path) -> str:
    """Return the access token of the page of a home, the directory of runs. The access token is
    created when it is read for the first time."""
    homes.create_home(home)
    return write_if_missing(home / TOKEN_FILE, secrets.token_urlsafe(32), 0o600)


def listen(port: int | None) -> socket.socket:
    """Return a socket that listens on a port of the loopback interface. The default port is the
    first free port from FIRST_PORT on. Raises ConfigError if the port is taken."""
    if port is not None:
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"port {port} cannot be used ({error.strerror}): choose another one with --port, or"
                " omit it to use a free port."
            ) from error

    for candidate in range(FIRST_PORT, FIRST_PORT + PORTS_TO_TRY):
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", candidate))
    return socket.create_server(("127.0.0.1", 0))


class Connection(AutoHTTPProtocol):
    """uvicorn's protocol for one connection. Every user of this machine can connect to the page.
    Because every user can connect, a connection without a request is closed soon, or earlier if
    there are too many of these connections, so that they never block other connections."""

    if TYPE_CHECKING:
        loop: asyncio.AbstractEventLoop
        transport: asyncio.Transport
        # uvicorn's object for the last request and its response; None before the first request
        cycle: Any

    # connections that have not sent a request yet, oldest first
    waiting: ClassVar[dict["Connection", None]] = {}
    last_cycle: Any = None
    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.waiting[self] = None
        if len(self.waiting) > MAX_WAITING_CONNECTIONS:
            next(iter(self.waiting)).abort()
        self._schedule()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.waiting.pop(self, None)
        if self.deadline:
            self.deadline.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle:
            self.waiting.pop(self, None)

    def abort(self) -> None:
        self.waiting.pop(self, None)
        self.transport.abort()

    def _schedule(self) -> None:
        self.deadline = self.loop.call_later(REQUEST_TIMEOUT_S, self._check_progress)

    def _check_progress(self) -> None:
        """Close the connection if the connection has only waited for a request since the last
        check."""
        is_waiting = self.cycle is None or self.cycle.response_complete
        if is_waiting and self.cycle is self.last_cycle:
            self.abort()
            return
        self.last_cycle = self.cycle
        self._schedule()


def raise_descriptor_limit() -> None:
    """Raise the limit of open files of this process, because each viewer of a page needs an open
    file."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_DESCRIPTORS if hard_limit < 0 else min(hard_limit, MAX_DESCRIPTORS)
    if 0 <= soft_limit < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard_limit))


def serve(
    app: ASGIApp, token: str, listening_socket: socket.socket, announce: Callable[[str], None]
) -> None:
    """Serve the page until SIGINT or SIGTERM. `announce`: function to call with the URL of the
    page, which contains the token."""
    port = listening_socket.getsockname()[1]
    raise_descriptor_limit()
    config = uvicorn.Config(
        Access(app, token, port),
        http=Connection,
        log_level="warning",
        access_log=False,
        server_header=False,
        # seconds; open event streams must not delay the shutdown
        timeout_graceful_shutdown=1,
    )
    announce(f"http://127.0.0.1:{port}/?token={token}")
    with listening_socket:
        uvicorn.Server(config).run(sockets=[listening_socket])
