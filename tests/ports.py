"""Ports of 127.0.0.1."""

import socket


def free_port() -> int:
    """One on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]
