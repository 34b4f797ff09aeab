"""Tests of the membership as a state machine: its reactions to joins, losses, errors and
restarts."""

import subprocess
import sys
from typing import Any

import pytest

from rekindle.training.membership.state_machine import (
    HANG_CHECK_TIMEOUT_S,
    MAX_CRASHES,
    MAX_FRUITLESS_GROUPS,
    REMINDER_INTERVAL_S,
    MembershipStateMachine,
)
from rekindle.training.spec import JOIN_TIMEOUT_S
from tests.rekindle.training.membership.members import make_join_message, make_spec, publish_group


def test_a_loss_interrupts_the_step_and_a_join_waits_for_it() -> None:
    membership = publish_group("a", "b", "c")
    membership.remove(2, "b")
    assert membership.outbox == [(worker, {"open": 2, "hard": True}) for worker in "ac"]
    membership = publish_group("a", "b", "c")
    membership.join(2, make_join_message("d"))
    assert ("a", {"open": 2, "hard": False}) in membership.outbox


def test_a_group_that_breaks_during_a_join_is_interrupted() -> None:
    membership = publish_group("a", "b", "c")
    membership.join(2, make_join_message("d"))
    membership.report_failure(2, "b", 1)
    assert ("a", {"open": 2, "hard": True}) in membership.outbox


def test_a_silent_worker_is_dropped_and_the_others_continue() -> None:
    membership = publish_group("a", "b", "c")
    for worker in "ab":
        membership.heartbeat(2.1, worker, -1)

    membership.tick(2.2)
    assert ("c", {"dropped": "silent"}) in membership.outbox

    assert {
        "event": "lost",
        "worker": "c",
        "name": "c",
        "why": "silent",
        "step": 0,
    } in membership.events

    for worker in "ab":
        membership.acknowledge(2.3, worker, 2, 1)

    assert membership.members == ["a", "b"]


def test_a_step_proves_that_members_are_alive_but_not_that_spares_are_alive() -> None:
    membership = publish_group("a", "b", "c", "d")
    membership.join(JOIN_TIMEOUT_S, make_join_message("e"))  # a spare
    for tenth in range(10, 60):
        membership.heartbeat(tenth / 10, "a", tenth)
        membership.tick(tenth / 10)
    assert membership.is_published
    assert sorted(membership.alive_workers) == ["a", "b", "c", "d"]
    membership.heartbeat(7, "a", 59)
    membership.tick(7)
    assert sorted(membership.alive_workers) == ["a"]


def test_no_worker_is_dropped_after_a_pause_of_the_coordinator() -> None:
    membership = publish_group("a", "b", "c")
    membership.shift_times(30)
    membership.tick(JOIN_TIMEOUT_S + 30)
    assert membership.is_published
    assert not membership.outbox


def test_a_hung_worker_is_dropped_and_informed() -> None:
    membership = publish_group("a", "b", "c")

    def live(now: float, busy: bool = False) -> None:
        for worker in membership.alive_workers:
            membership.heartbeat(now, worker, -1, busy)
        membership.tick(now)

    # the workers report that they are busy, as the worker that writes the model does
    live(20, busy=True)
    live(39)
    assert membership.is_published
    live(41)
    assert ("a", {"open": 2, "hard": True}) in membership.outbox

    for worker in "ab":
        membership.acknowledge(41, worker, 2, -1)

    live(41 + min(HANG_CHECK_TIMEOUT_S, 20) - 1)
    assert "c" in membership.alive_workers
    live(41 + min(HANG_CHECK_TIMEOUT_S, 20) + 1)
    assert ("c", {"dropped": "hung"}) in membership.outbox
    assert membership.members == ["a", "b"]


def test_no_worker_is_dropped_while_one_restores_a_large_state() -> None:
    membership = publish_group("a", "b", "c")
    # no worker acknowledges the group: a reads its state, and b and c wait for the state of a
    membership.join(1, make_join_message("d"))
    membership.acknowledge(1, "d", 2, -1)

    def live(since: int, until: int, busy: str = "") -> None:
        for now in range(since, until):
            for worker in membership.alive_workers:
                membership.heartbeat(now, worker, -1, worker in busy)
            membership.tick(now)

    live(1, 100, busy="a")
    assert set(membership.alive_workers) == set("abcd")
    assert not membership.must_abort
    # at this time, a hangs, but b and c do not
    live(100, 121)
    assert ("b", {"open": 2, "hard": True}) in membership.outbox

    for worker in "bc":
        membership.acknowledge(121, worker, 2, -1)

    live(121, 143)
    assert membership.is_published
    assert membership.members == ["b", "c", "d"]


