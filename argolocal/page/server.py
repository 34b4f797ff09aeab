"""Serve the page: one uvicorn server on the loopback interface."""

import contextlib
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from argolocal.common import homes
from argolocal.common.files import write_once
from argolocal.errors import ConfigError
from argolocal.page.access import Access

FIRST_PORT = 7070
PORTS_TO_TRY = 100
TOKEN_FILE = "page-token"  # name of the token's file in the home  # nosec B105


def read_token(home: Path) -> str:
    """Return the access token of a home's page. On first use, the token is created."""
    homes.make(home)
    return write_once(home / TOKEN_FILE, secrets.token_urlsafe(32), 0o600)


def listen(port: int | None) -> socket.socket:
    """Return a socket that listens on a port of the loopback interface. The default is the first
    free port from FIRST_PORT on. Raises ConfigError if the port is taken."""
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


def serve(
    app: ASGIApp, token: str, listening_socket: socket.socket, announce: Callable[[str], None]
) -> None:
    """Serve the page until SIGINT or SIGTERM. `announce` is called with the URL of the page, which
    contains the token."""
    port = listening_socket.getsockname()[1]
    config = uvicorn.Config(
        Access(app, token, port),
        log_level="warning",
        access_log=False,
        server_header=False,
        # seconds; open event streams must not delay the shutdown
        timeout_graceful_shutdown=1,
    )
    announce(f"http://127.0.0.1:{port}/?token={token}")
    with listening_socket:
        uvicorn.Server(config).run(sockets=[listening_socket])
