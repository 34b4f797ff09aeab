"""The ledger of a training run: the history of its workers, as events in the object store.

    <prefix>/<epoch ms>-<writer>-<number>.jsonl

one JSON object per line: {"t": unix seconds, "event": name, ...}

The coordinator writes the ledger. If the run has no coordinator, the process with rank 0 writes it.
Each process that writes to the ledger creates its own objects (segments). An object store cannot
append to an object, so the process writes its newest segment again until the segment is full.
ledger_summary.py lists the events. The ledger never delays or ends a training: while the object
store is unavailable, events wait in memory.
"""

import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from argolocal.common.json_text import loads, to_json
from rekindle.errors import RekindleError, write_stderr
from rekindle.training.ledger.event_types import check_event

if TYPE_CHECKING:
    from rekindle.storage import Store

# delay in seconds until events `step` are written
STEP_DELAY_S = 5.0
# delay in seconds until other events are written, so that one request writes several events
EVENT_DELAY_S = 0.3
# size of a full segment in bytes
SEGMENT_BYTES = 256 << 10
# maximum number of events in memory while the object store is unavailable
MAX_WAITING_EVENTS = 20_000
READ_THREADS = 8
# time to write the last events of a process if the object store is unavailable or slow
CLOSE_TIMEOUT_S = 20.0

Event = dict[str, Any]


