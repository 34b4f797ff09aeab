"""Every second of every worker is counted once, as the right kind of time."""

import math
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rekindle.training.ledger.accounting import summarize_events
from rekindle.training.ledger.ledger_summary import (
    LOST_KIND,
    TRAINED_KIND,
    WAITED_KIND,
    LedgerSummary,
    merge_intervals,
)
from tests.rekindle.training.ledger.events import (
    make_generation,
    make_lost,
    make_start,
    make_step,
    summarize,
)


def list_worker_seconds(summary: LedgerSummary, name: str | None = None) -> tuple[float, ...]:
    return tuple(
        round(summary.compute_worker_seconds(kind, name), 6)
        for kind in (TRAINED_KIND, WAITED_KIND, LOST_KIND)
    )


def test_an_undisturbed_run_waits_only_until_all_workers_have_joined():
    summary = summarize(
        *make_start("a", "b"),
        make_step(3, 10),
        make_step(4, 20),
        (5, "complete", {"step": 30, "sha256": "f00d"}),
    )
    assert list_worker_seconds(summary) == (6, 4, 0)
    assert summary.state == "complete"
    assert summary.steps == 30
    assert summary.repeated == 0
    assert summary.sha256 == "f00d"
    assert summary.steps_per_second == 10
    assert summary.incidents == []


def test_a_broken_group_loses_the_time_since_its_last_step_but_no_step():
    summary = summarize(
        *make_start("a", "b"),
        make_step(3, 10),
        make_step(4, 20),
        make_lost(5.25, "b"),
        (5.25, "open", {"generation": 2, "hard": True}),
        make_generation(5.5, 2, 32, "a"),
        make_step(6.5, 37),
        (7.5, "complete", {"step": 42}),
    )

    # the 32nd step was made at second 5.2, because the worker makes 10 steps per second
    assert list_worker_seconds(summary, "a") == (3.2 + 2, 2 + 0.25, 0.05)
    assert list_worker_seconds(summary, "b") == (3.2, 2, 0.05)
    assert summary.repeated == 0
    (incident,) = summary.incidents

    assert incident.name == "b"
    assert incident.why == "connection"
    assert incident.resumed == 5.5
    assert incident.repeated == 0


def test_a_silent_worker_costs_everyone_the_time_until_it_is_dropped():
    summary = summarize(
        *make_start("a", "b", "c"),
        make_step(3, 10),
        make_step(4, 20),
        make_lost(6, "c", "silent"),
        (6, "open", {"generation": 2, "hard": True}),
        make_generation(6, 2, 21, "a", "b"),
        (7, "complete", {"step": 31}),
    )
    assert list_worker_seconds(summary)[2] == 5.7


def test_a_drain_finishes_its_step_and_loses_nothing():
    summary = summarize(
        *make_start("a", "b"),
        make_step(3, 10),
        (3.5, "open", {"generation": 2, "hard": False}),
        (3.7, "drain", {"worker": "id-b", "name": "b"}),
        make_generation(4, 2, 16, "a"),
        (5, "complete", {"step": 26}),
    )
    assert list_worker_seconds(summary, "a") == (1.6 + 1, 2 + 0.4, 0)
    assert list_worker_seconds(summary)[2] == 0
    assert summary.count_incidents("drain") == 1


def test_a_joining_worker_waits_and_costs_the_others_nothing():
    joining = (3, "join", {"worker": "id-b", "name": "b", "step": -1})
    summary = summarize(
        *make_start("a"),
        make_step(3, 10),
        joining,
        (3, "open", {"generation": 2, "hard": False}),
        make_generation(3.1, 2, 11, "a", "b"),
        (4.1, "complete", {"step": 21}),
    )
    assert list_worker_seconds(summary, "a") == (2.1, 2, 0)
    assert list_worker_seconds(summary, "b") == (1, 0.1, 0)
    assert [(i.kind, i.name) for i in summary.incidents] == [("join", "b")]


