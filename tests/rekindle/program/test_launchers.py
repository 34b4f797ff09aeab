"""Tests of a command that starts the processes of its pod by itself, such as torchrun. The program
of such a command continues after a loss, saves on SIGTERM, and its errors have the line of the
program."""

import re
import signal
import sys
from pathlib import Path

import pytest

from argolocal.common import exit_codes
from rekindle.storage import Store
from tests.rekindle.program.pods import PROGRAMS, Pods, StartPods
from tests.waiting import until

COUNTER = PROGRAMS / "counter.py"
TORCHRUN = [
    "--nnodes={nodes}",
    "--node-rank={node_rank}",
    "--nproc-per-node={processes}",
    "--master-addr={master_address}",
    "--master-port={master_port}",
]
# launchers that start the processes of two pods, with two processes each
LAUNCHERS = {
    "deepspeed": [
        str(PROGRAMS / "deepspeed"),
        "--num_nodes={nodes}",
        "--node_rank={node_rank}",
        "--num_gpus={processes}",
        "--master_addr={master_address}",
        "--master_port={master_port}",
    ],
    "torchrun": ["torchrun", *TORCHRUN],
    "module": ["python", "-m", "torch.distributed.run", *TORCHRUN],
    # torchrun takes its options from the environment, too
    "bare": ["torchrun"],
    "accelerate": [
        *(
            "accelerate",
            "launch",
            "--multi_gpu",
            "--num_machines={nodes}",
            "--machine_rank={node_rank}",
        ),
        *("--num_processes={world_size}", "--main_process_ip={master_address}"),
        "--main_process_port={master_port}",
    ],
}


def start(
    start_pods: StartPods, launcher: str, arguments: list[str], agents: int = 2, processes: int = 2
) -> Pods:
    command = [*LAUNCHERS[launcher], str(COUNTER), "--folder", "{checkpoints}", *arguments]
    program = {"processes": processes, "result": "{checkpoints}/final.txt", "preload": []}
    pods = start_pods(command, program=program, workers=agents, min_workers=agents)
    pods.start(agents)
    return pods


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_pod_is_replaced_and_all_launchers_start_again(
    launcher: str, start_pods: StartPods, s3: Store, tmp_path: Path
) -> None:
    # on a busy machine a pod could end before it is killed
    is_killed = tmp_path / "killed"
    pods = start(start_pods, launcher, ["--steps", "100", "--last-steps-after", str(is_killed)])
    pods.wait_for("rank 0 of 4 starts at step 0")
    until("a checkpoint", lambda: list(s3.list(f"{pods.prefix}/checkpoints/program/checkpoints")))

    killed_pod = pods.pods[2]
    killed_pod.send(signal.SIGKILL)
    is_killed.touch()
    agents = [pods.pods[1], pods.agent(1)]
    assert [agent.wait() for agent in agents] == [0, 0], pods.logs()
    assert pods.start_steps()[-1] >= 5
    assert s3.get(f"{pods.prefix}/model/result/final.txt") == b"100"


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_exception_has_the_line_of_the_program_and_not_of_the_launcher(
    launcher: str, start_pods: StartPods
) -> None:
    never = "1000000"
    arguments = ["--fail-at", "7", "--steps", never, "--save-every", never]
    pods = start(start_pods, launcher, arguments)
    assert [pod.wait() for pod in pods.pods] == [1, 1, 1], pods.logs()
    line = 1 + COUNTER.read_text()[: COUNTER.read_text().index("raise ValueError")].count("\n")
    assert re.search(
        rf"the program ended with exit code 1: \S*counter\.py:{line}: ValueError: the learning rate"
        " is negative$",
        pods.pods[0].output.rstrip(),
    ), pods.logs()


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("torchrun", marks=pytest.mark.slow),
        pytest.param("accelerate", marks=pytest.mark.slow),
        "shell",
    ],
)
def test_the_program_of_a_launcher_saves_on_sigterm(
    launcher: str, start_pods: StartPods, tmp_path: Path
) -> None:
    LAUNCHERS["shell"] = ["sh", str(tmp_path / "train.sh")]
    (tmp_path / "train.sh").write_text(f'{sys.executable} "$@"\n')
    pods = start(start_pods, launcher, ["--steps", "1000000"], agents=1, processes=1)
    pods.wait_for("rank 0 of 1 starts at step 0")
    pods.pods[1].send(signal.SIGTERM)
    assert pods.pods[1].wait() == exit_codes.TERMINATED, pods.logs()
    assert "rank 0 leaves after step" in pods.pods[1].output, pods.logs()


@pytest.mark.slow
def test_a_file_that_a_launcher_does_not_find_is_named(start_pods: StartPods) -> None:
    pods = start_pods(["torchrun", "trian.py", "{checkpoints}"], program={"preload": []})
    (agent,) = pods.start(1)
    assert agent.wait() == 1, pods.logs()
    assert re.search(r"exit code 1: .*can't open file '\S*/trian\.py'", pods.pods[0].output)