def test_a_new_coordinator_adopts_the_existing_group() -> None:
    membership = MembershipStateMachine(make_spec())
    about = {"generation": 5, "group": 5, "peers": ["a", "b", "c"], "step": 7}
    for worker in "bac":
        membership.join(0, make_join_message(worker, **about))

    assert membership.is_published
    assert membership.generation == 5
    assert membership.members == ["a", "b", "c"]

    assert not membership.outbox
    membership = MembershipStateMachine(make_spec())

    for worker in "ba":  # c died with the coordinator; a and b notice its death in the next step
        membership.join(0, make_join_message(worker, **about))

    for worker in "ba":
        membership.report_failure(0.1, worker, 5)
        membership.acknowledge(0.1, worker, 6, 7)
        membership.heartbeat(1.2, worker, 7)

    membership.tick(1.2)
    assert membership.members == ["a", "b"]
    assert membership.generation == 6


def test_a_new_coordinator_skips_a_generation_number_that_may_be_published() -> None:
    membership = MembershipStateMachine(make_spec())
    membership.join(0, make_join_message("a", generation=5, group=0, peers=["a", "b"]))
    membership.join(0, make_join_message("b", generation=5, group=5, peers=["a", "b"]))
    assert membership.generation == 6
    assert not membership.is_published
    assert ("b", {"open": 6, "hard": True}) in membership.outbox


def test_a_new_coordinator_skips_the_generation_number_of_a_broken_group() -> None:
    run = MembershipStateMachine(make_spec(min_workers=1, max_workers=4))
    run.join(0.0, make_join_message("fresh"))
    assert run.generation == 1
    assert run.is_published is False
    run.join(
        0.1, make_join_message("old") | {"generation": 1, "group": 0, "peers": ["old", "gone"]}
    )
    asked = [
        message["open"] for worker, message in run.outbox if worker == "old" and "open" in message
    ]
    assert asked
    # the coordinator asks again; otherwise the worker and the coordinator would wait for each other
    assert asked[-1] > 1
    for worker in ("fresh", "old"):
        run.acknowledge(0.2, worker, run.generation, 3)
    run.tick(0.2 + JOIN_TIMEOUT_S)
    assert sorted(run.members) == ["fresh", "old"]


def test_groups_that_break_repeatedly_are_delayed_and_logged() -> None:
    membership = publish_group("a", "b")
    for generation in range(1, MAX_FRUITLESS_GROUPS + 2):
        membership.report_failure(2, "a", generation)
        for worker in "ab":
            membership.acknowledge(2, worker, generation + 1, -1)
    assert not membership.is_published
    assert "can the workers reach each other?" in membership.log[-1]
    for worker in "ab":
        membership.heartbeat(2.5, worker, -1)
    membership.tick(2.5)
    assert membership.is_published


def test_the_reason_for_a_wait_is_logged_at_intervals() -> None:
    membership = publish_group("a", "b", min_workers=2)
    membership.remove(2, "b")
    membership.acknowledge(2, "a", 2, -1)
    for second in range(2, 3 + int(2 * REMINDER_INTERVAL_S)):
        membership.heartbeat(second, "a", -1)
        membership.tick(second)
    assert membership.log == ["training waits for workers: 1 alive, at least 2 required"] * 2


def test_a_worker_with_another_protocol_is_refused_by_name() -> None:
    membership = publish_group("a", "b")
    membership.join(2, make_join_message("old", protocol=0))
    assert (
        'worker "old" is refused: its protocol is 0 and not' in membership.outbox[0][1]["refused"]
    )


def test_an_unavailable_service_does_not_count_as_a_crash() -> None:
    membership = publish_group("a", "b")
    for _ in range(2 * MAX_CRASHES):
        membership.report_error(
            "b", "s3://x: the object store cannot be used", 1, is_temporary=True
        )
    assert membership.verdict is None


def test_too_few_workers_wait_for_more() -> None:
    membership = publish_group("a", "b", "c")
    membership.remove(2, "b")
    membership.remove(2, "c")
    membership.acknowledge(2, "a", 2, 1)
    membership.tick(3)
    assert not membership.is_published
    membership.join(4, make_join_message("d"))
    membership.acknowledge(4, "d", 2, -1)
    assert membership.members == ["a", "d"]


