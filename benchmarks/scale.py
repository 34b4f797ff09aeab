"""Measure the load of a real coordinator process with 512 simulated workers, which do not train.

    python -m benchmarks.scale [--members 512] [--runs 10] [--json]

Each run closes the connections of 1 to 5 workers at once. The last run closes the connections of a
third of all workers, as if a rack were lost. The figure is the time until all remaining workers
have received the member list of the next generation. Afterwards, new workers replace the lost ones.
All simulated workers run in the process of this benchmark, and the figure includes their work.
"""

import asyncio
import json
import os
import random
import resource
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.bars import make_bar, make_parser, report
from rekindle.local.services.services import Services
from rekindle.training.membership import handshake
from rekindle.training.membership.client import HEARTBEAT_INTERVAL_S, CoordinatorClient
from rekindle.training.membership.protocol import PROTOCOL_VERSION

COORDINATOR_FLAGS = (
    *("--workload=steps.digits", "--dataset=d", f"--digest={'d' * 64}"),
    *("--out=scale/model", "--checkpoints=scale/checkpoints", "--virtual-workers=4096"),
)


class SimulatedWorker(asyncio.Protocol):
    """A simulated worker, which joins, acknowledges new generations, and records when it received a
    list of members."""

    def __init__(self, member_number: int) -> None:
        self.id = f"member-{member_number}"
        self.pending = b""
        self.opened = 0
        self.group = 0
        self.list_time = 0.0
        self.joined = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def introduce(self, nonce: str) -> None:
        self.send(
            {
                "nonce": self.id,
                "proof": handshake.compute_proof(
                    handshake.read_run_secret(), "worker", nonce, self.id
                ),
            }
        )

        hello_message = {
            "protocol": PROTOCOL_VERSION,
            "id": self.id,
            "name": self.id,
            "address": "127.0.0.1",
            "step": 0,
        }

        self.send(
            {"join": hello_message | {"fingerprint": {}, "generation": 0, "group": 0, "peers": []}}
        )
        self.joined = True

    def send(self, message: dict[str, Any]) -> None:
        self.transport.write(json.dumps(message).encode() + b"\n")

    def data_received(self, data: bytes) -> None:
        *message_lines, self.pending = (self.pending + data).split(b"\n")
        for message_line in message_lines:
            if message_line.startswith(b'{"nonce"'):
                self.introduce(json.loads(message_line)["nonce"])
            elif message_line.startswith(b'{"open"'):
                self.opened = json.loads(message_line)["open"]
                self.send({"ack": self.opened, "step": 0})
            elif message_line.startswith(b'{"members"'):
                self.group = int(message_line.rpartition(b":")[2].rstrip(b"}"))
                self.list_time = time.monotonic()


async def wait_for_group(simulated_workers: list[SimulatedWorker], last_group_number: int) -> float:
    """Wait until all members are in one generation whose number is above `last_group_number`.

    Returns the time when the last member received the list of the group.
    """
    deadline_seconds = time.monotonic() + 60
    while (
        len({member.group for member in simulated_workers}) != 1
        or simulated_workers[0].group <= last_group_number
    ):
        if time.monotonic() > deadline_seconds:
            raise TimeoutError("the members did not agree within a minute")
        await asyncio.sleep(0.005)
    return max(member.list_time for member in simulated_workers)