def test_when_all_workers_are_lost_the_work_since_the_restored_step_is_lost():
    second_attempt = [
        (10, "join", {"worker": f"new-{name}", "name": name, "step": -1}) for name in ("a", "b")
    ]
    summary = summarize(
        *make_start("a", "b"),
        *[make_step(t, 10 * (t - 2)) for t in range(3, 9)],
        make_lost(8.5, "a"),
        (8.5, "open", {"generation": 2, "hard": True}),
        make_lost(8.5, "b"),
        *second_attempt,
        make_generation(11, 3, 60, "a", "b"),
        (11, "restored", {"step": 35, "tier": "durable"}),
        make_step(12, 45),
        (13, "complete", {"step": 55}),
    )

    assert list_worker_seconds(summary) == (2 * (3.5 + 2), 2 * (2 + 1), 2 * 3)
    assert summary.repeated == 25
    assert summary.steps == 55
    assert [(i.repeated, i.resumed, i.back) for i in summary.incidents] == [(25, 11, 11)] * 2


def test_workers_that_do_not_return_to_a_restarted_coordinator_count_as_lost():
    summary = summarize(
        *make_start("a", "b"),
        make_step(3, 10),
        make_step(4, 20),
        (30, "coordinator", {"id": "c2"}),
        *[
            (30, "join", {"worker": "id-a", "name": "a", "step": 270}),
            (30, "open", {"generation": 2, "hard": False}),
        ],
        make_generation(30.1, 2, 270, "a"),
        (31.1, "complete", {"step": 280}),
    )

    assert list_worker_seconds(summary, "b") == (2, 2, 0)
    # step 270 was made at second 29
    assert list_worker_seconds(summary, "a") == (27 + 1, 2, 1.1)
    assert [(i.kind, i.name, i.why) for i in summary.incidents] == [
        ("coordinator", "c2", ""),
        ("lost", "b", "unseen"),
    ]


def test_a_killed_run_under_torchrun_continues_from_the_restored_step():
    names = ["rank0", "rank1"]

    def run(t: float, restored: int) -> list[tuple[Any, ...]]:
        joins = [(t, "join", {"worker": name, "name": name, "step": -1}) for name in names]
        return [
            *joins,
            make_generation(t, 1, -1, *names),
            (t, "restored", {"step": restored, "tier": "durable"}),
        ]

    second_attempt = [*run(60, 5), make_step(61, 15), (62, "complete", {"step": 25})]
    summary = summarize(*run(0, 0), make_step(1, 10), make_step(2, 20), *second_attempt)
    assert list_worker_seconds(summary) == (1 + 4, 0, 3)
    assert summary.repeated == 15
    assert [(i.kind, i.name, i.why, i.back) for i in summary.incidents] == [
        ("lost", name, "unseen", 60) for name in names
    ]


def test_a_trial_that_continues_after_a_pause_loses_nothing_until_it_is_killed():
    def run(t: float, restored: int) -> list[tuple[Any, ...]]:
        joined = (t, "join", {"worker": "rank0", "name": "rank0", "step": -1})
        return [
            joined,
            make_generation(t, 1, -1, "rank0"),
            (t, "restored", {"step": restored, "tier": "durable"}),
        ]

    paused = [*run(0, 0), make_step(1, 10), (2, "complete", {"step": 20})]
    continued = [*run(60, 20), make_step(61, 30)]
    summary = summarize(*paused, *continued, (62, "complete", {"step": 40}))

    assert list_worker_seconds(summary) == (4, 0, 0)
    assert summary.state == "complete"
    assert summary.repeated == 0
    assert summary.incidents == []

    summary = summarize(
        *paused, *continued, *run(70, 20), make_step(71, 30), (72, "complete", {"step": 40})
    )
    assert list_worker_seconds(summary) == (4, 0, 1)
    assert summary.repeated == 10
    assert [(incident.kind, incident.name) for incident in summary.incidents] == [("lost", "rank0")]


def test_a_group_that_survives_a_new_coordinator_trains_without_a_gap():
    summary = summarize(
        *make_start("a", "b"),
        make_step(3, 10),
        (20, "coordinator", {"id": "c2"}),
        make_step(21, 190),
        (22, "lost", {"worker": "id-b", "name": "id-b", "why": "silent"}),
        (22, "open", {"hard": True}),
        make_generation(22, 2, 195, "a"),
        (23, "complete", {"step": 205}),
    )
    assert list_worker_seconds(summary, "a") == (18 + 1.5 + 1, 2, 0.5)
    assert [(i.kind, i.name) for i in summary.incidents] == [("coordinator", "c2"), ("lost", "b")]


