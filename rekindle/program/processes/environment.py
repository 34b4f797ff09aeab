"""The environment variables of a program's processes, as torchrun sets them.

Source: torch 2.13, the modules torch.distributed.elastic.agent.server.local_elastic_agent and
torch.distributed.run.
"""

import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

MAX_RESTARTS = 2**31 - 1
DEFAULT_PORT = 29500  # of torchrun


@dataclass(frozen=True)
class Layout:
    """The ranks of a group's processes, as seen by one node. `process_counts`: number of processes
    of each node, by rank of the node; `restarts`: number of generations before this one;
    `torchrun`: False if the operator of another framework's job sets the environment variables."""

    node_rank: int
    process_counts: tuple[int, ...]
    master_address: str
    master_port: int
    restarts: int
    torchrun: bool = True

    @property
    def nodes(self) -> int:
        return len(self.process_counts)

    @property
    def processes(self) -> int:
        """Number of processes of this node."""
        return self.process_counts[self.node_rank]

    @property
    def first_rank(self) -> int:
        """Rank of the first process of this node."""
        return sum(self.process_counts[: self.node_rank])

    @property
    def world_size(self) -> int:
        return sum(self.process_counts)


def find_free_port(address: str) -> int:
    """Return a free port of an address; DEFAULT_PORT if the address is not one of this machine."""
    with socket.socket() as probe:
        with suppress(OSError):
            probe.bind((address, 0))
        return probe.getsockname()[1] or DEFAULT_PORT


def node_variables(layout: Layout, run: str) -> dict[str, str]:
    """Return the variables that all processes of a node share, including the options of torchrun
    (PET_*). `run`: id of the run."""
    if not layout.torchrun:
        return {"PYTHONUNBUFFERED": "1"}

    address = layout.master_address
    port = str(layout.master_port)

    variables = {
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "GROUP_RANK": str(layout.node_rank),
        "GROUP_WORLD_SIZE": str(layout.nodes),
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_RESTART_COUNT": str(layout.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(MAX_RESTARTS),
        # no agent of torchrun runs, so rank 0 of the program serves the store
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PET_NNODES": str(layout.nodes),
        "PET_NPROC_PER_NODE": str(layout.processes),
        "PET_NODE_RANK": str(layout.node_rank),
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": port,
        # replace the endpoint that the operator sets for an elasticPolicy, because the coordinator
        # uses that port
        "PET_RDZV_BACKEND": "static",
        "PET_RDZV_ENDPOINT": f"{address}:{port}",
        "PYTHONUNBUFFERED": "1",
        "PATH": _search_path(),
    }
    # gloo must use the loopback interface: host names do not resolve to the addresses of local pods
    if address.startswith("127."):
        variables["GLOO_SOCKET_IFNAME"] = "lo" if os.uname().sysname == "Linux" else "lo0"
    return variables


def _search_path() -> str:
    """Return PATH with the folder of this interpreter, so that `torchrun` is found even if the
    virtual environment is not activated."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    own_folder = os.path.dirname(sys.executable)
    if own_folder not in folders:
        folders.insert(0, own_folder)
    return os.pathsep.join(folders)


def rank_variables(layout: Layout, local_rank: int) -> dict[str, str]:
    """Return the variables of one process."""
    if not layout.torchrun:
        return {}

    rank = layout.first_rank + local_rank
    size = layout.world_size
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(layout.processes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(size),
    }


def default_threads(variables: Mapping[str, str], processes: int) -> dict[str, str]:
    """Return OMP_NUM_THREADS=1, as torchrun does, if a node has several processes and the variable
    is not set; else {}."""
    if processes > 1 and "OMP_NUM_THREADS" not in variables:
        return {"OMP_NUM_THREADS": "1"}
    return {}
