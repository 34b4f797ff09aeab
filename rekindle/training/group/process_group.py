"""Creates torch's process groups (gloo, nccl) on a store, within milliseconds and without global
state."""

import hmac
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed

from argolocal.common.environment import read_integer
from rekindle.errors import write_stderr
from rekindle.training.group.sockets import find_local_address
from rekindle.training.membership.handshake import compute_proof, read_run_secret
from rekindle.training.membership.protocol import read_coordinator_port

# the type stubs lack stores and groups
dist: Any = torch.distributed

# time limit for connections to live members
CONNECT_TIMEOUT = timedelta(seconds=10)
# time limit of a collective operation; a lost peer is noticed earlier, because its connection
# closes or its heartbeats stop
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
MAX_PROCESSES = 1_000_000


class Collective(Protocol):
    """A collective operation in progress, as torch returns it."""

    def wait(self, timeout: timedelta, /) -> object: ...


@dataclass(frozen=True)
class GroupView:
    """One group of workers as seen by this process: the rank of this process, the size of the
    group, and torch's process group (None for a single process)."""

    rank: int
    size: int
    pg: Any = None


def create_process_group(
    store: Any, rank: int, group_size: int, device: torch.device, own_address: str
) -> Any:
    """Create a process group on `store`; the other members reach this process at `own_address`."""
    if device.type == "cuda":
        backend_options = dist.ProcessGroupNCCL.Options()
        backend_options._timeout = COLLECTIVE_TIMEOUT
        return dist.ProcessGroupNCCL(store, rank, group_size, backend_options)
    backend_options = dist.ProcessGroupGloo._Options()
    backend_options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
    backend_options._timeout = CONNECT_TIMEOUT
    backend_options._threads = 1
    process_group = dist.ProcessGroupGloo(store, rank, group_size, backend_options)
    process_group._set_default_timeout(COLLECTIVE_TIMEOUT)
    return process_group


def authenticate_peers(
    process_group: Any, rank: int, member_ids: list[str], generation_number: int
) -> None:
    """Exchange proofs that each peer knows the run's secret, since gloo accepts any process.

    Raises RuntimeError if a proof is wrong.
    """
    run_secret = read_run_secret()
    own_id = member_ids[rank]
    sender_label = f"member {generation_number}"

    own_proofs = [
        compute_proof(run_secret, sender_label, own_id, peer_id).encode() for peer_id in member_ids
    ]
    expected_proofs = b"".join(
        compute_proof(run_secret, sender_label, peer_id, own_id).encode() for peer_id in member_ids
    )

    proof_bytes = torch.frombuffer(bytearray(b"".join(own_proofs)), dtype=torch.uint8)
    received_proofs = torch.empty_like(proof_bytes)
    process_group.alltoall_base(received_proofs, proof_bytes, [], []).wait(CONNECT_TIMEOUT)

    if not hmac.compare_digest(received_proofs.numpy().tobytes(), expected_proofs):
        raise RuntimeError(
            "peer authentication failed: an unknown process has connected in place of a member"
        )


def wait_for_collectives(collectives: Iterable[Collective]) -> None:
    """Wait for collective operations. Raises RuntimeError if an operation fails."""
    for collective in collectives:
        collective.wait(COLLECTIVE_TIMEOUT)


def read_world_size() -> int:
    """Return the number of processes under torchrun; 1 without torchrun. Raises ConfigError."""
    return read_integer("WORLD_SIZE", 1, 1, MAX_PROCESSES)


def join_torchrun_group(device: torch.device) -> GroupView:
    """Create the group that torchrun's environment variables describe."""
    # check the variable here, because torch's errors do not name it
    read_integer("RANK", 0, 0, read_world_size() - 1)
    read_coordinator_port()
    has_several_nodes = read_integer("GROUP_WORLD_SIZE", 1, 1, MAX_PROCESSES) > 1
    if (
        has_several_nodes
        and os.environ.get("RANK") == "0"
        and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"
    ):
        write_stderr(
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE is not 1: torchrun 2.13 cannot replace a lost node"
            " without it, and all agents exit with a DistStoreError. Set it to 1 in the environment"
            " of every agent."
        )

    rendezvous_store, rank, group_size = next(dist.rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
    own_address = os.environ.get("PET_LOCAL_ADDR") or find_local_address(os.environ["MASTER_ADDR"])
    return GroupView(
        rank,
        group_size,
        create_process_group(
            dist.PrefixStore("rekindle", rendezvous_store), rank, group_size, device, own_address
        ),
    )
