"""Computes the cost of a training from the times in its ledger and the prices in its Tariff.

While no worker is alive, the cost of the coordinator counts as *queued*: the workers then wait for
nodes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from argolocal.common.wording import format_duration
from rekindle.training.cost.tariff import Tariff
from rekindle.training.ledger import sentences
from rekindle.training.ledger.ledger_summary import (
    LOST,
    TRAINED,
    WAITED,
    Incident,
    Interval,
    Summary,
    format_percent,
    merge_intervals,
)

COORDINATOR = "coordinator"
QUEUED = "queued"
USES = (TRAINED, WAITED, LOST, COORDINATOR, QUEUED)
PREEMPTION_KINDS = ("lost", "drain")  # kinds of incidents that spot nodes cause
# a better checkpoint interval is reported only if it saves at least this fraction of the training's
# cost
MIN_SAVED_SHARE = 0.01


@dataclass(frozen=True)
class IntervalComparison:
    """Compares the mean time between durable checkpoints with the cheapest time, given how often
    this training lost workers.

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974:
    if a checkpoint takes C seconds and a worker is lost every M seconds on average, checkpoints
    every W seconds cost the fraction C/W + W/2M of the training time; the best W is √(2·C·M). A
    lost worker counts only if the training was then restored from a durable checkpoint. `seconds`
    is the mean time between checkpoints, and `best_seconds` is the best W.
    """

    losses: int
    repeated: int  # number of training steps that were repeated after a loss
    seconds: float
    best_seconds: float
    saved: float  # amount of money that the best checkpoint interval would have saved


@dataclass
class Bill:
    """The cost of a training, split by how the time was used, and split into spot nodes and
    on-demand nodes."""

    currency: str
    uses: dict[str, float] = field(default_factory=lambda: dict.fromkeys(USES, 0.0))
    spot: float = 0.0  # cost of the pods on spot nodes
    on_demand: float = 0.0  # cost of the pods on on-demand nodes
    preemptions: int = 0
    # cost of the time that workers waited after preemptions, a part of uses["waited"]
    waits: float = 0.0
    # estimated cost of the same training on on-demand nodes, without preemptions
    without_spot: float = 0.0
    checkpoint_interval: IntervalComparison | None = None

    @property
    def total(self) -> float:
        return self.spot + self.on_demand

    @property
    def losses(self) -> float:
        """Cost of the preemptions: lost work, and waiting for the next group."""
        return self.uses[LOST] + self.waits

    def amounts(self) -> dict[str, float]:
        """Return all amounts of the bill by name."""
        if self.spot:
            saved = {"without_spot": self.without_spot, "saved": self.without_spot - self.total}
        else:
            saved = {}

        losses = {"losses": self.losses} if self.preemptions else {}

        return {
            "total": self.total,
            **self.uses,
            "spot": self.spot,
            "on_demand": self.on_demand,
            **losses,
            **saved,
        }

    def as_json(self) -> dict[str, Any]:
        """Return the amounts and the currency. The key `checkpoints` exists only if work was
        restored from a durable checkpoint."""
        interval = self.checkpoint_interval
        if interval:
            more = {
                "checkpoints": {name: round(value, 9) for name, value in vars(interval).items()}
            }
        else:
            more = {}

        return (
            {"currency": self.currency}
            | {name: round(value, 9) for name, value in self.amounts().items()}
            | more
        )


def compute_bill(summary: Summary, tariff: Tariff) -> Bill:
    """Return the cost of a training. Raises ConfigError if a pod has no price."""
    bill = Bill(tariff.prices.currency, preemptions=summary.preemptions)

    pauses = merge_intervals(
        [
            Interval(item.t, _recovery_time(item), WAITED)
            for item in summary.incidents
            if item.kind in PREEMPTION_KINDS
        ]
    )

    for name, intervals in summary.intervals.items():
        is_spot = tariff.prices.is_spot(tariff.worker_pod(name))
        for interval in intervals:
            seconds = interval.end - interval.start
            _add_cost(bill, interval.kind, tariff.worker_cost(name, seconds), is_spot)
            avoidable = {WAITED: _overlap_s(interval, pauses), LOST: seconds}.get(
                interval.kind, 0.0
            )
            bill.waits += tariff.worker_cost(name, avoidable) if interval.kind == WAITED else 0.0
            bill.without_spot += tariff.worker_cost(name, seconds - avoidable, spot=False)

    if tariff.coordinator and summary.counts.get("coordinator"):
        busy = sum(
            end - start
            for start, end in merge_intervals(
                [i for worker in summary.intervals.values() for i in worker]
            )
        )
        for use, seconds in (
            (COORDINATOR, busy),
            (QUEUED, max(0.0, summary.ended - summary.began - busy)),
        ):
            cost = tariff.prices.pod_cost(tariff.coordinator, seconds)
            _add_cost(bill, use, cost, tariff.prices.is_spot(tariff.coordinator))
            bill.without_spot += tariff.prices.pod_cost(tariff.coordinator, seconds, spot=False)

    bill.checkpoint_interval = _compare_interval(summary, bill.uses[TRAINED] + bill.uses[LOST])
    return bill


def _add_cost(bill: Bill, use_name: str, cost: float, is_spot: bool) -> None:
    bill.uses[use_name] += cost
    if is_spot:
        bill.spot += cost
    else:
        bill.on_demand += cost


def _recovery_time(incident: Incident) -> float:
    """Return the time when both the training had resumed and the lost worker was replaced."""
    return max(incident.t, incident.resumed or incident.t, incident.back or incident.t)


def _overlap_s(interval: Interval, pauses: list[tuple[float, float]]) -> float:
    return sum(
        max(0.0, min(interval.end, end) - max(interval.start, start)) for start, end in pauses
    )


def _compare_interval(summary: Summary, cost: float) -> IntervalComparison | None:
    """Compare the actual time between durable checkpoints with the cheapest time. `cost`: cost of
    the part of the workers' time that counts as trained or lost."""
    restored = {
        item.resumed: item
        for item in summary.incidents
        if item.tier == "durable" and item.kind != "coordinator"
    }

    costs = [event["cost"] for event in summary.checkpoints if event.get("cost")]

    seconds = summary.training_seconds
    if not (restored and costs and seconds):
        return None

    checkpoint_s = sum(costs) / len(costs)
    loss_interval_s = seconds / len(restored)
    interval_s = seconds / len(summary.checkpoints)
    best_s = math.sqrt(2 * checkpoint_s * loss_interval_s)
    overheads = [
        checkpoint_s / value + value / (2 * loss_interval_s) for value in (interval_s, best_s)
    ]
    repeated = sum(item.repeated for item in restored.values())

    return IntervalComparison(
        len(restored), repeated, interval_s, best_s, cost * (overheads[0] - overheads[1])
    )


