"""The cost of a training is the sum of its parts, for every history of its workers."""

import math
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.training.cost.bill import Bill, compute_bill, describe_bill, format_amount
from rekindle.training.cost.pod_requests import PodRequests
from rekindle.training.cost.prices import Prices
from rekindle.training.cost.tariff import TrainingTariff
from rekindle.training.ledger.ledger_summary import (
    LOST_KIND,
    TRAINED_KIND,
    WAITED_KIND,
    merge_intervals,
)
from tests.rekindle.training.cost.price_list import PRICES
from tests.rekindle.training.ledger.events import (
    make_generation,
    make_lost,
    make_start,
    make_step,
    summarize,
)

SPOT = PodRequests(cpus=1, labels={"spot": "yes"})
REGULAR = PodRequests(cpus=1)


def make_tariff(
    workers: dict[str, PodRequests], coordinator: PodRequests | None = None
) -> TrainingTariff:
    return TrainingTariff(
        prices=Prices.parse(PRICES, "prices.yaml"), workers=workers, coordinator=coordinator
    )


def compute_events_bill(*lines: tuple[Any, ...], pod: PodRequests = SPOT) -> Bill:
    return compute_bill(summarize(*lines), make_tariff({"Worker": pod}))


@st.composite
def training_events(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Return the events of a training whose workers join, train and are lost at random times."""
    lines = [*make_start("a-worker-0", "b-1", "c-worker-1")]
    t = 2.0

    for number in range(2, draw(st.integers(2, 12))):
        t += draw(st.floats(0, 20))
        name = draw(st.sampled_from(["a-worker-0", "b-1", "c-worker-1"]))
        joining = (t, "join", {"worker": f"id-{name}", "name": name, "step": -1})

        event = draw(
            st.sampled_from(
                [
                    make_lost(t, name),
                    joining,
                    make_step(t, 3 * number),
                    make_generation(t, number, 2 * number, name),
                    (t, "coordinator", {"id": str(number)}),
                    (t, "open", {"generation": number, "hard": True}),
                    (t, "restored", {"step": number, "tier": "durable"}),
                    (t, "checkpoint", {"step": number, "cost": 0.5}),
                ]
            )
        )

        lines.append(event)

    return [*lines, *draw(st.sampled_from([[], [(t + 1, "complete", {"step": 99})]]))]


@given(training_events())
def test_all_uses_of_time_and_all_kinds_of_nodes_add_up_to_the_same_total(
    lines: list[tuple[Any, ...]],
):
    summary = summarize(*lines)
    bill = compute_bill(summary, make_tariff({"Worker": SPOT, "": REGULAR}, coordinator=REGULAR))
    workers = {name: 0.25 if "-worker-" in name else 1.0 for name in summary.intervals}

    for kind in (TRAINED_KIND, WAITED_KIND, LOST_KIND):
        assert bill.uses[kind] == pytest.approx(
            sum(p * summary.compute_worker_seconds(kind, name) for name, p in workers.items())
        )

    coordinator_cost = bill.uses["coordinator"] + bill.uses["queued"]
    assert coordinator_cost == pytest.approx(
        sum(end - begin for begin, end in merge_intervals([*chain(*summary.intervals.values())]))
        + summary.coordinator_idle_seconds
    )
    if summary.counts["coordinator"] == 1:
        assert coordinator_cost == pytest.approx(summary.ended - summary.began)
    assert (
        sum(bill.uses.values())
        == pytest.approx(bill.spot + bill.on_demand)
        == pytest.approx(bill.total)
    )

    assert min(bill.uses.values()) >= 0
    assert 0 <= bill.waits <= bill.uses[WAITED_KIND] + 1e-9
    figures = bill.as_json()
    assert figures["trained"] + figures["waited"] + figures["lost"] + figures[
        "coordinator"
    ] + figures["queued"] == (pytest.approx(figures["total"], abs=1e-8))


def test_the_report_of_a_training_without_losses_names_no_losses():
    bill = compute_events_bill(
        *make_start("a", "b"), make_step(3, 10), (6, "complete", {"step": 40})
    )
    assert bill.uses[TRAINED_KIND] == 2
    assert bill.uses[WAITED_KIND] == 1
    assert bill.total == 3
    assert bill.without_spot == 12
    assert list(describe_bill(bill)) == [
        "The training cost 3.00 EUR: 2.00 trained, 1.00 waited.",
        (
            "3.00 EUR of it is for spot nodes. On demand and without preemptions, the training"
            " would have cost 12.00 EUR: after all losses, spot nodes saved 9.00 (75 %)."
        ),
    ]
    assert not {"losses", "checkpoints"} & bill.as_json().keys()


def test_the_report_of_a_training_on_demand_names_no_spot_nodes():
    bill = compute_events_bill(
        *make_start("a"), make_step(3, 10), (4, "complete", {"step": 20}), pod=REGULAR
    )
    assert list(describe_bill(bill)) == ["The training cost 4.00 EUR: 2.00 trained, 2.00 waited."]
    assert not {"saved", "without_spot"} & bill.as_json().keys()


def test_losses_cost_the_lost_work_and_the_wait_for_the_next_group():
    second_attempt = [
        (10, "join", {"worker": f"new-{name}", "name": name, "step": -1}) for name in ("a", "b")
    ]
    bill = compute_events_bill(
        *make_start("a", "b"),
        *[make_step(t, 10 * (t - 2)) for t in range(3, 9)],
        (4, "checkpoint", {"step": 20, "cost": 0.01}),
        (6, "checkpoint", {"step": 35, "cost": 0.03}),
        make_lost(8.5, "a"),
        (8.5, "open", {"generation": 2, "hard": True}),
        make_lost(8.5, "b"),
        *second_attempt,
        make_generation(14, 3, 60, "a", "b"),
        (14, "restored", {"step": 35, "tier": "durable"}),
        make_step(15, 45),
        (16, "complete", {"step": 55}),
    )

    # 5.5 s of training, of which 3 s were repeated; the workers came back at 10 s and waited until
    # 14 s
    assert bill.uses[TRAINED_KIND] == 2 * 5.5 / 4
    assert bill.uses[LOST_KIND] == 2 * 3 / 4
    assert bill.uses[WAITED_KIND] == 2 * 6 / 4

    assert bill.waits == 2 * 4 / 4
    assert bill.losses == 2 * 7 / 4
    assert bill.without_spot == 2 * 5.5 + 2 * 2
    checkpointing = bill.checkpoint_interval
    assert checkpointing
    assert checkpointing.losses == 1
    assert checkpointing.repeated == 25
    # the workers trained for 8.5 s, with one loss and two checkpoints: one checkpoint of 0.02 s per
    # 4.25 s
    best = math.sqrt(2 * 0.02 * 8.5)
    rate = 2 * 8.5 / 4
    assert checkpointing.seconds == 4.25
    assert checkpointing.best_seconds == pytest.approx(best)
    assert checkpointing.saved == pytest.approx(
        rate * (0.02 / 4.25 + 4.25 / 17 - 0.02 / best - best / 17)
    )

    assert list(describe_bill(bill))[1:] == [
        "2 preemptions cost 3.50 EUR: 1.50 of lost work and 2.00 of waiting.",
        (
            "7.25 EUR of it is for spot nodes. On demand and without preemptions, the training"
            " would have cost 15.00 EUR: after all losses, spot nodes saved 7.75 (51.7 %)."
        ),
        (
            "Once, the work was restored from the object store, and 25 steps were repeated. At this"
            " rate, a durable checkpoint every 0.58 s (train.checkpoint_seconds) instead of every"
            " 4.2 s would have saved about 0.79 EUR."
        ),
    ]


def test_a_loss_restored_from_shared_memory_recommends_no_checkpoint_interval():
    new_join = (10, "join", {"worker": "new-a", "name": "a", "step": -1})
    bill = compute_events_bill(
        *make_start("a"),
        make_step(3, 10),
        (4, "checkpoint", {"step": 20, "cost": 0.01}),
        make_step(6, 40),
        make_lost(6.5, "a"),
        new_join,
        make_generation(11, 2, 60, "a"),
        (11, "restored", {"step": 38, "tier": "hot"}),
        (12, "complete", {"step": 55}),
    )

    assert bill.preemptions == 1
    assert bill.uses[LOST_KIND] > 0
    assert bill.checkpoint_interval is None


def test_a_worker_that_replaces_a_spot_worker_on_demand_is_charged_by_its_own_pod():
    summary = summarize(
        *make_start("x-train-worker-0"),
        make_step(3, 10),
        make_lost(4, "x-train-worker-0"),
        (5, "join", {"worker": "2", "name": "x-train-5d8f-abcde", "step": -1}),
        make_generation(6, 2, 20, "x-train-5d8f-abcde"),
        (6, "restored", {"step": 20, "tier": "hot"}),
        (8, "complete", {"step": 40}),
    )
    bill = compute_bill(summary, make_tariff({"Worker": SPOT, "": REGULAR}))
    assert bill.spot == 4 / 4
    assert bill.on_demand == 3


def test_the_workers_of_a_pod_with_several_gpus_share_its_cost():
    pod = PodRequests(devices={"gpu/gpu": 2})
    bill = compute_bill(
        summarize(*make_start("x-worker-0", "x-worker-0/1"), (3, "complete", {"step": 1})),
        make_tariff({"Worker": pod}),
    )
    # two GPUs for three seconds
    assert bill.total == 2 * 3


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.00"), (1234.5, "1,234.50"), (0.104, "0.10"), (0.0123, "0.012"), (-0.00123, "-0.0012")],
)
def test_small_amounts_keep_two_digits(value: float, text: str):
    assert format_amount(value) == text
