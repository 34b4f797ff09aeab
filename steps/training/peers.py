"""How the processes of a run find each other: alone, under torchrun, or under our coordinator, in generations.

Each kind gives `Formation`s: who we are among how many, and the process group to talk through. A group of torch's is
built directly on a store prefix of its own, so that the next one costs milliseconds; nothing global is initialised.
"""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from steps.training.client import Client

dist: Any = torch.distributed  # whose stubs know neither stores nor groups

CONNECT = timedelta(seconds=10)  # to find the others of a group that the coordinator says are alive
TIMEOUT = timedelta(minutes=10)  # of a collective; a lost peer is found by its closed connection or its silence


@dataclass(frozen=True)
class Formation:
    """One group: our place in it, and how to talk (None: we are alone)."""

    rank: int
    size: int
    pg: Any = None


class Peers:
    """One process, or the processes that torchrun started: nobody comes or goes, and a broken group is the end."""

    elastic = False  # whether the others can go on without one of us
    complete = False  # whether the run is known to be over

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def form(self, step: int, give_up: Callable[[], bool]) -> Formation | None:
        """The next group; None if `give_up()` became true while waiting, or the run is complete."""
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            return Formation(0, 1)
        store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
        address = os.environ.get("PET_LOCAL_ADDR") or _route_to(os.environ["MASTER_ADDR"])
        store = dist.PrefixStore("rekindle", store)
        return Formation(rank, size, process_group(store, rank, size, self.device, address))

    def stale(self) -> bool:
        """Whether all should stop after this step, because others want to join."""
        return False

    def dead(self) -> bool:
        """Whether this group is known to be broken."""
        return False

    def fault(self, error: RuntimeError) -> None:
        """A collective failed. Raises the error where nobody can form another group."""
        raise error

    def leave(self) -> None:
        """We go before the end. (Here, as below: torchrun hears of it from our exit code.)"""

    def failed(self, message: str, code: int) -> None:
        """We end because of an error."""

    def note(self, event: str, **fields: Any) -> None:
        """Something happened that the ledger should know. Returns at once."""

    def finish(self, sha256: str) -> bool:
        """All steps are made (rank 0 gives the hash of the model it wrote): is the run over? May wait some seconds."""
        return True


class Elastic(Peers):
    """Members come and go in generations, which the coordinator publishes."""

    elastic = True

    def __init__(self, host: str, port: int, fingerprint: dict[str, Any], device: torch.device) -> None:
        super().__init__(device)
        self.generation = 0
        self._pg: Any = None
        self._sockets: dict[int, str] = {}  # those of the group
        self._lock = threading.Lock()
        # each worker offers a store; the group meets in that of its first member, so no store outlives its use
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.client = Client(host, port, self._store.port, fingerprint)
        self.client.on_hard = self._abort

    def form(self, step: int, give_up: Callable[[], bool]) -> Formation | None:
        self._drop()
        while found := self.client.agree(self.generation, step, give_up):
            self.generation, members = found
            rank = [id for id, _ in members].index(self.client.id)
            try:
                pg = self._build(rank, len(members), members[0][1]) if len(members) > 1 else None
            except (OSError, RuntimeError):
                self.client.send({"fault": self.generation})
                continue
            with self._lock:
                self._pg = pg
            if not self.dead():  # the news may have come while there was nothing to abort
                return Formation(rank, len(members), pg)
            self._drop()
        self.complete = self.client.complete
        return None

    def stale(self) -> bool:
        return self.client.opened > self.generation

    def dead(self) -> bool:
        return self.client.hard > self.generation

    def fault(self, error: RuntimeError) -> None:
        self.client.send({"fault": self.generation})

    def leave(self) -> None:
        self.client.send({"leave": "SIGTERM"})

    def failed(self, message: str, code: int) -> None:
        self.client.fail(message, code)

    def finish(self, sha256: str) -> bool:
        if sha256:
            self.client.send({"done": sha256})
        self.complete = self.client.wait_complete(self.generation, 5.0)
        return self.complete

    def _build(self, rank: int, size: int, meeting: str) -> Any:
        host, _, port = meeting.rpartition(":")
        store = self._store
        if rank:
            socket.create_connection((host, int(port)), timeout=2).close()  # refuses at once; the store would retry
            store = dist.TCPStore(host, int(port), is_master=False, timeout=CONNECT, wait_for_workers=False)
        before, store = sockets(), dist.PrefixStore(f"{self.generation}", store)
        pg = process_group(store, rank, size, self.device, self.client.address)
        self._sockets = dict(sockets().items() - before.items())
        return pg

    def _abort(self) -> None:
        with self._lock:
            if self._pg is not None and self.dead():
                self._wake(self._pg)

    def _drop(self) -> None:
        with self._lock:
            pg, self._pg = self._pg, None
            if pg is not None and self.dead():
                self._wake(pg)

    def _wake(self, pg: Any) -> None:
        """End a blocked collective within milliseconds, though the one that it waits for may be silent for ever."""
        pg.abort()  # for nccl it is enough; gloo does not heed it
        for number, _ in self._sockets.items() & sockets().items():
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.getpeername()  # fails for one that listens, whose shutdown gloo does not survive
                connection.shutdown(socket.SHUT_RDWR)
        self._sockets = {}


def sockets() -> dict[int, str]:
    """The sockets of this process: file descriptor → what tells it from a later one of that number."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return {number: link for number, link in found.items() if link.startswith("socket:")}


def process_group(store: Any, rank: int, size: int, device: torch.device, address: str) -> Any:
    """A group of torch's own, gloo or nccl, that no global state knows of."""
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


def _route_to(host: str) -> str:
    """Our address on the way to `host`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def find(fingerprint: dict[str, Any], device: torch.device) -> Peers:
    """The peers that the environment tells of."""
    if "TORCHELASTIC_RUN_ID" not in os.environ and (host := os.environ.get("MASTER_ADDR")):
        return Elastic(host, int(os.environ.get("MASTER_PORT", 23456)), fingerprint, device)
    return Peers(device)