def build_report(summary: Summary, tariff: Tariff | None) -> dict[str, Any]:
    """Return the report of a training: its Summary as numbers and as sentences (`words`), and with
    a tariff also its `cost`."""
    bill = compute_bill(summary, tariff) if tariff and summary.intervals else None
    words = [*sentences.describe(summary), *(describe_bill(bill) if bill else ())]
    return {"words": words} | summary.as_json() | ({"cost": bill.as_json()} if bill else {})


def describe_bill(bill: Bill) -> Iterator[str]:
    """Yield sentences about the cost of a training."""
    uses = [
        (TRAINED, "trained"),
        (WAITED, "waited"),
        (LOST, "lost"),
        (QUEUED, "queued"),
        (COORDINATOR, "coordinator"),
    ]

    parts = ", ".join(
        f"{format_amount(bill.uses[use])} {word}" for use, word in uses if bill.uses[use]
    )
    yield f"The training cost {format_money(bill.total, bill.currency)}: {parts}."

    if bill.preemptions and bill.losses:
        count = f"{bill.preemptions} preemption{'s' * (bill.preemptions > 1)}"
        work = format_amount(bill.uses[LOST])
        waits = format_amount(bill.waits)
        losses = format_money(bill.losses, bill.currency)
        yield f"{count} cost {losses}: {work} of lost work and {waits} of waiting."

    if bill.spot:
        spot = format_money(bill.spot, bill.currency)
        without_spot = format_money(bill.without_spot, bill.currency)
        saved = bill.without_spot - bill.total
        effect = "saved" if saved >= 0 else "cost another"

        share = ""
        if bill.without_spot:
            share = f" ({format_percent(abs(saved) / bill.without_spot)})"

        yield (
            f"{spot} of it is for spot nodes. On demand and without preemptions, the training would"
            f" have cost {without_spot}: after all losses, spot nodes {effect}"
            f" {format_amount(abs(saved))}{share}."
        )

    interval = bill.checkpoint_interval
    if interval and interval.saved >= MIN_SAVED_SHARE * bill.total:
        times = "once" if interval.losses == 1 else f"{interval.losses} times"
        yield (
            f"{times.capitalize()}, the work was restored from the object store, and"
            f" {interval.repeated} steps were repeated. At this rate, a durable checkpoint every"
            f" {format_duration(interval.best_seconds)} (train.checkpoint_seconds) instead of every"
            f" {format_duration(interval.seconds)} would have saved about"
            f" {format_money(interval.saved, bill.currency)}."
        )


def format_money(value: float, currency: str) -> str:
    """Format an amount with its currency: `12.30 USD`, `0.0041 USD`."""
    return f"{format_amount(value)} {currency}"


def format_amount(value: float) -> str:
    """Format an amount with two digits, or with two significant digits below 0.1."""
    if value == 0 or abs(value) >= 0.1:
        return f"{value:,.2f}"
    return f"{value:.{1 - math.floor(math.log10(abs(value)))}f}"
