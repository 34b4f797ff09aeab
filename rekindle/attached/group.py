"""The processes of a program that train together, and the data that they exchange between two
steps."""

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
MESSAGE_BYTES = 64 << 20
# time limit of an exchange: another process may, for example, still load a large dataset
TIMEOUT = timedelta(hours=1)

T = TypeVar("T")


class Group:
    """The processes of torch.distributed; a single process if it is not initialized.

    All methods except `start_sum` must be called by all processes in the same order. This class
    creates separate process groups with the backend gloo, so its messages do not mix with those of
    the program.
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
            self._exchanges = _new_group()
            self.checkpoints = _new_group()

        # the pod is part of the host name, because pods on the same machine do not share their
        # memory
        self.host = os.environ.get(POD_NAME) or socket.gethostname()
        hosts = self.gather(self.host)
        # index of this process among the processes of its host
        self.local_index = hosts[: self.rank].count(self.host)

        self._sums: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def gather(self, value: T) -> list[T]:
        """Return a list with the value of each rank, ordered by rank."""
        if self.world == 1:
            return [value]
        values: list[T] = [value] * self.world
        dist.all_gather_object(values, value, group=self._exchanges)
        return values

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

        sums = [int(number) for number in self._sums.tolist()]
        self._sums = None
        self._work = None
        return sums

    def broadcast(self, data: torch.Tensor | None, owner: int) -> torch.Tensor:
        """Send the bytes `data` (uint8 [size]) of the rank `owner` to all ranks, and return
        them."""
        sizes = self.gather(data.numel() if data is not None else 0)
        if data is None:
            data = torch.empty(sizes[owner], dtype=torch.uint8)

        for piece in data.split(MESSAGE_BYTES):
            dist.broadcast(piece, src=owner, group=self._exchanges)
        return data

    def move(
        self, data: torch.Tensor | None, transfers: Mapping[int, int], size_limit: int = 1 << 50
    ) -> torch.Tensor | None:
        """Send bytes (uint8 [size]) between ranks; `transfers` maps each receiver to its sender.
        Return the received bytes, or `data` if this rank receives nothing."""
        sizes = self.gather(data.numel() if data is not None else 0)
        received = data
        for receiver, sender in sorted(transfers.items()):
            if self.rank == sender and data is not None:
                for piece in data.split(MESSAGE_BYTES):
                    dist.send(piece, dst=receiver, group=self._exchanges)
            elif self.rank == receiver:
                received = torch.empty(min(sizes[sender], size_limit), dtype=torch.uint8)
                for piece in received.split(MESSAGE_BYTES):
                    dist.recv(piece, src=sender, group=self._exchanges)
        return received


def _new_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _require_initialized(is_initialized: bool, environment: Mapping[str, str]) -> None:
    size = environment.get("WORLD_SIZE", "1")
    if not is_initialized and size != "1":
        raise ConfigError(
            f"rekindle.attach was called before torch.distributed is initialized, and WORLD_SIZE is"
            f" {size}: the processes must agree on the step. Call"
            " torch.distributed.init_process_group() first."
        )
