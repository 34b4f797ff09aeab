"""Measure a real coordinator process with 512 real launchers, each with one worker without torch.

    python -m benchmarks.scale [--members 512] [--nodes 16] [--runs 10] [--json]

Each launcher, its forkserver and its worker are separate processes; threads simulate nothing. A
worker is a member of the group through the real `CoordinatorClient`, and makes steps of a second
without any computation (benchmarks/launchers/worker.py). With root, the pods are distributed over
16 network namespaces behind a bridge, and each pod has its own address and process namespace.
Without root, all pods share the network of this machine. The coordinator and all pods share the
CPUs of this machine, so all times include the work of the pods.

The benchmark kills 1 to 5 pods at once, then single workers, which their launchers start again,
then a third of all pods; afterwards, this third starts again at once. In one generation, all
workers send a value to each other, as torch's gloo does. Finally, the benchmark replaces the
coordinator twice by SIGKILL: first during the training of an unchanged group, then while a new pod
waits for the coordinator. A time ends when all workers have received the member list of their next
generation. After a loss, the time begins when the coordinator loses the first connection: until
then, the CPUs are busy with the end of the killed processes, which would happen on other nodes.
"""

import os
import random
import resource
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from benchmarks.bars import Bar, make_bar, make_parser, report
from benchmarks.launchers.network import Network
from benchmarks.launchers.nodes import NodeSettings, Pods
from benchmarks.launchers.worker import Board, compute_value_bytes
from benchmarks.programs.services import start_object_store
from rekindle.kubernetes_names import (
    AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY,
    POD_IP,
    REKINDLE_SECRET,
    S3_BUCKET,
    S3_ENDPOINT_URL,
)
from rekindle.storage import Store
from rekindle.training.ledger.events import read_events

RUN_FLAGS = (
    *("--workload=steps.digits", "--dataset=d", f"--digest={'d' * 64}"),
    *("--out=scale/model", "--checkpoints=scale/checkpoints", "--virtual-workers=4096"),
    "--min-workers=1",
)
LEDGER_PREFIX = "scale/checkpoints/ledger"
# in the fallback without namespaces, other benchmarks may run on the same machine
COORDINATOR_PORT = 20000 + os.getpid() % 10000
TIMEOUT_S = 300.0
POLL_INTERVAL_S = 0.002
# duration of the measurement of the CPU at rest
REST_S = 10.0
# number of pods whose use of CPU is measured
SAMPLED_PODS = 32
WORKER_LOSSES = 5


