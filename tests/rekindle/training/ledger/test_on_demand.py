"""A user sees how long workers ran on spot nodes and on on-demand nodes, and what each cost."""

from typing import Any

import pytest

from rekindle.training.cost.bill import compute_bill, describe_bill
from rekindle.training.cost.pod_requests import PodRequests
from rekindle.training.cost.prices import Prices
from rekindle.training.cost.tariff import TrainingTariff
from rekindle.training.ledger.publish import compute_metrics
from rekindle.training.ledger.sentences import describe_summary
from tests.rekindle.training.cost.price_list import PRICES
from tests.rekindle.training.ledger.events import make_generation, make_lost, make_step, summarize

SPOT_NAME = "a-train-worker-0"
ON_DEMAND_NAME = "a-train-on-demand-5d8f-x7k2p"
PODS = {
    "on-demand": PodRequests(cpus=1),
    "Worker": PodRequests(cpus=1, labels={"spot": "yes"}),
}


def join(t: float, name: str, capacity: str) -> tuple[Any, ...]:
    return (
        t,
        "join",
        {"worker": f"id-{name}-{t}", "name": name, "step": -1, "capacity": capacity},
    )


def change(t: float, previous: int, workers: int) -> tuple[Any, ...]:
    return (t, "on_demand", {"workers": workers, "previous": previous, "seconds": 20.0})


# the worker on a spot node is lost; another worker trains until spot nodes are back
EVENTS = [
    (0, "coordinator", {"id": "c1", "created": 0}),
    (0, "run", {"workers": 1, "virtual_workers": 8, "steps": 100}),
    join(0, SPOT_NAME, "spot"),
    make_generation(0, 1, 0, SPOT_NAME),
    (0, "restored", {"step": 0, "tier": "none"}),
    make_step(10, 10),
    (10, "lost", {"worker": f"id-{SPOT_NAME}-0", "name": SPOT_NAME, "why": "connection"}),
    change(30, 0, 1),
    join(40, ON_DEMAND_NAME, "on-demand"),
    make_generation(40, 2, 10, ON_DEMAND_NAME),
    (40, "restored", {"step": 10, "tier": "durable"}),
    make_step(60, 30),
    join(60, SPOT_NAME, "spot"),
    change(80, 1, 0),
    (80, "drain", {"worker": f"id-{ON_DEMAND_NAME}-40", "name": ON_DEMAND_NAME, "step": 50}),
    make_generation(80, 3, 50, SPOT_NAME),
    make_step(80, 50),
    (90, "complete", {"step": 60}),
]


def test_explain_tells_why_on_demand_workers_came_and_how_long_they_ran() -> None:
    summary = summarize(*EVENTS)
    assert summary.capacity_seconds == {"spot": 40, "on-demand": 40}

    text = "\n".join(describe_summary(summary))
    assert "1 on-demand worker was requested, because spot nodes had been missing for 20 s" in text
    assert "1 on-demand worker was released, because workers had been on spot nodes" in text
    assert "on-demand-5d8f-x7k2p (on demand) left on request" in text
    assert (
        "Workers were alive for 40 worker-seconds on spot nodes, and for 40 worker-seconds on"
        " on-demand nodes." in text
    )

    report = summary.as_json()
    assert report["capacity_seconds"] == {"spot": 40, "on-demand": 40}
    assert [each["workers"] for each in report["on_demand_changes"]] == [1, 0]
    assert report["workers"][ON_DEMAND_NAME]["capacity"] == "on-demand"

    metrics = compute_metrics(summary, "workers")
    assert metrics["workers/on_demand_worker_seconds"] == 40
    assert metrics["workers/spot_worker_seconds"] == 40


def test_a_worker_of_the_job_is_queued_while_another_worker_replaces_it() -> None:
    summary = summarize(*EVENTS)
    assert summary.queued_by_worker[SPOT_NAME] == pytest.approx(50)
    assert summary.queued_by_worker.get(ON_DEMAND_NAME, 0.0) == 0


def test_the_bill_tells_what_the_on_demand_workers_cost_and_would_have_cost_on_spot_nodes() -> None:
    prices = Prices.parse(PRICES, "prices.yaml")
    bill = compute_bill(summarize(*EVENTS), TrainingTariff(prices=prices, workers=PODS))
    assert (bill.on_demand, bill.spot) == (pytest.approx(40), pytest.approx(10))
    assert (bill.on_demand_workers, bill.on_demand_workers_on_spot) == (
        pytest.approx(40),
        pytest.approx(10),
    )
    assert (
        "The on-demand workers that replaced workers on spot nodes cost 40.00 EUR of it; on spot"
        " nodes, they would have cost 10.00." in describe_bill(bill)
    )
    assert {"on_demand_workers", "on_demand_workers_on_spot"} <= bill.as_json().keys()


def test_an_on_demand_worker_is_never_charged_as_spot() -> None:
    # without the pod of the Deployment, the name does not tell the kind of node
    prices = Prices.parse(PRICES, "prices.yaml")
    workers = {"Worker": PODS["Worker"]}
    bill = compute_bill(summarize(*EVENTS), TrainingTariff(prices=prices, workers=workers))
    assert bill.on_demand == pytest.approx(40)


def test_a_training_without_replacements_does_not_mention_them() -> None:
    events = [event for event in EVENTS[:6] if event[1] != "on_demand"]
    summary = summarize(*events, make_lost(10, SPOT_NAME))
    assert summary.capacity_seconds == {"spot": 10}
    assert "on-demand" not in "\n".join(describe_summary(summary))
    prices = Prices.parse(PRICES, "prices.yaml")
    bill = compute_bill(summary, TrainingTariff(prices=prices, workers=PODS))
    assert "on_demand_workers" not in bill.as_json()
