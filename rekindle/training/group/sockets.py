"""Finds the sockets of gloo in /proc, since gloo does not expose them: only their shutdown wakes a
call that is blocked in gloo."""

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Any


def list_open_sockets() -> dict[int, str]:
    """Return the inode of each open socket by its file descriptor; the inode shows whether a
    descriptor was reused."""
    links = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor was just closed
            links[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {fd: link for fd, link in links.items() if link.startswith("socket:")}


def find_peer_sockets(
    hosts: set[str], candidates: dict[int, str], coordinator_port: int
) -> dict[int, str]:
    """Return the `candidates` that are connected to members of the group, not to something else
    such as the object store.

    If this process opened the connection, the remote address identifies the member. A member that
    opened the connection may have any source address, so the local listening address identifies it.
    Listening sockets are excluded: their shutdown crashes gloo.
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


def shut_down_sockets(fds: Iterable[int]) -> None:
    """Shut down both directions of these sockets, which wakes the threads that are blocked on
    them."""
    for fd in fds:
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def close_listeners(fds: Iterable[int], address: str) -> None:
    """Stop the sockets that listen at `address`. The file descriptors of the sockets stay in use
    until their owner closes them."""
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
                # the listener is shut down before dup2, so that gloo's event loop accepts no
                # further connection
                listener.close()
                os.dup2(replacement.fileno(), fd, inheritable=False)


def find_local_address(host: str) -> str:
    """Return the address of this machine on the route to `host`, without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]
