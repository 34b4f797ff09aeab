"""The coordinator of a training run: who trains together, and when the run is over. Holds no tensor, imports no torch.

    python -m steps.training.coordinator <the same flags as `python -m steps train`>

Listens on MASTER_PORT (23456) of POD_IP (every address). Exit code 0 only when `<out>/model.json` is in the object
store; 78, 65 or 1 with the workers' message if they cannot go on.

Membership goes in generations. The coordinator *opens* one when a worker joins, leaves or is lost; every worker stops
at a step's boundary (or at once, if the group is broken) and *acknowledges*; when all have, the member list is
*published* and training goes on. A worker that dies closes its connection; one that is silent for `silence_seconds`
is dropped. The protocol is one JSON object a line, each a single-key message:

    worker → coordinator                                        may be sent
    {"join": {id, name, address, fingerprint, step,             first, and again after a reconnect
              generation, peers}}
    {"beat": step}                                              any time; proof of life and progress
    {"ack": generation, "step": step}                           after an "open" of that generation
    {"fault": generation}                                       a collective of that generation failed
    {"leave": reason}                                           last: it exits on purpose
    {"failed": message, "code": exit code, "name": name}        in a connection of its own: why this worker ends
    {"done": sha256}                                            the model is in the object store

    coordinator → worker
    {"refused": message}                                        this worker must not take part
    {"open": generation, "hard": bool}                          stop after this step (hard: now), then ack
    {"members": [[id, address], ...], "generation": n}          the group; rank = place in the list
    {"failed": message, "code": exit code}                      the run is given up
    {"complete": true}                                          the run is over, exit 0
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any, cast

from steps.errors import ConfigError, RekindleError, StorageError
from steps.step import fail, load, parse, parser
from steps.train import Inputs

PATIENCE = 1.0  # seconds the first generation waits for `workers` of them; a later one joins in passing
CRASHES = 3  # errors of workers without a newer step in between, after which trying again is no use
PORT = 23456
LONGEST = 1 << 20  # bytes of a message

Message = dict[str, Any]


@dataclass
class Worker:
    """What the coordinator knows about one live process."""

    id: str
    name: str
    address: str
    seen: float
    acked: int = 0


@dataclass
class Membership:
    """The state machine: events in (each with the time), messages out in `outbox`. No clock, no socket."""

    config: Inputs
    generation: int = 0
    agreed: bool = False  # the generation's member list is published
    hard: bool = False  # the group before the open generation is broken: do not wait for the end of its step
    members: list[str] = field(default_factory=list)
    alive: dict[str, Worker] = field(default_factory=dict)
    fingerprint: dict[str, Any] = field(default_factory=dict)
    wanted: int = 0  # members worth waiting for until `patient_until`
    patient_until: float = 0.0
    step: int = -1
    crashes: int = 0
    crashed_at: int = -1
    verdict: tuple[int, str] | None = None
    outbox: list[tuple[str, Message]] = field(default_factory=list)

    def join(self, now: float, hello: Message) -> None:
        """A worker is there, for the first time or again."""
        if problem := self._objection(hello):
            self.outbox.append((hello["id"], {"refused": problem}))
            return
        self.fingerprint = self.fingerprint or hello["fingerprint"]
        if not self.alive and not self.members:
            self.patient_until = now + PATIENCE
            self.wanted = self.config.workers
        if hello["generation"] > self.generation:  # we were restarted: their group goes on until all are back
            self.generation, self.agreed = hello["generation"], True
            self.wanted = len(hello["peers"])
        self.alive[hello["id"]] = Worker(hello["id"], hello["name"], hello["address"], now)
        self.step = max(self.step, hello["step"])
        if not self.agreed and self.generation:
            self.outbox.append((hello["id"], {"open": self.generation, "hard": self.hard}))
        self.settle(now)

    def beat(self, now: float, worker: str, step: int) -> None:
        """A worker lives."""
        self.alive[worker].seen = now
        self.step = max(self.step, step)

    def ack(self, now: float, worker: str, generation: int, step: int) -> None:
        """A worker has left its former group and waits for the members of `generation`."""
        self.beat(now, worker, step)
        self.alive[worker].acked = generation
        self.settle(now)

    def fault(self, now: float, worker: str, generation: int) -> None:
        """A collective failed: the group of that generation is of no more use to anybody."""
        self.beat(now, worker, -1)
        if generation == self.generation - (not self.agreed):
            self._open(hard=True)

    def lost(self, now: float, worker: str, *, left: bool = False) -> None:
        """A worker is gone; `left`: on purpose, after the step that all agreed to stop at."""
        if self.alive.pop(worker, None) is None:
            return
        if worker in self.members and not left:
            self._open(hard=True)
        self.settle(now)

    def failed(self, name: str, message: str, code: int) -> None:
        """A worker ends with an error: the verdict, if a retry cannot cure it or did not."""
        self.crashes = self.crashes + 1 if self.step == self.crashed_at else 1
        self.crashed_at = self.step
        if code != 1 or self.crashes >= CRASHES:
            again = f" ({self.crashes} times without a newer step)" if code == 1 else ""
            self.verdict = code, f"{name}{again}: {message}"

    def tick(self, now: float) -> None:
        """Time passed: drop who is silent."""
        for worker in [w for w in self.alive.values() if now - w.seen > self.config.silence_seconds]:
            self.lost(now, worker.id)
        self.settle(now)

    def settle(self, now: float) -> None:
        """Open a generation if the members changed; publish the open one if everybody is ready."""
        eligible = self._eligible()
        if not eligible:
            return
        if (self.agreed or not self.generation) and eligible != self.members:
            self._open(hard=False)
        acked = [worker for worker in eligible if self.alive[worker].acked == self.generation]
        if self.agreed or acked != eligible or len(acked) < self.config.min_workers:
            return
        if len(acked) < self.wanted and now < self.patient_until:
            return
        self.members, self.agreed, self.wanted = acked, True, 0
        group = [[worker, self.alive[worker].address] for worker in acked]
        self.outbox += [(worker, {"members": group, "generation": self.generation}) for worker in acked]

    def _eligible(self) -> list[str]:
        """Members first, then by arrival; those beyond max_workers stand by."""
        kept = [worker for worker in self.members if worker in self.alive]
        return (kept + [worker for worker in self.alive if worker not in kept])[: self.config.max_workers]

    def _open(self, *, hard: bool) -> None:
        if self.agreed or not self.generation:
            self.generation, self.agreed, self.hard = self.generation + 1, False, False
        elif self.hard or not hard:
            return  # they know
        self.hard = hard
        self.outbox += [(worker, {"open": self.generation, "hard": hard}) for worker in self.alive]

    def _objection(self, hello: Message) -> str:
        if not self.fingerprint:
            return ""
        theirs = hello["fingerprint"]
        differ = [k for k in self.fingerprint | theirs if self.fingerprint.get(k) != theirs.get(k)]
        if not differ:
            return ""
        listed = ", ".join(f"{key} is {theirs.get(key)} and not {self.fingerprint.get(key)}" for key in differ)
        return (
            f'worker "{hello["name"]}" is refused: its {listed}. Every worker of a run must compute the same bits: '
            "give all of them the same image, kind of node, threads, config and data."
        )


class Server:
    """Sockets, the clock and the object store around a Membership."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.membership = Membership(inputs)
        self.connections: dict[str, Connection] = {}
        self.over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.checks: set[asyncio.Task[None]] = set()

    async def run(self, host: str | None, port: int) -> int:
        """Serve until the verdict; gives the exit code."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(self), host, port)
        loop.add_signal_handler(signal.SIGTERM, self.end, 143)
        self._check_soon(sure=False)
        ticker = asyncio.create_task(self._tick())
        await asyncio.wait({self.over, ticker}, return_when=asyncio.FIRST_COMPLETED)
        if ticker.done():
            ticker.result()  # raises: without it nobody would miss a silent worker
        code = await self.over
        ticker.cancel()
        server.close()
        for connection in self.connections.values():
            connection.transport.close()  # after what is still to be sent
        return code

    async def _tick(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.1)
            now = time.monotonic()
            if now - last > 1:  # it is us who slept: nobody is to blame for a silence we could not hear
                for worker in self.membership.alive.values():
                    worker.seen = now
            last = now
            self.membership.tick(now)
            self.flush()

    def handle(self, worker: str, message: Message) -> None:
        """One message of a worker. Raises ValueError if it makes no sense."""
        now, membership = time.monotonic(), self.membership
        if "join" in message:
            membership.join(now, message["join"])
        elif "failed" in message:
            membership.failed(message["name"], message["failed"], message["code"])
        elif worker not in membership.alive:
            raise ValueError("it is not registered")
        elif "beat" in message:
            membership.beat(now, worker, message["beat"])
        elif "ack" in message:
            membership.ack(now, worker, message["ack"], message["step"])
        elif "fault" in message:
            membership.fault(now, worker, message["fault"])
        elif "leave" in message:
            membership.lost(now, worker, left=True)
        elif "done" in message:
            self._check_soon(sure=True)
        else:
            raise ValueError(f"unknown message {message}")
        self.flush()

    def flush(self) -> None:
        """Send what the state machine has to say; end if it has come to a verdict."""
        membership = self.membership
        outbox, membership.outbox = membership.outbox, []
        for worker, message in outbox:
            if "members" in message and worker == membership.members[0]:
                names = " ".join(membership.alive[w].name for w in membership.members)
                note(f"generation {membership.generation}: {names}")
            if "refused" in message:
                note(message["refused"])
            self._send(worker, message)
        if membership.verdict and not self.over.done():
            code, text = membership.verdict
            for worker in self.connections:
                self._send(worker, {"failed": text, "code": code})
            fail(RekindleError(text))
            self.end(code)

    def end(self, code: int) -> None:
        """Exit with `code`, unless something else came first."""
        if not self.over.done():
            self.over.set_result(code)

    def _send(self, worker: str, message: Message) -> None:
        if connection := self.connections.get(worker):
            connection.transport.write(json.dumps(message).encode() + b"\n")

    def _check_soon(self, *, sure: bool) -> None:
        task = asyncio.create_task(self._check(sure))
        self.checks.add(task)
        task.add_done_callback(self.checks.discard)

    async def _check(self, sure: bool) -> None:
        """Is the model there? `sure`: a worker says so."""
        while True:
            try:
                there = await asyncio.to_thread(finished, self.inputs)
                break
            except StorageError as error:
                note(f"{error} Trying again.")
                await asyncio.sleep(1)
            except RekindleError as error:
                return self.end(fail(error))
        if there:
            for worker in self.connections:
                self._send(worker, {"complete": True})
            self.end(0)
        elif sure:
            self.end(fail(RekindleError(f"{self.inputs.out}/model.json is missing although a worker has written it.")))


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
        if self.server.connections.get(self.worker) is self:  # not if it has connected anew in the meantime
            del self.server.connections[self.worker]
            self.server.membership.lost(time.monotonic(), self.worker)
            self.server.flush()


def finished(inputs: Inputs) -> bool:
    """Whether this very run's model is in the object store. Raises ConfigError if another run's is."""
    from steps.storage import NotFound, Store

    store, key = Store.from_env(), f"{inputs.out}/model.json"
    try:
        theirs = json.loads(store.get(key)).get("identity")
    except NotFound:
        return False
    if theirs != inputs.identity_hash():
        raise ConfigError(
            f"{store.uri(key)} is the model of another run (identity {str(theirs)[:12]}, this run's is "
            f"{inputs.identity_hash()[:12]}): nothing was changed. Give this run another `out` prefix."
        )
    return True


def note(text: str) -> None:
    """One line of log, with the time. A full disk costs the line, not the run."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        sys.stderr.flush()


def main(argv: list[str]) -> int:
    """The command."""
    try:
        flags = vars(parser("train", load("train")).parse_args(argv))
        inputs = cast(Inputs, parse(Inputs, {name: flags[name] for name in flags if name in Inputs.model_fields}))
    except RekindleError as error:
        return fail(error)

    async def serve() -> int:
        return await Server(inputs).run(os.environ.get("POD_IP"), int(os.environ.get("MASTER_PORT", PORT)))

    return asyncio.run(serve())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
