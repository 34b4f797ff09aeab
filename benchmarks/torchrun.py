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

from benchmarks.workloads.stamped import FEATURES, STAMP, Model

NODES = 3
# CONF tunes the rendezvous c10d for a fast reaction to lost nodes. The first variable in
# ENVIRONMENT avoids a defect of torch 2.13 that stops elastic jobs.
CONF = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}


def next_step(runs: int) -> list[float]:
    """Return the seconds from the SIGKILL of one of three nodes to the next step of the other two,
    minus the duration of a step."""
    return [_once(29400 + number) for number in range(runs)]


def _once(port: int) -> float:
    with tempfile.TemporaryDirectory() as name:
        agents = [_agent(Path(name), port, node) for node in range(NODES)]
        try:
            until(lambda: all(len(read_stamps(Path(name), NODES)) >= 10 for _ in agents))
            earlier = read_stamps(Path(name), NODES)
            start = time.monotonic()
            # not the first agent: it hosts the rendezvous store, so its loss would end all agents
            _kill(agents[-1])
            until(lambda: len(read_stamps(Path(name), NODES - 1)) >= 1)

            return (
                read_stamps(Path(name), NODES - 1)[0]
                - start
                - (earlier[-1] - earlier[0]) / (len(earlier) - 1)
            )
        finally:
            for agent in agents:
                _kill(agent)


def _agent(folder: Path, port: int, node: int) -> subprocess.Popen:
    command = [
        *(
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes=1:{NODES}",
            "--max-restarts=100",
        ),
        *(
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{port}",
            f"--rdzv-conf={CONF},is_host={int(not node)}",
        ),
        *(f"--local-addr=127.0.0.{node + 1}", "-m", "benchmarks.torchrun", str(folder)),
    ]
    with open(folder / f"agent{node}.log", "w") as log:
        return subprocess.Popen(
            command, env=os.environ | ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
        )


def _kill(agent: subprocess.Popen) -> None:
    """Kill an agent and its worker, to simulate the loss of a node. The worker is not in the
    agent's process group, so it is killed separately."""
    children = subprocess.run(
        ["pgrep", "-P", str(agent.pid)], capture_output=True, text=True
    ).stdout.split()
    for pid in [agent.pid, *map(int, children)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    agent.wait()


def read_stamps(folder: Path, size: int) -> list[float]:
    """Return the times when rank 0 of a group of `size` workers finished its steps."""
    contents = [path.read_bytes() for path in folder.glob(f"{size}-0-*")]
    return sorted(
        time for data in contents for time, _ in STAMP.iter_unpack(data[: len(data) // 16 * 16])
    )


def until(condition, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("torchrun did not make the expected steps within two minutes")
        time.sleep(0.02)


def worker(folder: Path) -> None:
    """Train as in the tutorial of DDP; the workers share the 8 micro-batches of a step."""
    import torch
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("gloo")
    size = dist.get_world_size()
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(FEATURES, Model().width), nn.ReLU(), nn.Linear(Model().width, 1))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    file = os.open(folder / f"{size}-{rank}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    rows = torch.randn(8 * 8 // size, FEATURES)

    while True:
        optimizer.zero_grad()
        (model(rows) - rows.square().sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        os.write(file, STAMP.pack(time.monotonic(), 0.0))


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
