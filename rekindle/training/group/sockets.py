"""Finds the sockets of gloo in /proc, since gloo does not expose its sockets, and only their
shutdown wakes a call that is blocked in gloo."""

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Any


def list_open_sockets() -> dict[int, str]:
    """Return the inode of each open socket by its file descriptor; the inode shows whether a
    descriptor was reused."""
    link_by_descriptor = {}
    for descriptor_name in os.listdir("/proc/self/fd"):
        # an error means that the descriptor was just closed
        with suppress(OSError):
            link_by_descriptor[int(descriptor_name)] = os.readlink(
                f"/proc/self/fd/{descriptor_name}"
            )
    return {
        descriptor: link_target
        for descriptor, link_target in link_by_descriptor.items()
        if link_target.startswith("socket:")
    }


def find_peer_sockets(
    member_hosts: set[str], candidate_sockets: dict[int, str], coordinator_port: int
) -> dict[int, str]:
    """Return the `candidate_sockets` that are connected to members of the group, and not, for
    example, to the object store.

    If this process opened the connection, the remote address identifies the member. A member that
    opened the connection may have any source address, so the local listening address identifies it.
    Listening sockets are excluded, because their shutdown would crash gloo.
    """
    addresses_by_descriptor = dict[int, tuple[Any, Any]]()
    listening_addresses = set[Any]()

    for descriptor in candidate_sockets:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as open_socket:
            if open_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening_addresses.add(open_socket.getsockname())
            else:
                addresses_by_descriptor[descriptor] = (
                    open_socket.getsockname(),
                    open_socket.getpeername(),
                )

    return {
        descriptor: candidate_sockets[descriptor]
        for descriptor, (local_address, remote_address) in addresses_by_descriptor.items()
        if local_address in listening_addresses
        or (remote_address[0] in member_hosts and remote_address[1] != coordinator_port)
    }


def shut_down_sockets(descriptors: Iterable[int]) -> None:
    """Shut down both directions of the given sockets, which wakes the threads that are blocked on
    these sockets."""
    for descriptor in descriptors:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as open_socket:
            open_socket.shutdown(socket.SHUT_RDWR)


def close_listeners(descriptors: Iterable[int], listening_address: str) -> None:
    """Stop the sockets that listen at `listening_address`. The file descriptors of the sockets
    stay in use until their owner closes them."""
    for descriptor in descriptors:
        with (
            suppress(OSError),
            socket.socket(fileno=os.dup(descriptor)) as listening_socket,
            socket.socket() as replacement_socket,
        ):
            if (
                listening_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                and listening_socket.getsockname()[0] == listening_address
            ):
                # shut down the listening socket before dup2, so that gloo's event loop accepts no
                # further connection
                listening_socket.close()
                os.dup2(replacement_socket.fileno(), descriptor, inheritable=False)


def find_local_address(host: str) -> str:
    """Return the address of this machine on the route to `host`, without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_socket:
        probe_socket.connect((host, 9))
        return probe_socket.getsockname()[0]
