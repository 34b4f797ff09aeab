"""The membership's numbers and times: who is waited for and how long, what counts as life, as progress, as a place."""

from collections.abc import Iterable
from typing import Any

import pytest

from rekindle.training.membership.machine import CrashCounter, Membership, listed
from tests.rekindle.training.membership.test_server import config, hello, started


def of_kind(membership: Membership, kind: str) -> list[dict[str, Any]]:
    return [event for event in membership.events if event["event"] == kind]


def joined(*workers: str, **settings: Any) -> Membership:
    """A run whose workers have joined and acknowledged, all at 0."""
    membership = Membership(config(**settings))
    for worker in workers:
        membership.join(0, hello(worker))
    for worker in workers:
        membership.ack(0, worker, membership.generation, -1)
    return membership


def test_a_first_group_waits_one_second_for_the_configured_workers() -> None:
    membership = joined("a", "b", workers=3)
    assert not (membership.quorum(0.9) or membership.short or membership.missing)
    membership.tick(0.9)
    assert not membership.agreed
    membership.tick(1.0)
    assert membership.agreed and membership.members == ["a", "b"]
    assert joined("a", "b", "c", workers=3).agreed, "when all are there nothing is waited for"


def test_after_the_loss_of_all_workers_as_many_are_awaited_as_trained() -> None:
    membership = started("a", "b", workers=3)
    for worker in "ab":
        membership.lost(5, worker)
    membership.join(5, hello("c"))
    membership.ack(5, "c", 2, -1)
    membership.join(5, hello("d"))
    assert not membership.agreed
    membership.ack(5, "d", 2, -1)
    assert membership.agreed and membership.members == ["c", "d"]


def test_a_group_that_broke_without_a_step_too_often_waits_longer_each_time() -> None:
    membership = started("a", "b", min_workers=1)
    pauses = []
    for generation in range(1, 14):
        membership.report_failure(2, "a", generation)
        for worker in "ab":
            membership.ack(2, worker, generation + 1, -1)
        if not membership.agreed:
            pauses.append(round(membership.join_deadline - 2, 9))
            for worker in "ab":
                membership.heartbeat(membership.join_deadline, worker, -1)
            membership.tick(membership.join_deadline)
        assert membership.agreed
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0], "from the fourth on, at most five seconds"
    membership.heartbeat(9, "a", 1)
    assert membership.fruitless == 0


def test_the_ledger_says_who_joined_once_and_where_training_began() -> None:
    membership = joined("a", "b", workers=2)
    membership.join(1, hello("a", generation=1, group=1, peers=["a", "b"]))  # its connection broke
    assert [(event["worker"], event["step"]) for event in of_kind(membership, "join")] == [("a", -1), ("b", -1)]
    assert [(event["generation"], event["step"]) for event in of_kind(membership, "generation")] == [(1, -1)]
    membership.heartbeat(1, "a", 0)
    assert of_kind(membership, "step") == [{"event": "step", "step": 0}]


def test_a_restored_state_tells_the_ledger_its_step() -> None:
    membership = Membership(config(workers=2))
    membership.join(0, hello("a", step=7))
    membership.join(0, hello("b", step=3))
    for worker in "ab":
        membership.ack(0, worker, 1, 3)
    assert [event["step"] for event in of_kind(membership, "generation")] == [7]


def test_the_ledger_gets_one_step_a_second() -> None:
    membership = started("a", "b")
    for step, now in enumerate((1.0, 1.5, 1.9, 2.0, 2.9, 3.5), 1):
        membership.heartbeat(now, "a", step)
    assert [event["step"] for event in of_kind(membership, "step")] == [1, 4, 6]


def test_a_member_that_missed_the_list_of_its_group_stops_the_others_at_once() -> None:
    membership = started("a", "b", "c")
    membership.join(2, hello("c", generation=1, group=0, peers=["a", "b", "c"]))
    assert membership.outbox == [(worker, {"open": 2, "hard": True}) for worker in "abc"]
    assert [(event["generation"], event["hard"]) for event in of_kind(membership, "open")] == [(2, True)]


def test_who_comes_to_a_generation_that_is_open_learns_its_number() -> None:
    membership = Membership(config())
    membership.join(0, hello("a"))
    assert membership.outbox == [("a", {"open": 1, "hard": True})]
    membership.outbox.clear()
    membership.join(0, hello("b"))
    assert membership.outbox == [("b", {"open": 1, "hard": True})]


def test_a_failure_that_is_reported_is_a_sign_of_life() -> None:
    membership = started("a", "b", "c", min_workers=1)
    membership.report_failure(2, "a", 1)
    assert of_kind(membership, "fault") == [{"event": "fault", "name": "a", "generation": 1}]
    membership.tick(2.5)
    assert list(membership.alive) == ["a"]


def test_who_trained_before_the_coordinator_died_comes_before_a_newcomer() -> None:
    membership = Membership(config(min_workers=1, max_workers=1, workers=1))
    membership.join(0, hello("new"))
    membership.join(0, hello("old", generation=5, group=0, peers=["old", "gone"], step=9))
    for worker in ("new", "old"):
        membership.ack(0.1, worker, membership.generation, 9)
    membership.tick(1.0)
    assert membership.members == ["old"]