def test_workers_that_end_after_the_verdict_are_not_preemptions():
    failed_event = (4, "failed", {"name": "a", "message": "the gradient is not finite", "code": 78})
    verdict = (4, "verdict", {"code": 78, "message": "a: the gradient is not finite"})
    summary = summarize(
        *make_start("a", "b"),
        make_step(3, 10),
        failed_event,
        verdict,
        make_lost(4.1, "a"),
        make_lost(4.1, "b"),
    )
    assert summary.state == "failed"
    assert summary.code == 78
    assert summary.message == "a: the gradient is not finite"
    assert [incident.kind for incident in summary.incidents] == ["failed"]


def test_invalid_events_are_skipped_and_counted():
    invalid_events = [
        (3, "step", {"step": "many"}),
        (3, "step", {"step": math.inf}),
        (3, "step", {}),
    ]
    invalid_events += [(3, "checkpoint", {name: "many"}) for name in ("bytes", "seconds")]
    summary = summarize(*make_start("a"), *invalid_events, (3, "new", {}), (4, "complete", {}))
    assert summary.skipped == len(invalid_events)
    assert list_worker_seconds(summary) == (2, 2, 0)
    assert summary.counts["new"] == 1
    assert summary.as_json()["checkpoints"]["bytes"] == 0


NAMES = st.sampled_from("abcd")
EVENTS = st.one_of(
    st.builds(
        lambda n, i: {"event": "join", "worker": f"{n}{i}", "name": n}, NAMES, st.integers(0, 2)
    ),
    st.builds(
        lambda n, i: {"event": "lost", "worker": f"{n}{i}", "name": n}, NAMES, st.integers(0, 2)
    ),
    st.builds(
        lambda n, i: {"event": "drain", "worker": f"{n}{i}", "name": n}, NAMES, st.integers(0, 2)
    ),
    st.builds(lambda is_hard: {"event": "open", "hard": is_hard}, st.booleans()),
    st.builds(
        lambda m, s: {"event": "generation", "members": m, "step": s},
        st.lists(NAMES, unique=True),
        st.integers(-1, 50),
    ),
    st.builds(lambda s: {"event": "step", "step": s}, st.integers(0, 60)),
    st.builds(lambda s: {"event": "restored", "step": s}, st.integers(0, 60)),
    st.sampled_from([{"event": "coordinator"}, {"event": "failed", "name": "a"}]),
    st.sampled_from(
        [{"event": "verdict", "code": 1, "message": ""}, {"event": "complete", "step": 60}]
    ),
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 4), EVENTS), max_size=40))
def test_trained_waited_and_lost_add_up_to_the_time_alive_for_any_events(
    steps: list[tuple[int, dict[str, Any]]],
):
    t = 0
    events = []
    living = dict[str, int]()
    expected = 0
    unseen = False

    for pause, event in steps:
        t += pause
        events.append({"t": t, **event})

        match event["event"]:
            case "join" if event["worker"] not in living:
                unseen |= any(worker[0] == event["name"] and len(worker) > 1 for worker in living)
                # before this event, only the name of the worker was known, from the members of a
                # generation
                since = living.pop(event["name"], t)
                living.setdefault(event["worker"], since)
            case "lost" | "drain" if event["worker"] in living:
                expected += t - living.pop(event["worker"])
            case "coordinator":
                unseen = True
            case "generation":
                names = {worker[0] for worker in living}
                living.update({name: t for name in event["members"] if name not in names})
            case "verdict" | "complete":
                expected += sum(t - since for since in living.values())
                living.clear()

    expected += sum(t - since for since in living.values())
    summary = summarize_events(events)
    total = sum(
        summary.compute_worker_seconds(kind) for kind in (TRAINED_KIND, WAITED_KIND, LOST_KIND)
    )
    lives = summary.intervals.values()
    assert all(interval.start <= interval.end <= t for intervals in lives for interval in intervals)

    # the sum is exact; otherwise a lost worker would count as alive until its last event
    if not unseen:
        assert abs(total - expected) < 1e-6

    assert total <= expected + 1e-6
    by_process = sum(
        end - start for intervals in lives for start, end in merge_intervals(intervals)
    )
    assert by_process <= total + 1e-6