def test_workers_beyond_max_workers_are_spares_until_one_is_lost() -> None:
    membership = publish_group("a", "b", "c", "d")
    membership.join(2, make_join_message("e"))
    assert membership.is_published
    assert {worker for worker, _ in membership.outbox} == {"e"}
    membership.remove(3, "a")
    for worker in "bcde":
        membership.acknowledge(3, worker, 2, 1)
    assert membership.members == ["b", "c", "d", "e"]


def test_crashes_count_only_without_progress_and_invalid_data_ends_the_run() -> None:
    membership = publish_group("a", "b")
    for step in range(5):
        membership.heartbeat(2, "a", step)
        membership.report_error("b", "boom", 1)
    assert membership.verdict is None
    membership.report_error("b", "boom", 1)
    membership.report_error("b", "boom", 1)
    assert membership.verdict == (1, "b (3 times without a newer step): boom")
    membership = publish_group("a", "b")
    membership.report_error("b", "no such column", 65)
    assert membership.verdict == (65, "b: no such column")


def test_one_fault_reported_by_all_workers_counts_once() -> None:
    membership = publish_group("a", "b", "c")
    for round in (1, 2):
        for worker in "abc":
            membership.report_error(worker, "no space left on the shared disk", 1)
            membership.remove(round, worker)
        assert membership.verdict is None
    membership.report_error("c", "no space left on the shared disk", 1)
    assert membership.verdict == (
        1,
        "c (3 times without a newer step): no space left on the shared disk",
    )


def test_crashes_of_workers_with_new_names_end_the_run() -> None:
    membership = MembershipStateMachine(make_spec(workers=1, min_workers=1))
    for worker in "abc":
        assert membership.verdict is None
        membership.report_error(worker, "boom", 1)
        # the state was restored, but no step was completed
        membership.step = 0
    assert membership.verdict


def test_after_a_restart_the_running_group_has_priority_over_an_early_worker_with_other_bits() -> (
    None
):
    membership = MembershipStateMachine(make_spec())
    membership.join(0, make_join_message("x", fingerprint={"torch": "3"}))
    about: dict[str, Any] = {"generation": 7, "group": 7, "peers": ["a", "b"], "step": 9}
    membership.join(0, make_join_message("a", **about))
    membership.join(0, make_join_message("b", **about))
    refused = {id: message["refused"] for id, message in membership.outbox if "refused" in message}
    assert list(refused) == ["x"]
    assert 'worker "x" is refused: its torch is 3 and not 2.' in refused["x"]
    assert membership.members == ["a", "b"] == list(membership.alive_workers)
    assert membership.is_published
    membership.join(1, make_join_message("x", fingerprint={"torch": "3"}))
    assert "refused" in membership.outbox[-1][1]


def test_a_worker_with_another_torch_build_is_refused_by_name() -> None:
    membership = publish_group("a", "b")
    membership.join(2, make_join_message("c", fingerprint={"torch": "3"}))
    (worker, message), *rest = membership.outbox
    assert worker == "c"
    assert not rest
    assert membership.is_published
    assert message["refused"].startswith('worker "c" is refused: its torch is 3 and not 2.')


def test_a_worker_lost_before_the_first_group_does_not_fix_the_fingerprint() -> None:
    membership = MembershipStateMachine(make_spec(workers=2))
    membership.join(0, make_join_message("x", fingerprint={"torch": "3"}))
    membership.remove(0, "x")
    for worker in "ab":
        membership.join(0, make_join_message(worker))
    for worker in "ab":
        membership.acknowledge(0, worker, membership.generation, -1)
    assert membership.members == ["a", "b"]
    for worker in "ab":
        membership.remove(1, worker)
    membership.join(2, make_join_message("x", fingerprint={"torch": "3"}))
    assert "refused" in membership.outbox[-1][1], "the bits are those of the first published group"


def test_on_mixed_nodes_the_config_chooses_the_kind_of_node_that_trains() -> None:
    chosen = {"instruction set": "x86_64 AVX512"}
    membership = MembershipStateMachine(make_spec(workers=2, fingerprint=chosen))
    membership.join(
        0, make_join_message("x", fingerprint={"torch": "2", "instruction set": "x86_64 AVX2"})
    )
    assert (
        "its instruction set is x86_64 AVX2 and not x86_64 AVX512"
        in membership.outbox[-1][1]["refused"]
    )
    for worker in "ab":
        membership.join(0, make_join_message(worker, fingerprint={"torch": "2"} | chosen))
    assert list(membership.alive_workers) == ["a", "b"]


