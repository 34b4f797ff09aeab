"""torch's process groups, gloo or nccl, built directly on a store, without global state: that takes milliseconds."""

import hmac
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from rekindle.errors import say
from rekindle.training.group.sockets import route_to
from rekindle.training.membership.handshake import proof, run_secret

dist: Any = torch.distributed  # whose stubs know neither stores nor groups

CONNECT = timedelta(seconds=10)  # to connect to the members that the coordinator says are alive
TIMEOUT = timedelta(minutes=10)  # of a collective; a lost peer is detected by its closed connection or its silence


@dataclass(frozen=True)
class GroupView:
    """One group as this process sees it: rank, size, and the process group (None for a single process)."""

    rank: int
    size: int
    pg: Any = None


def create(store: Any, rank: int, size: int, device: torch.device, address: str) -> Any:
    """A process group on `store`; `address` is ours as the other members reach it."""
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout, options._threads = CONNECT, 1
    pg = dist.ProcessGroupGloo(store, rank, size, options)
    pg._set_default_timeout(TIMEOUT)
    return pg


def recognize(pg: Any, rank: int, ids: list[str], generation: int) -> None:
    """Every other member proves over its connection that it knows the run's secret: gloo takes whoever is the first.

    Raises RuntimeError.
    """
    secret, ours, who = run_secret(), ids[rank], f"member {generation}"
    sent = [proof(secret, who, ours, theirs).encode() for theirs in ids]
    expected = b"".join(proof(secret, who, theirs, ours).encode() for theirs in ids)
    proofs = torch.frombuffer(bytearray(b"".join(sent)), dtype=torch.uint8)
    received = torch.empty_like(proofs)
    pg.alltoall_base(received, proofs, [], []).wait(CONNECT)
    if not hmac.compare_digest(received.numpy().tobytes(), expected):
        raise RuntimeError("a stranger has connected in the place of a member")


def from_torchrun(device: torch.device) -> GroupView:
    """The group that torchrun's environment variables describe."""
    several = int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1
    if several and os.environ.get("RANK") == "0" and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        say(
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE is not 1: torchrun 2.13 cannot replace a lost node without it, all "
            "agents would end with a DistStoreError. Set it in the environment of every agent."
        )
    store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    address = os.environ.get("PET_LOCAL_ADDR") or route_to(os.environ["MASTER_ADDR"])
    return GroupView(rank, size, create(dist.PrefixStore("rekindle", store), rank, size, device, address))
