"""What 512 workers cost the coordinator: simulated ones, without training, against a real coordinator process.

    python -m benchmarks.scale [--members 512] [--runs 10] [--json]

Each run breaks 1 to 5 connections at once, the last one a third of all, as if a rack were lost; it takes the time
until every other member has the list of the next generation, and then all come back. The members share one process
with this program, whose own work is part of the figure.
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
    *("--workload=steps.digits", "--dataset=d", "--digest=d"),
    *("--out=scale/model", "--checkpoints=scale/checkpoints", "--virtual-workers=4096"),
)


class Member(asyncio.Protocol):
    """One simulated worker: registers, beats, acknowledges, and remembers when it was given a list."""

    def __init__(self, number: int) -> None:
        self.id, self.pending, self.opened, self.group, self.at = f"member-{number}", b"", 0, 0, 0.0
        self.joined = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def introduce(self, nonce: str) -> None:
        self.send({"nonce": self.id, "proof": handshake.proof(handshake.run_secret(), "worker", nonce, self.id)})
        hello = {"protocol": PROTOCOL, "id": self.id, "name": self.id, "address": "127.0.0.1", "step": 0}
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
                self.group, self.at = int(line.rpartition(b":")[2].rstrip(b"}")), time.monotonic()


async def together(members: list[Member], after: int) -> float:
    """Wait until all are in one group later than `after`; gives the moment when the last one heard of it."""
    deadline = time.monotonic() + 60
    while len({member.group for member in members}) != 1 or members[0].group <= after:
        if time.monotonic() > deadline:
            raise TimeoutError("the members did not agree within a minute")
        await asyncio.sleep(0.005)
    return max(member.at for member in members)


async def measure(port: int, process: psutil.Process, count: int, runs: int) -> tuple[list[float], float, float]:
    """Seconds from each loss to the next generation at every member; the coordinator's share of a core at rest, and
    its memory (MB) at the end."""
    loop, members, numbers = asyncio.get_running_loop(), list[Member](), iter(range(10**6))

    async def add() -> None:
        while len(members) < count:
            missing = min(32, count - len(members))
            batch = [loop.create_connection(lambda: Member(next(numbers)), "127.0.0.1", port) for _ in range(missing)]
            members.extend(protocol for _, protocol in await asyncio.gather(*batch))

    async def beat() -> None:
        for turn in range(10**9):
            await asyncio.sleep(HEARTBEAT_INTERVAL_S / 8)
            for member in [member for member in members[turn % 8 :: 8] if member.joined]:
                member.send({"beat": turn // 8, "busy": False})

    await add()
    beating = asyncio.create_task(beat())
    await together(members, 0)
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    await asyncio.sleep(10)
    share = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)
    took = []
    for number in range(runs):
        group = members[0].group
        losses = count // 3 if number == runs - 1 else number % 5 + 1
        victims = [members.pop(random.randrange(len(members))) for _ in range(losses)]
        at = time.monotonic()
        for victim in victims:
            victim.transport.abort()
        took.append(await together(members, group) - at)
        group = members[0].group
        await add()
        await together(members, group)
    beating.cancel()
    return took, share, process.memory_info().rss / 1e6


def listening(port: int) -> None:
    """Wait until the coordinator takes connections."""
    deadline = time.monotonic() + 60
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if time.monotonic() > deadline:
            raise TimeoutError("the coordinator did not start within a minute")
        time.sleep(0.05)


def membership_share(port: int, seconds: float = 10.0) -> float:
    """CPU seconds a second of a worker's thread that beats and listens, the rest of the process at rest."""
    client = Client("127.0.0.1", port, {}, lambda: False)
    threading.Thread(target=client.wait_for_group, args=(0, 0, lambda: False), daemon=True).start()
    time.sleep(1)
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(seconds)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / seconds


def main() -> int:
    command = parser(__doc__)
    command.add_argument("--members", type=int, default=512, help="simulated workers (default: 512)")
    command.add_argument("--runs", type=int, default=10, help="losses (default: 10)")
    options = command.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.environ[handshake.VARIABLE] = secrets.token_hex(32)
    with tempfile.TemporaryDirectory() as name:
        services = Services(Path(name) / "home", {})
        services.start("s3")
        port = 20000 + os.getpid() % 10000
        environment = services.credentials() | {"S3_ENDPOINT_URL": services.url("s3"), "S3_BUCKET": "rekindle"}
        command = [sys.executable, "-m", "rekindle.training.membership.server", *FLAGS, f"--workers={options.members}"]
        command += ["--min-workers=1", "--silence-seconds=10"]  # it is one process that beats for all
        environment |= {"MASTER_PORT": str(port), "POD_IP": "127.0.0.1"}
        with open(Path(name) / "log", "w") as log:
            process = subprocess.Popen(command, env=os.environ | environment, stderr=log)
        try:
            listening(port)
            took, share, memory = asyncio.run(measure(port, psutil.Process(process.pid), options.members, options.runs))
            client = membership_share(port)
        finally:
            process.kill()
            process.wait()
            services.down()
    bars = [
        bar(f"next generation of {options.members}", took[:-1], "s", 0.5),
        bar(f"next generation without a third of {options.members}", took[-1:], "s", 0.5),
        bar("coordinator's memory", memory, "MB", 300),
        bar("coordinator at rest", 100 * share, "% of a core", 30),
        bar("membership in a worker", 100 * client, "% of a core", 1),
    ]
    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
