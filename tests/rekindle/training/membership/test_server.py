"""The membership as a state machine: whatever happens in whatever order, the live workers end in one agreed group."""

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rekindle.training.membership.machine import ANSWER, CRASHES, FRUITLESS, PATIENCE, PROTOCOL, REMIND, Membership
from rekindle.training.spec import TrainingSpec as Inputs

NAMES = list("abcdef")


def config(**settings: Any) -> Inputs:
    values: dict[str, Any] = {"max_workers": 4, "min_workers": 2, "workers": 3, "hung_seconds": 20} | settings
    return Inputs(workload="w", dataset="d", digest="x", out="o", checkpoints="c", **values)


class Run(RuleBasedStateMachine):
    """Workers that ack what is opened, in any order and delay, or freeze, or die; coordinators that die, too."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.config = config()
        self.membership = Membership(self.config)
        self.opened: dict[str, int] = {}  # by live worker: the newest generation it has heard of
        self.acked: dict[str, int] = {}
        self.group: dict[str, tuple[int, tuple[str, ...]]] = {}  # the newest published, as heard
        self.training: set[str] = set()  # who is in its group, and not on the way to the next
        self.frozen: set[str] = set()
        self.strangers: set[str] = set()  # alive, but the coordinator has dropped them
        self.published: dict[int, tuple[str, ...]] = {}
        self.step = 0

    def deliver(self) -> None:
        for worker, message in self.membership.outbox:
            if worker not in self.opened:
                continue
            if "open" in message:
                self.opened[worker] = max(self.opened[worker], message["open"])
            elif "members" in message:
                members = tuple(id for id, _ in message["members"])
                assert self.published.setdefault(message["generation"], members) == members
                assert worker in members and self.acked[worker] == message["generation"]
                self.group[worker] = message["generation"], members
                self.training.add(worker)
            elif "dropped" in message:
                assert worker in self.frozen or message["dropped"] == "hung", "a false alarm"
                self.strangers.add(worker)
        self.membership.outbox.clear()

    def register(self, worker: str) -> None:
        generation, members = self.group.get(worker, (0, ()))
        self.opened.setdefault(worker, 0)
        self.acked[worker] = generation if worker in self.training else 0  # nobody leaves a group that is whole
        self.strangers.discard(worker)
        about = {"generation": self.opened[worker], "peers": list(members), "step": self.step}
        about["group"] = generation if worker in self.training else 0
        self.membership.join(self.now, hello(worker, **about))
        self.deliver()

    @rule(worker=st.sampled_from(NAMES))
    def join(self, worker: str) -> None:
        if worker not in self.opened:
            self.register(worker)

    @precondition(lambda self: self.opened)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.opened)))
        self.forget(worker)
        self.membership.lost(self.now, worker, "drain" if data.draw(st.booleans()) else "connection")
        self.deliver()

    def forget(self, worker: str) -> None:
        for known in (self.opened, self.acked, self.group):
            known.pop(worker, None)
        for known in (self.training, self.frozen, self.strangers):
            known.discard(worker)

    @precondition(lambda self: self.opened)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        self.ack(data.draw(st.sampled_from(sorted(self.opened))))

    def ack(self, worker: str) -> None:
        if worker not in self.frozen | self.strangers and self.acked[worker] < self.opened[worker]:
            self.acked[worker] = self.opened[worker]
            self.training.discard(worker)
            self.membership.ack(self.now, worker, self.opened[worker], self.step)
            self.deliver()

    @precondition(lambda self: self.opened)
    @rule(data=st.data())
    def freeze_or_thaw(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.opened)))
        if worker in self.frozen:
            self.thaw(worker)
        else:
            self.frozen.add(worker)

    def thaw(self, worker: str) -> None:
        self.frozen.discard(worker)
        if worker in self.strangers:
            self.register(worker)

    @precondition(lambda self: self.training - self.frozen - self.strangers)
    @rule(data=st.data())
    def fault(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.training - self.frozen - self.strangers)))
        self.training.discard(worker)
        self.membership.report_failure(self.now, worker, self.group[worker][0])
        self.deliver()

    @precondition(lambda self: self.opened)
    @rule(data=st.data())
    def nonsense(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.opened)))
        if worker not in self.strangers:
            with pytest.raises(ValueError, match="was never opened"):
                self.membership.ack(self.now, worker, self.membership.generation + 1, 1)
            with pytest.raises(ValueError, match="was never opened"):
                self.membership.report_failure(self.now, worker, self.membership.generation + 1)

    @rule(data=st.data())
    def coordinator_restarts(self, data: st.DataObject) -> None:
        """Workers come back in any order, some not at all, and those that are frozen later."""
        self.membership = Membership(self.config)
        newest = max(self.opened.values(), default=0)  # later numbers may be used again: nobody has heard of them
        self.published = {number: group for number, group in self.published.items() if number <= newest}
        for worker in data.draw(st.permutations(sorted(self.opened))):
            if data.draw(st.integers(0, 5)) == 0:
                self.forget(worker)
            elif worker in self.frozen:
                self.strangers.add(worker)
            else:
                self.register(worker)

    @rule(seconds=st.sampled_from([0.1, PATIENCE, 2 * PATIENCE, 25.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        groups = {self.group[worker] for worker in self.training}
        if len(groups) == 1 and set(next(iter(groups))[1]) == self.training and not self.training & self.frozen:
            self.step += 1
        for worker in set(self.opened) - self.frozen - self.strangers:
            self.membership.heartbeat(self.now, worker, self.step)
        self.membership.tick(self.now)
        self.deliver()
        for worker in self.strangers - self.frozen:  # hung: its process ends
            self.forget(worker)

    @invariant()
    def generations_never_go_back(self) -> None:
        known = set(self.opened) - self.strangers
        assert all(self.membership.generation >= self.opened[worker] for worker in known)

    def teardown(self) -> None:
        """Let everybody answer: then all live workers, up to max_workers, are in one group, if they are enough."""
        for worker in list(self.frozen):
            self.thaw(worker)
        for _ in range(8):
            for worker in list(self.opened):
                self.ack(worker)
            self.wait(PATIENCE)
        if len(self.opened) < self.config.min_workers:
            return
        members = set(self.membership.members)
        assert self.membership.agreed
        assert members <= set(self.opened) and len(members) == min(len(self.opened), self.config.max_workers)
        assert {self.group[worker] for worker in members} == {
            (self.membership.generation, tuple(self.membership.members))
        }
        assert members == self.training


Run.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestMembership = Run.TestCase


def started(*workers: str, **settings: Any) -> Membership:
    """A run whose first group is published."""
    membership = Membership(config(**settings))
    for worker in workers:
        membership.join(0, hello(worker))
    for worker in workers:
        membership.ack(0, worker, 1, 0)
    membership.tick(PATIENCE)
    assert membership.members == list(workers)
    for said in (membership.outbox, membership.events, membership.log):
        said.clear()
    return membership


def hello(worker: str, **settings: Any) -> dict[str, Any]:
    first = {"id": worker, "name": worker, "address": "x:1", "fingerprint": {"torch": "2"}, "step": -1}
    return first | {"protocol": PROTOCOL, "generation": 0, "group": 0, "peers": []} | settings


def test_a_lost_worker_stops_the_others_at_once_and_a_newcomer_after_the_step() -> None:
    membership = started("a", "b", "c")
    membership.lost(2, "b")
    assert membership.outbox == [(worker, {"open": 2, "hard": True}) for worker in "ac"]
    membership = started("a", "b", "c")
    membership.join(2, hello("d"))
    assert ("a", {"open": 2, "hard": False}) in membership.outbox


def test_a_group_that_breaks_while_a_newcomer_is_awaited_is_stopped_at_once() -> None:
    membership = started("a", "b", "c")
    membership.join(2, hello("d"))
    membership.report_failure(2, "b", 1)
    assert ("a", {"open": 2, "hard": True}) in membership.outbox


def test_a_silent_worker_is_dropped_and_the_rest_goes_on() -> None:
    membership = started("a", "b", "c")
    for worker in "ab":
        membership.heartbeat(2.1, worker, -1)
    membership.tick(2.2)
    assert ("c", {"dropped": "silent"}) in membership.outbox
    assert {"event": "lost", "worker": "c", "name": "c", "why": "silent"} in membership.events
    for worker in "ab":
        membership.ack(2.3, worker, 2, 1)
    assert membership.members == ["a", "b"]


def test_a_step_proves_that_silent_members_live_but_not_that_others_do() -> None:
    membership = started("a", "b", "c", "d")
    membership.join(PATIENCE, hello("e"))  # stands by
    for tenth in range(10, 60):
        membership.heartbeat(tenth / 10, "a", tenth)
        membership.tick(tenth / 10)
    assert membership.agreed and sorted(membership.alive) == ["a", "b", "c", "d"]
    membership.heartbeat(7, "a", 59)
    membership.tick(7)
    assert sorted(membership.alive) == ["a"]


def test_nobody_is_blamed_for_what_a_coordinator_that_slept_did_not_hear() -> None:
    membership = started("a", "b", "c")
    membership.exclude_pause(30)
    membership.tick(PATIENCE + 30)
    assert membership.agreed and not membership.outbox


def test_who_neither_steps_nor_answers_is_dropped_and_told() -> None:
    membership = started("a", "b", "c")

    def live(now: float, busy: bool = False) -> None:
        for worker in membership.alive:
            membership.heartbeat(now, worker, -1, busy)
        membership.tick(now)

    live(20, busy=True)  # as the one that writes the model
    live(39)
    assert membership.agreed
    live(41)
    assert ("a", {"open": 2, "hard": True}) in membership.outbox
    for worker in "ab":
        membership.ack(41, worker, 2, -1)
    live(41 + min(ANSWER, 20) - 1)
    assert "c" in membership.alive
    live(41 + min(ANSWER, 20) + 1)
    assert ("c", {"dropped": "hung"}) in membership.outbox and membership.members == ["a", "b"]


def test_nobody_is_dropped_while_one_restores_a_large_state_and_the_others_wait_for_it() -> None:
    membership = started("a", "b", "c")
    membership.join(1, hello("d"))  # a, b, c cannot acknowledge it: b and c wait for what a reads
    membership.ack(1, "d", 2, -1)

    def live(since: int, until: int, busy: str = "") -> None:
        for now in range(since, until):
            for worker in membership.alive:
                membership.heartbeat(now, worker, -1, worker in busy)
            membership.tick(now)

    live(1, 100, busy="a")
    assert set(membership.alive) == set("abcd") and not membership.immediate
    live(100, 121)  # now it hangs, which the others do not
    assert ("b", {"open": 2, "hard": True}) in membership.outbox
    for worker in "bc":
        membership.ack(121, worker, 2, -1)
    live(121, 143)
    assert membership.agreed and membership.members == ["b", "c", "d"]


def test_a_new_coordinator_takes_up_the_group_as_it_is() -> None:
    membership = Membership(config())
    about = {"generation": 5, "group": 5, "peers": ["a", "b", "c"], "step": 7}
    for worker in "bac":
        membership.join(0, hello(worker, **about))
    assert membership.agreed and membership.generation == 5 and membership.members == ["a", "b", "c"]
    assert not membership.outbox
    membership = Membership(config())
    for worker in "ba":  # c died with the coordinator, and a step has shown that the others know
        membership.join(0, hello(worker, **about))
    for worker in "ba":
        membership.report_failure(0.1, worker, 5)
        membership.ack(0.1, worker, 6, 7)
        membership.heartbeat(1.2, worker, 7)
    membership.tick(1.2)
    assert membership.members == ["a", "b"] and membership.generation == 6


def test_a_new_coordinator_does_not_use_a_number_that_may_be_published() -> None:
    membership = Membership(config())
    membership.join(0, hello("a", generation=5, group=0, peers=["a", "b"]))
    membership.join(0, hello("b", generation=5, group=5, peers=["a", "b"]))
    assert membership.generation == 6 and not membership.agreed
    assert ("b", {"open": 6, "hard": True}) in membership.outbox


def test_a_broken_group_comes_back_to_a_new_coordinator_that_uses_its_number_already() -> None:
    run = Membership(config(min_workers=1, max_workers=4))
    run.join(0.0, hello("fresh"))
    assert (run.generation, run.agreed) == (1, False)
    run.join(0.1, hello("old") | {"generation": 1, "group": 0, "peers": ["old", "gone"]})
    asked = [message["open"] for worker, message in run.outbox if worker == "old" and "open" in message]
    assert asked and asked[-1] > 1  # or it would wait for another, and be waited for
    for worker in ("fresh", "old"):
        run.ack(0.2, worker, run.generation, 3)
    run.tick(0.2 + PATIENCE)
    assert sorted(run.members) == ["fresh", "old"]


def test_groups_that_break_again_and_again_are_slowed_down_and_it_is_said() -> None:
    membership = started("a", "b")
    for generation in range(1, FRUITLESS + 2):
        membership.report_failure(2, "a", generation)
        for worker in "ab":
            membership.ack(2, worker, generation + 1, -1)
    assert not membership.agreed
    assert "can the workers reach each other?" in membership.log[-1]
    for worker in "ab":
        membership.heartbeat(2.5, worker, -1)
    membership.tick(2.5)
    assert membership.agreed


def test_what_a_run_waits_for_is_said_now_and_then() -> None:
    membership = started("a", "b", min_workers=2)
    membership.lost(2, "b")
    membership.ack(2, "a", 2, -1)
    for second in range(2, 3 + int(2 * REMIND)):
        membership.heartbeat(second, "a", -1)
        membership.tick(second)
    assert membership.log == ["training waits for workers: 1 of at least 2 are there"] * 2


def test_a_worker_of_another_version_is_refused_by_name() -> None:
    membership = started("a", "b")
    membership.join(2, hello("old", protocol=0))
    assert 'worker "old" is refused: it speaks protocol 0 and not' in membership.outbox[0][1]["refused"]


def test_a_service_that_is_away_is_no_crash() -> None:
    membership = started("a", "b")
    for _ in range(2 * CRASHES):
        membership.report_error("b", "s3://x: the object store cannot be used", 1, temporary=True)
    assert membership.verdict is None


def test_too_few_workers_wait_for_more() -> None:
    membership = started("a", "b", "c")
    membership.lost(2, "b")
    membership.lost(2, "c")
    membership.ack(2, "a", 2, 1)
    membership.tick(3)
    assert not membership.agreed
    membership.join(4, hello("d"))
    membership.ack(4, "d", 2, -1)
    assert membership.members == ["a", "d"]


def test_more_than_max_workers_stand_by_until_one_is_lost() -> None:
    membership = started("a", "b", "c", "d")
    membership.join(2, hello("e"))
    assert membership.agreed and {worker for worker, _ in membership.outbox} == {"e"}
    membership.lost(3, "a")
    for worker in "bcde":
        membership.ack(3, worker, 2, 1)
    assert membership.members == ["b", "c", "d", "e"]


def test_crashes_count_only_without_progress_and_a_wrong_config_at_once() -> None:
    membership = started("a", "b")
    for step in range(5):
        membership.heartbeat(2, "a", step)
        membership.report_error("b", "boom", 1)
    assert membership.verdict is None
    membership.report_error("b", "boom", 1)
    membership.report_error("b", "boom", 1)
    assert membership.verdict == (1, "b (3 times without a newer step): boom")
    membership = started("a", "b")
    membership.report_error("b", "no such column", 65)
    assert membership.verdict == (65, "b: no such column")


def test_one_fault_that_hits_all_workers_at_once_is_not_the_end_of_the_run() -> None:
    membership = started("a", "b", "c")
    for round in (1, 2):
        for worker in "abc":
            membership.report_error(worker, "no space left on the shared disk", 1)
            membership.lost(round, worker)
        assert membership.verdict is None
    membership.report_error("c", "no space left on the shared disk", 1)
    assert membership.verdict == (1, "c (3 times without a newer step): no space left on the shared disk")


def test_workers_whose_names_are_never_the_same_do_not_fail_for_ever() -> None:
    membership = Membership(config(workers=1, min_workers=1))
    for worker in "abc":
        assert membership.verdict is None
        membership.report_error(worker, "boom", 1)
        membership.step = 0  # the first has not come to say so
    assert membership.verdict


def test_after_a_restart_the_living_group_stays_and_an_early_stranger_is_refused() -> None:
    membership = Membership(config())
    membership.join(0, hello("x", fingerprint={"torch": "3"}))
    about: dict[str, Any] = {"generation": 7, "group": 7, "peers": ["a", "b"], "step": 9}
    membership.join(0, hello("a", **about))
    membership.join(0, hello("b", **about))
    refused = {id: message["refused"] for id, message in membership.outbox if "refused" in message}
    assert list(refused) == ["x"] and 'worker "x" is refused: its torch is 3 and not 2.' in refused["x"]
    assert membership.members == ["a", "b"] == list(membership.alive) and membership.agreed
    membership.join(1, hello("x", fingerprint={"torch": "3"}))
    assert "refused" in membership.outbox[-1][1]


def test_another_build_of_torch_is_refused_by_name() -> None:
    membership = started("a", "b")
    membership.join(2, hello("c", fingerprint={"torch": "3"}))
    (worker, message), *rest = membership.outbox
    assert worker == "c" and not rest and membership.agreed
    assert message["refused"].startswith('worker "c" is refused: its torch is 3 and not 2.')


def test_a_first_worker_that_is_gone_before_the_first_group_decides_no_fingerprint() -> None:
    membership = Membership(config(workers=2))
    membership.join(0, hello("x", fingerprint={"torch": "3"}))
    membership.lost(0, "x")
    for worker in "ab":
        membership.join(0, hello(worker))
    for worker in "ab":
        membership.ack(0, worker, membership.generation, -1)
    assert membership.members == ["a", "b"]
    for worker in "ab":
        membership.lost(1, worker)
    membership.join(2, hello("x", fingerprint={"torch": "3"}))
    assert "refused" in membership.outbox[-1][1], "the bits are those of the first published group"


def test_on_mixed_nodes_the_config_names_who_trains() -> None:
    wanted = {"instruction set": "x86_64 AVX512"}
    membership = Membership(config(workers=2, fingerprint=wanted))
    membership.join(0, hello("x", fingerprint={"torch": "2", "instruction set": "x86_64 AVX2"}))
    assert "its instruction set is x86_64 AVX2 and not x86_64 AVX512" in membership.outbox[-1][1]["refused"]
    for worker in "ab":
        membership.join(0, hello(worker, fingerprint={"torch": "2"} | wanted))
    assert list(membership.alive) == ["a", "b"]


def test_a_run_whose_workers_are_refused_for_ever_ends_with_the_reason() -> None:
    membership = Membership(config(min_workers=2, hung_seconds=20))
    membership.join(0, hello("a"))
    for now in range(0, 30, 6):
        membership.heartbeat(now, "a", -1)
        membership.join(now, hello(f"x{now}", name="pod-1", fingerprint={"torch": "3"}))
        assert (membership.verdict is not None) == (now > 20)
    assert membership.verdict
    code, text = membership.verdict
    assert code == 78 and text.startswith('worker "pod-1" is refused: its torch is 3 and not 2.')


def test_a_refused_worker_does_not_end_a_run_that_trains_without_it() -> None:
    membership = started("a", "b")
    for now in range(2, 90):
        for worker in "ab":
            membership.heartbeat(now, worker, now)
        membership.join(now, hello(f"x{now}", fingerprint={"torch": "3"}))
    assert membership.verdict is None and membership.agreed and membership.members == ["a", "b"]


@pytest.mark.parametrize(
    "claim",
    [
        {"generation": 10**12, "group": 10**12, "peers": ["x", "y", "z"], "fingerprint": {"torch": "2"}},
        {"generation": 10**12, "group": 10**12, "peers": ["x", "y", "z"], "fingerprint": {"torch": "3"}},
        {"generation": 10**12, "group": 0, "peers": ["a", "a", "a"]},
        {"generation": 2, "group": 2, "peers": ["x", "a", "x", "a"]},
        {"generation": 0, "group": 0, "peers": [], "step": 2**52},
    ],
    ids=["group", "bits", "waits", "twice", "steps"],
)
@pytest.mark.parametrize("restarted", [False, True])
def test_no_claim_of_one_worker_takes_the_run_from_the_others_for_long(claim: dict[str, Any], restarted: bool) -> None:
    membership = Membership(config(min_workers=2, max_workers=3)) if restarted else started("a", "b")
    membership.join(2, hello("x", **claim))
    if not restarted and claim.get("fingerprint") != {"torch": "3"}:
        assert {"a", "b"} < set(membership.alive)
    membership.lost(2.1, "x")
    for worker in "" if restarted else "ab":
        membership.heartbeat(3.2, worker, 7)
    membership.tick(3.2)  # those whom it made up have been silent for long enough
    opened = 1
    for worker in "ab" if restarted else "":
        membership.join(4, hello(worker, generation=1, group=1, peers=["a", "b"], step=7))
    for tenth in range(40, 90):
        now = tenth / 10
        for worker, message in membership.outbox:
            if "open" in message and worker in "ab" and worker in membership.alive:
                opened = max(opened, message["open"])
                membership.ack(now, worker, opened, 7)
        membership.outbox.clear()
        for worker in membership.alive.keys() & {"a", "b"}:
            membership.heartbeat(now, worker, 7)
        membership.tick(now)
    assert membership.agreed and set(membership.members) == {"a", "b"} and membership.verdict is None
    assert membership.fingerprint == {"torch": "2"}


def test_members_tell_each_other_where_they_listen_and_nobody_else_is_heard() -> None:
    membership = started("a", "b", "c", "d")
    membership.join(2, hello("e"))  # stands by
    membership.outbox.clear()
    put = {"put": 1, "key": "0", "value": "eA=="}
    for worker, message in (("e", put), ("a", put | {"put": 0}), ("a", put | {"put": 2})):
        membership.exchange(worker, message)
        assert not (membership.outbox or membership.values)
    membership.exchange("a", put)
    assert membership.outbox == [(worker, put) for worker in "bcd"]
    membership.outbox.clear()
    about = {"generation": 1, "group": 1, "peers": ["a", "b", "c", "d"]}
    membership.join(3, hello("b", **about))  # its connection broke: it may have missed it
    assert membership.outbox == [("b", put)]
    with pytest.raises(ValueError, match="values of each member"):
        for number in range(1000):
            membership.exchange("a", put | {"key": f"{number}"})


def test_a_full_disk_below_the_log_costs_a_line_and_not_the_run() -> None:
    program = "from rekindle.training.membership.server import log; log('x'); log('y'); print('goes on')"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=full, text=True)
    assert done.stdout == "goes on\n"
