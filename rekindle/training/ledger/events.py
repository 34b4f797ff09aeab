"""The ledger of a training run: the history of its workers, as events in the object store.

    <prefix>/<epoch ms>-<writer>-<number>.jsonl     one JSON object a line: {"t": unix seconds, "event": name, ...}

The coordinator writes it (without one, rank 0), each process in its own segments. Objects cannot be appended to, so the
newest segment is rewritten until it is full. report.py lists the events. The ledger never delays or ends a training:
while the object store is unavailable, events wait in memory.
"""

import json
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from rekindle.errors import RekindleError, say

if TYPE_CHECKING:
    from rekindle.storage import Store

STEP_DELAY_S = 5.0  # until step events are written
EVENT_DELAY_S = 0.3  # until other events are written, to combine events of the same moment
SEGMENT_BYTES = 256 << 10  # a segment of this size is full
MAX_WAITING = 20_000  # events kept while the object store is unavailable
THREADS = 8  # parallel reads
CLOSE_TIMEOUT_S = 20.0  # for an unavailable or slow object store at the end of a process

Event = dict[str, Any]


class Ledger:
    """Writes events in a thread, which also calls `open_store`, again if it fails."""

    def __init__(self, open_store: Callable[[], "Store"], prefix: str) -> None:
        self.prefix = prefix
        self._open, self._store = open_store, None
        self._writer = f"{time.time() * 1000:013.0f}-{uuid.uuid4().hex[:6]}"
        self._number = 0
        self._segment = bytearray()  # the whole newest segment
        self._unwritten = False  # the segment has events that the object store lacks
        self._waiting: list[tuple[str, bytes]] = []  # (event, line) not yet in a segment
        self._dropped = 0
        self._latest = 0.0
        self._quiet_until = 0.0
        self._lock = threading.Lock()
        self._closing, self._urgent = threading.Event(), threading.Event()
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)

    def note(self, event: str, **fields: Any) -> None:
        """Record an event, at the current time unless `t` is given. Returns immediately and never raises."""
        with self._lock:
            self._latest = max(self._latest, time.time())  # the clock may be set back: keep the order of events
            line = _line({"t": round(self._latest, 6), "event": event} | fields)
            self._waiting.append((event, line))
            if len(self._waiting) > MAX_WAITING:
                self._thin()
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
        if self._waiting or self._unwritten:
            self._quiet_until = 0.0
            self._say(f"the last events of the ledger are not in the object store ({self.prefix})")

    def _thin(self) -> None:
        """Drop every second `step` event, or the oldest events if `step` events are few."""
        steps = [index for index, (event, _) in enumerate(self._waiting) if event == "step"]
        dropped = set(steps[::2] if len(steps) > MAX_WAITING // 4 else range(MAX_WAITING // 4))
        self._waiting = [item for index, item in enumerate(self._waiting) if index not in dropped]
        self._dropped += len(dropped)

    def _run(self) -> None:
        while True:
            if not self._closing.is_set():
                self._urgent.wait(STEP_DELAY_S)
            self._urgent.clear()
            ending = self._closing.wait(EVENT_DELAY_S)
            try:
                self._write()
            except Exception as error:  # any: this thread must survive to write later events
                text = str(error) if isinstance(error, RekindleError) else repr(error)
                self._say(f"the ledger is waiting for the object store: {text}")
                if ending and time.monotonic() < self._deadline:
                    time.sleep(0.2)  # the wait above returns immediately after close()
                    continue
            if ending:
                return

    def _write(self) -> None:
        while self._fill_segment():
            self._store = self._store or self._open()
            # a copy: a failed request may still reference its body, and a referenced bytearray cannot grow
            whole = bytes(self._segment)
            self._store.put(f"{self.prefix}/{self._writer}-{self._number:05d}.jsonl", whole)
            self._unwritten = False
            if len(self._segment) >= SEGMENT_BYTES:
                self._number, self._segment = self._number + 1, bytearray()

    def _fill_segment(self) -> bool:
        """Move waiting events to the segment until it is full. Returns True if the segment must be written."""
        with self._lock:
            if self._dropped:
                fields = {"t": round(self._latest, 6), "event": "dropped", "events": self._dropped}
                self._waiting.append(("dropped", _line(fields)))
                self._dropped = 0
            count = 0
            while count < len(self._waiting) and len(self._segment) < SEGMENT_BYTES:
                self._segment += self._waiting[count][1]
                count += 1
            del self._waiting[:count]
            self._unwritten = self._unwritten or count > 0
            return self._unwritten

    def _say(self, text: str) -> None:
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + 60
            say(text)


def _line(fields: Event) -> bytes:
    try:
        return json.dumps(fields, default=str).encode() + b"\n"
    except (TypeError, ValueError):  # invalid keys or cycles: store the repr
        return json.dumps({"t": fields["t"], "event": fields["event"], "odd": repr(fields)}).encode() + b"\n"


def read(store: "Store", prefix: str) -> list[Event]:
    """Return all events below `prefix`, sorted by time and without duplicates; [] if the ledger does not exist.

    A last event `skipped` counts invalid and duplicate lines. Raises StorageError if the object store is unavailable.
    """
    keys = [entry.key for entry in store.list(f"{prefix}/") if entry.key.endswith(".jsonl")]
    with ThreadPoolExecutor(THREADS) as pool:
        lines = [line for data in pool.map(store.get, keys) for line in data.split(b"\n") if line.strip()]
    events, skipped = [], 0
    for line in dict.fromkeys(lines):
        event = _event(line)
        if event:
            events.append(event)
        else:
            skipped += 1
    skipped += len(lines) - len(set(lines))
    events.sort(key=lambda event: event["t"])
    if skipped:
        events.append({"t": events[-1]["t"] if events else 0.0, "event": "skipped", "lines": skipped})
    return events


def _event(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
        valid = isinstance(event["t"], int | float) and isinstance(event["event"], str)
    except (ValueError, KeyError, TypeError):
        return None
    return event if valid else None
