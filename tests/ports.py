"""Free ports of 127.0.0.1."""

import socket
from contextlib import suppress
from pathlib import Path
from random import SystemRandom

LOWEST_OUTGOING = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def is_listening(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def free_port() -> int:
    """Return a free port outside the range of outgoing connections, so that the port stays free."""
    for port in SystemRandom().sample(range(10_000, LOWEST_OUTGOING), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("100 ports of 127.0.0.1 are taken")
