"""The processes of a program that train one model together, and the data that the processes
exchange between two steps."""

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from rekindle.errors import ConfigError
from rekindle.kubernetes_names import POD_NAME

# maximum size of a message in bytes
MAX_MESSAGE_BYTES = 64 << 20
# time limit of an exchange between processes; the limit is long, because a process may still load a
# large dataset
EXCHANGE_TIMEOUT = timedelta(hours=1)

T = TypeVar("T")


class Group:
    """The processes of torch.distributed; a single process if torch.distributed is not initialized.

    All processes must call the methods of Group, except `start_sum`, in the same order. The class
    Group creates separate process groups with the backend gloo, so its messages do not mix with the
    messages of the program.
    """

    def __init__(self) -> None:
        """Raises ConfigError if several processes train but torch.distributed is not
        initialized."""
        self.is_distributed = dist.is_available() and dist.is_initialized()
        _require_initialized(self.is_distributed, os.environ)

        self.rank = 0
        self.world = 1
        self._exchanges: dist.ProcessGroup | None = None
        # group for torch.distributed.checkpoint, which exchanges messages in a thread
        self.checkpoints: dist.ProcessGroup | None = None
        if self.is_distributed:
            self.rank = dist.get_rank()
            self.world = dist.get_world_size()
            self._exchanges = _create_gloo_group()
            self.checkpoints = _create_gloo_group()

        # the pod is part of the host name, because pods on the same machine do not share their
        # memory
        self.host = os.environ.get(POD_NAME) or socket.gethostname()
        rank_hosts = self.gather(self.host)
        # index of this process among the processes of its host
        self.local_index = rank_hosts[: self.rank].count(self.host)

        self._sums: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def gather(self, value: T) -> list[T]:
        """Return a list with the value of each rank, ordered by rank."""
        if self.world == 1:
            return [value]
        rank_values: list[T] = [value] * self.world
        dist.all_gather_object(rank_values, value, group=self._exchanges)
        return rank_values

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather(None)

    def start_sum(self, numbers: list[int]) -> None:
        """Start to sum numbers over all ranks, and return immediately."""
        self._sums = torch.tensor(numbers, dtype=torch.int64)
        if self.world > 1:
            self._work = dist.all_reduce(self._sums, group=self._exchanges, async_op=True)

    def finish_sum(self) -> list[int] | None:
        """Wait for the sums that `start_sum` has started, and return them; None if no sum was
        started."""
        if self._sums is None:
            return None
        if self._work is not None:
            self._work.wait()

        summed_numbers = [int(number) for number in self._sums.tolist()]
        self._sums = None
        self._work = None
        return summed_numbers

    def broadcast(self, payload_bytes: torch.Tensor | None, owner_rank: int) -> torch.Tensor:
        """Send the bytes `payload_bytes` (uint8 [size]) of the rank `owner_rank` to all ranks, and
        return them; the other ranks pass None."""
        byte_counts = self.gather(payload_bytes.numel() if payload_bytes is not None else 0)
        if payload_bytes is None:
            payload_bytes = torch.empty(byte_counts[owner_rank], dtype=torch.uint8)

        for message in payload_bytes.split(MAX_MESSAGE_BYTES):
            dist.broadcast(message, src=owner_rank, group=self._exchanges)
        return payload_bytes

    def move(
        self, payload_bytes: torch.Tensor | None, sender_by_receiver: Mapping[int, int]
    ) -> torch.Tensor | None:
        """Send bytes (uint8 [size]) between ranks; `sender_by_receiver` maps each receiver to
        its sender. Return the received bytes, or `payload_bytes` if this rank receives nothing."""
        byte_counts = self.gather(payload_bytes.numel() if payload_bytes is not None else 0)
        received_bytes = payload_bytes
        for receiver_rank, sender_rank in sorted(sender_by_receiver.items()):
            if self.rank == sender_rank and payload_bytes is not None:
                for message in payload_bytes.split(MAX_MESSAGE_BYTES):
                    dist.send(message, dst=receiver_rank, group=self._exchanges)
            elif self.rank == receiver_rank:
                received_bytes = torch.empty(byte_counts[sender_rank], dtype=torch.uint8)
                for message in received_bytes.split(MAX_MESSAGE_BYTES):
                    dist.recv(message, src=sender_rank, group=self._exchanges)
        return received_bytes


def _create_gloo_group() -> dist.ProcessGroup:
    process_group = dist.new_group(backend="gloo", timeout=EXCHANGE_TIMEOUT)
    assert isinstance(process_group, dist.ProcessGroup)
    return process_group


def _require_initialized(is_initialized: bool, environment: Mapping[str, str]) -> None:
    world_size = environment.get("WORLD_SIZE", "1")
    if not is_initialized and world_size != "1":
        raise ConfigError(
            f"rekindle.attach was called before torch.distributed is initialized, and WORLD_SIZE is"
            f" {world_size}: the processes must agree on the step. Call"
            " torch.distributed.init_process_group() first."
        )
