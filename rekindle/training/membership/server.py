"""The coordinator of a training run: decides which workers train together and when the run is
complete. No torch.

    python -m rekindle.training.membership.server <the same flags as `rekindle step steps.train`>

Listens on port MASTER_PORT (default 23456) of POD_IP (default: every address) for clients that
prove knowledge of REKINDLE_SECRET (handshake.py). Exits with 0 only when `<out>/model.json` is in
the object store; with 78, 65 or 1 and the workers' message if they cannot continue; with 143 after
SIGTERM: the next coordinator resumes the run. A new coordinator takes the run over from an older
coordinator.

protocol.py defines the messages, state_machine.py makes the decisions. A worker that dies closes
its connection. A worker that is silent for `silence_seconds` is dropped, unless the group has
completed a step since; it may join again. A worker that is alive, but neither completes steps nor
acknowledges for `hung_seconds`, is dropped and must exit. Without a coordinator the workers
continue in their group.
"""

import signal
import socket

# pending until a handler is installed: the kernel would discard the signal for PID 1
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
from typing import Any, NoReturn, cast

from argolocal.common.environment import MAX_PORT, read_integer, read_seconds
from rekindle.errors import RekindleError, StorageError, say
from rekindle.step import fail
from rekindle.training.ledger.events import Ledger
from rekindle.training.membership import handshake, metrics_endpoint
from rekindle.training.membership.completion import completed_model, open_store
from rekindle.training.membership.lease import Lease
from rekindle.training.membership.messages import parse
from rekindle.training.membership.metrics_endpoint import Exporter
from rekindle.training.membership.model_reuse import ReusableModel
from rekindle.training.membership.protocol import MAX_LINE, Message, coordinator_port, encode
from rekindle.training.membership.state_machine import Membership
from rekindle.training.spec import TrainingSpec

# environment variable: seconds that the workers may train; time that they wait does not count
DEADLINE = "REKINDLE_DEADLINE"
TICK_S = 0.1
LATE_TICK_S = 0.05  # longest delay of a tick; a longer delay counts as a pause of the coordinator
# maximum number of connections that have not authenticated yet, in addition to one per worker;
# further connections close the oldest
MAX_UNVERIFIED = 128
MAX_UNREAD = 64 << 20  # maximum number of bytes that are buffered for a peer that does not read
RECORD_TIMEOUT_S = 10.0  # time limit for recording the model for reuse at the end of a run
LOG_INTERVAL_S = 60.0  # time between two log lines about rejected connections


