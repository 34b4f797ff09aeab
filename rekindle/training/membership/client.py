"""A worker's side of the coordinator's protocol: a thread that listens, sends heartbeats and reconnects."""

import base64
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

from rekindle.errors import ConfigError, RekindleError, RunAborted, say
from rekindle.training.membership import handshake
from rekindle.training.membership.protocol import MAX_TEXT, PROTOCOL, Address, Members, Message, encode

HEARTBEAT = 0.2  # seconds between heartbeats
RETRY = 0.1  # seconds between attempts to reach an unavailable coordinator
AWAY = 5.0  # seconds without a coordinator after which the run may be complete
COMPLAIN = 60.0  # seconds between two log lines about it


class Client:
    """What this worker knows of the run's membership. Thread-safe."""

    def __init__(self, host: str, port: int, fingerprint: dict[str, Any], run_complete: Callable[[], bool]) -> None:
        """`run_complete` is polled while the coordinator is unavailable: it may have exited because of that.

        Raises ConfigError if the run has no secret.
        """
        handshake.run_secret()
        self.run_complete = run_complete
        self.coordinator = (host, port)
        self.id = uuid.uuid4().hex[:12]
        self.name = os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}"
        self.address = ""  # ours, as the coordinator's network sees it
        self.step = -1
        self.busy = False  # working on something that makes no steps for a while
        self.opened = 0  # the newest generation that we know of
        self.immediate = 0  # groups older than this generation are broken
        self.group: tuple[int, Members] = (0, [])  # the newest published
        self.complete = False
        self._left = False
        self.on_immediate: Callable[[], None] = lambda: None
        self._hello = {"protocol": PROTOCOL, "id": self.id, "name": self.name, "fingerprint": fingerprint}
        self._ours: dict[str, Message] = {}  # what we tell the members of the newest group
        self._values: dict[str, bytes] = {}  # what all of them tell each other
        self._acked = 0
        self._waiting = True  # for the next group, in none now
        self._error: RekindleError | None = None
        self._socket: socket.socket | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    def wait_for_group(self, current: int, step: int, give_up: Callable[[], bool]) -> tuple[int, Members] | None:
        """Wait for the members of a generation after `current`; None if `give_up()`, or the run is complete.

        Raises ConfigError if the coordinator refuses this worker, RekindleError if it has given up the run.
        """
        self.step = step
        if not self._thread.ident:  # not earlier: from our registration on the others would wait for us
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
                self._changed.wait()  # whoever makes give_up() true calls `wake`
        return None

    @property
    def must_exit(self) -> bool:
        """Whether this process must exit with an error, which `wait_for_group` and `wait_complete` raise."""
        return self._error is not None

    def report_failure(self, generation: int) -> None:
        """A collective of that generation failed. If the message is lost, the next `join` says it again."""
        with self._changed:
            self._waiting = True
            self.send({"fault": generation})

    def wake(self) -> None:
        """Make waiting threads check their condition again."""
        with self._changed:
            self._changed.notify_all()

    def wait_complete(self, current: int, seconds: float) -> bool:
        """Wait until the run is complete (True) or a generation after `current` is open, at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self.complete or self._error or self.opened > current, seconds)
            if self._error:
                raise self._error
            return self.complete

    def put(self, generation: int, key: str, value: bytes) -> None:
        """Tell the members of that generation's group."""
        with self._changed:
            if generation == self.group[0]:
                self._values[key] = value
                self._ours[key] = {"put": generation, "key": key, "value": base64.b64encode(value).decode()}
                self.send(self._ours[key])

    def values(self, generation: int, keys: list[str], seconds: float) -> list[bytes]:
        """What members of that generation's group have put, waited for. Raises RuntimeError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.has(generation, keys) or self._over(generation), seconds):
                raise RuntimeError(f"no member has told within {seconds:g} s what {' '.join(keys)} is")
            if self._over(generation):
                raise RuntimeError(f"generation {generation} is over")
            return [self._values[key] for key in keys]

    def has(self, generation: int, keys: list[str]) -> bool:
        """Whether members of that generation's group have put all of these."""
        return generation == self.group[0] and self._values.keys() >= set(keys)

    def _over(self, generation: int) -> bool:
        return self.immediate > generation or self.group[0] > generation or self.must_exit

    def send(self, message: Message) -> None:
        """Send to the coordinator; dropped if there is none (a reconnect repeats all that matters)."""
        with self._changed:
            try:
                if self._socket:
                    self._socket.sendall(encode(message))
            except OSError:
                self._socket = None  # the listening thread reconnects

    def note(self, event: str, **fields: Any) -> None:
        """Record an event in the ledger, also after we have left."""
        message = {"event": event, "name": self.name} | fields
        if self._left:
            with contextlib.suppress(OSError):
                send_once(self.coordinator, message)
        else:
            self.send(message)

    def leave(self) -> None:
        """Leave on purpose: no further heartbeat, whatever else this process does before it exits."""
        with self._changed:
            self.send({"leave": "SIGTERM"})
            self._left = True
            if self._socket:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)  # a heartbeat after it would be an invalid message
            self._socket = None

    def report_error(self, message: str, code: int, *, temporary: bool) -> None:
        """Tell the coordinator why this process ends, unless it told us to. Works unregistered, too."""
        if not self._error:
            report_error(self.coordinator, self.name, message, code, temporary=temporary)

    def _run(self) -> None:
        last_contact = last_complaint = time.monotonic()
        while not (self.complete or self.must_exit or self._left):
            try:
                with connect(self.coordinator) as connection:
                    self._listen(connection)
                last_contact = time.monotonic()
            except (OSError, ValueError, KeyError, TypeError) as error:
                if self._socket:
                    last_contact = time.monotonic()
                if (now := time.monotonic()) - last_contact > AWAY:
                    last_contact = now
                    self._check_complete()
                    if now - last_complaint > COMPLAIN:
                        say(f"the coordinator at {self.coordinator[0]}:{self.coordinator[1]} does not answer: {error}")
                        last_complaint = now
            with self._changed:
                self._socket, self._acked = None, 0
            time.sleep(RETRY)

    def _check_complete(self) -> None:
        complete, problem = False, None
        try:
            complete = self.run_complete()
        except ConfigError as error:  # the prefix is another run's: the coordinator ended for that reason
            problem = error
        except RekindleError as error:
            return say(f"whether the run is complete is not known: {error}")
        with self._changed:
            self.complete, self._error = self.complete or complete, self._error or problem
            self._changed.notify_all()
        if self.must_exit:
            self.on_immediate()

    def _listen(self, connection: socket.socket) -> None:
        with self._changed:
            self.address = connection.getsockname()[0]
            group, members = self.group
            hello = {"address": self.address, "step": self.step, "generation": self.opened}
            hello |= {"group": 0 if self._waiting else group, "peers": [id for id, _ in members]}
            self._socket, self._acked = connection, 0  # an earlier ack may have been lost
            self.send({"join": self._hello | hello})
            for message in self._ours.values():
                self.send(message)
        next_heartbeat, pending = time.monotonic() + HEARTBEAT, b""
        while not self.must_exit:
            if select.select([connection], [], [], max(0.0, next_heartbeat - time.monotonic()))[0]:
                if not (data := connection.recv(1 << 18)):
                    return
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._handle(json.loads(line))
            if time.monotonic() >= next_heartbeat:
                next_heartbeat = time.monotonic() + HEARTBEAT
                self.send({"beat": self.step, "busy": self.busy})

    def _handle(self, message: Message) -> None:
        with self._changed:
            if "open" in message:
                self.opened = max(self.opened, message["open"])
                self.immediate = max(self.immediate, message["open"] if message["hard"] else 0)
            elif "put" in message:
                if message["put"] == self.group[0]:
                    self._values[message["key"]] = base64.b64decode(message["value"])
            elif "members" in message:
                if message["generation"] != self.group[0]:
                    self._ours, self._values = {}, {}
                self.group = message["generation"], [(id, address) for id, address in message["members"]]
            elif "complete" in message:
                self.complete = True
            elif "refused" in message:
                self._error = ConfigError(message["refused"])
            elif "failed" in message:
                self._error = RunAborted(message["failed"])
                self._error.exit_code = message["code"]
            elif message.get("dropped") == "hung":
                self._exit_hung()
            elif "dropped" in message:
                say("this worker was silent and is no longer a member: joining again")
            self._changed.notify_all()
        if message.get("hard") or self.must_exit:
            self.on_immediate()

    def _exit_hung(self) -> None:
        """The others continue without this process, whose main thread hangs: print where, and exit."""
        say("this worker has made no step for too long and is dropped. Stack of each thread:")
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(all_threads=True)
        os._exit(1)


