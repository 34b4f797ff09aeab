"""How the processes of a run find each other: alone, under torchrun, or under our coordinator, in generations.

Each kind gives `Formation`s: who we are among how many, and the process group to talk through. A group of torch's is
built directly on a store prefix of its own, so that the next one costs milliseconds; nothing global is initialised.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed

from rekindle.errors import say
from rekindle.ledger.events import Ledger
from rekindle.training.checkpoint import snapshot_file
from rekindle.training.group.interruptible import Caller, bury
from rekindle.training.membership.client import Address, Client, coordinator_address, report
from rekindle.training.membership.server import finished, store
from rekindle.training.spec import TrainingSpec as Inputs

T = TypeVar("T")
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

    def __init__(self, inputs: Inputs, device: torch.device) -> None:
        self.device = device
        self._step, self._noted = -1, 0.0
        self._ledger = Ledger(store, inputs.ledger) if int(os.environ.get("RANK", 0)) == 0 else None
        self._early: list[dict[str, Any]] | None = []  # until we train, the prefix may turn out to be another run's

    def form(self, step: int, leaving: threading.Event) -> Formation | None:
        """The next group; None if we were told to leave while waiting, or the run is complete."""
        formation = self._meet()
        names = [f"rank{rank}" for rank in range(formation.size)]
        for name in names:
            self.note("join", worker=name, name=name, step=step)
        self.note("generation", generation=1, members=names, step=step)
        return formation

    def _meet(self) -> Formation:
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            return Formation(0, 1)
        check_torchrun()
        store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
        address = os.environ.get("PET_LOCAL_ADDR") or _route_to(os.environ["MASTER_ADDR"])
        store = dist.PrefixStore("rekindle", store)
        return Formation(rank, size, process_group(store, rank, size, self.device, address))

    def progress(self, step: int) -> None:
        """So many steps are made."""
        early, self._early = self._early, None
        for fields in early or []:
            self.note(**fields)
        if step > self._step and time.monotonic() - self._noted >= 1:
            self._step, self._noted = step, time.monotonic()
            self.note("step", step=step)

    def busy(self, busy: bool) -> None:
        """No steps are to be expected from us for a while, or again."""

    def stale(self) -> bool:
        """Whether all should stop after this step, because others want to join or the run is complete."""
        return False

    def dead(self) -> bool:
        """Whether this group is known to be broken, or we are told to end with an error."""
        return False

    def run(self, call: Callable[[], T]) -> T:
        """What `call` gives or raises; RuntimeError once the group is known to be broken, whatever becomes of it."""
        return call()

    def wait(self, *works: Any) -> None:
        """Until these collectives are done. Raises RuntimeError if one cannot be."""
        for work in works:
            work.wait(TIMEOUT)

    def fault(self, error: Exception) -> None:
        """A collective failed. Raises the error if another group would not help, or cannot be formed."""
        raise error

    def leave(self) -> None:
        """We go before the end. (torchrun hears of it from our exit code.)"""
        self.note("drain", worker="rank0", name="rank0")
        self.close()

    def failed(self, message: str, code: int, *, temporary: bool = False) -> None:
        """We end because of an error; `temporary`: of a service that is away."""
        self.note("failed", name="rank0", message=message, code=code)
        self.close()

    def note(self, event: str, **fields: Any) -> None:
        """Something happened that the ledger should know. Returns at once."""
        if self._early is not None:
            self._early.append({"event": event, "t": time.time()} | fields)
        elif self._ledger:
            self._ledger.note(event, **fields)

    def finish(self, sha256: str, step: int) -> bool:
        """All steps are made (rank 0 gives the hash of the model it wrote): is the run over? May wait some seconds."""
        self.note("complete", sha256=sha256, step=step)
        self.close()
        return True

    def close(self) -> None:
        """Nothing will be noted any more."""
        if self._ledger:
            self._ledger.close()


class Elastic(Peers):
    """Members come and go in generations, which the coordinator publishes."""

    elastic = True

    def __init__(self, inputs: Inputs, where: Address, fingerprint: dict[str, Any], device: torch.device) -> None:
        self.device = device
        self.generation = 0
        self._pg: Any = None
        self._caller = Caller(self.dead)
        self._sockets: dict[int, str] = {}  # those of the group
        self._lock = threading.Lock()
        self._waker: threading.Thread | None = None
        # each worker offers a store; the group meets in that of its first member, so no store outlives its use
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.client = Client(*where, self._store.port, fingerprint, lambda: bool(finished(inputs)))
        self.client.on_hard = self._abort

    def form(self, step: int, leaving: threading.Event) -> Formation | None:
        self._drop()
        if not self._waker:
            self._waker = threading.Thread(target=lambda: (leaving.wait(), self.client.wake()), daemon=True)
            self._waker.start()
        while found := self.client.agree(self.generation, step, leaving.is_set):
            self.generation, members = found
            rank = [id for id, _ in members].index(self.client.id)
            pg, sockets = None, {}
            if len(members) > 1:
                try:
                    pg, sockets = self._build(rank, [address for _, address in members])
                except (OSError, RuntimeError) as error:
                    self.fault(error)
                    continue
            with self._lock:
                self._pg, self._sockets = pg, sockets
            if not self.dead():  # the news may have come while there was nothing to abort
                return Formation(rank, len(members), pg)
            self._drop()
        self.complete = self.client.complete
        return None

    def progress(self, step: int) -> None:
        self.client.step = step

    def busy(self, busy: bool) -> None:
        self.client.busy = busy

    def stale(self) -> bool:
        return self.client.opened > self.generation or self.client.complete

    def dead(self) -> bool:
        return self.client.hard > self.generation or self.client.doomed

    def run(self, call: Callable[[], T]) -> T:
        return self._caller.run(call)

    def wait(self, *works: Any) -> None:
        if self.device.type == "cuda":  # nccl only notes what the stream waits for, and heeds `abort`
            return super().wait(*works)
        wait = super().wait
        self.run(lambda: wait(*works))

    def fault(self, error: Exception) -> None:
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise error
        if not self.dead():  # else it is what the news of a lost member, which all have, did to us
            say(f"generation {self.generation} broke: {str(error).partition(chr(10))[0][:300]}")
        self.client.fault(self.generation)

    def leave(self) -> None:
        self.client.leave()

    def failed(self, message: str, code: int, *, temporary: bool = False) -> None:
        self.client.fail(message, code, temporary=temporary)

    def note(self, event: str, **fields: Any) -> None:
        self.client.note(event, **fields)

    def finish(self, sha256: str, step: int) -> bool:
        if sha256:
            self.client.send({"done": sha256})
        self.complete = self.client.wait_complete(self.generation, 5.0)
        return self.complete

    def close(self) -> None:
        """The coordinator keeps the ledger."""

    def _build(self, rank: int, addresses: list[str]) -> tuple[Any, dict[int, str]]:
        """The group and its sockets. Raises RuntimeError if it cannot be built, or is known to be broken meanwhile."""

        def build() -> tuple[Any, dict[int, str]]:
            before = sockets()
            host, _, port = addresses[0].rpartition(":")
            store = dist.TCPStore(host, int(port), is_master=False, timeout=CONNECT, wait_for_workers=False)
            store = dist.PrefixStore(f"{self.generation}", store)
            pg = process_group(store, rank, len(addresses), self.device, self.client.address)
            hosts = {address.rpartition(":")[0] for address in addresses}
            return pg, between(hosts, dict(sockets().items() - before.items()), self.client.where[1])

        return self.run(build)

    def _abort(self) -> None:
        with self._lock:
            if not self.dead():
                return
            if self._pg is not None:
                self._wake(self._pg)
        self._caller.interrupt()

    def _drop(self) -> None:
        with self._lock:
            held, self._pg = [self._pg], None
            if held[0] is None:
                return
            if self.dead():
                self._wake(held[0])
        bury(held)

    def _wake(self, pg: Any) -> None:
        """End a blocked collective within milliseconds, though the one that it waits for may be silent for ever."""
        with suppress(RuntimeError):
            pg.abort()  # for nccl it is enough; gloo does not heed it
        for number, _ in self._sockets.items() & sockets().items():
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        self._sockets = {}


def sockets() -> dict[int, str]:
    """The sockets of this process: file descriptor → what tells it from a later one of that number."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return {number: link for number, link in found.items() if link.startswith("socket:")}


