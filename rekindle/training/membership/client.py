"""The worker's side of the protocol between coordinator and workers: a thread that receives the
coordinator's messages, sends heartbeats and reconnects."""

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

from rekindle.errors import ConfigError, RekindleError, RunAborted, write_stderr
from rekindle.kubernetes_names import POD_IP, POD_NAME, REKINDLE_CAPACITY, REKINDLE_HARVESTED
from rekindle.training.membership import handshake
from rekindle.training.membership.protocol import (
    MAX_TEXT_CHARS,
    PROTOCOL_VERSION,
    Address,
    Members,
    Message,
    encode_message,
)
from rekindle.training.spec import Fingerprint

HEARTBEAT_INTERVAL_S = 0.2
# seconds between attempts to reach an unavailable coordinator
RETRY_INTERVAL_S = 0.1
# time between two checks whether the run is complete, while the coordinator is unavailable
COMPLETE_CHECK_INTERVAL_S = 5.0
# time between two log lines about an unavailable coordinator
LOG_INTERVAL_S = 60.0


class CoordinatorClient:
    """The connection of this worker to the coordinator, and the newest group that the coordinator
    has published. Thread-safe."""

    def __init__(
        self, host: str, port: int, fingerprint: Fingerprint, is_run_complete: Callable[[], bool]
    ) -> None:
        """`is_run_complete` is polled while the coordinator is unavailable, because the coordinator
        exits when the run is complete.

        Raises ConfigError if the run's secret is missing.
        """
        handshake.read_run_secret()
        self.is_run_complete = is_run_complete
        self.coordinator = (host, port)
        self.id = uuid.uuid4().hex[:12]
        self.name = os.environ.get(POD_NAME) or f"{socket.gethostname()}-{os.getpid()}"
        # address of this worker in the coordinator's network
        self.address = ""
        self.step = -1
        # True while this worker does work other than steps
        self.is_busy = False
        # the newest generation known to be open
        self.open_generation = 0
        # the newest generation that was opened with an abort, so that all groups with a lower
        # number are broken
        self.abort_generation = 0
        # number of the newest published generation, and its members
        self.published_group: tuple[int, Members] = (0, [])
        self.is_complete = False
        self._has_left = False
        self.on_abort: Callable[[], None] = lambda: None

        self._hello = {
            "protocol": PROTOCOL_VERSION,
            "id": self.id,
            "name": self.name,
            "fingerprint": fingerprint,
            "harvested": bool(os.environ.get(REKINDLE_HARVESTED)),
            "capacity": os.environ.get(REKINDLE_CAPACITY, ""),
        }

        # `put` messages that this worker has sent to the newest group; after a reconnect, the
        # worker sends them again
        self._sent_values: dict[str, Message] = {}
        # values of all members of the newest group
        self._values: dict[str, bytes] = {}
        self._acked_generation = 0
        # False while this worker is a member of a group
        self._waits_for_group = True
        self._error: RekindleError | None = None
        self._socket: socket.socket | None = None
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    def wait_for_group(
        self, current_generation: int, step: int, should_give_up: Callable[[], bool]
    ) -> tuple[int, Members] | None:
        """Wait until the coordinator publishes a generation after `current_generation` that
        includes this worker. Return None once `should_give_up()` is true or the run is complete.

        Raises ConfigError if the coordinator refuses this worker, RekindleError if it has aborted
        the run.
        """
        self.step = step
        # start the thread only now, because the other workers wait for this worker once it has
        # registered
        if not self._thread.ident:
            self._thread.start()

        with self._condition:
            self._waits_for_group = True
            while not (self.is_complete or should_give_up()):
                if self._error:
                    raise self._error

                if (
                    self.open_generation > current_generation
                    and self._acked_generation < self.open_generation
                ):
                    self._acked_generation = self.open_generation
                    self.send({"ack": self.open_generation, "step": step})

                published_generation, members = self.published_group
                if (
                    published_generation == self.open_generation > current_generation
                    and self.id in [member_id for member_id, _ in members]
                ):
                    self._waits_for_group = False
                    return self.published_group

                # `notify_waiters` must be called when should_give_up() becomes true, because this
                # wait does not poll
                self._condition.wait()

        return None

    @property
    def must_exit(self) -> bool:
        """True if this process must exit with an error; `wait_for_group` and `wait_until_complete`
        raise this error."""
        return self._error is not None

    def report_failure(self, generation_number: int) -> None:
        """Report that a collective of `generation_number` failed. If the message about the failure
        is lost, the next message `join` reports the failure, because it says that this worker waits
        for a group.
        """
        with self._condition:
            self._waits_for_group = True
            self.send({"fault": generation_number})

    def notify_waiters(self) -> None:
        """Wake all threads that wait for the coordinator, so that they check their condition
        again."""
        with self._condition:
            self._condition.notify_all()

    def wait_until_complete(self, current_generation: int, timeout_seconds: float) -> bool:
        """Wait at most `timeout_seconds` until the run is complete or a newer generation is
        open. Return True if the run is complete."""
        with self._condition:
            self._condition.wait_for(
                lambda: (
                    self.is_complete or self._error or self.open_generation > current_generation
                ),
                timeout_seconds,
            )
            if self._error:
                raise self._error
            return self.is_complete

    def send_value(self, generation_number: int, key: str, value_bytes: bytes) -> None:
        """Send a value to the other members of the group `generation_number`."""
        with self._condition:
            if generation_number == self.published_group[0]:
                self._values[key] = value_bytes
                self._sent_values[key] = {
                    "put": generation_number,
                    "key": key,
                    "value": base64.b64encode(value_bytes).decode(),
                }
                self.send(self._sent_values[key])

    def wait_for_values(
        self, generation_number: int, keys: list[str], timeout_seconds: float
    ) -> list[bytes]:
        """Wait until members of the group `generation_number` have sent values for `keys`, and
        return them. Raises RuntimeError."""
        with self._condition:
            if not self._condition.wait_for(
                lambda: (
                    self.has_values(generation_number, keys) or self._is_over(generation_number)
                ),
                timeout_seconds,
            ):
                raise RuntimeError(
                    f"no member has sent {' '.join(keys)} within {timeout_seconds:g} s"
                )
            if self._is_over(generation_number):
                raise RuntimeError(f"generation {generation_number} is over")
            return [self._values[value_key] for value_key in keys]

    def has_values(self, generation_number: int, keys: list[str]) -> bool:
        """Return True if the members of the group `generation_number` have sent values for all keys
        in `keys`."""
        return generation_number == self.published_group[0] and self._values.keys() >= set(keys)

    def find_value(self, generation_number: int, key: str) -> bytes | None:
        """Return the value that a member of the group `generation_number` has sent for `key`, or
        None if the value has not arrived, or a newer group is published."""
        with self._condition:
            if generation_number == self.published_group[0]:
                return self._values.get(key)
            return None

    def _is_over(self, generation_number: int) -> bool:
        return (
            self.abort_generation > generation_number
            or self.published_group[0] > generation_number
            or self.must_exit
        )

    def send(self, message: Message) -> None:
        """Send a message to the coordinator.

        While the coordinator is unavailable, the message is dropped, because after a reconnect the
        message `join` contains the current state.
        """
        with self._condition:
            try:
                if self._socket:
                    self._socket.sendall(encode_message(message))
            except OSError:
                # ignore the error, because the receiving thread reconnects
                self._socket = None

    def note(self, event: str, **event_fields: object) -> None:
        """Record an event in the ledger, even after `leave`."""
        event_message = {"event": event, "name": self.name} | event_fields
        if self._has_left:
            with contextlib.suppress(OSError):
                send_single_message(self.coordinator, event_message)
        else:
            self.send(event_message)

    def leave(self) -> None:
        """Tell the coordinator that this process leaves, and send no further heartbeats."""
        with self._condition:
            self.send({"leave": "SIGTERM"})
            self._has_left = True
            if self._socket:
                with contextlib.suppress(OSError):
                    # send no more messages, because the coordinator would reject a heartbeat after
                    # `leave` as invalid
                    self._socket.shutdown(socket.SHUT_WR)
            self._socket = None

    def report_error(self, message: str, exit_code: int, *, is_temporary: bool) -> None:
        """Report to the coordinator why this process ends, unless the coordinator has sent the
        error."""
        if not self._error:
            report_error(self.coordinator, self.name, message, exit_code, is_temporary=is_temporary)

    def _run(self) -> None:
        last_contact_s = last_log_s = time.monotonic()
        while not (self.is_complete or self.must_exit or self._has_left):
            try:
                with connect_to_coordinator(self.coordinator) as connection:
                    self._exchange_messages(connection)

                last_contact_s = time.monotonic()
            except (OSError, ValueError, KeyError, TypeError) as error:
                if self._socket:
                    last_contact_s = time.monotonic()

                now_s = time.monotonic()
                if now_s - last_contact_s > COMPLETE_CHECK_INTERVAL_S:
                    last_contact_s = now_s
                    self._check_run_complete()
                    if now_s - last_log_s > LOG_INTERVAL_S:
                        write_stderr(
                            f"the coordinator at {self.coordinator[0]}:{self.coordinator[1]} does"
                            f" not answer: {error}"
                        )
                        last_log_s = now_s

            with self._condition:
                self._socket = None
                self._acked_generation = 0

            time.sleep(RETRY_INTERVAL_S)

    def _check_run_complete(self) -> None:
        is_complete = False
        config_problem = None
        try:
            is_complete = self.is_run_complete()
        except ConfigError as error:
            # the output prefix belongs to another run, and the coordinator has exited for the same
            # reason
            config_problem = error
        except RekindleError as error:
            write_stderr(f"cannot find out whether the run is complete: {error}")
            return

        with self._condition:
            self.is_complete = self.is_complete or is_complete
            self._error = self._error or config_problem
            self._condition.notify_all()

        if self.must_exit:
            self.on_abort()

    def _exchange_messages(self, connection: socket.socket) -> None:
        with self._condition:
            self.address = connection.getsockname()[0]
            published_generation, members = self.published_group

            hello_message = {
                "address": self.address,
                "step": self.step,
                "generation": self.open_generation,
                "group": 0 if self._waits_for_group else published_generation,
                "peers": [member_id for member_id, _ in members],
            }

            # acknowledge the generation again, because an earlier `ack` may have been lost
            self._socket = connection
            self._acked_generation = 0
            self.send({"join": self._hello | hello_message})

            for value_message in self._sent_values.values():
                self.send(value_message)

        next_heartbeat_s = time.monotonic() + HEARTBEAT_INTERVAL_S
        pending_bytes = b""

        while not self.must_exit:
            wait_s = max(0.0, next_heartbeat_s - time.monotonic())
            readable_sockets, _, _ = select.select([connection], [], [], wait_s)
            if readable_sockets:
                received_bytes = connection.recv(1 << 18)
                if not received_bytes:
                    return

                *message_lines, pending_bytes = (pending_bytes + received_bytes).split(b"\n")
                for line in message_lines:
                    self._handle(json.loads(line))

            if time.monotonic() >= next_heartbeat_s:
                next_heartbeat_s = time.monotonic() + HEARTBEAT_INTERVAL_S
                self.send({"beat": self.step, "busy": self.is_busy})

    def _handle(self, message: Message) -> None:
        with self._condition:
            if "open" in message:
                self.open_generation = max(self.open_generation, message["open"])
                self.abort_generation = max(
                    self.abort_generation, message["open"] if message["hard"] else 0
                )
            elif "put" in message:
                if message["put"] == self.published_group[0]:
                    self._values[message["key"]] = base64.b64decode(message["value"])
            elif "members" in message:
                if message["generation"] != self.published_group[0]:
                    self._sent_values = {}
                    self._values = {}

                self.published_group = (
                    message["generation"],
                    [
                        (member_id, member_address)
                        for member_id, member_address in message["members"]
                    ],
                )
            elif "complete" in message:
                self.is_complete = True
            elif "refused" in message:
                self._error = ConfigError(message["refused"])
            elif "failed" in message:
                self._error = RunAborted(*message["failed"].splitlines())
                self._error.exit_code = message["code"]
            elif message.get("dropped") == "hung":
                self._exit_hung()
            elif "dropped" in message:
                write_stderr("this worker was silent and was dropped: it joins again")

            self._condition.notify_all()

        if message.get("hard") or self.must_exit:
            self.on_abort()

    def _exit_hung(self) -> None:
        """Print the stack of each thread and exit, because the main thread hangs."""
        write_stderr(
            "this worker has completed no step for too long and was dropped. Stack of each thread:"
        )
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(all_threads=True)
        os._exit(1)