class Ledger:
    """Writes the events of a run to the object store in a background thread. The thread also calls
    `open_store`, and repeats the call if it fails."""

    def __init__(self, open_store: Callable[[], "Store"], key_prefix: str) -> None:
        self.prefix = key_prefix
        self._open_store = open_store
        self._store = None
        self._writer = f"{time.time() * 1000:013.0f}-{uuid.uuid4().hex[:6]}"
        self._number = 0
        # bytes of the newest segment
        self._segment = bytearray()
        # True if the object store lacks events of the segment
        self._has_unwritten = False
        # (event, line) not yet in a segment
        self._waiting_events: list[tuple[str, bytes]] = []
        self._dropped_count = 0
        self._latest_time = 0.0
        self._quiet_until = 0.0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._urgent = threading.Event()
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._write_until_closed, name="ledger", daemon=True)

    def note(self, event: str, *, age_s: float = 0.0, **event_fields: Any) -> None:
        """Record an event that happened `age_s` seconds ago, or at the time in the field `t`.

        `note` returns immediately and never raises.
        """
        with self._lock:
            # the times of events must not decrease when the clock is set back
            self._latest_time = max(self._latest_time, time.time())
            event_line = _encode_event(
                {"t": round(self._latest_time - _parse_age(age_s), 6), "event": event}
                | event_fields
            )
            self._waiting_events.append((event, event_line))

            if len(self._waiting_events) > MAX_WAITING_EVENTS:
                self._drop_events()
            if event != "step":
                self._urgent.set()
            if not self._thread.ident and not self._closing.is_set():
                self._thread.start()

    def close(self, timeout_s: float | None = None) -> None:
        """Write the remaining events; retry for at most `timeout_s` (default: CLOSE_TIMEOUT_S)."""
        timeout_s = CLOSE_TIMEOUT_S if timeout_s is None else timeout_s
        with self._lock:
            self._deadline = time.monotonic() + timeout_s
            self._closing.set()
            self._urgent.set()
        if self._thread.ident:
            self._thread.join(timeout_s)
        if self._waiting_events or self._has_unwritten:
            self._quiet_until = 0.0
            self._log_rarely(
                f"the last events of the ledger are not in the object store ({self.prefix})"
            )

    def _drop_events(self) -> None:
        """Drop every second `step` event, or the oldest events if `step` events are few."""
        step_event_indices = [
            index
            for index, (waiting_event, _) in enumerate(self._waiting_events)
            if waiting_event == "step"
        ]
        dropped_indices = set(
            step_event_indices[::2]
            if len(step_event_indices) > MAX_WAITING_EVENTS // 4
            else range(MAX_WAITING_EVENTS // 4)
        )
        self._waiting_events = [
            indexed_event
            for index, indexed_event in enumerate(self._waiting_events)
            if index not in dropped_indices
        ]
        self._dropped_count += len(dropped_indices)

    def _write_until_closed(self) -> None:
        while True:
            if not self._closing.is_set():
                self._urgent.wait(STEP_DELAY_S)

            self._urgent.clear()
            is_closing = self._closing.wait(EVENT_DELAY_S)

            try:
                self._write()
            # catch any exception, since the thread must survive to write later events
            except Exception as error:
                if isinstance(error, RekindleError):
                    error_text = str(error)
                else:
                    error_text = repr(error)

                self._log_rarely(f"the ledger is waiting for the object store: {error_text}")
                if is_closing and time.monotonic() < self._deadline:
                    # after `close`, the wait for the event returns at once, so wait here
                    time.sleep(0.2)
                    continue

            if is_closing:
                return

    def _write(self) -> None:
        while self._fill_segment():
            self._store = self._store or self._open_store()
            # the bytes are copied, because a failed request may still reference its body, and a
            # bytearray with references cannot grow
            segment_bytes = bytes(self._segment)
            self._store.put(f"{self.prefix}/{self._writer}-{self._number:05d}.jsonl", segment_bytes)
            self._has_unwritten = False
            if len(self._segment) >= SEGMENT_BYTES:
                self._number += 1
                self._segment = bytearray()

    def _fill_segment(self) -> bool:
        """Move waiting events to the segment until it is full. Return True if the segment has
        events that are not written yet."""
        with self._lock:
            if self._dropped_count:
                event_fields = {
                    "t": round(self._latest_time, 6),
                    "event": "dropped",
                    "events": self._dropped_count,
                }
                self._waiting_events.append(("dropped", _encode_event(event_fields)))
                self._dropped_count = 0

            moved_event_count = 0
            while (
                moved_event_count < len(self._waiting_events) and len(self._segment) < SEGMENT_BYTES
            ):
                self._segment += self._waiting_events[moved_event_count][1]
                moved_event_count += 1

            del self._waiting_events[:moved_event_count]
            self._has_unwritten = self._has_unwritten or moved_event_count > 0
            return self._has_unwritten

    def _log_rarely(self, log_text: str) -> None:
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + 60
            write_stderr(log_text)


def _parse_age(reported_age: object) -> float:
    """Return the age of an event that a worker has reported, or 0 if the age is not a positive
    number."""
    if isinstance(reported_age, int | float) and 0 < reported_age < float("inf"):
        return reported_age
    return 0.0


def _encode_event(event_fields: Event) -> bytes:
    try:
        return to_json(event_fields, default=str).encode() + b"\n"
    # JSON cannot encode some keys, or an event that contains itself
    except (TypeError, ValueError):
        return (
            to_json(
                {"t": event_fields["t"], "event": event_fields["event"], "odd": repr(event_fields)}
            ).encode()
            + b"\n"
        )


def read_events(store: "Store", key_prefix: str) -> list[Event]:
    """Return all events below `key_prefix`, sorted by time and without duplicates; [] if the ledger
    does not exist.

    If lines are duplicate, or are not events with fields of the right types, the list ends with an
    event `skipped`, which contains the number of these lines. Raises StorageError.
    """
    segment_keys = [
        segment_entry.key
        for segment_entry in store.list(f"{key_prefix}/")
        if segment_entry.key.endswith(".jsonl")
    ]
    with ThreadPoolExecutor(READ_THREADS) as thread_pool:
        event_lines = [
            line
            for segment_bytes in thread_pool.map(store.get, segment_keys)
            for line in segment_bytes.split(b"\n")
            if line.strip()
        ]

    ledger_events = []
    skipped_line_count = 0
    for line in dict.fromkeys(event_lines):
        event = _parse_event(line)
        if event:
            ledger_events.append(event)
        else:
            skipped_line_count += 1

    skipped_line_count += len(event_lines) - len(set(event_lines))
    ledger_events.sort(key=lambda event: event["t"])
    if skipped_line_count:
        ledger_events.append(
            {
                "t": ledger_events[-1]["t"] if ledger_events else 0.0,
                "event": "skipped",
                "lines": skipped_line_count,
            }
        )

    return ledger_events


def parse_events(segment_bytes: bytes) -> list[Event]:
    """Return the valid events of a segment, in the order in which they were written."""
    parsed_events = [_parse_event(line) for line in segment_bytes.split(b"\n") if line.strip()]
    return [event for event in parsed_events if event]


def _parse_event(event_line: bytes) -> Event | None:
    """Return the event in a line; None if the line is damaged or a field has a wrong type."""
    try:
        event = loads(event_line)
        check_event(event)
    except ValueError:
        return None
    return event
