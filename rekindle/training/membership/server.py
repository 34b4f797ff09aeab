"""The coordinator of a training run: decides which workers train together, and when the run is
complete. The coordinator does not import torch.

    python -m rekindle.training.membership.server <the same flags as `rekindle step steps.train`>

The coordinator listens on port MASTER_PORT (default 23456) of POD_IP (default: every address) for
clients that prove that they know REKINDLE_SECRET (handshake.py). Exit codes: 0 if
`<out>/model.json` is in the object store; 78, 65 or 1, with the workers' error message, if the run
cannot continue; 143 after SIGTERM, after which the next coordinator continues the run. If a second
coordinator of a run starts, the new coordinator takes over the run and the old coordinator exits.

protocol.py defines the messages between coordinator and workers, and state_machine.py makes the
decisions. When a worker dies, its connection closes. The coordinator drops a worker that is silent
for `silence_seconds`, unless the group completes steps; such a worker may join again. The
coordinator also drops a live worker that for `hung_seconds` neither completes a step nor
acknowledges a generation; such a worker must exit. While the coordinator is unavailable, the
workers continue in their group.
"""

import signal
import socket

# block SIGTERM until a handler is installed, because the kernel discards signals without a handler
# for PID 1
if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

import asyncio
import contextlib
import math
import os
import resource
import sys
import time
import traceback
import uuid
from collections import deque
from collections.abc import Coroutine
from typing import Any, NoReturn, cast

from argolocal.common import exit_codes
from argolocal.common.environment import MAX_PORT, read_integer, read_seconds
from rekindle.errors import RekindleError, StorageError, write_stderr
from rekindle.kubernetes_names import POD_IP, REKINDLE_DEADLINE, REKINDLE_METRICS
from rekindle.step import fail
from rekindle.training.ledger.events import Ledger
from rekindle.training.membership import handshake
from rekindle.training.membership.account.checkpoint_signal import CheckpointSignal
from rekindle.training.membership.account.on_demand import (
    ON_DEMAND_EVENT,
    RETRY_INTERVAL_S,
    OnDemandWorkers,
)
from rekindle.training.membership.completion import open_store, read_completed_model
from rekindle.training.membership.job_time import (
    TRAINED_EVENT,
    TRAINED_INTERVAL_S,
    read_creation_time,
    read_trained_seconds,
)
from rekindle.training.membership.lease import CoordinatorLease
from rekindle.training.membership.messages import parse_message
from rekindle.training.membership.metrics_endpoint import MetricsExporter
from rekindle.training.membership.model_reuse import ReusableModel
from rekindle.training.membership.protocol import (
    MAX_LINE_BYTES,
    Message,
    encode_message,
    read_coordinator_port,
)
from rekindle.training.membership.run_spec import RunSpec
from rekindle.training.membership.state_machine import MembershipStateMachine
from rekindle.training.spec import TrainingSpec

TICK_INTERVAL_S = 0.1
# if a tick is delayed by more than this, the coordinator process was paused
MAX_TICK_DELAY_S = 0.05
# minimum and maximum time of the wait for the workers of an earlier coordinator
RECONNECT_S = 0.3
MAX_RECONNECT_S = 2.0
# maximum wait of the event loop for a thread that uses the object store
SWITCH_INTERVAL_S = 0.0002
# maximum number of connections without authentication, in addition to one per worker; a further
# connection closes the oldest
MAX_UNVERIFIED_CONNECTIONS = 128
# maximum number of bytes to queue for a peer that does not read
MAX_UNREAD_BYTES = 64 << 20
MAX_WRITE_BYTES = 64 << 10  # maximum number of bytes of several lines that are written at once
# time limit for recording the model for reuse at the end of a run
RECORD_TIMEOUT_S = 10.0
# time between two log lines about rejected connections
LOG_INTERVAL_S = 60.0


