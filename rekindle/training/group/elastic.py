"""A group of workers whose members join and leave. The coordinator publishes each new group as a
generation."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch

from argolocal.common.environment import read_integer
from rekindle.errors import ConfigError, write_stderr
from rekindle.training.checkpoint import snapshot_file
from rekindle.training.group import sockets
from rekindle.training.group.interface import Membership
from rekindle.training.group.interruptible import InterruptibleCaller, release_in_background
from rekindle.training.group.process_group import (
    CONNECT_TIMEOUT,
    Collective,
    GroupView,
    authenticate_peers,
    create_process_group,
    dist,
    read_world_size,
    wait_for_collectives,
)
from rekindle.training.group.static import StaticGroup
from rekindle.training.ledger.events import Ledger
from rekindle.training.membership.client import CoordinatorClient, report_error
from rekindle.training.membership.completion import open_store, read_completed_model
from rekindle.training.membership.protocol import Address, Members, read_coordinator_address
from rekindle.training.spec import Fingerprint, TrainingSpec

# maximum number of seconds that a call of `finish` waits for the coordinator to report the run as
# complete
COMPLETE_TIMEOUT_S = 5.0

ResultT = TypeVar("ResultT")


class ExchangeStore(dist.Store):
    """The torch.distributed Store of one generation: members exchange their listening addresses
    over their connections to the coordinator.

    ExchangeStore replaces torch's TCPStore, which listens on every address and lets any client read
    and write. Each key is written once. Keep a reference to the ExchangeStore while its process
    group exists.
    """

    def __init__(self, client: CoordinatorClient, generation_number: int) -> None:
        super().__init__()
        self.client = client
        self.generation = generation_number

    def set(self, key: str, value: bytes) -> None:
        self.client.send_value(self.generation, key, bytes(value))

    def get(self, key: str) -> bytes:
        timeout_seconds = CONNECT_TIMEOUT.total_seconds()
        return self.client.wait_for_values(self.generation, [key], timeout_seconds)[0]

    def wait(self, keys: list[str], timeout: timedelta = CONNECT_TIMEOUT) -> None:
        self.client.wait_for_values(self.generation, keys, timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        return self.client.has_values(self.generation, keys)

    def clone(self) -> "ExchangeStore":
        # nccl's watchdog calls this method
        return self


class ElasticGroup:
    """A Membership whose groups the coordinator publishes. ElasticGroup holds the process group of
    the current generation."""

    can_shrink = True

    def __init__(
        self,
        training_spec: TrainingSpec,
        coordinator_endpoint: Address,
        fingerprint: Fingerprint,
        device: torch.device,
    ) -> None:
        self.device = device
        self.generation = 0
        self.is_complete = False
        self.client = CoordinatorClient(
            *coordinator_endpoint, fingerprint, lambda: bool(read_completed_model(training_spec))
        )
        self.client.on_abort = self._abort_collective

        # the lock protects the process group and the sockets of the current generation, because
        # `_abort_collective` uses them in the client's thread
        self._lock = threading.Lock()
        self._pg: Any = None
        self._sockets: dict[int, str] = {}
        self._store: ExchangeStore | None = None
        self._caller = InterruptibleCaller(self.aborted)

        self._waker: threading.Thread | None = None

    def form(self, step: int, leaving_event: threading.Event) -> GroupView | None:
        self._release_process_group()
        self._wake_client_when(leaving_event)

        while published_group := self.client.wait_for_group(
            self.generation, step, leaving_event.is_set
        ):
            self.generation, members = published_group
            rank = [member_id for member_id, _ in members].index(self.client.id)
            process_group = None
            group_sockets = {}

            if len(members) > 1:
                try:
                    process_group, group_sockets = self._build_process_group(rank, members)
                except (OSError, RuntimeError) as error:
                    self.report_failure(error)
                    continue

            with self._lock:
                self._pg = process_group
                self._sockets = group_sockets

            # the generation may have been aborted before the process group was stored in `_pg`, so
            # that `_abort_collective` did not find the process group
            if not self.aborted():
                return GroupView(rank, len(members), process_group)

            self._release_process_group()

        self.is_complete = self.client.is_complete
        return None

    def report_step(self, step: int) -> None:
        self.client.step = step

    def report_busy(self, is_busy: bool) -> None:
        self.client.is_busy = is_busy

    def regroup_pending(self) -> bool:
        return self.client.open_generation > self.generation or self.client.is_complete

    def aborted(self) -> bool:
        return self.client.abort_generation > self.generation or self.client.must_exit

    def run(self, function: Callable[[], ResultT]) -> ResultT:
        return self._caller.run(function)

    def wait(self, *collectives: Collective) -> None:
        # nccl does not need a separate thread, because its `wait` returns immediately, and its
        # `abort` ends a collective
        if self.device.type == "cuda":
            wait_for_collectives(collectives)
        else:
            self.run(lambda: wait_for_collectives(collectives))

    def report_failure(self, error: Exception) -> None:
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise error

        # print the error only without an abort, because after an abort the coordinator has already
        # logged the cause
        if not self.aborted():
            first_line = str(error).partition("\n")[0]
            write_stderr(f"generation {self.generation} broke: {first_line[:300]}")
        self.client.report_failure(self.generation)

    def leave(self) -> None:
        self.client.leave()

    def report_error(self, message: str, exit_code: int, *, is_temporary: bool = False) -> None:
        self.client.report_error(message, exit_code, is_temporary=is_temporary)

    def note(self, event: str, **event_fields: object) -> None:
        self.client.note(event, **event_fields)

    def finish(self, sha256: str, step: int) -> bool:
        if sha256:
            self.client.send({"done": sha256})
        self.is_complete = self.client.wait_until_complete(self.generation, COMPLETE_TIMEOUT_S)
        return self.is_complete

    def _wake_client_when(self, leaving_event: threading.Event) -> None:
        """Start a thread that wakes the threads waiting for the coordinator once `leaving_event` is
        set."""
        if self._waker:
            return

        def wake() -> None:
            leaving_event.wait()
            self.client.notify_waiters()

        self._waker = threading.Thread(target=wake, daemon=True)
        self._waker.start()

    def _build_process_group(self, rank: int, members: Members) -> tuple[Any, dict[int, str]]:
        """Build the process group of a generation; return the process group and its sockets. Raises
        RuntimeError after a failure or an abort."""
        generation_number = self.generation
        exchange_store = ExchangeStore(self.client, generation_number)
        self._store = exchange_store

        def build() -> tuple[Any, dict[int, str]]:
            earlier_sockets = sockets.list_open_sockets()
            process_group = create_process_group(
                exchange_store, rank, len(members), self.device, self.client.address
            )
            new_sockets = dict(sockets.list_open_sockets().items() - earlier_sockets.items())

            member_addresses = {address for _, address in members}
            coordinator_port = self.client.coordinator[1]
            group_sockets = sockets.find_peer_sockets(
                member_addresses, new_sockets, coordinator_port
            )

            # nccl authenticates its connections with a number that only members know
            if self.device.type == "cuda":
                return process_group, group_sockets

            # close the listening sockets, because all members are connected, and gloo would accept
            # connections of any other process
            sockets.close_listeners(new_sockets, self.client.address)
            try:
                authenticate_peers(
                    process_group, rank, [member_id for member_id, _ in members], generation_number
                )
            except RuntimeError:
                # shut down the sockets, because otherwise the destructor of the process group might
                # block
                sockets.shut_down_sockets(group_sockets)
                raise

            return process_group, group_sockets

        return self.run(build)

    def _abort_collective(self) -> None:
        """End the current collective operation. The client's thread calls this method when the
        generation is aborted."""
        with self._lock:
            if not self.aborted():
                return
            if self._pg is not None:
                self._unblock_collective(self._pg)
        self._caller.interrupt()

    def _release_process_group(self) -> None:
        """Release the process group of the current generation, if it has one."""
        with self._lock:
            group_references = [self._pg]
            self._pg = None
            if group_references[0] is None:
                return
            if self.aborted():
                self._unblock_collective(group_references[0])
        release_in_background(group_references)

    def _unblock_collective(self, process_group: Any) -> None:
        """End a blocked collective operation within milliseconds, even if a peer never answers."""
        with suppress(RuntimeError):
            # `abort` ends a collective of nccl; gloo ignores `abort`, but fails when its sockets
            # are shut down
            process_group.abort()
        open_group_sockets = self._sockets.items() & sockets.list_open_sockets().items()
        sockets.shut_down_sockets(descriptor for descriptor, _ in open_group_sockets)
        self._sockets = {}


def create_membership(
    training_spec: TrainingSpec, fingerprint: Fingerprint, device: torch.device
) -> Membership:
    """Create the Membership that the environment variables describe, with a coordinator, under
    torchrun or for a single process.

    Raises ConfigError if this machine does not match train.fingerprint. If the run has a
    coordinator, the coordinator makes this check instead.
    """
    coordinator_endpoint = _find_coordinator()
    if coordinator_endpoint:
        return ElasticGroup(training_spec, coordinator_endpoint, fingerprint, device)

    fingerprint_mismatches = training_spec.find_fingerprint_mismatches(fingerprint)
    if fingerprint_mismatches:
        raise ConfigError(
            "this machine does not match train.fingerprint: its"
            f" {', '.join(fingerprint_mismatches)}. Use another"
            " machine, or change train.fingerprint (this changes the result)."
        )

    is_first_rank = read_integer("RANK", 0, 0, read_world_size() - 1) == 0
    return StaticGroup(device, Ledger(open_store, training_spec.ledger) if is_first_rank else None)


def report_early_error(message: str, exit_code: int, *, is_temporary: bool) -> None:
    """Report the error of a process that ends before it has joined a group."""
    coordinator_endpoint = _find_coordinator()
    if coordinator_endpoint:
        report_error(
            coordinator_endpoint,
            snapshot_file.read_worker_name(),
            message,
            exit_code,
            is_temporary=is_temporary,
        )


def _find_coordinator() -> Address | None:
    """Return the coordinator's address; None under torchrun and for a single process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return read_coordinator_address()
    return None