def wait_until(condition: Callable[[], bool], description: str) -> float:
    """Wait for a condition, and return the time."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {TIMEOUT_S:.0f} s: {description}")
        time.sleep(POLL_INTERVAL_S)
    return time.monotonic()


class CoordinatorProcess:
    """The coordinator, which is replaced by SIGKILL and a new process at the same address."""

    def __init__(self, flags: list[str], environment: dict[str, str], log_path: Path) -> None:
        self.flags = flags
        self.environment = environment
        self.log_path = log_path
        self.max_memory_bytes = 0
        self.process: psutil.Popen | None = None

    def start(self) -> float:
        """Start a coordinator; return the time when it accepts connections."""
        with open(self.log_path, "w") as log_file:
            self.process = psutil.Popen(
                [sys.executable, "-m", "rekindle.training.membership.server", *self.flags],
                env=os.environ | self.environment,
                stderr=log_file,
            )
        return wait_until(self._accepts_connections, "the coordinator accepts connections")

    def kill(self) -> None:
        """Kill the coordinator."""
        if self.process:
            self.max_memory_bytes = max(self.max_memory_bytes, self.read_peak_memory())
            self.process.kill()
            self.process.wait()
            self.process = None

    def measure_cpu_seconds(self) -> float:
        assert self.process
        return sum(self.process.cpu_times()[:2])

    def read_peak_memory(self) -> int:
        """Return the largest resident memory of this process in bytes."""
        assert self.process
        status_lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        peak_line = next(line for line in status_lines if line.startswith("VmHWM:"))
        return 1024 * int(peak_line.split()[1])

    def has_logged(self, log_text: str) -> bool:
        return log_text in self.log_path.read_text()

    def _accepts_connections(self) -> bool:
        assert self.process
        if self.process.poll() is not None:
            raise RuntimeError(f"the coordinator has ended:\n{self.log_path.read_text()}")
        with socket.socket() as probe_socket:
            address = self.environment[POD_IP], COORDINATOR_PORT
            return probe_socket.connect_ex(address) == 0


@dataclass(frozen=True)
class Loss:
    """Pods that were killed at once. `seconds_from_kill` and `seconds_from_loss` end when all other
    workers are in their next generation, and begin with the SIGKILL and with the first connection
    that the coordinator has lost. The time in between is the work of the kernel, which ends the
    processes of the pods on the same CPUs."""

    pods: set[int]
    seconds_from_kill: float
    seconds_from_loss: float


@dataclass
class MeasuredGroup:
    """The coordinator, all pods, and the measurements."""

    coordinator: CoordinatorProcess
    store: Store
    pods: Pods
    pod_count: int
    alive_pods: set[int] = field(default_factory=set)

    def find_generation(self) -> int:
        """Return the generation that all live pods are in, else 0."""
        entries = self.pods.board.read()
        generations = {entries[pod_number][0] for pod_number in self.alive_pods}
        return generations.pop() if len(generations) == 1 else 0

    def wait_for_generation(self, earlier_generation: int) -> float:
        """Wait until all live pods are in one generation after `earlier_generation`. Return the
        time when the last of them received the member list."""
        wait_until(
            lambda: self.find_generation() > earlier_generation,
            f"{len(self.alive_pods)} pods in a generation after {earlier_generation}",
        )
        entries = self.pods.board.read()
        return max(entries[pod_number][1] for pod_number in self.alive_pods)

    def start_pods(self, pod_numbers: set[int]) -> float:
        """Start pods; return the seconds until all pods are in one generation."""
        earlier_generation = self.find_generation()
        start_s = time.monotonic()
        self.pods.start(pod_numbers)
        self.alive_pods |= pod_numbers
        return self.wait_for_generation(earlier_generation) - start_s

    def kill_pods(self, pod_count: int) -> Loss:
        """Kill pods at once, and wait until the others are in their next generation."""
        killed_pods = set(random.sample(sorted(self.alive_pods), pod_count))
        earlier_generation = self.find_generation()
        self.alive_pods -= killed_pods
        kill_s = time.monotonic()
        self.pods.kill(killed_pods)
        end_s = self.wait_for_generation(earlier_generation)
        return Loss(killed_pods, end_s - kill_s, end_s - self._find_first_loss(kill_s))

    def _find_first_loss(self, kill_s: float) -> float:
        """Return the time after `kill_s` when the coordinator noticed the loss of a worker, as its
        ledger says."""
        clock_offset_s = time.time() - time.monotonic()
        loss_times = list[float]()

        def read_loss_times() -> bool:
            loss_times[:] = [
                event["t"] - clock_offset_s
                for event in read_events(self.store, LEDGER_PREFIX)
                if event["event"] == "lost" and event["t"] - clock_offset_s >= kill_s
            ]
            return bool(loss_times)

        wait_until(read_loss_times, "the ledger has the loss")
        return min(loss_times)

    def kill_worker(self) -> float:
        """Kill the worker of a pod; return the seconds until the workers of all pods are members
        of one worker group again."""
        pod_number = random.choice(sorted(self.alive_pods))
        # the forkserver is older than the worker
        worker_process = max(
            psutil.Process(self.pods.pids[pod_number]).children(), key=psutil.Process.create_time
        )
        earlier_generation = self.find_generation()
        self.pods.board.write(pod_number, 0, 0.0)
        kill_s = time.monotonic()
        worker_process.kill()
        return self.wait_for_generation(earlier_generation) - kill_s

    def measure_exchange(self) -> tuple[float, float]:
        """Kill a pod, and let the others send a value to each other in their next generation.
        Return the seconds until all have all values, and the CPU seconds of the coordinator."""
        start_cpu_s = self.coordinator.measure_cpu_seconds()
        self.pods.board.must_exchange = True
        loss = self.kill_pods(1)
        cpu_seconds = self.coordinator.measure_cpu_seconds() - start_cpu_s
        self.pods.board.must_exchange = False
        self.start_pods(loss.pods)
        return loss.seconds_from_loss, cpu_seconds

    def measure_rest(self) -> tuple[float, float]:
        """Return the shares of a core that the coordinator and one pod use at rest."""
        sampled_processes = [
            process
            for pod_number in sorted(self.alive_pods)[:SAMPLED_PODS]
            for process in [
                psutil.Process(self.pods.pids[pod_number]),
                *psutil.Process(self.pods.pids[pod_number]).children(),
            ]
        ]
        sampled_pods = min(SAMPLED_PODS, len(self.alive_pods))

        def measure_pods() -> float:
            return sum(sum(process.cpu_times()[:2]) for process in sampled_processes)

        start_s = time.monotonic()
        start_coordinator_s = self.coordinator.measure_cpu_seconds()
        start_pods_s = measure_pods()
        time.sleep(REST_S)
        seconds = time.monotonic() - start_s
        coordinator_share = (self.coordinator.measure_cpu_seconds() - start_coordinator_s) / seconds
        return coordinator_share, (measure_pods() - start_pods_s) / seconds / sampled_pods

    def replace_during_training(self) -> tuple[float, float, int]:
        """Replace the coordinator during the training of its group. Return the seconds until all
        workers are connected again, from the kill and from the time when the new coordinator
        accepts connections; and the number of generations that the replacement has opened."""
        earlier_generation = self.find_generation()
        kill_s = time.monotonic()
        self.coordinator.kill()
        listen_s = self.coordinator.start()
        end_s = wait_until(
            lambda: self.coordinator.has_logged("are connected again"), "all workers connected"
        )
        time.sleep(1)
        newest_generation = max(generation for generation, _ in self.pods.board.read())
        return end_s - kill_s, end_s - listen_s, newest_generation - earlier_generation

    def replace_with_newcomer(self) -> tuple[float, float]:
        """Replace the coordinator while a new pod waits for it. Return the seconds until all pods
        are in their next generation, from the kill and from the time when the new coordinator
        accepts connections."""
        new_pods = self.kill_pods(1).pods
        earlier_generation = self.find_generation()
        kill_s = time.monotonic()
        self.coordinator.kill()
        self.pods.start(new_pods)
        self.alive_pods |= new_pods
        listen_s = self.coordinator.start()
        end_s = self.wait_for_generation(earlier_generation)
        return end_s - kill_s, end_s - listen_s


def measure_group(group: MeasuredGroup, run_count: int) -> list[Bar]:
    """Take all measurements."""
    pod_count = group.pod_count
    node_count = len(group.pods.nodes)
    if group.pods.network.has_namespaces:
        network_text = f"{3 * pod_count} processes in {node_count} network namespaces"
    else:
        network_text = f"{3 * pod_count} processes in one network namespace"
    start_seconds = group.start_pods(set(range(pod_count)))
    coordinator_share, pod_share = group.measure_rest()

    losses = list[Loss]()
    for run_number in range(run_count - 1):
        losses.append(group.kill_pods(min(run_number % 5 + 1, pod_count - 1)))
        group.start_pods(losses[-1].pods)

    worker_seconds = [group.kill_worker() for _ in range(min(WORKER_LOSSES, run_count))]
    loss_of_third = group.kill_pods(pod_count // 3)
    herd_seconds = group.start_pods(loss_of_third.pods)
    exchange_seconds, exchange_cpu_seconds = group.measure_exchange()
    trained_from_kill, trained_from_listen, opened_generations = group.replace_during_training()
    joined_from_kill, joined_from_listen = group.replace_with_newcomer()
    memory_bytes = max(group.coordinator.max_memory_bytes, group.coordinator.read_peak_memory())

    return [
        make_bar(
            f"start of {pod_count} launchers: first generation",
            start_seconds,
            "s",
            remark_text=network_text,
        ),
        make_bar(
            f"next generation of {pod_count} workers after the loss of 1 to 5 pods",
            [loss.seconds_from_loss for loss in losses],
            "s",
            0.5,
            remark_text=f"{median(loss.seconds_from_kill for loss in losses):.2f} s from SIGKILL",
        ),
        make_bar(
            f"next generation of {pod_count} workers after the loss of a third",
            loss_of_third.seconds_from_loss,
            "s",
            0.5,
            remark_text=f"{loss_of_third.seconds_from_kill:.2f} s from SIGKILL",
        ),
        make_bar(
            "SIGKILL of a worker: generation with the worker that its launcher starts again",
            worker_seconds,
            "s",
        ),
        make_bar("a third comes back at once: generation of all workers", herd_seconds, "s"),
        make_bar(
            "new generation after each worker has sent its addresses to all others, as with gloo",
            exchange_seconds,
            "s",
            remark_text=f"{compute_value_bytes(pod_count)} bytes each",
        ),
        make_bar("CPU of the coordinator for this generation", exchange_cpu_seconds, "s"),
        make_bar(
            "coordinator replaced: all workers of the same group connected",
            trained_from_listen,
            "s",
            1,
            remark_text=f"{trained_from_kill:.2f} s from SIGKILL of the old coordinator",
        ),
        make_bar("generations that this replacement opened", opened_generations, "", 0),
        make_bar(
            "coordinator replaced while a pod waits: next generation of all workers",
            joined_from_listen,
            "s",
            1,
            remark_text=f"{joined_from_kill:.2f} s from SIGKILL of the old coordinator",
        ),
        make_bar("memory of the coordinator", memory_bytes / 1e6, "MB", 300),
        make_bar(
            "CPU of the coordinator while no worker is lost",
            100 * coordinator_share,
            "% of a core",
            30,
        ),
        make_bar("CPU of a pod for its membership", 100 * pod_share, "% of a core", 1),
    ]


def main() -> int:
    argument_parser = make_parser(__doc__)
    argument_parser.add_argument(
        "--members", type=int, default=512, help="number of pods (default: 512)"
    )
    argument_parser.add_argument(
        "--nodes", type=int, default=16, help="number of nodes (default: 16)"
    )
    argument_parser.add_argument(
        "--runs", type=int, default=10, help="number of losses (default: 10)"
    )
    options = argument_parser.parse_args()
    descriptor_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor_limit, descriptor_limit))

    with ExitStack() as exit_stack:
        folder = Path(exit_stack.enter_context(tempfile.TemporaryDirectory()))
        network = Network.create()
        flags = [*RUN_FLAGS, f"--workers={options.members}"]
        environment = {
            "MASTER_ADDR": network.coordinator_address,
            "MASTER_PORT": str(COORDINATOR_PORT),
            REKINDLE_SECRET: secrets.token_hex(32),
            "REKINDLE_SHM": str(folder),
        }
        # the nodes are forked first, before this process has threads
        pods = Pods.create(
            NodeSettings(network, Board(options.members), flags, environment, folder),
            options.members,
            min(options.nodes, options.members),
        )
        exit_stack.callback(pods.close)

        store_environment = exit_stack.enter_context(start_object_store())
        coordinator = CoordinatorProcess(
            flags,
            environment | store_environment | {POD_IP: network.coordinator_address},
            folder / "coordinator.log",
        )
        exit_stack.callback(coordinator.kill)
        coordinator.start()
        store = Store(
            *(store_environment[name] for name in (S3_BUCKET, S3_ENDPOINT_URL)),
            *(store_environment[name] for name in (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)),
        )
        group = MeasuredGroup(coordinator, store, pods, options.members)
        bars = measure_group(group, options.runs)

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
