"""Measure how long torchrun is interrupted by the loss of a node, for comparison in
benchmarks/recovery.py.

Three agents of torchrun start workers, which train the model of benchmarks/workloads/stamped.py
with DDP.

python -m benchmarks.torchrun STAMPS        (a worker; torchrun runs this command)
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.workloads.stamped import FEATURE_COUNT, STAMP_STRUCT, Model

NODE_COUNT = 3
# This setting tunes the rendezvous c10d for a fast reaction to lost nodes. The variable
# TORCH_DISABLE_SHARE_RDZV_TCP_STORE avoids a defect of torch 2.13 that stops elastic jobs.
RENDEZVOUS_CONFIG = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
AGENT_ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}


def measure_next_step(run_count: int) -> list[float]:
    """Return the seconds from the SIGKILL of one of three nodes to the next step of the other two,
    minus the duration of a step."""
    return [_measure_once(29400 + run_number) for run_number in range(run_count)]


def _measure_once(rendezvous_port: int) -> float:
    with tempfile.TemporaryDirectory() as temporary_folder:
        agent_processes = [
            _start_agent(Path(temporary_folder), rendezvous_port, node_number)
            for node_number in range(NODE_COUNT)
        ]
        try:
            wait_until(
                lambda: all(
                    len(read_stamps(Path(temporary_folder), NODE_COUNT)) >= 10
                    for _ in agent_processes
                )
            )
            earlier_stamps = read_stamps(Path(temporary_folder), NODE_COUNT)
            kill_seconds = time.monotonic()
            # do not kill the first agent, which hosts the rendezvous store, because its loss would
            # end all agents
            _kill_agent(agent_processes[-1])
            wait_until(lambda: len(read_stamps(Path(temporary_folder), NODE_COUNT - 1)) >= 1)

            return (
                read_stamps(Path(temporary_folder), NODE_COUNT - 1)[0]
                - kill_seconds
                - (earlier_stamps[-1] - earlier_stamps[0]) / (len(earlier_stamps) - 1)
            )
        finally:
            for agent_process in agent_processes:
                _kill_agent(agent_process)


def _start_agent(log_folder: Path, rendezvous_port: int, node_number: int) -> subprocess.Popen:
    agent_command = [
        *(
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes=1:{NODE_COUNT}",
            "--max-restarts=100",
        ),
        *(
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{rendezvous_port}",
            f"--rdzv-conf={RENDEZVOUS_CONFIG},is_host={int(not node_number)}",
        ),
        *(f"--local-addr=127.0.0.{node_number + 1}", "-m", "benchmarks.torchrun", str(log_folder)),
    ]
    with open(log_folder / f"agent{node_number}.log", "w") as log_file:
        return subprocess.Popen(
            agent_command,
            env=os.environ | AGENT_ENVIRONMENT,
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,
        )


def _kill_agent(agent_process: subprocess.Popen) -> None:
    """Kill an agent of torchrun and its worker, to simulate the loss of a node. The worker is not
    in the agent's process group, so the worker is killed separately."""
    child_pids = subprocess.run(
        ["pgrep", "-P", str(agent_process.pid)], capture_output=True, text=True
    ).stdout.split()
    for killed_pid in [agent_process.pid, *map(int, child_pids)]:
        try:
            os.kill(killed_pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    agent_process.wait()


def read_stamps(stamps_folder: Path, worker_count: int) -> list[float]:
    """Return the times when rank 0 of a group of `worker_count` workers finished its steps."""
    stamp_contents = [
        stamp_path.read_bytes() for stamp_path in stamps_folder.glob(f"{worker_count}-0-*")
    ]
    return sorted(
        finish_seconds
        for stamp_bytes in stamp_contents
        for finish_seconds, _ in STAMP_STRUCT.iter_unpack(
            stamp_bytes[: len(stamp_bytes) // 16 * 16]
        )
    )


def wait_until(is_fulfilled, seconds: float = 120) -> None:
    deadline_seconds = time.monotonic() + seconds
    while not is_fulfilled():
        if time.monotonic() > deadline_seconds:
            raise TimeoutError("torchrun did not make the expected steps within two minutes")
        time.sleep(0.02)


def train_as_worker(stamps_folder: Path) -> None:
    """Train as in the tutorial of DDP; the workers share the 8 micro-batches of a step."""
    import torch
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo")
    worker_count = dist.get_world_size()
    rank = dist.get_rank()
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(FEATURE_COUNT, Model().width), nn.ReLU(), nn.Linear(Model().width, 1)
    )
    ddp_model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(ddp_model.parameters(), fused=True)
    stamp_file = os.open(
        stamps_folder / f"{worker_count}-{rank}-{os.getpid()}",
        os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    )
    batch_rows = torch.randn(8 * 8 // worker_count, FEATURE_COUNT)

    while True:
        optimizer.zero_grad()
        (
            ddp_model(batch_rows) - batch_rows.square().sum(1, keepdim=True)
        ).square().mean().backward()
        optimizer.step()
        os.write(stamp_file, STAMP_STRUCT.pack(time.monotonic(), 0.0))


if __name__ == "__main__":
    train_as_worker(Path(sys.argv[1]))