def connect(coordinator: Address, timeout: float = 5.0) -> socket.socket:
    """A connection to the coordinator, each having proved to the other that it is of this run. Raises OSError."""
    secret = handshake.run_secret()
    # bound to the pod's own address: otherwise all local pods would appear as 127.0.0.1
    connection = socket.create_connection(coordinator, timeout, (os.environ.get("POD_IP", ""), 0))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # a node that is cut off does not say so: data unacknowledged for so long (ms) ends the connection
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)
    try:
        handshake.introduce(connection, secret)
    except BaseException:
        connection.close()
        raise
    return connection


def send_once(coordinator: Address, message: Message, timeout: float = 5.0) -> None:
    """Send one message on a connection of its own, unregistered. Raises OSError."""
    with connect(coordinator, timeout) as connection:
        connection.sendall(encode(message))


def report_error(
    coordinator: Address, name: str, message: str, code: int, *, temporary: bool = False, timeout: float = 5.0
) -> None:
    """Tell the coordinator why a worker ends."""
    text = message.encode(errors="replace").decode()[-MAX_TEXT:]
    try:
        send_once(coordinator, {"failed": text, "code": code, "name": name, "temporary": temporary}, timeout)
    except (OSError, ConfigError) as error:
        say(f"the coordinator cannot be told why {name} ends: {error}")
