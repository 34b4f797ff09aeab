"""Tests of a pod that must leave: the program saves, and the other pods continue from this save."""

import re
import signal

import pytest

from argolocal.common import exit_codes
from rekindle.storage import Store
from tests.rekindle.program.pods import PROGRAMS, Pod, Pods, StartPods
from tests.waiting import until

DDP = [str(PROGRAMS / "ddp.py"), "--checkpoint-dir", "{checkpoints}"]
FSDP2 = [str(PROGRAMS / "fsdp2.py"), "--checkpoint-dir", "{checkpoints}"]
FSDP2_PROGRAM = {"resume": ["--checkpoint", "{checkpoint}"], "result": "{checkpoints}/final.pt"}
LIBRARIES = ("tests.rekindle.program.loaded_libraries",)


def stop_pod(pods: Pods, agent: Pod) -> None:
    """Send SIGTERM to a pod, and wait until the pod has ended."""
    agent.send(signal.SIGTERM)
    assert agent.wait() == exit_codes.TERMINATED, pods.logs()


def find_steps(pods: Pods, text: str) -> list[int]:
    """Return the steps in the output of rank 0, sorted."""
    return sorted(int(step) for step in re.findall(rf"rank 0 {text} step (\d+)", pods.logs()))


def count_starts(pods: Pods, world_size: int) -> int:
    return len(re.findall(rf"rank 0 of {world_size} starts", pods.logs()))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_no_step_before_the_save_on_sigterm_is_repeated(start_pods: StartPods, count: int) -> None:
    pods = start_pods(
        [*DDP, "--steps", "1000000", "--save-every", "1000000"],
        program={"restart_seconds": 0.1},
        workers=3,
    )
    agents = pods.start(3)
    until("the start", lambda: count_starts(pods, 3))

    for number in range(count):
        starts_of_two, starts_of_three = count_starts(pods, 2), count_starts(pods, 3)
        stop_pod(pods, agents[number % 3])
        until("two pods", lambda two=starts_of_two: count_starts(pods, 2) > two, evidence=pods.logs)

        agents[number % 3] = pods.agent(number % 3)
        until(
            "three pods",
            lambda three=starts_of_three: count_starts(pods, 3) > three,
            evidence=pods.logs,
        )

    starts = find_steps(pods, r"of \d starts at")
    assert starts == [0, *find_steps(pods, "leaves after")]
    assert len(starts) == 1 + 2 * count


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fsdp2_continues_with_fewer_and_with_more_pods(start_pods: StartPods, s3: Store) -> None:
    undisturbed = start_pods(
        [*FSDP2, "--steps", "200"], program=FSDP2_PROGRAM, preload=LIBRARIES, workers=3
    )
    assert [agent.wait() for agent in undisturbed.start(3)] == [0, 0, 0], undisturbed.logs()

    pods = start_pods(
        [*FSDP2, "--steps", "200"], program=FSDP2_PROGRAM, preload=LIBRARIES, workers=3
    )
    agents = pods.start(3)
    pods.wait_for(r"step 50 loss")
    stop_pod(pods, agents[2])
    pods.wait_for(r"rank 0 of 2 starts at step [1-9]")
    pods.wait_for(r"step 100 loss")
    agents[2] = pods.agent(2)
    assert [agent.wait() for agent in agents] == [0, 0, 0], pods.logs()

    assert count_starts(pods, 3) == 2
    assert s3.head(f"{pods.prefix}/model/result/final.pt")
    expected = read_losses(undisturbed)
    assert read_losses(pods).keys() == expected.keys()
    for step, losses in read_losses(pods).items():
        assert losses == pytest.approx(expected[step] * len(losses), rel=1e-4, abs=1e-6), step


def read_losses(pods: Pods) -> dict[int, list[float]]:
    """Return the losses of each step, by all generations of the group that made the step."""
    losses: dict[int, list[float]] = {}
    for step, loss in re.findall(r"step (\d+) loss (\S+)", pods.logs()):
        losses.setdefault(int(step), []).append(float(loss))
    return losses


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_trainer_with_jit_checkpoints_saves_on_sigterm(start_pods: StartPods) -> None:
    # with several processes, the Trainers stop at different steps: each process has its own timer
    pods = start_pods(
        [
            *(str(PROGRAMS / "bert_trainer.py"), "--output_dir", "{checkpoints}"),
            *("--max_steps", "1000000", "--save_steps", "1000000", "--use_cpu", "True"),
            *("--report_to", "none", "--disable_tqdm", "True", "--logging_strategy", "no"),
            *("--enable_jit_checkpoint", "True"),
        ],
        program={"resume": ["--resume_from_checkpoint", "{checkpoint}"]},
        preload=LIBRARIES,
    )
    (agent,) = pods.start(1)
    pods.wait_for("rank 0 of 1 starts at step 0")
    stop_pod(pods, agent)
    pods.agent(0)
    pods.wait_for("rank 0 of 1 starts at step [1-9]")
