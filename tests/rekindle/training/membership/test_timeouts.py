"""Tests of the timeouts and limits of the membership: waiting for workers, signs of life, progress,
and places in the group."""

from collections.abc import Iterable
from typing import Any

import pytest

from argolocal.common.wording import join_first_names
from rekindle.training.membership.state_machine import (
    CrashCounter,
    MembershipStateMachine,
)
from tests.rekindle.training.membership.members import make_join_message, make_spec, publish_group


def select_events(membership: MembershipStateMachine, kind: str) -> list[dict[str, Any]]:
    return [event for event in membership.events if event["event"] == kind]


def join_workers(*workers: str, **settings: Any) -> MembershipStateMachine:
    """Return the membership of a run whose workers have all joined and acknowledged the group at
    time 0."""
    membership = MembershipStateMachine(make_spec(**settings))
    for worker in workers:
        membership.join(0, make_join_message(worker))
    for worker in workers:
        membership.acknowledge(0, worker, membership.generation, -1)
    return membership


def test_a_first_group_waits_one_second_for_the_configured_workers() -> None:
    membership = join_workers("a", "b", workers=3)
    assert not membership.has_quorum(0.9)
    assert not membership.lacks_workers
    assert not membership.unacknowledged_ids
    membership.tick(0.9)
    assert not membership.is_published
    membership.tick(1.0)
    assert membership.is_published
    assert membership.members == ["a", "b"]
    assert join_workers("a", "b", "c", workers=3).is_published, "no wait when all have joined"


def test_after_the_loss_of_all_workers_a_group_waits_for_as_many_workers_as_before() -> None:
    membership = publish_group("a", "b", workers=3)
    for worker in "ab":
        membership.remove(5, worker)
    membership.join(5, make_join_message("c"))
    membership.acknowledge(5, "c", 2, -1)
    membership.join(5, make_join_message("d"))
    assert not membership.is_published
    membership.acknowledge(5, "d", 2, -1)
    assert membership.is_published
    assert membership.members == ["c", "d"]


def test_after_repeated_groups_without_a_step_the_pause_doubles() -> None:
    membership = publish_group("a", "b", min_workers=1)
    pauses = []

    for generation in range(1, 14):
        membership.report_failure(2, "a", generation)
        for worker in "ab":
            membership.acknowledge(2, worker, generation + 1, -1)

        if not membership.is_published:
            pauses.append(round(membership.join_deadline - 2, 9))
            for worker in "ab":
                membership.heartbeat(membership.join_deadline, worker, -1)

            membership.tick(membership.join_deadline)

        assert membership.is_published

    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0], (
        "after the third, at most five seconds"
    )
    membership.heartbeat(9, "a", 1)
    assert membership.fruitless_groups == 0


def test_the_ledger_has_each_join_once_and_the_first_step() -> None:
    membership = join_workers("a", "b", workers=2)
    membership.join(
        1, make_join_message("a", generation=1, group=1, peers=["a", "b"])
    )  # the connection of this worker broke
    assert [(event["worker"], event["step"]) for event in select_events(membership, "join")] == [
        ("a", -1),
        ("b", -1),
    ]
    assert [
        (event["generation"], event["step"]) for event in select_events(membership, "generation")
    ] == [(1, -1)]
    membership.heartbeat(1, "a", 0)
    assert select_events(membership, "step") == [{"event": "step", "step": 0}]


def test_the_ledger_has_the_step_of_a_restored_state() -> None:
    membership = MembershipStateMachine(make_spec(workers=2))
    membership.join(0, make_join_message("a", step=7))
    membership.join(0, make_join_message("b", step=3))
    for worker in "ab":
        membership.acknowledge(0, worker, 1, 3)
    assert [event["step"] for event in select_events(membership, "generation")] == [7]


def test_the_ledger_gets_at_most_one_step_per_second() -> None:
    membership = publish_group("a", "b")
    for step, now in enumerate((1.0, 1.5, 1.9, 2.0, 2.9, 3.5), 1):
        membership.heartbeat(now, "a", step)
    assert [event["step"] for event in select_events(membership, "step")] == [1, 4, 6]


def test_a_member_that_missed_the_member_list_interrupts_the_others() -> None:
    membership = publish_group("a", "b", "c")
    membership.join(2, make_join_message("c", generation=1, group=0, peers=["a", "b", "c"]))
    assert membership.outbox == [(worker, {"open": 2, "hard": True}) for worker in "abc"]
    assert [
        (event["generation"], event["hard"]) for event in select_events(membership, "open")
    ] == [(2, True)]


def test_a_worker_that_joins_during_an_open_generation_receives_its_number() -> None:
    membership = MembershipStateMachine(make_spec())
    membership.join(0, make_join_message("a"))
    assert membership.outbox == [("a", {"open": 1, "hard": True})]
    membership.outbox.clear()
    membership.join(0, make_join_message("b"))
    assert membership.outbox == [("b", {"open": 1, "hard": True})]


def test_a_failure_report_counts_as_a_sign_of_life() -> None:
    membership = publish_group("a", "b", "c", min_workers=1)
    membership.report_failure(2, "a", 1)
    assert select_events(membership, "fault") == [{"event": "fault", "name": "a", "generation": 1}]
    membership.tick(2.5)
    assert list(membership.alive_workers) == ["a"]


def test_after_a_coordinator_restart_previous_members_have_priority() -> None:
    membership = MembershipStateMachine(make_spec(min_workers=1, max_workers=1, workers=1))
    membership.join(0, make_join_message("new"))
    membership.join(
        0, make_join_message("old", generation=5, group=0, peers=["old", "gone"], step=9)
    )
    for worker in ("new", "old"):
        membership.acknowledge(0.1, worker, membership.generation, 9)
    membership.tick(1.0)
    assert membership.members == ["old"]


