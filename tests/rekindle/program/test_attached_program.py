"""Tests of a program that calls `rekindle.attach`, on the pods of a run: a loss costs at most the
time between two snapshots, and each sample is used once."""

import json
import re
import signal

import pytest

from argolocal.common import exit_codes
from rekindle.attached.data import order_samples
from rekindle.storage import Store
from tests.rekindle.program.pods import PROGRAMS, ROOT, Pod, Pods, StartPods

LOOP = [str(PROGRAMS / "attached_loop.py"), "--result", "{checkpoints}/final.json"]
CALLBACKS = ROOT / "tests/rekindle/attached/callback_programs.py"
# number of steps: 4 epochs of 240 samples, in batches of 12
STEPS = 80
# number of steps of 0.05 s within the 2 s between two snapshots
SNAPSHOT_STEPS = 40


def start_agent(pods: Pods, pod_number: int) -> Pod:
    """Start a pod with its own shared memory, which the replacement of the pod on the same node
    finds again."""
    memory = pods.folder / f"memory-{pod_number}"
    memory.mkdir(exist_ok=True)
    return pods.agent(pod_number, REKINDLE_SHM=str(memory))


def start(start_pods: StartPods, **settings: int) -> tuple[Pods, list[Pod]]:
    program = {"result": "{checkpoints}/final.json", "restart_seconds": 0.1}
    pods = start_pods(
        LOOP, program=program, preload=("tests.rekindle.attached.loaded",), workers=3, **settings
    )
    pods.coordinator()
    return pods, [start_agent(pods, number) for number in range(3)]


def assert_each_sample_is_used_once(pods: Pods, agents: list[Pod], s3: Store) -> None:
    assert [agent.wait() for agent in agents] == [0, 0, 0], pods.logs()
    result = json.loads(s3.get(f"{pods.prefix}/model/result/final.json"))
    assert result["samples"] == [
        sample for epoch in range(4) for sample in order_samples(240, 0, epoch, shuffle=True)
    ]


def find_newest_step(pods: Pods) -> int:
    """Return the last step that rank 0 has made."""
    return max(map(int, re.findall(r"rank 0 of \d has made step (\d+)", pods.logs())))


@pytest.mark.slow
def test_a_killed_pod_costs_at_most_the_time_between_two_snapshots(
    start_pods: StartPods, s3: Store
) -> None:
    pods, agents = start(start_pods, min_workers=3)
    pods.wait_for("rank 0 of 3 has made step 50")
    agents[1].send(signal.SIGKILL)
    agents[1].wait()
    newest = find_newest_step(pods)
    agents[1] = start_agent(pods, 1)

    assert_each_sample_is_used_once(pods, agents, s3)
    assert newest - SNAPSHOT_STEPS <= pods.start_steps()[-1] <= newest + 1
    assert f"rank 0 of 3 starts at step {pods.start_steps()[-1]} from memory" in pods.logs()


@pytest.mark.slow
def test_the_number_of_pods_changes_without_a_repeated_sample(
    start_pods: StartPods, s3: Store
) -> None:
    pods, agents = start(start_pods)
    pods.wait_for("rank 0 of 3 has made step 20")
    agents[2].send(signal.SIGTERM)
    assert agents[2].wait() == exit_codes.TERMINATED, pods.logs()
    pods.wait_for(r"rank 0 of 2 starts at step [1-9]")
    pods.wait_for(r"rank 0 of 2 has made step 4\d")
    agents[2] = start_agent(pods, 2)
    pods.wait_for(r"rank 0 of 3 starts at step [1-9]")
    assert_each_sample_is_used_once(pods, agents, s3)
    steps = list(map(int, re.findall(r"rank 0 of \d has made step (\d+)", pods.logs())))
    assert sorted(steps) == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["huggingface", "lightning"])
def test_a_trainer_with_a_callback_continues_on_two_pods_with_the_same_weights(
    start_pods: StartPods, s3: Store, kind: str
) -> None:
    weights: list[bytes] = []
    for kill_step in (0, 5):
        command = [str(CALLBACKS), kind, "{checkpoints}", str(kill_step)]
        pods = start_pods(
            command,
            program={
                "result": "{checkpoints}/final.json",
                "environment": {"PYTHONPATH": str(ROOT)},
            },
            workers=2,
            min_workers=2,
        )
        pods.coordinator()
        agents = [start_agent(pods, number) for number in range(2)]
        assert [agent.wait() for agent in agents] == [0, 0], pods.logs()
        weights.append(s3.get(f"{pods.prefix}/model/result/final.json"))

    assert pods.logs().count("resumed=True") == 2, pods.logs()
    assert weights[0] == weights[1]
