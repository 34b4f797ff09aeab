"""Computes the cost of a training from the times in its ledger and the prices in its
TrainingTariff.

While no worker is alive, the cost of the coordinator counts as *queued*, because the workers then
wait for nodes. While neither a worker nor the coordinator is running, for example in a queue, a
training costs nothing.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from argolocal.common.wording import format_duration
from rekindle.training.cost.tariff import TrainingTariff
from rekindle.training.ledger import sentences
from rekindle.training.ledger.ledger_summary import (
    LOST_KIND,
    TRAINED_KIND,
    WAITED_KIND,
    Incident,
    LedgerSummary,
    TimeInterval,
    format_percent,
    merge_intervals,
)

COORDINATOR_TIME = "coordinator"
QUEUED_TIME = "queued"
TIME_USES = (TRAINED_KIND, WAITED_KIND, LOST_KIND, COORDINATOR_TIME, QUEUED_TIME)
# kinds of incidents in the ledger that spot nodes cause
PREEMPTION_KINDS = ("lost", "drain")
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
    # number of training steps that were repeated after a loss
    repeated: int
    seconds: float
    best_seconds: float
    # amount of money that the best checkpoint interval would have saved
    saved: float


@dataclass
class Bill:
    """The cost of a training, split by how the time was used, and split into spot nodes and
    on-demand nodes."""

    currency: str
    uses: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIME_USES, 0.0))
    # cost of the pods on spot nodes
    spot: float = 0.0
    # cost of the pods on on-demand nodes
    on_demand: float = 0.0
    preemptions: int = 0
    # cost of the time that workers waited after preemptions, a part of uses["waited"]
    waits: float = 0.0
    # estimated cost of the same training on on-demand nodes, without preemptions
    without_spot: float = 0.0
    # cost of the harvested workers; None without such workers
    harvest: float | None = None
    # cost of the same workers on on-demand nodes
    harvest_on_demand: float = 0.0
    # cost of the workers on demand that have replaced workers on spot nodes; None without them
    on_demand_workers: float | None = None
    # cost of the same workers on spot nodes; None if these have no price
    on_demand_workers_on_spot: float | None = None
    checkpoint_interval: IntervalComparison | None = None

    @property
    def total(self) -> float:
        return self.spot + self.on_demand

    @property
    def losses(self) -> float:
        """The cost of the preemptions, which consists of lost work and of waiting for the next
        group of workers."""
        return self.uses[LOST_KIND] + self.waits

    def amounts(self) -> dict[str, float]:
        """Return all amounts of the bill by name."""
        if self.spot:
            saved_amounts = {
                "without_spot": self.without_spot,
                "saved": self.without_spot - self.total,
            }
        else:
            saved_amounts = {}

        loss_amounts = {"losses": self.losses} if self.preemptions else {}
        harvest_amounts = (
            {}
            if self.harvest is None
            else {"harvest": self.harvest, "harvest_on_demand": self.harvest_on_demand}
        )

        on_demand_worker_amounts = {
            "on_demand_workers": self.on_demand_workers,
            "on_demand_workers_on_spot": self.on_demand_workers_on_spot,
        }

        return {
            "total": self.total,
            **self.uses,
            "spot": self.spot,
            "on_demand": self.on_demand,
            **loss_amounts,
            **harvest_amounts,
            **{
                name: amount
                for name, amount in on_demand_worker_amounts.items()
                if amount is not None
            },
            **saved_amounts,
        }

    def as_json(self) -> dict[str, Any]:
        """Return the amounts and the currency of the bill. The key `checkpoints` exists only if
        work was restored from a durable checkpoint."""
        interval_comparison = self.checkpoint_interval
        if interval_comparison:
            checkpoint_fields = {
                "checkpoints": {
                    field_name: round(field_value, 9)
                    for field_name, field_value in vars(interval_comparison).items()
                }
            }
        else:
            checkpoint_fields = {}

        return (
            {"currency": self.currency}
            | {
                field_name: round(field_value, 9)
                for field_name, field_value in self.amounts().items()
            }
            | checkpoint_fields
        )


def compute_bill(ledger_summary: LedgerSummary, tariff: TrainingTariff) -> Bill:
    """Return the cost of a training. Raises ConfigError if a pod has no price."""
    bill = Bill(tariff.prices.currency, preemptions=ledger_summary.preemptions)

    recovery_pauses = merge_intervals(
        [
            TimeInterval(incident.t, _find_recovery_time(incident), WAITED_KIND)
            for incident in ledger_summary.incidents
            if incident.kind in PREEMPTION_KINDS
        ]
    )

    for worker_name, worker_intervals in ledger_summary.intervals.items():
        worker_pod = tariff.find_worker_pod(worker_name)
        is_spot = not ledger_summary.is_on_demand(worker_name) and tariff.prices.is_spot(worker_pod)
        for interval in worker_intervals:
            interval_seconds = interval.end - interval.start
            _add_cost(
                bill,
                interval.kind,
                tariff.compute_worker_cost(worker_name, interval_seconds, is_spot),
                is_spot,
            )
            avoidable_seconds = {
                WAITED_KIND: _compute_overlap_s(interval, recovery_pauses),
                LOST_KIND: interval_seconds,
            }.get(interval.kind, 0.0)
            if interval.kind == WAITED_KIND:
                bill.waits += tariff.compute_worker_cost(worker_name, avoidable_seconds, is_spot)
            bill.without_spot += tariff.compute_worker_cost(
                worker_name, interval_seconds - avoidable_seconds, runs_on_spot=False
            )

    if tariff.coordinator and ledger_summary.counts.get("coordinator"):
        busy_seconds = sum(
            interval_end_s - interval_start_s
            for interval_start_s, interval_end_s in merge_intervals(
                [
                    time_interval
                    for process_intervals in ledger_summary.intervals.values()
                    for time_interval in process_intervals
                ]
            )
        )
        for time_use, interval_seconds in (
            (COORDINATOR_TIME, busy_seconds),
            (QUEUED_TIME, ledger_summary.coordinator_idle_seconds),
        ):
            cost = tariff.prices.compute_pod_cost(tariff.coordinator, interval_seconds)
            _add_cost(bill, time_use, cost, tariff.prices.is_spot(tariff.coordinator))
            bill.without_spot += tariff.prices.compute_pod_cost(
                tariff.coordinator, interval_seconds, runs_on_spot=False
            )

    _add_harvest_cost(bill, ledger_summary, tariff)
    _add_on_demand_worker_cost(bill, ledger_summary, tariff)
    bill.checkpoint_interval = _compare_checkpoint_interval(
        ledger_summary, bill.uses[TRAINED_KIND] + bill.uses[LOST_KIND]
    )
    return bill


def _add_harvest_cost(bill: Bill, ledger_summary: LedgerSummary, tariff: TrainingTariff) -> None:
    """Add the cost of the harvested workers, which is also a part of the other amounts."""
    for worker_name in ledger_summary.harvested:
        alive_seconds = ledger_summary.compute_alive_seconds(worker_name)
        bill.harvest = (bill.harvest or 0.0) + tariff.compute_worker_cost(
            worker_name, alive_seconds
        )
        bill.harvest_on_demand += tariff.compute_worker_cost(
            worker_name, alive_seconds, runs_on_spot=False
        )


def _add_on_demand_worker_cost(
    bill: Bill, ledger_summary: LedgerSummary, tariff: TrainingTariff
) -> None:
    """Add the cost of the workers on demand that have replaced workers on spot nodes, which is also
    a part of the other amounts."""
    for worker_name in ledger_summary.intervals:
        if not ledger_summary.is_on_demand(worker_name):
            continue

        alive_seconds = ledger_summary.compute_alive_seconds(worker_name)
        bill.on_demand_workers = (bill.on_demand_workers or 0.0) + tariff.compute_worker_cost(
            worker_name, alive_seconds, runs_on_spot=False
        )
        if tariff.has_spot_price(worker_name):
            bill.on_demand_workers_on_spot = (
                bill.on_demand_workers_on_spot or 0.0
            ) + tariff.compute_worker_cost(worker_name, alive_seconds, runs_on_spot=True)


def _add_cost(bill: Bill, time_use: str, cost: float, is_spot: bool) -> None:
    bill.uses[time_use] += cost
    if is_spot:
        bill.spot += cost
    else:
        bill.on_demand += cost


def _find_recovery_time(incident: Incident) -> float:
    """Return the time when both the training had resumed and the lost worker was replaced."""
    return max(incident.t, incident.resumed or incident.t, incident.back or incident.t)


def _compute_overlap_s(interval: TimeInterval, recovery_pauses: list[tuple[float, float]]) -> float:
    return sum(
        max(0.0, min(interval.end, pause_end_s) - max(interval.start, pause_start_s))
        for pause_start_s, pause_end_s in recovery_pauses
    )


def _compare_checkpoint_interval(
    ledger_summary: LedgerSummary, worker_cost: float
) -> IntervalComparison | None:
    """Compare the actual time between durable checkpoints with the cheapest time. `worker_cost`:
    cost of the time that the workers trained, including the time whose work was lost."""
    restored_incidents = {
        incident.resumed: incident
        for incident in ledger_summary.incidents
        if incident.tier == "durable" and incident.kind != "coordinator"
    }

    checkpoint_costs_s = [
        checkpoint_event["cost"]
        for checkpoint_event in ledger_summary.checkpoints
        if checkpoint_event.get("cost")
    ]

    training_seconds = ledger_summary.training_seconds
    if not (restored_incidents and checkpoint_costs_s and training_seconds):
        return None

    checkpoint_s = sum(checkpoint_costs_s) / len(checkpoint_costs_s)
    loss_interval_s = training_seconds / len(restored_incidents)
    interval_s = training_seconds / len(ledger_summary.checkpoints)
    best_interval_s = math.sqrt(2 * checkpoint_s * loss_interval_s)
    overhead_shares = [
        checkpoint_s / interval_seconds + interval_seconds / (2 * loss_interval_s)
        for interval_seconds in (interval_s, best_interval_s)
    ]
    repeated_steps = sum(incident.repeated for incident in restored_incidents.values())

    return IntervalComparison(
        len(restored_incidents),
        repeated_steps,
        interval_s,
        best_interval_s,
        worker_cost * (overhead_shares[0] - overhead_shares[1]),
    )


def build_report(ledger_summary: LedgerSummary, tariff: TrainingTariff | None) -> dict[str, Any]:
    """Return the report of a training: its summary as numbers and as sentences (`words`), and with
    a tariff also its `cost`."""
    bill = compute_bill(ledger_summary, tariff) if tariff and ledger_summary.intervals else None
    report_sentences = [
        *sentences.describe_summary(ledger_summary),
        *(describe_bill(bill) if bill else ()),
    ]
    return (
        {"words": report_sentences}
        | ledger_summary.as_json()
        | ({"cost": bill.as_json()} if bill else {})
    )


def describe_bill(bill: Bill) -> Iterator[str]:
    """Yield sentences about the cost of a training."""
    named_time_uses = [
        (TRAINED_KIND, "trained"),
        (WAITED_KIND, "waited"),
        (LOST_KIND, "lost"),
        (QUEUED_TIME, "queued"),
        (COORDINATOR_TIME, "coordinator"),
    ]

    cost_parts = ", ".join(
        f"{format_amount(bill.uses[time_use])} {use_word}"
        for time_use, use_word in named_time_uses
        if bill.uses[time_use]
    )
    yield f"The training cost {format_money(bill.total, bill.currency)}: {cost_parts}."

    if bill.preemptions and bill.losses:
        preemption_count_text = f"{bill.preemptions} preemption{'s' * (bill.preemptions > 1)}"
        lost_work_text = format_amount(bill.uses[LOST_KIND])
        waits_text = format_amount(bill.waits)
        losses_text = format_money(bill.losses, bill.currency)
        yield (
            f"{preemption_count_text} cost {losses_text}: {lost_work_text} of lost work and"
            f" {waits_text} of waiting."
        )

    if bill.spot:
        spot_text = format_money(bill.spot, bill.currency)
        without_spot_text = format_money(bill.without_spot, bill.currency)
        saved_amount = bill.without_spot - bill.total
        effect_words = "saved" if saved_amount >= 0 else "cost another"

        share_text = ""
        if bill.without_spot:
            share_text = f" ({format_percent(abs(saved_amount) / bill.without_spot)})"

        yield (
            f"{spot_text} of it is for spot nodes. On demand and without preemptions, the training"
            f" would have cost {without_spot_text}: after all losses, spot nodes {effect_words}"
            f" {format_amount(abs(saved_amount))}{share_text}."
        )

    if bill.harvest is not None:
        yield (
            f"The harvested workers cost {format_money(bill.harvest, bill.currency)} of it; on"
            f" demand, they would have cost {format_amount(bill.harvest_on_demand)}."
        )

    if bill.on_demand_workers is not None:
        sentence = (
            "The on-demand workers that replaced workers on spot nodes cost"
            f" {format_money(bill.on_demand_workers, bill.currency)} of it"
        )
        if bill.on_demand_workers_on_spot is not None:
            spot_text = format_amount(bill.on_demand_workers_on_spot)
            sentence += f"; on spot nodes, they would have cost {spot_text}"
        yield f"{sentence}."

    interval_comparison = bill.checkpoint_interval
    if interval_comparison and interval_comparison.saved >= MIN_SAVED_SHARE * bill.total:
        loss_count_text = (
            "once" if interval_comparison.losses == 1 else f"{interval_comparison.losses} times"
        )
        yield (
            f"{loss_count_text.capitalize()}, the work was restored from the object store, and"
            f" {interval_comparison.repeated} steps were repeated. At this rate, a durable"
            f" checkpoint every {format_duration(interval_comparison.best_seconds)}"
            " (train.checkpoint_seconds) instead of every"
            f" {format_duration(interval_comparison.seconds)} would have saved about"
            f" {format_money(interval_comparison.saved, bill.currency)}."
        )


def format_money(amount: float, currency: str) -> str:
    """Format an amount with its currency, such as `12.30 USD` or `0.0041 USD`."""
    return f"{format_amount(amount)} {currency}"


def format_amount(amount: float) -> str:
    """Format an amount of money with two digits, or with two significant digits below 0.1."""
    if amount == 0 or abs(amount) >= 0.1:
        return f"{amount:,.2f}"
    return f"{amount:.{1 - math.floor(math.log10(abs(amount)))}f}"
