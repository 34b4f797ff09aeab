"""A worker's half of the coordinator's protocol (see coordinator.py): a thread that listens, beats and reconnects."""

import contextlib
import faulthandler
import json
import os
import select
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from rekindle.errors import ConfigError, GivenUp, RekindleError, say
from rekindle.training.membership.machine import PROTOCOL

PORT = 23456  # of the coordinator, unless MASTER_PORT says another
BEAT = 0.2  # seconds between proofs of life
RETRY = 0.1  # seconds between attempts to reach a coordinator that is away
AWAY = 5.0  # seconds after which it may have ended with the run
COMPLAIN = 60.0  # seconds between two lines about it

Address = tuple[str, int]
Members = list[tuple[str, str]]  # (id, address of its store) by rank


class Client:
    """What this worker knows of the run's membership. Thread-safe."""

    def __init__(
        self, host: str, port: int, store_port: int, fingerprint: dict[str, Any], over: Callable[[], bool]
    ) -> None:
        """`over`: asked now and then while the coordinator is away, whether it is so because the run is complete."""
        self.over = over
        self.where = (host, port)
        self.id = uuid.uuid4().hex[:12]
        self.name = os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}"
        self.address = ""  # ours, as the coordinator's network sees it
        self.step = -1
        self.busy = False  # at work on something that makes no steps for a while
        self.opened = 0  # the newest generation we have heard of
        self.hard = 0  # groups older than this one are broken
        self.group: tuple[int, Members] = (0, [])  # the newest published
        self.complete = False
        self._left = False
        self.on_hard: Callable[[], None] = lambda: None
        self._hello = {"protocol": PROTOCOL, "id": self.id, "name": self.name, "fingerprint": fingerprint}
        self._store_port = store_port
        self._acked = 0
        self._waiting = True  # for the next group: we are in none
        self._error: RekindleError | None = None
        self._socket: socket.socket | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    def agree(self, current: int, step: int, give_up: Callable[[], bool]) -> tuple[int, Members] | None:
        """Wait for the members of a generation after `current`; None if `give_up()` says so meanwhile, or it is over.

        Raises ConfigError if the coordinator refuses this worker, RekindleError if it has given up the run.
        """
        self.step = step
        if not self._thread.ident:  # only now are we ready: the others would wait for us from our registration on
            self._thread.start()
        with self._changed:
            self._waiting = True
            while not (self.complete or give_up()):
                if self._error:
                    raise self._error
                if self.opened > current and self._acked < self.opened:
                    self._acked = self.opened
                    self.send({"ack": self.opened, "step": step})
                generation, members = self.group
                if generation == self.opened > current and self.id in [id for id, _ in members]:
                    self._waiting = False
                    return self.group
                self._changed.wait()  # `wake` for whoever makes give_up() true
        return None

    @property
    def doomed(self) -> bool:
        """Whether we must end with an error, which `agree` and `wait_complete` raise."""
        return self._error is not None

    def fault(self, generation: int) -> None:
        """A collective of that generation failed. Heard by nobody, it is said again by the next hello: we wait."""
        with self._changed:
            self._waiting = True
            self.send({"fault": generation})

    def wake(self) -> None:
        """Let those who wait look again."""
        with self._changed:
            self._changed.notify_all()

    def wait_complete(self, current: int, seconds: float) -> bool:
        """Wait until the run is complete (True) or a generation after `current` is open, at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self.complete or self._error or self.opened > current, seconds)
            if self._error:
                raise self._error
            return self.complete

    def send(self, message: dict[str, Any]) -> None:
        """Tell the coordinator; it is lost if there is none (a reconnect says all that matters)."""
        with self._changed:
            try:
                if self._socket:
                    self._socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                self._socket = None  # the listening thread connects again

    def note(self, event: str, **fields: Any) -> None:
        """Something happened that the ledger should know, perhaps after we have left."""
        message = {"event": event, "name": self.name} | fields
        if self._left:
            with contextlib.suppress(OSError):
                tell(self.where, message)
        else:
            self.send(message)

    def leave(self) -> None:
        """We go on purpose: heard of no more, whatever else this process has to do before its end."""
        with self._changed:
            self.send({"leave": "SIGTERM"})
            self._left = True
            if self._socket:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)  # or the next beat would be nonsense
            self._socket = None

    def fail(self, message: str, code: int, *, temporary: bool) -> None:
        """Tell the coordinator, registered or not, why this process ends; unless it has told us to."""
        if not self._error:
            report(self.where, self.name, message, code, temporary=temporary)

    def _run(self) -> None:
        heard = said = time.monotonic()
        while not (self.complete or self.doomed or self._left):
            try:
                with connect(self.where) as connection:
                    self._listen(connection)
                heard = time.monotonic()
            except (OSError, ValueError, KeyError, TypeError) as error:
                if self._socket:
                    heard = time.monotonic()
                if (now := time.monotonic()) - heard > AWAY:
                    heard = now
                    self._ask_whether_over()
                    if now - said > COMPLAIN:
                        say(f"the coordinator at {self.where[0]}:{self.where[1]} does not answer: {error}")
                        said = now
            with self._changed:
                self._socket, self._acked = None, 0
            time.sleep(RETRY)

    def _ask_whether_over(self) -> None:
        over, wrong = False, None
        try:
            over = self.over()
        except ConfigError as error:  # the prefix is another run's, as the coordinator has found out before us
            wrong = error
        except RekindleError as error:
            return say(f"whether the run is complete is not known: {error}")
        with self._changed:
            self.complete, self._error = self.complete or over, self._error or wrong
            self._changed.notify_all()
        if self.doomed:
            self.on_hard()

    def _listen(self, connection: socket.socket) -> None:
        with self._changed:
            self.address = connection.getsockname()[0]
            group, members = self.group
            hello = {"address": f"{self.address}:{self._store_port}", "step": self.step, "generation": self.opened}
            hello |= {"group": 0 if self._waiting else group, "peers": [id for id, _ in members]}
            self._socket, self._acked = connection, 0  # an ack may have been meant for no connection at all
            self.send({"join": self._hello | hello})
        beat, pending = time.monotonic() + BEAT, b""
        while not self.doomed:
            if select.select([connection], [], [], max(0.0, beat - time.monotonic()))[0]:
                if not (data := connection.recv(1 << 18)):
                    return
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._hear(json.loads(line))
            if time.monotonic() >= beat:
                beat = time.monotonic() + BEAT
                self.send({"beat": self.step, "busy": self.busy})

    def _hear(self, message: dict[str, Any]) -> None:
        with self._changed:
            if "open" in message:
                self.opened = max(self.opened, message["open"])
                self.hard = max(self.hard, message["open"] if message["hard"] else 0)
            elif "members" in message:
                self.group = message["generation"], [(id, address) for id, address in message["members"]]
            elif "complete" in message:
                self.complete = True
            elif "refused" in message:
                self._error = ConfigError(message["refused"])
            elif "failed" in message:
                self._error = GivenUp(message["failed"])
                self._error.exit_code = message["code"]
            elif message.get("dropped") == "hung":
                self._end()
            elif "dropped" in message:
                say("this worker was silent and is no longer a member: it joins again")
            self._changed.notify_all()
        if message.get("hard") or self.doomed:
            self.on_hard()

    def _end(self) -> None:
        """The others go on without this process, whose main thread hangs: say where, and make room for the next."""
        say("this worker has made no step for too long and is dropped. Where each thread is:")
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(all_threads=True)
        os._exit(1)


def coordinator_address() -> Address | None:
    """Where the environment says that the coordinator is; None: there is none."""
    host = os.environ.get("MASTER_ADDR")
    return (host, int(os.environ.get("MASTER_PORT", PORT))) if host else None


def connect(where: Address, patience: float = 5.0) -> socket.socket:
    """A connection to the coordinator. Raises OSError."""
    # the pod's own address, or all local pods would be seen as 127.0.0.1
    connection = socket.create_connection(where, patience, (os.environ.get("POD_IP", ""), 0))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # a node that is cut off does not say so: what it does not take for so long (ms) ends the connection
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)
    return connection


def tell(where: Address, message: dict[str, Any], patience: float = 5.0) -> None:
    """Tell the coordinator something in a connection of its own: nobody need be registered. Raises OSError."""
    with connect(where, patience) as connection:
        connection.sendall(json.dumps(message).encode() + b"\n")


def report(
    where: Address, name: str, message: str, code: int, *, temporary: bool = False, patience: float = 5.0
) -> None:
    """Tell the coordinator why a worker ends."""
    try:
        tell(where, {"failed": message, "code": code, "name": name, "temporary": temporary}, patience)
    except OSError as error:
        say(f"the coordinator does not hear why {name} ends: {error}")