class Coordinator:
    """Connects the state machine with sockets, the clock and the object store."""

    def __init__(self, run_spec: RunSpec, run_secret: bytes) -> None:
        self.spec = run_spec
        self.secret = run_secret
        self.id = uuid.uuid4().hex[:12]
        self.membership = MembershipStateMachine(run_spec)
        self.ledger = Ledger(open_store, run_spec.ledger)
        self.exporter = MetricsExporter(self.membership)
        self.reusable = ReusableModel(run_spec)
        self.has_checked_reuse = False
        self.signal = CheckpointSignal.from_environment()
        # time of the newest checkpoint that is or will be written to annotations of pods
        self.signalled_time = 0.0
        self.is_signalling = False
        self.on_demand = OnDemandWorkers.from_environment(run_spec.min_workers)
        self.is_scaling = False
        self.trained_seconds = 0.0
        # trained seconds of the newest event in the ledger
        self.recorded_seconds = 0.0
        self.has_restored_time = False
        self.max_seconds = read_seconds(
            REKINDLE_DEADLINE, math.inf, "Correct it, or unset it for no limit."
        )
        self.connections: dict[str, Connection] = {}
        # connection without authentication → deadline for its proof; the oldest connection first
        self.unverified_connections: dict[Connection, float] = {}
        self.rejected_count = 0
        self.last_rejection_log = float("-inf")
        self.is_sending_scheduled = False
        self.exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.tasks: set[asyncio.Task[None]] = set()

    async def run(self, host: str | None, port: int) -> int:
        """Serve the workers until the run ends; return the exit code. Raises RekindleError if
        another process uses the port."""
        event_loop = asyncio.get_running_loop()

        try:
            # with the default backlog of 100, workers might wait for seconds while many connect
            server = await event_loop.create_server(
                lambda: Connection(self), host, port, backlog=socket.SOMAXCONN
            )
        except OSError as error:
            raise RekindleError(
                f"this coordinator cannot listen on {host or 'any address'}, port {port}"
                f" ({error.strerror}): another coordinator may be running on this machine. Stop it,"
                " or set MASTER_PORT to another port for this run."
            ) from error

        event_loop.add_signal_handler(signal.SIGTERM, self.set_exit_code, exit_codes.TERMINATED)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        metrics_server = await self._start_metrics_server(host)
        self._start_task(self._open_store_after_reconnect())
        if self.on_demand:
            self._start_task(self._read_on_demand_workers(self.on_demand))
        timer_task = asyncio.create_task(self._run_timer())
        await asyncio.wait({self.exit_code, timer_task}, return_when=asyncio.FIRST_COMPLETED)

        if timer_task.done():
            # raise the error that ended `_run_timer`: without the timer, silent workers would not
            # be dropped
            timer_task.result()

        exit_code = await self.exit_code
        timer_task.cancel()
        server.close()

        if metrics_server:
            metrics_server.close()

        for connection in self.connections.values():
            connection.close()

        # after any other exit code, no coordinator continues this job
        if exit_code == exit_codes.TERMINATED:
            self._record_trained_seconds()
        await asyncio.to_thread(self.ledger.close)
        return exit_code

    async def _open_store_after_reconnect(self) -> None:
        """Start the tasks that use the object store, after the workers of an earlier coordinator
        have connected: the import of the S3 library would make them wait."""
        deadline_s = time.monotonic() + MAX_RECONNECT_S
        await asyncio.sleep(RECONNECT_S)
        while self.membership.unregistered_ids and time.monotonic() < deadline_s:
            await asyncio.sleep(TICK_INTERVAL_S)

        self._start_task(self._check_completion())
        self._start_task(self._renew_lease())

    async def _start_metrics_server(self, host: str | None) -> asyncio.Server | None:
        metrics_port = read_integer(REKINDLE_METRICS, 0, 0, MAX_PORT)
        # do not serve metrics on a loopback address, where every local user could read them
        if metrics_port and not (host or "").startswith("127."):
            try:
                return await self.exporter.serve(host, metrics_port)
            except OSError as error:
                print_log_line(
                    f"metrics are unavailable: cannot listen on port {metrics_port}"
                    f" ({error.strerror})"
                )
        return None

    async def _run_timer(self) -> None:
        while True:
            due_time_s = time.monotonic() + TICK_INTERVAL_S
            await asyncio.sleep(TICK_INTERVAL_S)

            now_s = time.monotonic()
            if now_s - due_time_s > MAX_TICK_DELAY_S:
                self.membership.shift_times(now_s - due_time_s)
                if self.on_demand:
                    self.on_demand.plan.shift_times(now_s - due_time_s)

            self.membership.tick(now_s)
            if self.membership.is_published and self.membership.members:
                self.trained_seconds += TICK_INTERVAL_S

            if self.trained_seconds - self.recorded_seconds >= TRAINED_INTERVAL_S:
                self._record_trained_seconds()

            if self.trained_seconds > self.max_seconds:
                self.membership.end_run(
                    1,
                    f"this training takes longer than the {self.max_seconds / 60:g} minutes of"
                    " cluster.pods.train.deadline_minutes (time spent in a queue or waiting for"
                    " workers is not counted). Raise it, and continue from the newest checkpoint"
                    " with `rekindle resume`.",
                )

            self.send_outbox()
            if self.on_demand:
                self._replace_spot_workers(self.on_demand, now_s)

            for connection in [
                connection
                for connection, deadline_s in self.unverified_connections.items()
                if now_s > deadline_s
            ]:
                self.reject(connection)

    def _replace_spot_workers(self, on_demand_workers: OnDemandWorkers, now_s: float) -> None:
        """Change the number of on-demand workers if it was wrong for long enough."""
        if self.is_scaling or on_demand_workers.api.is_refused:
            return
        pod_count = on_demand_workers.plan.decide(now_s, self.membership.count_spot_workers())
        if pod_count is not None:
            self.is_scaling = True
            self._start_task(self._scale_on_demand_workers(on_demand_workers, pod_count))

    async def _read_on_demand_workers(self, on_demand_workers: OnDemandWorkers) -> None:
        """Read the number of on-demand workers. The Deployment may be created after the job."""
        while not on_demand_workers.api.is_refused:
            await asyncio.to_thread(on_demand_workers.read)
            if on_demand_workers.plan.pods is not None:
                return
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def _scale_on_demand_workers(
        self, on_demand_workers: OnDemandWorkers, pod_count: int
    ) -> None:
        change = await asyncio.to_thread(on_demand_workers.scale, pod_count)
        if change:
            self.note(ON_DEMAND_EVENT, **change)
        else:
            await asyncio.sleep(RETRY_INTERVAL_S)
        self.is_scaling = False

    def _record_trained_seconds(self) -> None:
        # record the trained time only if the time of earlier coordinators is known, because the sum
        # would otherwise be too small
        if self.has_restored_time:
            self.recorded_seconds = self.trained_seconds
            self.ledger.note(TRAINED_EVENT, seconds=round(self.trained_seconds, 1))

    async def _restore_trained_seconds(self) -> None:
        """Add the time that the earlier coordinators of this job have trained. Raises
        StorageError."""
        if not self.has_restored_time:
            earlier_seconds = await asyncio.to_thread(
                lambda: read_trained_seconds(open_store(), self.spec.ledger)
            )
            self.trained_seconds += earlier_seconds
            self.has_restored_time = True

    def admit(self, connection: "Connection") -> None:
        """Register a new connection, which must prove within seconds that it knows the secret."""
        self.unverified_connections[connection] = time.monotonic() + handshake.PROOF_TIMEOUT_S
        # the limit is high enough for all workers to reconnect at the same time
        if len(self.unverified_connections) > MAX_UNVERIFIED_CONNECTIONS + self.spec.max_workers:
            self.reject(next(iter(self.unverified_connections)))
        connection.transport.write(encode_message({"nonce": connection.nonce}))

    def reject(self, connection: "Connection") -> None:
        """Close a connection whose client has not proved that it knows the secret; log the number
        of such connections at intervals."""
        self.unverified_connections.pop(connection, None)
        connection.transport.abort()
        self.rejected_count += 1
        now_s = time.monotonic()
        if now_s - self.last_rejection_log >= LOG_INTERVAL_S:
            self.last_rejection_log = now_s
            print_log_line(
                f"{self.rejected_count} connections without this run's secret were closed, "
                f"the last from {connection.peer}"
            )

    def handle(self, worker_id: str, message_kind: str, message: Message) -> None:
        """Process one message of a worker. Raises ValueError if the worker is not registered."""
        now_s = time.monotonic()
        membership = self.membership

        if message_kind == "join":
            membership.join(now_s, message["join"])
        elif message_kind == "failed":
            membership.report_error(
                message["name"], message["failed"], message["code"], message["temporary"]
            )
        elif message_kind == "event":
            self.note(**message)
        elif worker_id not in membership.alive_workers:
            raise ValueError("the worker is not registered")
        elif message_kind == "beat":
            membership.heartbeat(now_s, worker_id, message["beat"], message["busy"])
        elif message_kind == "ack":
            membership.acknowledge(now_s, worker_id, message["ack"], message["step"])
        elif message_kind == "fault":
            membership.report_failure(now_s, worker_id, message["fault"])
        elif message_kind == "put":
            membership.forward_value(worker_id, message)
        elif message_kind == "leave":
            membership.remove(now_s, worker_id, "drain")
        elif message_kind == "done":
            membership.heartbeat(now_s, worker_id, -1, is_busy=True)
            self._start_task(self._check_completion(message["done"]))

        # messages that arrive together are answered together: if n workers send a value to each
        # other, this saves most of the n² writes
        if not self.is_sending_scheduled:
            self.is_sending_scheduled = True
            asyncio.get_running_loop().call_soon(self.send_outbox)

    def send_outbox(self) -> None:
        """Send the state machine's messages and record its events; exit if the state machine has
        ended the run."""
        self.is_sending_scheduled = False
        membership = self.membership
        outbox = membership.outbox
        membership.outbox = []
        # encode a message to several workers only once
        line_by_message_id: dict[int, bytes] = {}
        receiving_connections: dict[Connection, None] = {}

        for worker_id, message in outbox:
            connection = self.connections.get(worker_id)
            if connection:
                line = line_by_message_id.get(id(message)) or line_by_message_id.setdefault(
                    id(message), encode_message(message)
                )
                connection.queue(line)
                receiving_connections[connection] = None
                if "dropped" in message:
                    del self.connections[worker_id]
                    connection.close()

        for connection in receiving_connections:
            connection.write_queue()

        for ledger_event in membership.events:
            self.note(**ledger_event)

        for log_text in membership.log:
            for line in log_text.splitlines():
                print_log_line(line)

        membership.events = []
        membership.log = []
        if membership.verdict and not self.exit_code.done():
            exit_code, log_text = membership.verdict
            self._broadcast({"failed": log_text, "code": exit_code})
            self.set_exit_code(exit_code)
            fail(RekindleError(log_text))

    def note(self, event: str, **event_fields: Any) -> None:
        """Record an event in the ledger and in the metrics; the event `loss` only in the
        metrics."""
        if event != "loss":
            self.ledger.note(event, **event_fields)
        if event == "checkpoint" and self.signal:
            self.signalled_time = time.time()
            if not self.is_signalling:
                self.is_signalling = True
                self._start_task(self._write_signal(self.signal))
        # events with missing or invalid fields are left out of the metrics
        with contextlib.suppress(ValueError):
            self.exporter.note(event, **event_fields)

    async def _write_signal(self, checkpoint_signal: CheckpointSignal) -> None:
        """Write the time of the newest checkpoint to the pods, after the checkpoints that follow
        within the minimum interval."""
        await asyncio.sleep(checkpoint_signal.compute_delay())
        self.is_signalling = False
        await asyncio.to_thread(checkpoint_signal.write, self.signalled_time)

    def set_exit_code(self, exit_code: int) -> None:
        """Exit with `exit_code`, unless an exit code is already set."""
        if not self.exit_code.done():
            self.exit_code.set_result(exit_code)

    def _broadcast(self, message: Message) -> None:
        for connection in self.connections.values():
            connection.queue(encode_message(message))
            connection.write_queue()

    def _start_task(self, coroutine: Coroutine[object, object, None]) -> None:
        background_task = asyncio.create_task(coroutine)
        self.tasks.add(background_task)
        background_task.add_done_callback(self._on_task_done)

    def _on_task_done(self, background_task: "asyncio.Task[None]") -> None:
        self.tasks.discard(background_task)
        if (
            not background_task.cancelled()
            and (error := background_task.exception())
            and not self.exit_code.done()
        ):
            self.exit_code.set_exception(error)

    async def _check_completion(self, sha256: str = "") -> None:
        """Exit if the model of the run is in the object store. `sha256`: hash of the model that a
        worker reports as written, else ""."""
        while True:
            try:
                if not self.has_checked_reuse:
                    self.has_checked_reuse = True
                    if not await asyncio.to_thread(read_completed_model, self.spec):
                        await asyncio.to_thread(self.reusable.reuse)

                completed_model = await asyncio.to_thread(read_completed_model, self.spec)
                break
            except StorageError as error:
                print_log_line(f"{error} Trying again.")
                await asyncio.sleep(1)
            except RekindleError as error:
                return self.set_exit_code(fail(error))

        if self.exit_code.done():
            # another check has already ended the run
            return

        if completed_model:
            # the step of the model is the last step, while the newest heartbeat may be older
            self.ledger.note(
                "complete", step=completed_model["step"], sha256=completed_model["sha256"]
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(self.reusable.record), RECORD_TIMEOUT_S)

            self._broadcast({"complete": True})
            self.set_exit_code(0)
        elif sha256:
            self.set_exit_code(
                fail(
                    RekindleError(
                        f"{self.spec.out}/model.json is missing, although a worker has written it."
                    )
                )
            )

    async def _renew_lease(self) -> None:
        """Take over the run from an older coordinator; exit when a newer coordinator takes over the
        run."""
        coordinator_lease = CoordinatorLease(open_store, self.spec, self.id)
        is_reported = False

        while True:
            try:
                was_held = coordinator_lease.is_held
                await asyncio.to_thread(coordinator_lease.renew)
                if not was_held:
                    # record the event after `renew`, which checks that the key prefix does not
                    # belong to another run
                    created_s = read_creation_time()
                    self.ledger.note(
                        "coordinator",
                        id=self.id,
                        **({} if created_s is None else {"created": created_s}),
                    )

                await self._restore_trained_seconds()

                is_reported = False
            except StorageError as error:
                if not is_reported:
                    print_log_line(
                        f"cannot verify that this is the run's only coordinator: {error} Trying"
                        " again."
                    )

                is_reported = True
            except RekindleError as error:
                return self.set_exit_code(fail(error))

            await asyncio.sleep(coordinator_lease.RENEW_INTERVAL_S)
            if not (self.membership.is_published and self.membership.alive_workers):
                # the worker that wrote the model may have died before reporting it
                await self._check_completion()