def test_a_run_whose_workers_are_always_refused_ends_with_the_reason() -> None:
    membership = MembershipStateMachine(make_spec(min_workers=2, hung_seconds=20))
    membership.join(0, make_join_message("a"))
    for now in range(0, 30, 6):
        membership.heartbeat(now, "a", -1)
        membership.join(now, make_join_message(f"x{now}", name="pod-1", fingerprint={"torch": "3"}))
        assert (membership.verdict is not None) == (now > 20)
    assert membership.verdict
    code, text = membership.verdict
    assert code == 78
    assert text.startswith('worker "pod-1" is refused: its torch is 3 and not 2.')


def test_a_refused_worker_does_not_end_a_run_that_trains_without_it() -> None:
    membership = publish_group("a", "b")
    for now in range(2, 90):
        for worker in "ab":
            membership.heartbeat(now, worker, now)
        membership.join(now, make_join_message(f"x{now}", fingerprint={"torch": "3"}))
    assert membership.verdict is None
    assert membership.is_published
    assert membership.members == ["a", "b"]


@pytest.mark.parametrize(
    "claim",
    [
        {
            "generation": 10**12,
            "group": 10**12,
            "peers": ["x", "y", "z"],
            "fingerprint": {"torch": "2"},
        },
        {
            "generation": 10**12,
            "group": 10**12,
            "peers": ["x", "y", "z"],
            "fingerprint": {"torch": "3"},
        },
        {"generation": 10**12, "group": 0, "peers": ["a", "a", "a"]},
        {"generation": 2, "group": 2, "peers": ["x", "a", "x", "a"]},
        {"generation": 0, "group": 0, "peers": [], "step": 2**52},
    ],
    ids=["group", "bits", "waits", "twice", "steps"],
)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_false_claim_of_one_worker_does_not_stop_the_others(
    claim: dict[str, Any], restarted: bool
) -> None:
    if restarted:
        membership = MembershipStateMachine(make_spec(min_workers=2, max_workers=3))
    else:
        membership = publish_group("a", "b")

    membership.join(2, make_join_message("x", **claim))
    if not restarted and claim.get("fingerprint") != {"torch": "3"}:
        assert {"a", "b"} < set(membership.alive_workers)

    membership.remove(2.1, "x")
    for worker in "" if restarted else "ab":
        membership.heartbeat(3.2, worker, 7)

    # the invented members have been silent for so long that they are dropped
    membership.tick(3.2)
    opened = 1
    for worker in "ab" if restarted else "":
        membership.join(
            4, make_join_message(worker, generation=1, group=1, peers=["a", "b"], step=7)
        )

    for tenth in range(40, 90):
        now = tenth / 10
        for worker, message in membership.outbox:
            if "open" in message and worker in "ab" and worker in membership.alive_workers:
                opened = max(opened, message["open"])
                membership.acknowledge(now, worker, opened, 7)

        membership.outbox.clear()
        for worker in membership.alive_workers.keys() & {"a", "b"}:
            membership.heartbeat(now, worker, 7)

        membership.tick(now)

    assert membership.is_published
    assert set(membership.members) == {"a", "b"}
    assert membership.verdict is None

    assert membership.fingerprint == {"torch": "2"}


def test_only_members_of_the_current_group_exchange_values() -> None:
    membership = publish_group("a", "b", "c", "d")
    membership.join(2, make_join_message("e"))  # a spare
    membership.outbox.clear()

    put = {"put": 1, "key": "0", "value": "eA=="}
    for worker, message in (("e", put), ("a", put | {"put": 0}), ("a", put | {"put": 2})):
        membership.forward_value(worker, message)
        assert not membership.outbox
        assert not membership.values

    membership.forward_value("a", put)
    assert membership.outbox == [(worker, put) for worker in "bcd"]
    membership.outbox.clear()
    about = {"generation": 1, "group": 1, "peers": ["a", "b", "c", "d"]}
    membership.join(
        3, make_join_message("b", **about)
    )  # the connection of this worker broke, so it may not have received the value
    assert membership.outbox == [("b", put)]

    with pytest.raises(ValueError, match="values of each member"):
        for number in range(1000):
            membership.forward_value("a", put | {"key": f"{number}"})


@pytest.mark.slow
def test_a_full_disk_loses_log_lines_but_not_the_run() -> None:
    program = (
        "from rekindle.training.membership.server import print_log_line; print_log_line('x'); print_log_line('y');"
        " print('continues')"
    )
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=full, text=True
        )
    assert result.stdout == "continues\n"
