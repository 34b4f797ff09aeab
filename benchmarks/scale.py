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

from benchmarks.bars import bar, parser, report
from rekindle.local.services.services import Services
from rekindle.training.membership import handshake
from rekindle.training.membership.client import HEARTBEAT_INTERVAL_S, Client
from rekindle.training.membership.protocol import PROTOCOL

FLAGS = (
    *("--workload=steps.digits", "--dataset=d", f"--digest={'d' * 64}"),
    *("--out=scale/model", "--checkpoints=scale/checkpoints", "--virtual-workers=4096"),
)


class Member(asyncio.Protocol):
    """A simulated worker, which joins, acknowledges new generations, and records when it received a
    list of members."""

    def __init__(self, number: int) -> None:
        self.id = f"member-{number}"
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

        hello = {
            "protocol": PROTOCOL,
            "id": self.id,
            "name": self.id,
            "address": "127.0.0.1",
            "step": 0,
        }

        self.send({"join": hello | {"fingerprint": {}, "generation": 0, "group": 0, "peers": []}})
        self.joined = True

    def send(self, message: dict[str, Any]) -> None:
        self.transport.write(json.dumps(message).encode() + b"\n")

    def data_received(self, data: bytes) -> None:
        *lines, self.pending = (self.pending + data).split(b"\n")
        for line in lines:
            if line.startswith(b'{"nonce"'):
                self.introduce(json.loads(line)["nonce"])
            elif line.startswith(b'{"open"'):
                self.opened = json.loads(line)["open"]
                self.send({"ack": self.opened, "step": 0})
            elif line.startswith(b'{"members"'):
                self.group = int(line.rpartition(b":")[2].rstrip(b"}"))
                self.list_time = time.monotonic()


async def wait_for_group(members: list[Member], after: int) -> float:
    """Wait until all members are in one generation whose number is above `after`.

    Returns the time when the last member received the list of the group.
    """
    deadline = time.monotonic() + 60
    while len({member.group for member in members}) != 1 or members[0].group <= after:
        if time.monotonic() > deadline:
            raise TimeoutError("the members did not agree within a minute")
        await asyncio.sleep(0.005)
    return max(member.list_time for member in members)


async def measure(
    port: int, process: psutil.Process, count: int, runs: int
) -> tuple[list[float], float, float]:
    """Measure the seconds from each loss to the next generation, and the CPU share and memory of
    the coordinator.

    The CPU share is the share of a core that the coordinator uses while no member is lost; memory
    is in MB.
    """
    loop = asyncio.get_running_loop()
    members = list[Member]()
    numbers = iter(range(10**6))

    async def add() -> None:
        while len(members) < count:
            missing = min(32, count - len(members))
            batch = [
                loop.create_connection(lambda: Member(next(numbers)), "127.0.0.1", port)
                for _ in range(missing)
            ]
            members.extend(protocol for _, protocol in await asyncio.gather(*batch))

    async def beat() -> None:
        for turn in range(10**9):
            await asyncio.sleep(HEARTBEAT_INTERVAL_S / 8)
            for member in [member for member in members[turn % 8 :: 8] if member.joined]:
                member.send({"beat": turn // 8, "busy": False})

    await add()
    beating = asyncio.create_task(beat())
    await wait_for_group(members, 0)
    cpu = sum(process.cpu_times()[:2])
    began = time.monotonic()
    await asyncio.sleep(10)
    share = (sum(process.cpu_times()[:2]) - cpu) / (time.monotonic() - began)
    durations = []

    for number in range(runs):
        group = members[0].group
        losses = count // 3 if number == runs - 1 else number % 5 + 1
        victims = [members.pop(random.randrange(len(members))) for _ in range(losses)]
        start = time.monotonic()

        for victim in victims:
            victim.transport.abort()

        durations.append(await wait_for_group(members, group) - start)
        group = members[0].group
        await add()
        await wait_for_group(members, group)

    beating.cancel()
    return durations, share, process.memory_info().rss / 1e6


def wait_for_coordinator(port: int) -> None:
    """Wait until the coordinator accepts connections."""
    deadline = time.monotonic() + 60
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if time.monotonic() > deadline:
            raise TimeoutError("the coordinator did not start within a minute")
        time.sleep(0.05)


def membership_share(port: int, seconds: float = 10.0) -> float:
    """Return the share of a core that an idle worker uses to stay a member of the group."""
    client = Client("127.0.0.1", port, {}, lambda: False)
    threading.Thread(target=client.wait_for_group, args=(0, 0, lambda: False), daemon=True).start()
    time.sleep(1)
    start = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(seconds)
    end = resource.getrusage(resource.RUSAGE_SELF)
    return (end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime) / seconds


def main() -> int:
    command = parser(__doc__)
    command.add_argument(
        "--members", type=int, default=512, help="number of simulated workers (default: 512)"
    )
    command.add_argument("--runs", type=int, default=10, help="number of runs (default: 10)")
    options = command.parse_args()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    os.environ[handshake.REKINDLE_SECRET] = secrets.token_hex(32)

    with tempfile.TemporaryDirectory() as name:
        services = Services(Path(name) / "home", {})
        services.start("s3")
        port = 20000 + os.getpid() % 10000
        environment = services.credentials() | {
            "S3_ENDPOINT_URL": services.url("s3"),
            "S3_BUCKET": "rekindle",
        }

        command = [
            sys.executable,
            "-m",
            "rekindle.training.membership.server",
            *FLAGS,
            f"--workers={options.members}",
        ]

        command += [
            "--min-workers=1",
            "--silence-seconds=10",
        ]  # long timeout: heartbeats may be late, because a single process sends all of them
        environment["MASTER_PORT"] = str(port)
        environment["POD_IP"] = "127.0.0.1"

        with open(Path(name) / "log", "w") as log:
            process = subprocess.Popen(command, env=os.environ | environment, stderr=log)

        try:
            wait_for_coordinator(port)
            server = psutil.Process(process.pid)
            durations, share, memory = asyncio.run(
                measure(port, server, options.members, options.runs)
            )
            client = membership_share(port)
        finally:
            process.kill()
            process.wait()
            services.down()

    bars = [
        bar(
            f"next generation of {options.members} workers after the loss of 1 to 5",
            durations[:-1],
            "s",
            0.5,
        ),
        bar(
            f"next generation of {options.members} workers after the loss of a third",
            durations[-1:],
            "s",
            0.5,
        ),
        bar("memory of the coordinator", memory, "MB", 300),
        bar("CPU of the coordinator while no worker is lost", 100 * share, "% of a core", 30),
        bar("CPU of a worker for its membership", 100 * client, "% of a core", 1),
    ]
    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