class Coordinator:
    """Connects a Membership with sockets, the clock and the object store."""

    def __init__(self, spec: TrainingSpec, secret: bytes) -> None:
        self.spec, self.secret, self.id = spec, secret, uuid.uuid4().hex[:12]
        self.membership = Membership(spec)
        self.ledger = Ledger(open_store, spec.ledger)
        self.exporter = Exporter(self.membership)
        self.reusable = ReusableModel(spec)
        self.has_checked_reuse = False
        self.trained_seconds = 0.0
        self.max_seconds = read_seconds(DEADLINE, math.inf, "Correct it, or unset it for no limit.")
        self.connections: dict[str, Connection] = {}
        # connection without a proof → deadline of the proof; the oldest first
        self.unverified_connections: dict[Connection, float] = {}
        self.rejected_count = 0
        self.last_rejection_log = float("-inf")
        self.exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.tasks: set[asyncio.Task[None]] = set()

    async def run(self, host: str | None, port: int) -> int:
        """Serve until the run ends; return the exit code. Raises RekindleError if the port is
        taken."""
        loop = asyncio.get_running_loop()

        try:
            # with the default of 100, workers would wait for seconds while others open many
            # connections
            server = await loop.create_server(
                lambda: Connection(self), host, port, backlog=socket.SOMAXCONN
            )
        except OSError as error:
            raise RekindleError(
                f"this coordinator cannot listen on {host or 'any address'}, port {port}"
                f" ({error.strerror}): another coordinator may be running on this machine. Stop it,"
                " or set MASTER_PORT to another port for this run."
            ) from error

        loop.add_signal_handler(signal.SIGTERM, self.end, 143)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        metrics_server = await self._start_metrics_server(host)
        self._start_task(self._check_completion())
        self._start_task(self._renew_lease())
        ticker = asyncio.create_task(self._tick())
        await asyncio.wait({self.exit_code, ticker}, return_when=asyncio.FIRST_COMPLETED)

        if ticker.done():
            # raises the error of `_tick`: without ticks, no silent worker would be dropped
            ticker.result()

        code = await self.exit_code
        ticker.cancel()
        server.close()

        if metrics_server:
            metrics_server.close()

        for connection in self.connections.values():
            connection.transport.close()  # `close` first sends the data in the buffer

        await asyncio.to_thread(self.ledger.close)
        return code

    async def _start_metrics_server(self, host: str | None) -> asyncio.Server | None:
        port = read_integer(metrics_endpoint.VARIABLE, 0, 0, MAX_PORT)
        # on a loopback address, every local user could read the metrics
        if port and not (host or "").startswith("127."):
            try:
                return await self.exporter.serve(host, port)
            except OSError as error:
                log(f"metrics are unavailable: cannot listen on port {port} ({error.strerror})")
        return None

    async def _tick(self) -> None:
        while True:
            due_time = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)

            now = time.monotonic()
            if now - due_time > LATE_TICK_S:
                self.membership.exclude_pause(now - due_time)

            self.membership.tick(now)
            if self.membership.is_published and self.membership.members:
                self.trained_seconds += TICK_S

            if self.trained_seconds > self.max_seconds:
                self.membership.conclude(
                    1,
                    f"this training takes longer than the {self.max_seconds / 60:g} minutes of"
                    " cluster.pods.train.deadline_minutes (time spent waiting for workers is not"
                    " counted). Raise it, and continue from the newest checkpoint with `rekindle"
                    " resume`.",
                )

            self.flush()
            for connection in [
                connection
                for connection, deadline in self.unverified_connections.items()
                if now > deadline
            ]:
                self.reject(connection)

    def admit(self, connection: "Connection") -> None:
        """Accept a new connection and give it some seconds for its proof."""
        self.unverified_connections[connection] = time.monotonic() + handshake.TIMEOUT_S
        # all workers may reconnect at once
        if len(self.unverified_connections) > MAX_UNVERIFIED + self.spec.max_workers:
            self.reject(next(iter(self.unverified_connections)))
        connection.transport.write(encode({"nonce": connection.nonce}))

    def reject(self, connection: "Connection") -> None:
        """Close a connection without a proof; log the number of such connections at intervals."""
        self.unverified_connections.pop(connection, None)
        connection.transport.abort()
        self.rejected_count += 1
        now = time.monotonic()
        if now - self.last_rejection_log >= LOG_INTERVAL_S:
            self.last_rejection_log = now
            log(
                f"{self.rejected_count} connections without this run's secret were closed, "
                f"the last from {connection.peer}"
            )

    def handle(self, worker: str, kind: str, message: Message) -> None:
        """Process one message of a worker. Raises ValueError if the worker is not registered."""
        now = time.monotonic()
        membership = self.membership

        if kind == "join":
            membership.join(now, message["join"])
        elif kind == "failed":
            membership.report_error(
                message["name"], message["failed"], message["code"], message["temporary"]
            )
        elif kind == "event":
            self.note(**message)
        elif worker not in membership.alive_workers:
            raise ValueError("the worker is not registered")
        elif kind == "beat":
            membership.heartbeat(now, worker, message["beat"], message["busy"])
        elif kind == "ack":
            membership.ack(now, worker, message["ack"], message["step"])
        elif kind == "fault":
            membership.report_failure(now, worker, message["fault"])
        elif kind == "put":
            membership.exchange(worker, message)
        elif kind == "leave":
            membership.remove(now, worker, "drain")
        elif kind == "done":
            membership.heartbeat(now, worker, -1, busy=True)
            self._start_task(self._check_completion(message["done"]))

        self.flush()

    def flush(self) -> None:
        """Send the state machine's messages; exit if it has ended the run."""
        membership = self.membership
        outbox = membership.outbox
        membership.outbox = []
        lines: dict[int, bytes] = {}  # a message to several workers is encoded once

        for worker, message in outbox:
            connection = self.connections.get(worker)
            if connection:
                line = lines.get(id(message)) or lines.setdefault(id(message), encode(message))
                connection.send(line)
                if "dropped" in message:
                    del self.connections[worker]
                    connection.transport.close()

        for event in membership.events:
            self.note(**event)

        for text in membership.log:
            for line in text.splitlines():
                log(line)

        membership.events = []
        membership.log = []
        if membership.verdict and not self.exit_code.done():
            code, text = membership.verdict
            self._broadcast({"failed": text, "code": code})
            self.end(code)
            fail(RekindleError(text))

    def note(self, event: str, **fields: Any) -> None:
        """Record an event in the ledger and the metrics; record the event `loss` only in the
        metrics."""
        if event != "loss":
            self.ledger.note(event, **fields)
        # the exporter ignores malformed events
        with contextlib.suppress(KeyError, TypeError, ValueError):
            self.exporter.note(event, **fields)

    def end(self, code: int) -> None:
        """Exit with `code`, unless an exit code is already set."""
        if not self.exit_code.done():
            self.exit_code.set_result(code)

    def _broadcast(self, message: Message) -> None:
        for connection in self.connections.values():
            connection.send(encode(message))

    def _start_task(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self.exit_code.done():
            self.exit_code.set_exception(error)

    async def _check_completion(self, sha256: str = "") -> None:
        """Exit if the model is in the object store. `sha256`: set if a worker has reported this
        model."""
        while True:
            try:
                if not self.has_checked_reuse:
                    self.has_checked_reuse = True
                    if not await asyncio.to_thread(completed_model, self.spec):
                        await asyncio.to_thread(self.reusable.reuse)

                model = await asyncio.to_thread(completed_model, self.spec)
                break
            except StorageError as error:
                log(f"{error} Trying again.")
                await asyncio.sleep(1)
            except RekindleError as error:
                return self.end(fail(error))

        if self.exit_code.done():
            return  # another check has already ended the run

        if model:  # model["step"] is the last step; the newest heartbeat may be older
            self.ledger.note("complete", step=model["step"], sha256=model["sha256"])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(self.reusable.record), RECORD_TIMEOUT_S)

            self._broadcast({"complete": True})
            self.end(0)
        elif sha256:
            self.end(
                fail(
                    RekindleError(
                        f"{self.spec.out}/model.json is missing, although a worker has written it."
                    )
                )
            )

    async def _renew_lease(self) -> None:
        """Take the run over from any other coordinator; exit if another coordinator takes it over
        later."""
        lease = Lease(open_store, self.spec, self.id)
        is_reported = False

        while True:
            try:
                was_held = lease.is_held
                await asyncio.to_thread(lease.renew)
                if not was_held:
                    # not before `renew`: the prefix might belong to another run
                    self.ledger.note("coordinator", id=self.id)

                is_reported = False
            except StorageError as error:
                if not is_reported:
                    log(
                        f"cannot verify that this is the run's only coordinator: {error} Trying"
                        " again."
                    )

                is_reported = True
            except RekindleError as error:
                return self.end(fail(error))

            await asyncio.sleep(lease.RENEW_INTERVAL_S)
            if not (self.membership.is_published and self.membership.alive_workers):
                # the worker that wrote the model may have died before reporting it
                await self._check_completion()


