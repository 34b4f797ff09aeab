"""The coordinator of a training run: who trains together, and when the run is over. Holds no tensor, imports no torch.

    python -m rekindle.training.membership.server <the same flags as `rekindle step steps.train`>

Listens on MASTER_PORT (23456) of POD_IP (every address). Exit code 0 only when `<out>/model.json` is in the object
store; 78, 65 or 1 with the workers' message if they cannot go on; 143 after SIGTERM: the next one goes on with the run.
One that starts takes the run over from an older one.

Membership goes in generations (membership.py). The coordinator *opens* one when a worker joins, leaves or is lost;
every worker stops at a step's boundary (or at once, if the group is broken) and *acknowledges*; when all have, the
member list is *published* and training goes on. A worker that dies closes its connection. One that is silent for
`silence_seconds` is dropped, unless the group made a step since; it may join again. One that lives, but neither makes
steps nor answers for `hung_seconds`, is dropped and must end. Without a coordinator workers go on in their group.
One JSON object a line:

    worker → coordinator                                        may be sent
    {"join": {protocol, id, name, address, fingerprint, step,   first, and again after a reconnect; generation: the
              generation, group, peers}}                        newest known; group: the one it is in (0: it waits for
                                                                one), with its members
    {"beat": step, "busy": bool}                                any time; life and progress. busy: no steps for a while
    {"ack": generation, "step": step}                           after an "open" of that generation
    {"fault": generation}                                       a collective of that generation failed
    {"leave": reason}                                           last: it exits on purpose
    {"failed": message, "code": n, "name": x, "temporary": b}   in a connection of its own: why this worker ends
    {"done": sha256}                                            the model is in the object store
    {"event": what, "name": worker, ...}                        any time, also by one that has left; for the ledger

    coordinator → worker
    {"refused": message}                                        this worker must not take part
    {"open": generation, "hard": bool}                          stop after this step (hard: now), then ack
    {"members": [[id, address], ...], "generation": n}          the group; rank = place in the list
    {"dropped": "silent" or "hung"}                             last: join again; hung: end this process
    {"failed": message, "code": exit code}                      the run is given up
    {"complete": true}                                          the run is over, exit 0

What is none of these, unknown generations and messages of workers that are not registered end the connection.
"""

import signal

if __name__ == "__main__":  # kept until somebody listens; else a PID 1 would never hear of it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

import asyncio
import contextlib
import json
import os
import sys
import time
import traceback
import uuid
from typing import TYPE_CHECKING, Any, NoReturn, cast

from rekindle.errors import ConfigError, RekindleError, StorageError, say
from rekindle.ledger.events import Ledger
from rekindle.step import fail
from rekindle.training.membership.client import PORT
from rekindle.training.membership.lease import Claim
from rekindle.training.membership.machine import Membership, Message
from rekindle.training.spec import TrainingSpec as Inputs

if TYPE_CHECKING:
    from rekindle.storage import Store

TICK = 0.1  # seconds between looks at the clock
LATE = 0.05  # seconds by which we may wake up late before it counts as our own silence
LONGEST = 1 << 20  # bytes of a message


