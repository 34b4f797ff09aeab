"""The membership as a state machine: whatever happens in whatever order, the live workers end in one agreed group."""

import subprocess
import sys
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from steps.train import Inputs
from steps.training.coordinator import PATIENCE, Membership

NAMES = list("abcdef")


def config(**settings: Any) -> Inputs:
    return Inputs(
        dataset="d", digest="x", out="o", checkpoints="c", max_workers=4, min_workers=2, workers=3, **settings
    )


class Run(RuleBasedStateMachine):
    """Workers that behave: they ack what is opened, in any order and delay, and die at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.config = config()
        self.membership = Membership(self.config)
        self.opened: dict[str, int] = {}  # by live, registered worker: the newest generation it has heard of
        self.acked: dict[str, int] = {}
        self.group: dict[str, tuple[int, tuple[str, ...]]] = {}  # the newest published, as heard
        self.published: dict[int, tuple[str, ...]] = {}

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
        self.membership.outbox.clear()

    def register(self, worker: str) -> None:
        members = self.group.get(worker, (0, ()))[1]
        hello = {"id": worker, "name": worker, "address": "x:1", "fingerprint": {"torch": 1}, "step": 0}
        self.opened.setdefault(worker, 0)
        self.acked[worker] = 0
        self.membership.join(self.now, hello | {"generation": self.opened[worker], "peers": list(members)})
        self.deliver()

    @rule(worker=st.sampled_from(NAMES))
    def join(self, worker: str) -> None:
        if worker not in self.opened:
            self.register(worker)

    @precondition(lambda self: self.opened)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.opened)))
        for known in (self.opened, self.acked, self.group):
            known.pop(worker, None)
        self.membership.lost(self.now, worker, left=data.draw(st.booleans()))
        self.deliver()

    @precondition(lambda self: self.opened)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        self.ack(data.draw(st.sampled_from(sorted(self.opened))))

    def ack(self, worker: str) -> None:
        if self.acked[worker] < self.opened[worker]:
            self.acked[worker] = self.opened[worker]
            self.membership.ack(self.now, worker, self.opened[worker], 1)
            self.deliver()

    @precondition(lambda self: self.group)
    @rule(data=st.data())
    def fault(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.group)))
        self.membership.fault(self.now, worker, self.group[worker][0])
        self.deliver()

    @rule()
    def coordinator_restarts(self) -> None:
        self.membership = Membership(self.config)
        newest = max(self.opened.values(), default=0)  # later numbers may be used again: nobody has heard of them
        self.published = {number: group for number, group in self.published.items() if number <= newest}
        for worker in sorted(self.opened):
            self.register(worker)

    @rule(seconds=st.sampled_from([0.1, PATIENCE, 2 * PATIENCE]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for worker in self.opened:
            self.membership.beat(self.now, worker, 1)
        self.membership.tick(self.now)
        self.deliver()

    @invariant()
    def generations_never_go_back(self) -> None:
        assert all(self.membership.generation >= opened for opened in self.opened.values())

    def teardown(self) -> None:
        """Let everybody answer: then all live workers, up to max_workers, are in one group, if they are enough."""
        for _ in range(3):
            for worker in list(self.opened):
                self.ack(worker)
            self.wait(2 * PATIENCE)
        if len(self.opened) < self.config.min_workers:
            return
        members = set(self.membership.members)
        assert self.membership.agreed
        assert members <= set(self.opened) and len(members) == min(len(self.opened), self.config.max_workers)
        assert {self.group[worker] for worker in members} == {
            (self.membership.generation, tuple(self.membership.members))
        }


Run.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
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
    membership.outbox.clear()
    return membership


def hello(worker: str, **settings: Any) -> dict[str, Any]:
    first = {"id": worker, "name": worker, "address": "x:1", "fingerprint": {"torch": "2"}, "step": -1}
    return first | {"generation": 0, "peers": []} | settings


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
    membership.fault(2, "b", 1)
    assert ("a", {"open": 2, "hard": True}) in membership.outbox


def test_a_silent_worker_is_dropped_and_the_rest_goes_on() -> None:
    membership = started("a", "b", "c")
    for worker in "ab":
        membership.beat(7, worker, 1)
    membership.tick(7.1)
    for worker in "ab":
        membership.ack(7.1, worker, 2, 1)
    assert membership.members == ["a", "b"]


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
    assert membership.agreed and not membership.outbox
    membership.lost(3, "a")
    for worker in "bcde":
        membership.ack(3, worker, 2, 1)
    assert membership.members == ["b", "c", "d", "e"]


def test_crashes_count_only_without_progress_and_a_wrong_config_at_once() -> None:
    membership = started("a", "b")
    for step in range(5):
        membership.beat(2, "a", step)
        membership.failed("b", "boom", 1)
    assert membership.verdict is None
    membership.failed("b", "boom", 1)
    membership.failed("a", "boom", 1)
    assert membership.verdict == (1, "a (3 times without a newer step): boom")
    membership = started("a", "b")
    membership.failed("b", "no such column", 65)
    assert membership.verdict == (65, "b: no such column")


def test_another_build_of_torch_is_refused_by_name() -> None:
    membership = started("a", "b")
    membership.join(2, hello("c", fingerprint={"torch": "3"}))
    (worker, message), *rest = membership.outbox
    assert worker == "c" and not rest and membership.agreed
    assert message["refused"].startswith('worker "c" is refused: its torch is 3 and not 2.')


def test_a_full_disk_below_the_log_costs_a_line_and_not_the_run() -> None:
    program = "from steps.training.coordinator import note; note('x'); note('y'); print('goes on')"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=full, text=True)
    assert done.stdout == "goes on\n"
