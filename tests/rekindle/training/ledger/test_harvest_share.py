"""A user sees how much harvested workers (additional workers on idle capacity) have computed, and
how long the training would have taken without them."""

from typing import Any

import pytest

from rekindle.training.cost.bill import compute_bill, describe_bill
from rekindle.training.cost.pod_requests import PodRequests
from rekindle.training.cost.prices import Prices
from rekindle.training.cost.tariff import TrainingTariff
from rekindle.training.ledger.sentences import describe_summary
from tests.rekindle.training.cost.price_list import PRICES
from tests.rekindle.training.ledger.events import (
    make_generation,
    make_lost,
    make_start,
    make_step,
    summarize,
)

SPOT_WORKERS = {
    "Worker": PodRequests(cpus=1),
    "harvest": PodRequests(cpus=1, labels={"spot": "yes"}),
}


def harvested_join(t: float, name: str) -> tuple[Any, ...]:
    return (t, "join", {"worker": f"id-{name}", "name": name, "step": -1, "harvested": True})


# one worker makes 1 step per second; with a harvested worker, both make 2 steps per second
MEASURED = [
    *make_start("a-train-worker-0"),
    make_step(12, 10),
    harvested_join(22, "a-train-5d8f-x7k2p"),
    make_generation(22, 2, 20, "a-train-worker-0", "a-train-5d8f-x7k2p"),
    make_step(32, 40),
    make_lost(42, "a-train-5d8f-x7k2p", "silent"),
    make_generation(42, 3, 60, "a-train-worker-0"),
    (52, "complete", {"step": 70}),
]


def test_the_time_without_harvested_workers_follows_from_the_measured_speed() -> None:
    summary = summarize(*MEASURED)
    harvest = summary.harvest

    assert harvest
    assert harvest.is_measured
    assert harvest.worker_seconds == 20
    assert harvest.steps == 20, "half of the 40 steps of the group of two"
    assert harvest.seconds == 50
    assert harvest.seconds_without == pytest.approx(70)
    assert summary.as_json()["harvest"]["workers"] == ["a-train-5d8f-x7k2p"]
    assert summary.as_json()["workers"]["a-train-5d8f-x7k2p"]["harvested"]

    text = "\n".join(describe_summary(summary))
    assert "5d8f-x7k2p (harvested) was lost (silent for too long)" in text
    assert (
        "1 harvested worker trained for 20 worker-seconds and computed about 20 of the 70" in text
    )
    assert "would have taken an estimated 1 min 10 s instead of 50 s" in text
    assert "with the speed that was measured without them" in text


def test_without_a_measured_speed_the_others_compute_the_share_of_the_harvested_workers() -> None:
    workers = ["a-worker-0", "a-x7k2p", "a-y8l3q"]
    joins = [harvested_join(0, name) for name in workers[1:]]
    summary = summarize(
        (0, "coordinator", {"id": "c1"}),
        (0, "join", {"worker": "id-w", "name": workers[0], "step": -1}),
        *joins,
        make_generation(2, 1, 0, *workers),
        (2, "restored", {"step": 0, "tier": "none"}),
        make_step(7, 15),
        (12, "complete", {"step": 30}),
    )
    harvest = summary.harvest
    assert harvest
    assert not harvest.is_measured
    assert (harvest.steps, harvest.seconds, harvest.seconds_without) == (20, 10, 30)
    assert summarize(*make_start("a")).harvest is None
    never_trained = summarize(harvested_join(0, "a-x7k2p")).harvest
    assert never_trained
    assert (never_trained.steps, never_trained.seconds_without) == (0, 0)


def test_the_price_of_harvested_workers_on_demand_is_told() -> None:
    tariff = TrainingTariff(prices=Prices.parse(PRICES, "prices.yaml"), workers=SPOT_WORKERS)
    bill = compute_bill(summarize(*MEASURED), tariff)

    amounts = bill.amounts()
    assert (amounts["harvest"], amounts["harvest_on_demand"]) == (5, 20)
    assert (
        "The harvested workers cost 5.00 EUR of it; on demand, they would have cost 20.00."
        in describe_bill(bill)
    )