class Server:
    """Sockets, the clock and the object store around a Membership."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.id = inputs, uuid.uuid4().hex[:12]
        self.membership = Membership(inputs)
        self.ledger = Ledger(store, inputs.ledger)
        self.connections: dict[str, Connection] = {}
        self.over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.tasks: set[asyncio.Task[None]] = set()

    async def run(self, host: str | None, port: int) -> int:
        """Serve until the verdict; gives the exit code. Raises RekindleError if the port is taken."""
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(lambda: Connection(self), host, port)
        except OSError as error:
            raise RekindleError(
                f"this coordinator cannot listen on {host or 'any address'}, port {port} ({error.strerror}): another "
                "one may be running here. End it, or set MASTER_PORT to another port for this run."
            ) from error
        loop.add_signal_handler(signal.SIGTERM, self.end, 143)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self._soon(self._check())
        self._soon(self._hold())
        ticker = asyncio.create_task(self._tick())
        await asyncio.wait({self.over, ticker}, return_when=asyncio.FIRST_COMPLETED)
        if ticker.done():
            ticker.result()  # raises: without it nobody would miss a silent worker
        code = await self.over
        ticker.cancel()
        server.close()
        for connection in self.connections.values():
            connection.transport.close()  # after what is still to be sent
        await asyncio.to_thread(self.ledger.close)
        return code

    async def _tick(self) -> None:
        while True:
            due = time.monotonic() + TICK
            await asyncio.sleep(TICK)
            now = time.monotonic()
            if now - due > LATE:
                self.membership.slept(now - due)
            self.membership.tick(now)
            self.flush()

    def handle(self, worker: str, message: Message) -> None:
        """One message of a worker. Raises ValueError if it makes no sense."""
        now, membership = time.monotonic(), self.membership
        if "beat" in message and worker in membership.alive:  # the most frequent by far
            membership.beat(now, worker, message["beat"], message.get("busy", False))
        elif "join" in message:
            membership.join(now, message["join"])
        elif "failed" in message:
            temporary = message.get("temporary", False)
            membership.failed(message["name"], message["failed"], message["code"], temporary)
        elif "event" in message:
            self.ledger.note(**message)
        elif worker not in membership.alive:
            raise ValueError("it is not registered")
        elif "ack" in message:
            membership.ack(now, worker, message["ack"], message["step"])
        elif "fault" in message:
            membership.fault(now, worker, message["fault"])
        elif "leave" in message:
            membership.lost(now, worker, "drain")
        elif "done" in message:
            membership.beat(now, worker, -1, busy=True)
            self._soon(self._check(message["done"]))
        else:
            raise ValueError(f"unknown message {message}")
        self.flush()

    def flush(self) -> None:
        """Send what the state machine has to say; end if it has come to a verdict."""
        membership = self.membership
        outbox, membership.outbox = membership.outbox, []
        lines: dict[int, bytes] = {}  # a message to many is encoded once
        for worker, message in outbox:
            if connection := self.connections.get(worker):
                line = lines.get(id(message)) or lines.setdefault(id(message), encoded(message))
                connection.transport.write(line)
                if "dropped" in message:
                    del self.connections[worker]
                    connection.transport.close()
        for event in membership.events:
            self.ledger.note(**event)
        for text in membership.log:
            note(text)
        membership.events, membership.log = [], []
        if membership.verdict and not self.over.done():
            code, text = membership.verdict
            self._tell_all({"failed": text, "code": code})
            self.end(code)
            fail(RekindleError(text))

    def end(self, code: int) -> None:
        """Exit with `code`, unless something else came first."""
        if not self.over.done():
            self.over.set_result(code)

    def _tell_all(self, message: Message) -> None:
        for connection in self.connections.values():
            connection.transport.write(encoded(message))

    def _soon(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self.over.done():
            self.over.set_exception(error)

    async def _check(self, sha256: str = "") -> None:
        """Is the model there? With `sha256` a worker says so."""
        while True:
            try:
                model = await asyncio.to_thread(finished, self.inputs)
                break
            except StorageError as error:
                note(f"{error} Trying again.")
                await asyncio.sleep(1)
            except RekindleError as error:
                return self.end(fail(error))
        if self.over.done():
            return  # whoever looked at the same time has said it
        if model:  # its step is the last: that of the newest beat may be older
            self.ledger.note("complete", step=model["step"], sha256=model["sha256"])
            self._tell_all({"complete": True})
            self.end(0)
        elif sha256:
            self.end(fail(RekindleError(f"{self.inputs.out}/model.json is missing although a worker has written it.")))

    async def _hold(self) -> None:
        """Take the run over from any other coordinator, and end if another one does so later."""
        claim, quiet = Claim(store, self.inputs, self.id), False
        while True:
            try:
                if not claim.staked:
                    await asyncio.to_thread(claim.hold)
                    self.ledger.note("coordinator", id=self.id)  # only now is the prefix known to be this run's
                await asyncio.to_thread(claim.hold)
                quiet = False
            except StorageError as error:
                if not quiet:
                    note(f"whether this is the run's only coordinator is not known: {error} Trying again.")
                quiet = True
            except RekindleError as error:
                return self.end(fail(error))
            await asyncio.sleep(claim.PERIOD)
            if not (self.membership.agreed and self.membership.alive):
                await self._check()  # whoever wrote the model may have died before it said so


class Connection(asyncio.Protocol):
    """One worker's connection: lines in and out."""

    def __init__(self, server: Server) -> None:
        self.server, self.worker, self.pending = server, "", b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        *lines, self.pending = (self.pending + data).split(b"\n")
        try:
            for line in lines:
                message = json.loads(line)
                if "join" in message:
                    self.worker = message["join"]["id"]
                    self.server.connections[self.worker] = self
                self.server.handle(self.worker, message)
            if len(self.pending) > LONGEST:
                raise ValueError(f"a line of more than {LONGEST} bytes")
        except (ValueError, KeyError, TypeError) as error:
            note(f"{self.worker or 'a stranger'} sent nonsense and is disconnected ({error!r})")
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.server.over.done():  # it is we who hang up: nobody is lost
            return
        if self.server.connections.get(self.worker) is self:  # not if it has connected anew in the meantime
            del self.server.connections[self.worker]
            self.server.membership.lost(time.monotonic(), self.worker)
            self.server.flush()


def finished(inputs: Inputs) -> dict[str, Any] | None:
    """What this very run's model says of itself (`sha256`, `step`), if it is in the object store.

    Raises ConfigError if another run's is.
    """
    from rekindle.storage import NotFound

    objects, key = store(), f"{inputs.out}/model.json"
    try:
        model = json.loads(objects.get(key))
        theirs = model["identity"]
    except NotFound:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{objects.uri(key)} is not what a run writes ({error!r}): nothing was changed. Remove it, or give this "
            "run another `out` prefix."
        ) from error
    if theirs != inputs.identity_hash():
        raise ConfigError(
            f"{objects.uri(key)} is the model of another run (identity {str(theirs)[:12]}, this run's is "
            f"{inputs.identity_hash()[:12]}): nothing was changed. Give this run another `out` prefix."
        )
    return model


def store() -> "Store":
    """The object store of the environment; its import takes half a second."""
    from rekindle.storage import Store

    return Store.from_env()


def encoded(message: Message) -> bytes:
    """A message as a line."""
    return json.dumps(message).encode() + b"\n"


def note(text: str) -> None:
    """One line of log, with the time."""
    say(f"{time.strftime('%H:%M:%S')} {text}")


def main(argv: list[str]) -> int:
    """The command."""
    try:
        inputs = Inputs.from_flags(argv)
    except RekindleError as error:
        return fail(error)

    async def serve() -> NoReturn:
        code = 1
        try:
            code = await Server(inputs).run(os.environ.get("POD_IP"), int(os.environ.get("MASTER_PORT", PORT)))
        except RekindleError as error:
            code = fail(error)
        except Exception:
            traceback.print_exc()
        finally:  # asyncio and Python would wait for requests to an object store that may not answer for minutes
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            os._exit(code)

    return asyncio.run(serve())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
