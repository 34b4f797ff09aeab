"""A group whose members join and leave in generations, published by the coordinator."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch

from argolocal.common.environment import read_integer
from rekindle.errors import ConfigError, say
from rekindle.training.checkpoint import snapshot_file
from rekindle.training.group import sockets
from rekindle.training.group.interface import Membership
from rekindle.training.group.interruptible import InterruptibleCaller, release_in_background
from rekindle.training.group.process_group import (
    CONNECT_TIMEOUT,
    GroupView,
    authenticate,
    create,
    dist,
    wait_for_works,
    world_size,
)
from rekindle.training.group.static import StaticGroup
from rekindle.training.ledger.events import Ledger
from rekindle.training.membership.client import Client, report_error
from rekindle.training.membership.completion import completed_model, open_store
from rekindle.training.membership.protocol import Address, Members, coordinator_address
from rekindle.training.spec import TrainingSpec

# time to wait for the coordinator's word that the run is complete, per call of `finish`
COMPLETE_TIMEOUT_S = 5.0

T = TypeVar("T")


class ExchangeStore(dist.Store):
    """The store of one generation for gloo and nccl; each key is written once. Keep a reference
    while the group exists.

    Members exchange their listening addresses over their connections to the coordinator: torch's
    own TCPStore listens on every address, and any client may read, write and fill it.
    """

    def __init__(self, client: Client, generation: int) -> None:
        super().__init__()
        self.client = client
        self.generation = generation

    def set(self, key: str, value: bytes) -> None:
        self.client.put(self.generation, key, bytes(value))

    def get(self, key: str) -> bytes:
        return self.client.values(self.generation, [key], CONNECT_TIMEOUT.total_seconds())[0]

    def wait(self, keys: list[str], timeout: timedelta = CONNECT_TIMEOUT) -> None:
        self.client.values(self.generation, keys, timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        return self.client.has(self.generation, keys)

    def clone(self) -> "ExchangeStore":
        return self  # nccl's watchdog calls this method


class ElasticGroup:
    """A Membership whose groups the coordinator publishes: the process group of the current
    generation."""

    can_shrink = True

    def __init__(
        self,
        spec: TrainingSpec,
        coordinator: Address,
        fingerprint: dict[str, Any],
        device: torch.device,
    ) -> None:
        self.device = device
        self.generation = 0
        self.is_complete = False
        self.client = Client(*coordinator, fingerprint, lambda: bool(completed_model(spec)))
        self.client.on_abort = self._abort

        # the process group of the generation, which `_abort` ends from the client's thread
        self._lock = threading.Lock()
        self._pg: Any = None
        self._sockets: dict[int, str] = {}
        self._store: ExchangeStore | None = None
        self._caller = InterruptibleCaller(self.aborted)

        self._waker: threading.Thread | None = None

    def form(self, step: int, leaving: threading.Event) -> GroupView | None:
        self._drop()
        self._wake_client_when(leaving)

        while published_group := self.client.wait_for_group(self.generation, step, leaving.is_set):
            self.generation, members = published_group
            rank = [id for id, _ in members].index(self.client.id)
            pg = None
            group_sockets = {}

            if len(members) > 1:
                try:
                    pg, group_sockets = self._build(rank, members)
                except (OSError, RuntimeError) as error:
                    self.report_failure(error)
                    continue

            with self._lock:
                self._pg = pg
                self._sockets = group_sockets

            # an abort may have come before there was a group that it could end
            if not self.aborted():
                return GroupView(rank, len(members), pg)

            self._drop()

        self.is_complete = self.client.is_complete
        return None

    def report_step(self, step: int) -> None:
        self.client.step = step

    def report_busy(self, busy: bool) -> None:
        self.client.is_busy = busy

    def regroup_pending(self) -> bool:
        return self.client.open_generation > self.generation or self.client.is_complete

    def aborted(self) -> bool:
        return self.client.abort_generation > self.generation or self.client.must_exit

    def run(self, call: Callable[[], T]) -> T:
        return self._caller.run(call)

    def wait(self, *works: Any) -> None:
        # nccl's `wait` returns immediately, and `abort` ends the collective
        if self.device.type == "cuda":
            wait_for_works(works)
        else:
            self.run(lambda: wait_for_works(works))

    def report_failure(self, error: Exception) -> None:
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise error

        # after an abort, the cause is already known and logged by the coordinator
        if not self.aborted():
            first_line = str(error).partition("\n")[0]
            say(f"generation {self.generation} broke: {first_line[:300]}")
        self.client.report_failure(self.generation)

    def leave(self) -> None:
        self.client.leave()

    def report_error(self, message: str, code: int, *, temporary: bool = False) -> None:
        self.client.report_error(message, code, temporary=temporary)

    def note(self, event: str, **fields: Any) -> None:
        self.client.note(event, **fields)

    def finish(self, sha256: str, step: int) -> bool:
        if sha256:
            self.client.send({"done": sha256})
        self.is_complete = self.client.wait_complete(self.generation, COMPLETE_TIMEOUT_S)
        return self.is_complete

    def _wake_client_when(self, leaving: threading.Event) -> None:
        """End waits for the coordinator once `leaving` is set."""
        if self._waker:
            return

        def wake() -> None:
            leaving.wait()
            self.client.wake()

        self._waker = threading.Thread(target=wake, daemon=True)
        self._waker.start()

    def _build(self, rank: int, members: Members) -> tuple[Any, dict[int, str]]:
        """Build and return the process group, and its sockets. Raises RuntimeError after a failure
        or an abort."""
        generation = self.generation
        store = ExchangeStore(self.client, generation)
        self._store = store

        def build() -> tuple[Any, dict[int, str]]:
            earlier_sockets = sockets.open_sockets()
            pg = create(store, rank, len(members), self.device, self.client.address)
            new_sockets = dict(sockets.open_sockets().items() - earlier_sockets.items())

            addresses = {address for _, address in members}
            coordinator_port = self.client.coordinator[1]
            group_sockets = sockets.peer_sockets(addresses, new_sockets, coordinator_port)

            # nccl's connections start with a number that only members know
            if self.device.type == "cuda":
                return pg, group_sockets

            # all members are connected by now, and gloo would accept any process
            sockets.stop_listening(new_sockets, self.client.address)
            try:
                authenticate(pg, rank, [id for id, _ in members], generation)
            except RuntimeError:
                # without this call, the group's destructor might block
                sockets.shut_down(group_sockets)
                raise

            return pg, group_sockets

        return self.run(build)

    def _abort(self) -> None:
        """End the current collective. The client's thread calls this after a loss of a member."""
        with self._lock:
            if not self.aborted():
                return
            if self._pg is not None:
                self._unblock(self._pg)
        self._caller.interrupt()

    def _drop(self) -> None:
        """Give up the process group, if there is one."""
        with self._lock:
            references = [self._pg]
            self._pg = None
            if references[0] is None:
                return
            if self.aborted():
                self._unblock(references[0])
        release_in_background(references)

    def _unblock(self, pg: Any) -> None:
        """End a blocked collective within milliseconds, even if its peer never answers."""
        with suppress(RuntimeError):
            pg.abort()  # for nccl this call suffices; gloo ignores `abort`
        still_open = self._sockets.items() & sockets.open_sockets().items()
        sockets.shut_down(fd for fd, _ in still_open)
        self._sockets = {}


def discover(spec: TrainingSpec, fingerprint: dict[str, Any], device: torch.device) -> Membership:
    """Create the membership that the environment describes: by a coordinator, by torchrun, or of a
    single process.

    Raises ConfigError if this machine does not match train.fingerprint; a coordinator makes this
    check itself.
    """
    coordinator = _coordinator()
    if coordinator:
        return ElasticGroup(spec, coordinator, fingerprint, device)

    misfits = spec.misfits(fingerprint)
    if misfits:
        raise ConfigError(
            f"this machine does not match train.fingerprint: its {', '.join(misfits)}. Use another"
            " machine, or change train.fingerprint (this changes the result)."
        )

    is_first = read_integer("RANK", 0, 0, world_size() - 1) == 0
    return StaticGroup(device, Ledger(open_store, spec.ledger) if is_first else None)


def report_early_error(message: str, code: int, *, temporary: bool) -> None:
    """Report the error of a process that ends before it has joined a group."""
    coordinator = _coordinator()
    if coordinator:
        report_error(coordinator, snapshot_file.worker_name(), message, code, temporary=temporary)


def _coordinator() -> Address | None:
    """Return the coordinator's address; None under torchrun and for a single process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return coordinator_address()
    return None