class Connection(asyncio.Protocol):
    """The connection of one worker. The connection accepts messages once the worker has proved that
    it knows the secret."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.worker = ""
        self.pending_data = b""
        self.nonce = handshake.create_nonce()
        # lines that are not written to the transport yet; many connections share a line's memory
        self.queued_lines: deque[bytes] = deque()
        self.queued_bytes = 0
        self.is_writing_paused = False

    @property
    def peer(self) -> str:
        return str((self.transport.get_extra_info("peername") or ["?"])[0])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.coordinator.admit(self)

    def queue(self, message_line: bytes) -> None:
        """Queue a line for `write_queue`, or close the connection if the peer does not read."""
        if self.queued_bytes > MAX_UNREAD_BYTES:
            self.transport.abort()
        else:
            self.queued_lines.append(message_line)
            self.queued_bytes += len(message_line)

    def write_queue(self) -> None:
        """Write the queued lines until the peer reads too slowly: the transport copies its unsent
        bytes."""
        while self.queued_lines and not self.is_writing_paused:
            self._write_lines()

    def pause_writing(self) -> None:
        self.is_writing_paused = True

    def resume_writing(self) -> None:
        self.is_writing_paused = False
        self.write_queue()

    def close(self) -> None:
        """Close the connection after all queued lines have been sent."""
        while self.queued_lines:
            self._write_lines()
        self.transport.close()

    def _write_lines(self) -> None:
        lines = [self.queued_lines.popleft()]
        byte_count = len(lines[0])
        while self.queued_lines and byte_count + len(self.queued_lines[0]) <= MAX_WRITE_BYTES:
            lines.append(self.queued_lines.popleft())
            byte_count += len(lines[-1])

        self.queued_bytes -= byte_count
        self.transport.write(b"".join(lines))

    def data_received(self, data: bytes) -> None:
        *message_lines, self.pending_data = (self.pending_data + data).split(b"\n")
        try:
            for line in message_lines:
                if self.nonce:
                    self._verify_proof(line)
                else:
                    self._handle(line)

            if len(self.pending_data) > (
                handshake.MAX_LINE_BYTES if self.nonce else MAX_LINE_BYTES
            ):
                raise ValueError("line too long")
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            if self.nonce:
                self.coordinator.reject(self)
            else:
                print_log_line(
                    f"{self.worker or self.peer}: invalid message, closing the connection ({error})"
                )
                self.transport.abort()

    def _verify_proof(self, proof_line: bytes) -> None:
        if len(proof_line) > handshake.MAX_LINE_BYTES:
            raise ValueError("line too long")
        self.transport.write(
            handshake.verify_and_answer(proof_line, self.coordinator.secret, self.nonce)
        )
        self.nonce = ""
        del self.coordinator.unverified_connections[self]

    def _handle(self, message_line: bytes) -> None:
        message_kind, message = parse_message(message_line)
        if message_kind == "join":
            if self.worker not in ("", message["join"]["id"]):
                raise ValueError(f"this is the connection of worker {self.worker}")
            # reject a number that would mean more than one generation per millisecond since 1970
            if message["join"]["generation"] > 1000 * time.time():
                raise ValueError(f"generation {message['join']['generation']} was never opened")
            self.worker = message["join"]["id"]
            self.coordinator.connections[self.worker] = self
        self.coordinator.handle(self.worker, message_kind, message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.coordinator.unverified_connections.pop(self, None)
        # the coordinator closes all connections when it exits, so the worker is not lost
        if self.coordinator.exit_code.done():
            return
        # if the worker has reconnected, its new connection is registered
        if self.coordinator.connections.get(self.worker) is self:
            del self.coordinator.connections[self.worker]
            self.coordinator.membership.remove(time.monotonic(), self.worker)
            self.coordinator.send_outbox()


def print_log_line(message: str) -> None:
    """Print a line that begins with the time."""
    write_stderr(f"{time.strftime('%H:%M:%S')} {message}")


def main(argv: list[str], spec_class: type[RunSpec] = TrainingSpec) -> int:
    file_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # raise the limit of open files, since each worker needs a connection
    resource.setrlimit(resource.RLIMIT_NOFILE, (file_limit, file_limit))
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        run_spec = spec_class.from_flags(argv)
        run_secret = handshake.read_run_secret()
    except RekindleError as error:
        return fail(error)

    async def serve() -> NoReturn:
        exit_code = 1
        try:
            exit_code = await Coordinator(run_spec, run_secret).run(
                os.environ.get(POD_IP), read_coordinator_port()
            )
        except RekindleError as error:
            exit_code = fail(error)
        except Exception:
            traceback.print_exc()
        # exit at once, because asyncio and Python would wait for requests to the object store,
        # which may not answer for minutes
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()

            os._exit(exit_code)

    return asyncio.run(serve())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
