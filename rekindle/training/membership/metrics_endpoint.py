"""Prometheus metrics of a training, which the coordinator serves at the path / on port
REKINDLE_METRICS.

The endpoint is read-only and does not authenticate clients, so a NetworkPolicy limits access
(configs/platform/prometheus.yaml). A new coordinator starts all metrics from zero.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rekindle.training.ledger.accounting import EventAccounting
from rekindle.training.ledger.event_types import check_event
from rekindle.training.ledger.ledger_summary import LOST_KIND, TRAINED_KIND, WAITED_KIND
from rekindle.training.membership.state_machine import MembershipStateMachine

REQUEST_TIMEOUT_S = 5.0
# maximum number of requests that the metrics endpoint serves at the same time
MAX_REQUESTS = 16
MAX_REQUEST_BYTES = 16 << 10
COUNTED_EVENTS = ("lost", "drain", "join", "failed", "checkpoint")
# number of recent steps whose completion times are stored; older steps are not needed, since a
# failure repeats only recent steps
MAX_STEP_TIMES = 1000


class MetricsExporter(Collector):
    """Counts the events of a training, and serves the counts to Prometheus."""

    def __init__(self, group_membership: MembershipStateMachine) -> None:
        self.membership = group_membership
        self.accounts = EventAccounting()
        self.loss: float | None = None
        self.active_requests = 0

    def note(self, event: str, **event_fields: Any) -> None:
        """Count an event of the ledger, or record the newest training loss. Raises ValueError for
        wrong fields."""
        checked_event = {"t": time.time(), "event": event} | event_fields
        check_event(checked_event)
        if event == "loss":
            self.loss = event_fields["loss"]
        # an event with `age_s` reports a step of a process that has ended, whose steps this
        # coordinator does not count
        elif "age_s" not in event_fields:
            self.accounts.apply(checked_event)
            for step_points in (self.accounts.points, self.accounts.summary.points):
                del step_points[:-MAX_STEP_TIMES]

    async def serve(self, host: str | None, port: int) -> asyncio.Server:
        """Start the HTTP server of the metrics and return the server. Raises OSError if the port is
        in use."""
        return await asyncio.start_server(self._answer, host, port, limit=MAX_REQUEST_BYTES)

    async def _answer(
        self, stream_reader: asyncio.StreamReader, stream_writer: asyncio.StreamWriter
    ) -> None:
        self.active_requests += 1
        connection_errors = (
            OSError,
            TimeoutError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
        )

        try:
            with contextlib.suppress(*connection_errors):
                if self.active_requests <= MAX_REQUESTS:
                    async with asyncio.timeout(REQUEST_TIMEOUT_S):
                        await stream_reader.readuntil(b"\r\n\r\n")
                        response_body = self.format_metrics()
                        response_head = (
                            "HTTP/1.1 200 OK\r\nContent-Length:"
                            f" {len(response_body)}\r\nConnection: close\r\n"
                        )
                        stream_writer.write(
                            f"{response_head}Content-Type: text/plain;"
                            " version=0.0.4\r\n\r\n".encode()
                            + response_body
                        )
                        await stream_writer.drain()
        finally:
            self.active_requests -= 1
            stream_writer.close()

    def format_metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the training (called by Prometheus' client)."""
        membership = self.membership
        ledger_summary = self.accounts.summary

        if membership.is_published:
            training_worker_count = len(membership.members)
        else:
            training_worker_count = 0

        for metric_name, metric_description, metric_value in (
            ("step", "Completed updates.", max(0, membership.step)),
            ("steps", "Total updates of the training.", ledger_summary.run.get("steps")),
            ("loss", "Loss of the newest reported update.", self.loss),
            ("members", "Workers that train together.", training_worker_count),
            ("workers", "Workers that are alive.", len(membership.alive_workers)),
            ("generation", "Number of the newest group.", membership.published_generation),
        ):
            if metric_value is not None:
                yield GaugeMetricFamily(
                    f"rekindle_training_{metric_name}",
                    metric_description,
                    value=float(metric_value),
                )

        metric_description = "Worker-seconds trained, waited, and lost for repeated work."
        worker_seconds_metric = GaugeMetricFamily(
            "rekindle_training_worker_seconds", metric_description, labels=["kind"]
        )
        for interval_kind, worker_seconds in self._sum_worker_seconds().items():
            worker_seconds_metric.add_metric([interval_kind], worker_seconds)

        yield worker_seconds_metric
        events_metric = CounterMetricFamily(
            "rekindle_training_events", "Events of the ledger, by kind.", labels=["event"]
        )
        for event_name in COUNTED_EVENTS:
            events_metric.add_metric([event_name], ledger_summary.counts.get(event_name, 0))

        yield events_metric

    def _sum_worker_seconds(self) -> dict[str, float]:
        """Return the worker-seconds until now by kind: trained, waited, lost."""
        seconds_by_kind: dict[str, float] = dict.fromkeys(
            (TRAINED_KIND, WAITED_KIND, LOST_KIND), 0.0
        )
        now_s = time.time()
        for process_timeline in self.accounts.timelines.values():
            for interval in process_timeline.intervals:
                is_open_interval = (
                    process_timeline.alive and interval is process_timeline.intervals[-1]
                )
                seconds_by_kind[interval.kind] += max(
                    0.0, (now_s if is_open_interval else interval.end) - interval.start
                )
        return seconds_by_kind
