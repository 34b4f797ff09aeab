"""Find this process's sockets in /proc: gloo hides its sockets, and only shutting them down wakes a
blocked call."""

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Any


def open_sockets() -> dict[int, str]:
    """Return fd → socket inode (the inode detects a reused fd)."""
    links = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor was just closed
            links[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {fd: link for fd, link in links.items() if link.startswith("socket:")}


def peer_sockets(
    hosts: set[str], candidates: dict[int, str], coordinator_port: int
) -> dict[int, str]:
    """Return the candidates that are connected to members; other sockets may be connected to the
    object store, for example.

    The remote address identifies members that we connected to. A member that connected to us may
    use any source address, so such a connection is identified by our listening address. Listening
    sockets are excluded: gloo does not survive their shutdown.
    """
    connections = dict[int, tuple[Any, Any]]()
    listening_addresses = set[Any]()

    for fd in candidates:
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening_addresses.add(connection.getsockname())
            else:
                connections[fd] = connection.getsockname(), connection.getpeername()

    return {
        fd: candidates[fd]
        for fd, (local, remote) in connections.items()
        if local in listening_addresses or (remote[0] in hosts and remote[1] != coordinator_port)
    }


def shut_down(fds: Iterable[int]) -> None:
    """Shut down both directions of these sockets, which wakes the threads that are blocked on
    them."""
    for fd in fds:
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def stop_listening(fds: Iterable[int], address: str) -> None:
    """Close the sockets that listen at `address`; their fd numbers stay in use until the owner
    closes them."""
    for fd in fds:
        with (
            suppress(OSError),
            socket.socket(fileno=os.dup(fd)) as listener,
            socket.socket() as replacement,
        ):
            if (
                listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                and listener.getsockname()[0] == address
            ):
                # closed before dup2, so that gloo's event loop accepts no further connection
                listener.close()
                os.dup2(replacement.fileno(), fd, inheritable=False)


def route_to(host: str) -> str:
    """Return our address on the route to `host`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]
