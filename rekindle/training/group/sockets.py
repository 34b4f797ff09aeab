"""The sockets of this process, found through /proc: gloo does not expose its own, and only they wake a blocked call."""

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Any


def open_sockets() -> dict[int, str]:
    """fd → socket inode (detects fd reuse)."""
    links = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            links[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {fd: link for fd, link in links.items() if link.startswith("socket:")}


def peer_sockets(hosts: set[str], candidates: dict[int, str], coordinator_port: int) -> dict[int, str]:
    """The candidates connected to members; another thread may have opened others, for example to the object store.

    For a connection we made, the remote address identifies a member. A member that connected to us may use any source
    address, so there the local address we listen at decides. Listening sockets are excluded: gloo does not survive
    their shutdown.
    """
    connected, listening = dict[int, tuple[Any, Any]](), set[Any]()
    for fd in candidates:
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening.add(connection.getsockname())
            else:
                connected[fd] = connection.getsockname(), connection.getpeername()
    return {
        fd: candidates[fd]
        for fd, (local, remote) in connected.items()
        if local in listening or (remote[0] in hosts and remote[1] != coordinator_port)
    }


def shut_down(fds: Iterable[int]) -> None:
    """End both directions of these sockets, which wakes whoever is blocked on them."""
    for fd in fds:
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def stop_listening(fds: Iterable[int], address: str) -> None:
    """Close those of these sockets that listen at `address`; their numbers stay taken, for their owner closes them."""
    for fd in fds:
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as listener, socket.socket() as closed:
            if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and listener.getsockname()[0] == address:
                listener.close()  # first: gloo's loop must hear of no further connection
                os.dup2(closed.fileno(), fd, inheritable=False)


def route_to(host: str) -> str:
    """Our address on the route to `host`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]