def test_a_pause_of_the_coordinator_is_not_counted_against_workers() -> None:
    membership = publish_group("a", "b", hung_seconds=20)
    membership.remove(2, "b")
    membership.join(2, make_join_message("x", fingerprint={"torch": "3"}))
    membership.shift_times(30)
    membership.heartbeat(33, "a", -1)
    membership.join(33, make_join_message("x", fingerprint={"torch": "3"}))
    assert membership.verdict is None, "the refused worker has waited for one second"
    membership = publish_group("a", "b", "c", hung_seconds=20)
    membership.remove(2, "c")
    membership.acknowledge(2, "a", 2, -1)
    membership.heartbeat(2, "b", -1, is_busy=True)
    membership.shift_times(30)

    for now in (33, 52):
        for worker in "ab":
            membership.heartbeat(now, worker, -1)

        membership.tick(now)
        assert "b" in membership.alive_workers, "without the pause it hangs for 20 s"

    membership.tick(52.5)
    assert "b" not in membership.alive_workers


def test_a_group_without_steps_is_probed_after_hung_seconds() -> None:
    membership = publish_group("a", "b", hung_seconds=20)
    for now in (20, 21):  # the group of this worker was published at second 1
        for worker in "ab":
            membership.heartbeat(now, worker, -1)
        membership.tick(now)
        assert membership.is_published
    for worker in "ab":
        membership.heartbeat(21.1, worker, -1)
    membership.tick(21.1)
    assert not membership.is_published
    assert membership.log == [
        "no step for 20 s, although all workers are alive: probing each of them"
    ]


def test_a_silent_worker_is_dropped_after_silence_seconds() -> None:
    membership = publish_group("a", "b", silence_seconds=2)
    membership.heartbeat(3, "a", -1)
    # the group of this worker was published at second 1
    membership.tick(3)
    assert list(membership.alive_workers) == ["a", "b"]
    membership.tick(3.01)
    assert list(membership.alive_workers) == ["a"]


def test_a_group_may_exchange_sixteen_values_per_member() -> None:
    membership = publish_group("a", "b")
    for number in range(32):
        membership.forward_value("a", {"put": 1, "key": f"{number}", "value": ""})
    assert len(membership.values) == 32
    with pytest.raises(ValueError, match="more than 16 values"):
        membership.forward_value("a", {"put": 1, "key": "one more", "value": ""})
    membership.report_failure(2, "a", 1)
    for worker in "ab":
        membership.acknowledge(2, worker, 2, -1)
    assert membership.is_published
    assert not membership.values, "values belong to one group"


def test_a_restarted_coordinator_logs_when_all_members_are_back() -> None:
    membership = MembershipStateMachine(make_spec())
    about = {"generation": 5, "group": 5, "peers": ["a", "b", "c"], "step": 7}
    for worker in "ab":
        membership.join(0, make_join_message(worker, **about))
    assert membership.log == []
    membership.join(0, make_join_message("c", **about))
    assert membership.log == ["generation 5 continues, all 3 are connected again"]


def test_a_drain_waits_for_the_step_and_a_loss_interrupts_it() -> None:
    for reason, is_hard in (("drain", False), ("connection", True)):
        membership = publish_group("a", "b", "c")
        membership.remove(2, "b", reason)
        assert membership.outbox == [(worker, {"open": 2, "hard": is_hard}) for worker in "ac"]
        assert membership.events[0]["event"] == ("lost" if is_hard else "drain")
        membership.remove(2, "b", reason)
        assert len(membership.outbox) == 2, "already removed"


def test_errors_count_until_a_newer_step_and_once_per_member() -> None:
    counter = CrashCounter()
    assert [counter.record(name, -1, 1, member_count=2) for name in "abab"] == [1, 1, 2, 2]
    assert counter.record("a", 0, 1, member_count=2) == 3, "restoring a first state is not progress"
    assert counter.record("a", 1, 1, member_count=2) == 1
    assert counter.record("b", 1, 2, member_count=2) == 2, "another group is another error"


def test_a_long_list_of_names_is_truncated() -> None:
    names = [f"w{number}" for number in range(22)]
    assert join_first_names(names[:20], 20, " ") == " ".join(names[:20])
    assert join_first_names(names, 20, " ") == " ".join(names[:20]) + " and 2 more"


@pytest.mark.parametrize("probed", [True, False], ids=["probed", "joined"])
def test_a_probed_worker_has_thirty_seconds_and_others_have_hung_seconds(probed: bool) -> None:
    membership = publish_group("a", "b", "c", hung_seconds=60)
    opened = 61.1 if probed else 2.0
    if probed:
        send_heartbeats(membership, "abc", opened)
    else:
        membership.remove(opened, "c")

    assert not membership.is_published
    for worker in "ab" if probed else "a":
        membership.acknowledge(opened, worker, 2, -1)

    hung_member, last_time = ("c", opened + 30) if probed else ("b", opened + 60)
    send_heartbeats(membership, [*membership.alive_workers], last_time)
    assert hung_member in membership.alive_workers
    send_heartbeats(membership, [*membership.alive_workers], last_time + 0.1)
    assert hung_member not in membership.alive_workers
    assert (hung_member, {"dropped": "hung"}) in membership.outbox


def send_heartbeats(membership: MembershipStateMachine, workers: Iterable[str], now: float) -> None:
    for worker in workers:
        membership.heartbeat(now, worker, -1)
    membership.tick(now)


def test_a_run_without_workers_logs_that_it_waits() -> None:
    membership = publish_group("a", min_workers=1, workers=1)
    membership.remove(2, "a")
    for now in (3, 33):
        membership.tick(now)
    assert membership.log == ["training waits for workers: 0 alive, at least 1 required"]