def between(hosts: set[str], found: dict[int, str], coordinator_address: int) -> dict[int, str]:
    """Those of the sockets that lead to members; a thread may have opened others meanwhile, as to the object store.

    A member is known by its address if we connected, which need not be where it connects from: if it did, by our end,
    the address that we listen at. Who listens is left out: gloo does not survive a shutdown of it.
    """
    ends, ours = dict[int, tuple[Any, Any]](), set[Any]()
    for number in found:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ours.add(connection.getsockname())
            else:
                ends[number] = connection.getsockname(), connection.getpeername()
    return {
        number: found[number]
        for number, (here, there) in ends.items()
        if here in ours or (there[0] in hosts and there[1] != coordinator_address)
    }


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


def find(inputs: Inputs, fingerprint: dict[str, Any], device: torch.device) -> Peers:
    """The peers that the environment tells of."""
    if where := _meeting():
        return Elastic(inputs, where, fingerprint, device)
    return Peers(inputs, device)


def failed(message: str, code: int, *, temporary: bool) -> None:
    """`Peers.failed` of a process that ends before it has any."""
    if where := _meeting():
        report(where, snapshot_file.worker_name(), message, code, temporary=temporary)


def _meeting() -> Address | None:
    """Where our coordinator is, if we are under one."""
    return coordinator_address() if "TORCHELASTIC_RUN_ID" not in os.environ else None


def check_torchrun() -> None:
    """Say which setting torchrun needs where several nodes may be replaced, if it is missing."""
    several = int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1
    if several and os.environ.get("RANK") == "0" and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        say(
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE is not 1: torchrun 2.13 cannot replace a lost node without it, all "
            "agents would end with a DistStoreError. Set it in the environment of every agent."
        )
