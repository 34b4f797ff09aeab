"""Tests of a training program on several pods, with real processes."""

import signal
from pathlib import Path

import psutil

from rekindle.storage import Store
from tests.rekindle.program.pods import PROGRAMS, StartPods
from tests.waiting import until

DDP = [str(PROGRAMS / "ddp.py"), "--checkpoint-dir", "{checkpoints}"]
FINAL = {"result": "{checkpoints}/final.pt"}


def test_the_program_runs_on_all_pods_and_its_result_is_stored(
    start_pods: StartPods, s3: Store
) -> None:
    pods = start_pods([*DDP, "--steps", "10"], program=FINAL, workers=3)
    agents = pods.start(3)
    assert [pod.wait() for pod in agents] == [0, 0, 0], pods.logs()
    assert pods.start_steps() == [0]
    assert "rank 2 of 3 starts at step 0" in pods.logs()
    assert s3.head(f"{pods.prefix}/model/result/final.pt")


def test_a_killed_pod_costs_at_most_the_steps_since_the_last_save(
    start_pods: StartPods, s3: Store
) -> None:
    pods = start_pods([*DDP, "--steps", "1000"], program=FINAL, workers=3, min_workers=3)
    agents = pods.start(3)
    pods.wait_for("rank 0 of 3 starts")
    until("a checkpoint", lambda: list(s3.list(f"{pods.prefix}/checkpoints/program/checkpoints")))
    agents[2].send(signal.SIGKILL)
    agents[2] = pods.agent(2)
    assert [pod.wait() for pod in agents] == [0, 0, 0], pods.logs()
    assert pods.start_steps()[-1] >= 5


def test_the_program_imports_modules_of_its_pythonpath(
    start_pods: StartPods, tmp_path: Path, s3: Store
) -> None:
    (tmp_path / "neighbour.py").write_text("TEXT = 'found'")
    program_file = tmp_path.with_suffix(".py")
    program_file.write_text(
        "import sys, neighbour\nopen(sys.argv[1] + '/final', 'w').write(neighbour.TEXT)"
    )
    program = {"result": "{checkpoints}/final", "environment": {"PYTHONPATH": str(tmp_path)}}
    pods = start_pods([str(program_file), "{checkpoints}"], program=program)
    (agent,) = pods.start(1)
    assert agent.wait(25) == 0, pods.logs()
    assert s3.get(f"{pods.prefix}/model/result/final") == b"found"


def test_a_pod_that_joins_takes_part_after_the_next_save(start_pods: StartPods) -> None:
    pods = start_pods([*DDP, "--steps", "5000"], program=FINAL, workers=3, min_workers=2)
    agents = pods.start(3)
    until("all start", lambda: pods.logs().count("of 3 starts") == 3, evidence=pods.logs)
    agents[2].send(signal.SIGKILL)
    pods.wait_for("rank 0 of 2 starts")

    joined = pods.agent(2)
    until("the new pod takes part", lambda: "of 3 starts" in joined.output, evidence=pods.logs)
    # only rank 0 saves, so the other ranks must be told that the program restarts
    until("all take part", lambda: pods.logs().count("of 3 starts") == 6, evidence=pods.logs)


def test_a_pod_starts_again_if_the_process_that_starts_its_program_was_killed(
    start_pods: StartPods,
) -> None:
    pods = start_pods([*DDP, "--steps", "5"], program=FINAL)
    [agent] = pods.start(1)
    process = psutil.Process(agent.process.pid)
    until("the process that forks the program", process.children, evidence=pods.logs)
    [parent] = process.children()
    parent.suspend()
    pods.wait_for("generation 1: worker-0")
    looks = iter(range(20))
    until("the request to start", lambda: next(looks, None) is None)
    parent.kill()
    assert agent.wait(25) == 143, pods.logs()
    assert pods.agent(0).wait(40) == 0, pods.logs()
