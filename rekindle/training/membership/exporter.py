"""What Prometheus may know of a training: GET / of the port REKINDLE_METRICS of its coordinator.

Read-only and without a secret, so a NetworkPolicy says who may connect (configs/platform/prometheus.yaml). All begins
anew with each coordinator.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rekindle.training.ledger.accounting import Accounts
from rekindle.training.ledger.report import LOST, TRAINED, WAITED
from rekindle.training.membership.machine import Membership

VARIABLE = "REKINDLE_METRICS"  # environment: the port; without it there is none
SECONDS = 5.0  # for a request to come
MAX_REQUESTS = 16  # at once
MAX_BYTES = 16 << 10  # of a request
EVENTS = ("lost", "drain", "join", "failed", "checkpoint")
KEPT = 1000  # steps whose times are remembered: what is repeated is newer


class Exporter(Collector):
    """Adds up the events of a training for whoever asks."""

    def __init__(self, membership: Membership) -> None:
        self.membership, self.accounts = membership, Accounts()
        self.loss: float | None = None
        self.requests = 0

    def note(self, event: str, **fields: Any) -> None:
        """An event of the ledger, or the newest loss."""
        if event == "loss":
            self.loss = float(fields["loss"])
        else:
            self.accounts.apply({"t": time.time(), "event": event} | fields)
            for points in (self.accounts.points, self.accounts.summary.points):
                del points[:-KEPT]

    async def serve(self, host: str | None, port: int) -> asyncio.Server:
        """Answer until the server is closed. Raises OSError if the port is taken."""
        return await asyncio.start_server(self._answer, host, port, limit=MAX_BYTES)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests += 1
        errors = (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
        try:
            with contextlib.suppress(*errors):
                if self.requests <= MAX_REQUESTS:
                    async with asyncio.timeout(SECONDS):
                        await reader.readuntil(b"\r\n\r\n")
                        body = self.text()
                        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
                        writer.write(f"{head}Content-Type: text/plain; version=0.0.4\r\n\r\n".encode() + body)
                        await writer.drain()
        finally:
            self.requests -= 1
            writer.close()

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """The metrics, as Prometheus' client asks a collector for them."""
        membership, summary = self.membership, self.accounts.summary
        training = len(membership.members) if membership.agreed else 0
        for name, about, value in (
            ("step", "Updates made.", max(0, membership.step)),
            ("steps", "Updates that the training has in all.", summary.run.get("steps")),
            ("loss", "Loss of the newest update that was reported.", self.loss),
            ("members", "Workers that train together.", training),
            ("workers", "Workers that are alive.", len(membership.alive)),
            ("generation", "Number of the newest group.", membership.group),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"rekindle_training_{name}", about, value=float(value))
        about = "Worker-seconds trained, waited, and lost for repeated work."
        seconds = GaugeMetricFamily("rekindle_training_worker_seconds", about, labels=["kind"])
        for kind, value in self._seconds().items():
            seconds.add_metric([kind], value)
        yield seconds
        events = CounterMetricFamily("rekindle_training_events", "What happened to workers.", labels=["event"])
        for name in EVENTS:
            events.add_metric([name], summary.counts.get(name, 0))
        yield events

    def _seconds(self) -> dict[str, float]:
        """By kind, up to now."""
        seconds: dict[str, float] = dict.fromkeys((TRAINED, WAITED, LOST), 0.0)
        now = time.time()
        for life in self.accounts.lives.values():
            for interval in life.intervals:
                newest = life.alive and interval is life.intervals[-1]
                seconds[interval.kind] += max(0.0, (now if newest else interval.end) - interval.start)
        return seconds
