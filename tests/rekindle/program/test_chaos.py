"""Tests of programs whose pods, processes and coordinator are killed and stopped at random moments.
In spite of the kills, the result of the program is right, and no process continues from files of
two saves."""

import json
import random
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress

import psutil
import pytest

from rekindle.storage import Store
from tests.rekindle.program.pods import PROGRAMS, Pod, Pods, StartPods
from tests.waiting import until

# layouts of the files of a save; see tests/programs/saves.py
MODES = ["ranks", "pair", "slots", "latest"]
STEPS = 900
EVENTS = 15
PODS = 3


class Chaos:
    """The pods of a run, which are replaced when they are lost."""

    def __init__(self, pods: Pods, seed: int) -> None:
        self.pods = pods
        self.random = random.Random(seed)
        self.agents = pods.start(PODS)
        self.events: dict[str, Callable[[Pod], object]] = {
            "kill": lambda agent: agent.process.kill(),
            "kill two": self._kill_two,
            "leave": lambda agent: agent.send(signal.SIGTERM),
            "all leave": lambda agent: [
                each.send(signal.SIGTERM) for each in self._list_alive_agents()
            ],
            "kill a process": lambda agent: self.random.choice(agent.program).kill(),
            "stop the agent": self._stop_agent,
            "stop a process": self._stop_process,
            "kill the parent": lambda agent: _find_parent(agent).kill(),
            "kill the coordinator": lambda agent: self.coordinator.process.kill(),
            "kill the coordinator and a pod": self._kill_coordinator_and_pod,
        }

    @property
    def coordinator(self) -> Pod:
        return next(pod for pod in reversed(self.pods.pods) if pod.name == "coordinator")

    def is_over(self) -> bool:
        self._replace_lost()
        return self.coordinator.process.exitcode == 0

    def disturb(self) -> None:
        """Kill, stop or restart something at a random moment."""
        self._pause(self.random.uniform(0.3, 4.0))
        agent = self.random.choice(self.agents)
        # the process or its pod may have just started or ended
        with suppress(psutil.NoSuchProcess, ProcessLookupError, IndexError, ValueError):
            self.random.choice(list(self.events.values()))(agent)

    def _pause(self, seconds: float) -> None:
        looks = iter(range(int(seconds / 0.1)))
        until("a moment", lambda: next(looks, None) is None or self.is_over(), pause=0.1)

    def _replace_lost(self) -> None:
        code = self.coordinator.process.exitcode
        assert code is None or code <= 0, self.pods.logs()
        if code:
            self.pods.coordinator()
        for number, agent in enumerate(self.agents):
            if agent.process.exitcode:
                self.agents[number] = self.pods.agent(number)

    def _list_alive_agents(self) -> Iterator[Pod]:
        return (agent for agent in self.agents if agent.process.exitcode is None)

    def _kill_two(self, agent: Pod) -> None:
        agent.process.kill()
        self._pause(self.random.random())
        self.random.choice(self.agents).process.kill()

    def _stop_agent(self, agent: Pod) -> None:
        agent.send(signal.SIGSTOP)
        self._pause(self.random.choice([0.3, 2.5]))
        agent.send(signal.SIGCONT)

    def _stop_process(self, agent: Pod) -> None:
        process = self.random.choice(agent.program)
        process.suspend()
        self._pause(1.0)
        process.resume()

    def _kill_coordinator_and_pod(self, agent: Pod) -> None:
        self.coordinator.process.kill()
        agent.process.kill()


def _find_parent(agent: Pod) -> psutil.Process:
    """Return the process of a pod that forks the processes of the program."""
    children = psutil.Process(agent.process.pid).children()
    return min(children, key=lambda child: child.create_time())


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_program_that_is_disturbed_at_random_has_the_right_result(
    mode: str, start_pods: StartPods, s3: Store
) -> None:
    pods = start_pods(
        [str(PROGRAMS / "saves.py"), mode, "{checkpoints}", str(STEPS)],
        program={"preload": [], "result": "{checkpoints}/final.json", "stop_seconds": 2},
        workers=PODS,
        min_workers=PODS if mode == "ranks" else 1,
        hung_seconds=20,
    )
    chaos = Chaos(pods, seed=1)
    for _ in range(EVENTS):
        if not chaos.is_over():
            chaos.disturb()
    until("the end", chaos.is_over, 120, evidence=pods.logs)

    value = 1
    for step in range(1, STEPS + 1):
        value = (value * 31 + step) % 1_000_000_007
    result = json.loads(s3.get(f"{pods.prefix}/model/result/final.json"))
    assert result == {"step": STEPS, "value": value}
    assert re.findall(".*(?:MIXED|Traceback).*", pods.logs()) == []
