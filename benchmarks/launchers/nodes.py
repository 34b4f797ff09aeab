"""The nodes of the benchmark: each is a process that forks launchers, as a kubelet starts pods.

A pod consists of three processes: the launcher, its forkserver, and the worker. With root, each
node has its own network namespace, and each pod its own process namespace: the launcher has pid 1,
and the other processes of the pod end with it.
"""

import gc
import importlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from argolocal.common.linux import LIBC, die_with_parent
from benchmarks.launchers import worker
from benchmarks.launchers.network import CLONE_NEWNS, CLONE_NEWPID, Network, unshare
from benchmarks.launchers.worker import Board
from rekindle.kubernetes_names import POD_IP, POD_NAME
from rekindle.training.launch import launcher

# modules that a pod imports late: if the node has imported a module, all its pods share the memory
LATE_MODULES = (
    "rekindle.cache.key",
    "rekindle.cache.loaded",
    "rekindle.step",
    "rekindle.storage",
    "rekindle.training.worker",
    "rekindle.workload",
)

MS_PRIVATE_RECURSIVE = 0x40000 | 0x4000
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class NodeSettings:
    """The settings of all nodes. `flags` and `environment`: of all launchers."""

    network: Network
    board: Board
    flags: list[str]
    environment: dict[str, str]
    folder: Path


class Node:
    """A node as seen from the benchmark's own process."""

    def __init__(self, settings: NodeSettings, node_number: int, pod_numbers: range) -> None:
        """Start the process of the node. The calling process must not have any threads."""
        self.pod_numbers = pod_numbers
        self.connection, node_connection = FORK.Pipe()
        self.process = FORK.Process(
            target=_run_node,
            args=(settings, node_number, pod_numbers, node_connection, os.getpid()),
            daemon=True,
        )
        self.process.start()
        node_connection.close()

        self.connection.recv()
        assert self.process.pid
        settings.network.connect(node_number, self.process.pid)
        self.connection.send(None)
        self.connection.recv()


@dataclass
class Pods:
    """The pods of all nodes."""

    nodes: list[Node]
    board: Board
    network: Network
    # pod → pid of its launcher
    pids: dict[int, int] = field(default_factory=dict)

    @classmethod
    def create(cls, settings: NodeSettings, pod_count: int, node_count: int) -> "Pods":
        """Start `node_count` nodes, over which the pods will be distributed evenly."""
        for module_name in LATE_MODULES:
            importlib.import_module(module_name)
        # garbage collections would copy memory that all processes share
        gc.collect()
        gc.freeze()
        gc.disable()
        bounds = [node * pod_count // node_count for node in range(node_count + 1)]
        nodes = [
            Node(settings, node_number, range(bounds[node_number], bounds[node_number + 1]))
            for node_number in range(node_count)
        ]
        return cls(nodes, settings.board, settings.network)

    def start(self, pod_numbers: Iterable[int]) -> None:
        """Start the given pods, on all nodes at the same time."""
        started_pods = set(pod_numbers)
        for pod_number in started_pods:
            self.board.write(pod_number, 0, 0.0)
        for node in self.nodes:
            node.connection.send(sorted(started_pods.intersection(node.pod_numbers)))
        for node in self.nodes:
            self.pids.update(node.connection.recv())

    def kill(self, pod_numbers: Iterable[int]) -> None:
        """Kill the given pods at once."""
        for pod_number in pod_numbers:
            os.kill(self.pids.pop(pod_number), signal.SIGKILL)

    def close(self) -> None:
        """Kill the nodes, and with them all pods."""
        for node in self.nodes:
            node.process.kill()
        for node in self.nodes:
            node.process.join()


def _run_node(
    settings: NodeSettings,
    node_number: int,
    pod_numbers: range,
    connection: Connection,
    benchmark_pid: int,
) -> None:
    die_with_parent(benchmark_pid)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # the kernel removes the pods that have ended
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    settings.network.leave_network()
    connection.send(None)
    connection.recv()
    settings.network.configure(node_number, len(pod_numbers))
    connection.send(None)

    node_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
    while True:
        try:
            started_pods = connection.recv()
        except EOFError:
            return
        connection.send(
            {
                pod_number: _fork_pod(
                    settings,
                    pod_number,
                    settings.network.get_pod_address(node_number, pod_number - pod_numbers[0]),
                    node_namespace,
                )
                for pod_number in started_pods
            }
        )


def _fork_pod(
    settings: NodeSettings, pod_number: int, pod_address: str, node_namespace: int
) -> int:
    """Fork the launcher of a pod; return its pid."""
    has_namespaces = settings.network.has_namespaces
    if has_namespaces:
        # a process may create a namespace for its children only while they would stay in its own
        LIBC.setns(node_namespace, CLONE_NEWPID)
        unshare(CLONE_NEWPID)

    node_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid

    exit_code = 1
    try:
        # the parent of the first process of a namespace is invisible
        die_with_parent(0 if has_namespaces else node_pid)
        if has_namespaces:
            unshare(CLONE_NEWNS)
            LIBC.mount(b"none", b"/", None, MS_PRIVATE_RECURSIVE, None)
            LIBC.mount(b"proc", b"/proc", b"proc", 0, None)

        log_descriptor = os.open(
            settings.folder / f"pod-{pod_number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        os.dup2(log_descriptor, 1)
        os.dup2(log_descriptor, 2)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.update(settings.environment)
        os.environ.update({POD_NAME: f"pod-{pod_number}", POD_IP: pod_address})
        worker.install(settings.board, pod_number)
        exit_code = launcher.main(settings.flags)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(exit_code)
