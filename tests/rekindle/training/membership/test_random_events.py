"""After any sequence of events, the live workers end in one agreed group."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rekindle.training.membership.state_machine import MembershipStateMachine
from rekindle.training.spec import JOIN_TIMEOUT_S
from tests.rekindle.training.membership.members import make_join_message, make_spec

NAMES = list("abcdef")


class Run(RuleBasedStateMachine):
    """A random run: workers acknowledge generations in any order and with any delay, or freeze, or
    die; coordinators die, too."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.config = make_spec()
        self.membership = MembershipStateMachine(self.config)
        # live worker → number of the newest generation that it has received
        self.opened: dict[str, int] = {}
        self.acked: dict[str, int] = {}
        # live worker → newest list of members that it has received
        self.group: dict[str, tuple[int, tuple[str, ...]]] = {}
        # workers that train, instead of waiting for the next group
        self.training: set[str] = set()
        self.frozen: set[str] = set()
        # live workers that the coordinator has dropped
        self.dropped: set[str] = set()
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
                assert worker in members
                assert self.acked[worker] == message["generation"]
                self.group[worker] = message["generation"], members
                self.training.add(worker)
            elif "dropped" in message:
                assert worker in self.frozen or message["dropped"] == "hung", "a false alarm"
                self.dropped.add(worker)

        self.membership.outbox.clear()

    def register(self, worker: str) -> None:
        generation, members = self.group.get(worker, (0, ()))
        self.opened.setdefault(worker, 0)
        # the coordinator must keep an intact group
        self.acked[worker] = generation if worker in self.training else 0
        self.dropped.discard(worker)
        about = {
            "generation": self.opened[worker],
            "peers": list(members),
            "step": self.step,
            "group": generation if worker in self.training else 0,
        }
        self.membership.join(self.now, make_join_message(worker, **about))
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
        self.membership.remove(
            self.now, worker, "drain" if data.draw(st.booleans()) else "connection"
        )
        self.deliver()

    def forget(self, worker: str) -> None:
        for mapping in (self.opened, self.acked, self.group):
            mapping.pop(worker, None)
        for names in (self.training, self.frozen, self.dropped):
            names.discard(worker)

    @precondition(lambda self: self.opened)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        self.ack(data.draw(st.sampled_from(sorted(self.opened))))

    def ack(self, worker: str) -> None:
        if worker not in self.frozen | self.dropped and self.acked[worker] < self.opened[worker]:
            self.acked[worker] = self.opened[worker]
            self.training.discard(worker)
            self.membership.acknowledge(self.now, worker, self.opened[worker], self.step)
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
        if worker in self.dropped:
            self.register(worker)

    @precondition(lambda self: self.training - self.frozen - self.dropped)
    @rule(data=st.data())
    def fault(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.training - self.frozen - self.dropped)))
        self.training.discard(worker)
        self.membership.report_failure(self.now, worker, self.group[worker][0])
        self.deliver()

    @precondition(lambda self: self.opened)
    @rule(data=st.data())
    def nonsense(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.opened)))
        if worker not in self.dropped:
            with pytest.raises(ValueError, match="was never opened"):
                self.membership.acknowledge(self.now, worker, self.membership.generation + 1, 1)
            with pytest.raises(ValueError, match="was never opened"):
                self.membership.report_failure(self.now, worker, self.membership.generation + 1)

    @rule(data=st.data())
    def coordinator_restarts(self, data: st.DataObject) -> None:
        """Restart the coordinator: workers reconnect in any order, frozen workers reconnect later,
        and some workers never reconnect."""
        self.membership = MembershipStateMachine(self.config)
        workers = data.draw(st.permutations(sorted(self.opened)))
        for worker in workers:
            if data.draw(st.integers(0, 5)) == 0:
                self.forget(worker)

        # higher numbers may be used again, because no live worker has received them
        newest = max(self.opened.values(), default=0)
        self.published = {
            number: group for number, group in self.published.items() if number <= newest
        }

        for worker in workers:
            if worker in self.frozen:
                self.dropped.add(worker)
            elif worker in self.opened:
                self.register(worker)

    @rule(seconds=st.sampled_from([0.1, JOIN_TIMEOUT_S, 2 * JOIN_TIMEOUT_S, 25.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        groups = {self.group[worker] for worker in self.training}
        if (
            len(groups) == 1
            and set(next(iter(groups))[1]) == self.training
            and not self.training & self.frozen
        ):
            self.step += 1

        for worker in set(self.opened) - self.frozen - self.dropped:
            self.membership.heartbeat(self.now, worker, self.step)

        self.membership.tick(self.now)
        self.deliver()
        for worker in self.dropped - self.frozen:  # the process of a worker that hangs ends
            self.forget(worker)

    @invariant()
    def generations_never_go_back(self) -> None:
        registered = set(self.opened) - self.dropped
        assert all(self.membership.generation >= self.opened[worker] for worker in registered)

    def teardown(self) -> None:
        """Let all workers answer, at the end of a random run. If enough workers are alive, one
        group must then contain all of them, up to max_workers."""
        for worker in list(self.frozen):
            self.thaw(worker)

        for _ in range(8):
            for worker in list(self.opened):
                self.ack(worker)

            self.wait(JOIN_TIMEOUT_S)

        if len(self.opened) < self.config.min_workers:
            return

        members = set(self.membership.members)
        assert self.membership.is_published
        assert members <= set(self.opened)
        assert len(members) == min(len(self.opened), self.config.max_workers)
        assert {self.group[worker] for worker in members} == {
            (self.membership.generation, tuple(self.membership.members))
        }
        assert members == self.training


Run.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestMembership = Run.TestCase
