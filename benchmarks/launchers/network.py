"""The network of simulated nodes: each node has its own network namespace and one address per pod.

    network = Network.create()      # moves this process to the network of the coordinator
    network.connect(0, node_pid)    # in this process, after the node has called `leave_network`
    network.configure(0, 32)        # in the node

A bridge connects the nodes, and the coordinator listens on its address. Without root or the command
`ip`, all pods use loopback addresses of this machine's own network.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass

from argolocal.common.linux import LIBC

CLONE_NEWNS = 0x00020000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MAX_NODES = 250
MAX_PODS_PER_NODE = 250


def unshare(namespace_flags: int) -> None:
    """Move this process (CLONE_NEWPID: its next children) to new namespaces. Raises OSError."""
    if LIBC.unshare(namespace_flags) != 0:
        raise OSError("unshare(2) is not permitted: it needs root and CAP_SYS_ADMIN")


@dataclass(frozen=True)
class Network:
    """`prefix`: the first two bytes of all addresses."""

    has_namespaces: bool
    prefix: str

    @classmethod
    def create(cls) -> "Network":
        """Create the bridge in a new network, and move this process to it."""
        if os.geteuid() != 0 or shutil.which("ip") is None:
            return cls(False, "127.77")
        try:
            unshare(CLONE_NEWNET)
        except OSError:
            return cls(False, "127.77")

        network = cls(True, "10.77")
        _run_ip(
            "link set lo up",
            "link add nodes type bridge",
            f"addr add {network.coordinator_address}/16 dev nodes",
            "link set nodes up",
        )
        return network

    @property
    def coordinator_address(self) -> str:
        return f"{self.prefix}.0.1"

    def get_pod_address(self, node_number: int, pod_number: int) -> str:
        return f"{self.prefix}.{node_number + 1}.{pod_number + 1}"

    def leave_network(self) -> None:
        """Move this process to a network of its own."""
        if self.has_namespaces:
            unshare(CLONE_NEWNET)

    def connect(self, node_number: int, node_pid: int) -> None:
        """Connect the network of a node with the bridge."""
        if self.has_namespaces:
            bridge_end = f"node{node_number}"
            _run_ip(
                f"link add {bridge_end} type veth peer name eth0 netns {node_pid}",
                f"link set {bridge_end} master nodes up",
            )

    def configure(self, node_number: int, pod_count: int) -> None:
        """Add the addresses of the pods of this process's node."""
        if self.has_namespaces:
            pod_addresses = [
                self.get_pod_address(node_number, pod_number) for pod_number in range(pod_count)
            ]
            _run_ip(
                "link set lo up",
                *(f"addr add {pod_address}/16 dev eth0" for pod_address in pod_addresses),
                "link set eth0 up",
            )


def _run_ip(*commands: str) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(commands), text=True, check=True)
