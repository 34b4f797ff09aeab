"""The ledger of a training run: what happened to its workers and when, as events in the object store.

    <prefix>/<epoch ms>-<writer>-<number>.jsonl     one JSON object a line: {"t": unix seconds, "event": name, ...}

The leader of the run writes it (the coordinator, else rank 0), each process in segments of its own. An object cannot
be appended to, so the newest segment is rewritten until it is full. report.py lists the events. Nothing here delays or
ends a training: while the object store is unavailable, events wait in memory.
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

PERIOD = 5.0  # seconds until a step event is written
BURST = 0.3  # seconds until any other event is: events of one moment are written together
SEGMENT = 256 << 10  # bytes after which the next segment begins
WAITING = 20_000  # events kept while the object store is unavailable
THREADS = 8  # parallel reads
PATIENCE = 20.0  # seconds that the end of a process waits for an unavailable object store; a busy one may be slow

Event = dict[str, Any]


class Ledger:
    """Writes events from a thread. `open_store` is called there, and again if it fails."""

    def __init__(self, open_store: Callable[[], "Store"], prefix: str) -> None:
        self.prefix = prefix
        self._open, self._store = open_store, None
        self._writer = f"{time.time() * 1000:013.0f}-{uuid.uuid4().hex[:6]}"
        self._number = 0
        self._segment = bytearray()  # the newest one, from its start
        self._unwritten = False  # it has events that the object store lacks
        self._waiting: list[tuple[str, bytes]] = []  # (event, line) not yet in a segment
        self._dropped = 0
        self._latest = 0.0
        self._quiet_until = 0.0
        self._lock = threading.Lock()
        self._closing, self._urgent = threading.Event(), threading.Event()
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)

    def note(self, event: str, **fields: Any) -> None:
        """Record an event, now unless `t` says when. Returns at once and never raises."""
        with self._lock:
            self._latest = max(self._latest, time.time())  # a clock that is set back must not reorder events
            line = _line({"t": round(self._latest, 6), "event": event} | fields)
            self._waiting.append((event, line))
            if len(self._waiting) > WAITING:
                self._thin()
            if event != "step":
                self._urgent.set()
            if not self._thread.ident and not self._closing.is_set():
                self._thread.start()

    def close(self, patience: float | None = None) -> None:
        """Write the remaining events; retry for at most `patience` seconds (default: PATIENCE)."""
        patience = PATIENCE if patience is None else patience
        with self._lock:
            self._deadline = time.monotonic() + patience
            self._closing.set()
            self._urgent.set()
        if self._thread.ident:
            self._thread.join(patience)
        if self._waiting or self._unwritten:
            self._quiet_until = 0.0
            self._say(f"the last events of the ledger are not in the object store ({self.prefix})")

    def _thin(self) -> None:
        """Drop every second `step` event; if there are few of them, the oldest events."""
        steps = [at for at, (event, _) in enumerate(self._waiting) if event == "step"]
        dropped = set(steps[::2] if len(steps) > WAITING // 4 else range(WAITING // 4))
        self._waiting = [item for at, item in enumerate(self._waiting) if at not in dropped]
        self._dropped += len(dropped)

    def _run(self) -> None:
        while True:
            if not self._closing.is_set():
                self._urgent.wait(PERIOD)
            self._urgent.clear()
            ending = self._closing.wait(BURST)
            try:
                self._write()
            except Exception as error:  # of any kind: this thread must survive to write later events
                text = str(error) if isinstance(error, RekindleError) else repr(error)
                self._say(f"the ledger waits for the object store: {text}")
                if ending and time.monotonic() < self._deadline:
                    time.sleep(0.2)  # the wait above returns at once when closing
                    continue
            if ending:
                return

    def _write(self) -> None:
        while self._take():
            self._store = self._store or self._open()
            # a copy: a failed request may still reference its body, and a referenced bytearray cannot grow
            whole = bytes(self._segment)
            self._store.put(f"{self.prefix}/{self._writer}-{self._number:05d}.jsonl", whole)
            self._unwritten = False
            if len(self._segment) >= SEGMENT:
                self._number, self._segment = self._number + 1, bytearray()

    def _take(self) -> bool:
        """Move waiting events to the segment until it is full; returns whether there is anything to write."""
        with self._lock:
            if self._dropped:
                fields = {"t": round(self._latest, 6), "event": "dropped", "events": self._dropped}
                self._waiting.append(("dropped", _line(fields)))
                self._dropped = 0
            count = 0
            while count < len(self._waiting) and len(self._segment) < SEGMENT:
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
    except (TypeError, ValueError):  # keys that are no strings, cycles: better odd than lost
        return json.dumps({"t": fields["t"], "event": fields["event"], "odd": repr(fields)}).encode() + b"\n"


def read(store: "Store", prefix: str) -> list[Event]:
    """All events below `prefix` by time, without duplicates; a last one, `skipped`, counts the invalid lines.

    Raises StorageError if the object store is unavailable. Without a ledger there are no events.
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
