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
# the default port of torchrun
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class ProcessLayout:
    """The ranks of a group's processes, as seen by one node. `process_counts`: number of processes
    of each node, by rank of the node; `restarts`: number of generations before this one; `torchrun`
    is False if the operator of another framework's job sets the environment variables."""

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
    """Return a free port of an address; DEFAULT_PORT if the address does not belong to this
    machine."""
    with socket.socket() as probe_socket:
        with suppress(OSError):
            probe_socket.bind((address, 0))
        return probe_socket.getsockname()[1] or DEFAULT_PORT


def make_node_variables(process_layout: ProcessLayout, run_id: str) -> dict[str, str]:
    """Return the environment variables that all processes of a node share, including the options of
    torchrun (PET_*). `run_id`: id of the run, for torchrun."""
    if not process_layout.torchrun:
        return {"PYTHONUNBUFFERED": "1"}

    master_address = process_layout.master_address
    master_port = str(process_layout.master_port)

    variables_by_name = {
        "MASTER_ADDR": master_address,
        "MASTER_PORT": master_port,
        "GROUP_RANK": str(process_layout.node_rank),
        "GROUP_WORLD_SIZE": str(process_layout.nodes),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(process_layout.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(MAX_RESTARTS),
        # no agent of torchrun runs, so rank 0 of the program serves the TCPStore of
        # torch.distributed
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PET_NNODES": str(process_layout.nodes),
        "PET_NPROC_PER_NODE": str(process_layout.processes),
        "PET_NODE_RANK": str(process_layout.node_rank),
        "PET_MASTER_ADDR": master_address,
        "PET_MASTER_PORT": master_port,
        # replace the endpoint that the operator sets for an elasticPolicy, because the coordinator
        # uses that port
        "PET_RDZV_BACKEND": "static",
        "PET_RDZV_ENDPOINT": f"{master_address}:{master_port}",
        "PYTHONUNBUFFERED": "1",
        "PATH": _make_search_path(),
    }
    # gloo must use the loopback interface: host names do not resolve to the addresses of local pods
    if master_address.startswith("127."):
        variables_by_name["GLOO_SOCKET_IFNAME"] = "lo" if os.uname().sysname == "Linux" else "lo0"
    return variables_by_name


def _make_search_path() -> str:
    """Return PATH with the folder of this interpreter, so that `torchrun` is found even if the
    virtual environment is not activated."""
    path_folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    interpreter_folder = os.path.dirname(sys.executable)
    if interpreter_folder not in path_folders:
        path_folders.insert(0, interpreter_folder)
    return os.pathsep.join(path_folders)


def make_rank_variables(process_layout: ProcessLayout, local_rank: int) -> dict[str, str]:
    """Return the environment variables of one process of the program."""
    if not process_layout.torchrun:
        return {}

    rank = process_layout.first_rank + local_rank
    world_size = process_layout.world_size
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(process_layout.processes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
    }


def make_thread_defaults(
    environment_variables: Mapping[str, str], process_count: int
) -> dict[str, str]:
    """Return OMP_NUM_THREADS=1, as torchrun does, if a node has several processes and the variable
    is not set; else {}."""
    if process_count > 1 and "OMP_NUM_THREADS" not in environment_variables:
        return {"OMP_NUM_THREADS": "1"}
    return {}