async def measure_coordinator(
    coordinator_port: int, coordinator_process: psutil.Process, worker_count: int, loss_count: int
) -> tuple[list[float], float, float]:
    """Measure the seconds from each loss to the next generation, and the CPU share and memory of
    the coordinator.

    The CPU share is the share of a core that the coordinator uses while no member is lost; memory
    is in MB.
    """
    event_loop = asyncio.get_running_loop()
    simulated_workers = list[SimulatedWorker]()
    worker_numbers = iter(range(10**6))

    async def add() -> None:
        while len(simulated_workers) < worker_count:
            missing_count = min(32, worker_count - len(simulated_workers))
            connection_batch = [
                event_loop.create_connection(
                    lambda: SimulatedWorker(next(worker_numbers)), "127.0.0.1", coordinator_port
                )
                for _ in range(missing_count)
            ]
            simulated_workers.extend(
                connection_and_worker
                for _, connection_and_worker in await asyncio.gather(*connection_batch)
            )

    async def beat() -> None:
        for turn_number in range(10**9):
            await asyncio.sleep(HEARTBEAT_INTERVAL_S / 8)
            for member in [
                member for member in simulated_workers[turn_number % 8 :: 8] if member.joined
            ]:
                member.send({"beat": turn_number // 8, "busy": False})

    await add()
    heartbeat_task = asyncio.create_task(beat())
    await wait_for_group(simulated_workers, 0)
    start_cpu_seconds = sum(coordinator_process.cpu_times()[:2])
    start_seconds = time.monotonic()
    await asyncio.sleep(10)
    cpu_share = (sum(coordinator_process.cpu_times()[:2]) - start_cpu_seconds) / (
        time.monotonic() - start_seconds
    )
    regroup_seconds = []

    for loss_number in range(loss_count):
        group_before_loss = simulated_workers[0].group
        lost_worker_count = (
            worker_count // 3 if loss_number == loss_count - 1 else loss_number % 5 + 1
        )
        lost_workers = [
            simulated_workers.pop(random.randrange(len(simulated_workers)))
            for _ in range(lost_worker_count)
        ]
        loss_seconds = time.monotonic()

        for lost_worker in lost_workers:
            lost_worker.transport.abort()

        regroup_seconds.append(
            await wait_for_group(simulated_workers, group_before_loss) - loss_seconds
        )
        group_before_loss = simulated_workers[0].group
        await add()
        await wait_for_group(simulated_workers, group_before_loss)

    heartbeat_task.cancel()
    return regroup_seconds, cpu_share, coordinator_process.memory_info().rss / 1e6


def wait_for_coordinator(coordinator_port: int) -> None:
    """Wait until the coordinator accepts connections."""
    deadline_seconds = time.monotonic() + 60
    while True:
        with socket.socket() as probe_socket:
            if probe_socket.connect_ex(("127.0.0.1", coordinator_port)) == 0:
                return
        if time.monotonic() > deadline_seconds:
            raise TimeoutError("the coordinator did not start within a minute")
        time.sleep(0.05)


def measure_membership_share(coordinator_port: int, measured_seconds: float = 10.0) -> float:
    """Return the share of a core that an idle worker uses to stay a member of the group."""
    membership_client = CoordinatorClient("127.0.0.1", coordinator_port, {}, lambda: False)
    threading.Thread(
        target=membership_client.wait_for_group, args=(0, 0, lambda: False), daemon=True
    ).start()
    time.sleep(1)
    start_usage = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(measured_seconds)
    end_usage = resource.getrusage(resource.RUSAGE_SELF)
    return (
        end_usage.ru_utime + end_usage.ru_stime - start_usage.ru_utime - start_usage.ru_stime
    ) / measured_seconds


def main() -> int:
    coordinator_command = make_parser(__doc__)
    coordinator_command.add_argument(
        "--members", type=int, default=512, help="number of simulated workers (default: 512)"
    )
    coordinator_command.add_argument(
        "--runs", type=int, default=10, help="number of runs (default: 10)"
    )
    options = coordinator_command.parse_args()
    descriptor_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor_limit, descriptor_limit))
    os.environ[handshake.REKINDLE_SECRET] = secrets.token_hex(32)

    with tempfile.TemporaryDirectory() as temporary_folder:
        services = Services(Path(temporary_folder) / "home", {})
        services.start("s3")
        coordinator_port = 20000 + os.getpid() % 10000
        environment = services.credentials() | {
            "S3_ENDPOINT_URL": services.url("s3"),
            "S3_BUCKET": "rekindle",
        }

        coordinator_command = [
            sys.executable,
            "-m",
            "rekindle.training.membership.server",
            *COORDINATOR_FLAGS,
            f"--workers={options.members}",
        ]

        coordinator_command += [
            "--min-workers=1",
            "--silence-seconds=10",
        ]  # long timeout: heartbeats may be late, because a single process sends all of them
        environment["MASTER_PORT"] = str(coordinator_port)
        environment["POD_IP"] = "127.0.0.1"

        with open(Path(temporary_folder) / "log", "w") as log_file:
            coordinator_process = subprocess.Popen(
                coordinator_command, env=os.environ | environment, stderr=log_file
            )

        try:
            wait_for_coordinator(coordinator_port)
            coordinator = psutil.Process(coordinator_process.pid)
            regroup_seconds, cpu_share, memory_megabytes = asyncio.run(
                measure_coordinator(coordinator_port, coordinator, options.members, options.runs)
            )
            client_cpu_share = measure_membership_share(coordinator_port)
        finally:
            coordinator_process.kill()
            coordinator_process.wait()
            services.down()

    bars = [
        make_bar(
            f"next generation of {options.members} workers after the loss of 1 to 5",
            regroup_seconds[:-1],
            "s",
            0.5,
        ),
        make_bar(
            f"next generation of {options.members} workers after the loss of a third",
            regroup_seconds[-1:],
            "s",
            0.5,
        ),
        make_bar("memory of the coordinator", memory_megabytes, "MB", 300),
        make_bar(
            "CPU of the coordinator while no worker is lost", 100 * cpu_share, "% of a core", 30
        ),
        make_bar("CPU of a worker for its membership", 100 * client_cpu_share, "% of a core", 1),
    ]
    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