def test_a_pause_of_the_coordinator_is_nobodys_fault() -> None:
    membership = started("a", "b", hung_seconds=20)
    membership.lost(2, "b")
    membership.join(2, hello("x", fingerprint={"torch": "3"}))
    membership.exclude_pause(30)
    membership.heartbeat(33, "a", -1)
    membership.join(33, hello("x", fingerprint={"torch": "3"}))
    assert membership.verdict is None, "the refused have waited for a second"
    membership = started("a", "b", "c", hung_seconds=20)
    membership.lost(2, "c")
    membership.ack(2, "a", 2, -1)
    membership.heartbeat(2, "b", -1, busy=True)
    membership.exclude_pause(30)
    for now in (33, 52):
        for worker in "ab":
            membership.heartbeat(now, worker, -1)
        membership.tick(now)
        assert "b" in membership.alive, "it hangs for 20 s beside the pause"
    membership.tick(52.5)
    assert "b" not in membership.alive


def test_a_group_is_asked_only_after_the_seconds_that_are_set() -> None:
    membership = started("a", "b", hung_seconds=20)
    for now in (20, 21):  # its group was published at 1
        for worker in "ab":
            membership.heartbeat(now, worker, -1)
        membership.tick(now)
        assert membership.agreed
    for worker in "ab":
        membership.heartbeat(21.1, worker, -1)
    membership.tick(21.1)
    assert not membership.agreed and membership.log == [
        "no step for 20 s, though all workers live: asking each of them"
    ]


def test_a_silent_worker_is_dropped_only_after_the_seconds_that_are_set() -> None:
    membership = started("a", "b", silence_seconds=2)
    membership.heartbeat(3, "a", -1)
    membership.tick(3)  # its group was published at 1
    assert list(membership.alive) == ["a", "b"]
    membership.tick(3.01)
    assert list(membership.alive) == ["a"]


def test_sixteen_values_of_each_member_are_heard() -> None:
    membership = started("a", "b")
    for number in range(32):
        membership.exchange("a", {"put": 1, "key": f"{number}", "value": ""})
    assert len(membership.values) == 32
    with pytest.raises(ValueError, match="more than 16 values"):
        membership.exchange("a", {"put": 1, "key": "one more", "value": ""})
    membership.report_failure(2, "a", 1)
    for worker in "ab":
        membership.ack(2, worker, 2, -1)
    assert membership.agreed and not membership.values, "they belong to one group"


def test_a_restarted_coordinator_says_when_all_of_its_group_are_back() -> None:
    membership, about = Membership(config()), {"generation": 5, "group": 5, "peers": ["a", "b", "c"], "step": 7}
    for worker in "ab":
        membership.join(0, hello(worker, **about))
    assert membership.log == []
    membership.join(0, hello("c", **about))
    assert membership.log == ["generation 5 continues, all 3 are back"]


def test_a_drain_stops_nobody_at_once_and_a_loss_does() -> None:
    for why, hard in (("drain", False), ("connection", True)):
        membership = started("a", "b", "c")
        membership.lost(2, "b", why)
        assert membership.outbox == [(worker, {"open": 2, "hard": hard}) for worker in "ac"]
        assert membership.events[0]["event"] == ("lost" if hard else "drain")
        membership.lost(2, "b", why)
        assert len(membership.outbox) == 2, "it is gone already"


def test_errors_count_until_a_newer_step_and_once_for_each_member() -> None:
    counter = CrashCounter()
    assert [counter.record(name, -1, 1, members=2) for name in "abab"] == [1, 1, 2, 2]
    assert counter.record("a", 0, 1, members=2) == 3, "to restore a first state is no progress"
    assert counter.record("a", 1, 1, members=2) == 1
    assert counter.record("b", 1, 2, members=2) == 2, "another group is another error"


def test_many_names_are_cut_short() -> None:
    names = [f"w{number}" for number in range(22)]
    assert listed(names[:20]) == " ".join(names[:20])
    assert listed(names) == " ".join(names[:20]) + " and 2 more"


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "joined"])
def test_who_is_asked_has_half_a_minute_and_who_stops_a_step_has_the_time_that_is_set(asked: bool) -> None:
    membership = started("a", "b", "c", hung_seconds=60)
    opened = 61.1 if asked else 2.0
    if asked:
        live(membership, "abc", opened)
    else:
        membership.lost(opened, "c")
    assert not membership.agreed
    for worker in "ab" if asked else "a":
        membership.ack(opened, worker, 2, -1)
    hung, last = ("c", opened + 30) if asked else ("b", opened + 60)
    live(membership, [*membership.alive], last)
    assert hung in membership.alive
    live(membership, [*membership.alive], last + 0.1)
    assert hung not in membership.alive and (hung, {"dropped": "hung"}) in membership.outbox


def live(membership: Membership, workers: Iterable[str], now: float) -> None:
    for worker in workers:
        membership.heartbeat(now, worker, -1)
    membership.tick(now)


def test_a_run_without_workers_says_that_it_waits_for_one() -> None:
    membership = started("a", min_workers=1, workers=1)
    membership.lost(2, "a")
    for now in (3, 33):
        membership.tick(now)
    assert membership.log == ["training waits for workers: 0 of at least 1 are there"]