class Connection(asyncio.Protocol):
    """Connection of one worker, which exchanges messages once the worker has proved that it knows
    the secret."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.worker = ""
        self.pending_data = b""
        self.nonce = handshake.nonce()

    @property
    def peer(self) -> str:
        return str((self.transport.get_extra_info("peername") or ["?"])[0])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.coordinator.admit(self)

    def send(self, line: bytes) -> None:
        """Send a line, or close the connection if the peer does not read."""
        if self.transport.get_write_buffer_size() > MAX_UNREAD:
            self.transport.abort()
        else:
            self.transport.write(line)

    def data_received(self, data: bytes) -> None:
        *lines, self.pending_data = (self.pending_data + data).split(b"\n")
        try:
            for line in lines:
                if self.nonce:
                    self._prove(line)
                else:
                    self._handle(line)

            if len(self.pending_data) > (handshake.MAX_LINE if self.nonce else MAX_LINE):
                raise ValueError("line too long")
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            if self.nonce:
                self.coordinator.reject(self)
            else:
                log(
                    f"{self.worker or self.peer}: invalid message, closing the connection ({error})"
                )
                self.transport.abort()

    def _prove(self, line: bytes) -> None:
        if len(line) > handshake.MAX_LINE:
            raise ValueError("line too long")
        self.transport.write(handshake.answer(line, self.coordinator.secret, self.nonce))
        self.nonce = ""
        del self.coordinator.unverified_connections[self]

    def _handle(self, line: bytes) -> None:
        kind, message = parse(line)
        if kind == "join":
            if self.worker not in ("", message["join"]["id"]):
                raise ValueError(f"this is the connection of worker {self.worker}")
            # more than one generation per millisecond is impossible
            if message["join"]["generation"] > 1000 * time.time():
                raise ValueError(f"generation {message['join']['generation']} was never opened")
            self.worker = message["join"]["id"]
            self.coordinator.connections[self.worker] = self
        self.coordinator.handle(self.worker, kind, message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.coordinator.unverified_connections.pop(self, None)
        # the coordinator closes the connections: no worker is lost
        if self.coordinator.exit_code.done():
            return
        # not the case if the worker has reconnected
        if self.coordinator.connections.get(self.worker) is self:
            del self.coordinator.connections[self.worker]
            self.coordinator.membership.remove(time.monotonic(), self.worker)
            self.coordinator.flush()


def log(text: str) -> None:
    """Print a line that begins with the time."""
    say(f"{time.strftime('%H:%M:%S')} {text}")


def main(argv: list[str]) -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # the limit of open files must allow one connection per worker
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    try:
        spec = TrainingSpec.from_flags(argv)
        secret = handshake.run_secret()
    except RekindleError as error:
        return fail(error)

    async def serve() -> NoReturn:
        code = 1
        try:
            code = await Coordinator(spec, secret).run(os.environ.get("POD_IP"), coordinator_port())
        except RekindleError as error:
            code = fail(error)
        except Exception:
            traceback.print_exc()
        # asyncio and Python would wait for requests to the object store, which may be unresponsive
        # for minutes
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()

            os._exit(code)

    return asyncio.run(serve())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
