"""The processes of a program that train together, and their exchanges between two steps."""

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from rekindle.errors import ConfigError
from rekindle.kubernetes_names import POD_NAME

# bytes of one message of a transfer
MESSAGE_BYTES = 64 << 20
# a process waits this long for the others, for example while they load a large dataset
TIMEOUT = timedelta(hours=1)

T = TypeVar("T")


class Group:
    """The processes of torch.distributed; a single process if it is not initialized.

    All methods except `start_sum` must be called by all processes in the same order. Exchanges use
    groups of their own with the backend gloo, apart from the exchanges of the program.
    """

    def __init__(self) -> None:
        """Raises ConfigError if torch.distributed should be initialized, and is not."""
        self.is_distributed = dist.is_available() and dist.is_initialized()
        _require_initialized(self.is_distributed, os.environ)

        self.rank = 0
        self.world = 1
        self._exchanges: dist.ProcessGroup | None = None
        # of torch.distributed.checkpoint, whose exchanges take place in a thread
        self.checkpoints: dist.ProcessGroup | None = None
        if self.is_distributed:
            self.rank = dist.get_rank()
            self.world = dist.get_world_size()
            self._exchanges = _new_group()
            self.checkpoints = _new_group()

        # a pod has memory of its own, even if several pods share a machine
        self.host = os.environ.get(POD_NAME) or socket.gethostname()
        hosts = self.gather(self.host)
        # index of this process among the processes of its host
        self.local_index = hosts[: self.rank].count(self.host)

        self._sums: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank."""
        if self.world == 1:
            return [value]
        values: list[T] = [value] * self.world
        dist.all_gather_object(values, value, group=self._exchanges)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather(None)

    def start_sum(self, numbers: list[int]) -> None:
        """Start to sum numbers over all ranks, without waiting for them."""
        self._sums = torch.tensor(numbers, dtype=torch.int64)
        if self.world > 1:
            self._work = dist.all_reduce(self._sums, group=self._exchanges, async_op=True)

    def finish_sum(self) -> list[int] | None:
        """Wait for the sums that `start_sum` has started; None if it has not been called."""
        if self._sums is None:
            return None
        if self._work is not None:
            self._work.wait()

        sums = [int(number) for number in self._sums.tolist()]
        self._sums = None
        self._work = None
        return sums

    def broadcast(self, data: torch.Tensor | None, owner: int) -> torch.Tensor:
        """Return the bytes, uint8 [size], that the rank `owner` has."""
        sizes = self.gather(data.numel() if data is not None else 0)
        if data is None:
            data = torch.empty(sizes[owner], dtype=torch.uint8)

        for piece in data.split(MESSAGE_BYTES):
            dist.broadcast(piece, src=owner, group=self._exchanges)
        return data

    def move(
        self, data: torch.Tensor | None, transfers: Mapping[int, int], size_limit: int = 1 << 50
    ) -> torch.Tensor | None:
        """Move bytes, uint8 [size], between ranks: `transfers` has the sender of each receiver.
        Return the bytes for this rank, `data` if it is not a receiver."""
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