def connect_to_coordinator(coordinator_endpoint: Address, timeout_s: float = 5.0) -> socket.socket:
    """Connect to the coordinator, and let both sides prove that they belong to this run. Raises
    OSError."""
    run_secret = handshake.read_run_secret()
    # bind to the pod's own address, because otherwise all pods of the local runner would appear as
    # 127.0.0.1
    connection = socket.create_connection(
        coordinator_endpoint, timeout_s, (os.environ.get(POD_IP, ""), 0)
    )
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # a peer that lost its network does not close the connection; the kernel closes it when data is
    # unacknowledged for 10,000 ms
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)

    try:
        handshake.authenticate_worker(connection, run_secret)
    except BaseException:
        connection.close()
        raise

    return connection


def send_single_message(
    coordinator_endpoint: Address, message: Message, timeout_s: float = 5.0
) -> None:
    """Send one message to the coordinator on a separate connection, without joining the group.
    Raises OSError."""
    with connect_to_coordinator(coordinator_endpoint, timeout_s) as connection:
        connection.sendall(encode_message(message))


def report_error(
    coordinator_endpoint: Address,
    worker_name: str,
    message: str,
    exit_code: int,
    *,
    is_temporary: bool = False,
    timeout_s: float = 5.0,
) -> None:
    """Report to the coordinator why a worker ends."""
    error_text = message.encode(errors="replace").decode()[-MAX_TEXT_CHARS:]
    try:
        send_single_message(
            coordinator_endpoint,
            {
                "failed": error_text,
                "code": exit_code,
                "name": worker_name,
                "temporary": is_temporary,
            },
            timeout_s,
        )
    except (OSError, ConfigError) as error:
        write_stderr(f"cannot report to the coordinator why {worker_name} ends: {error}")
