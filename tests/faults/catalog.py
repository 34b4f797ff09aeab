"""The faults that a training must survive in a job of any kind, with the limits of their cost.

    for fault in FAULTS:
        fault.inject(stage)

tests/faults/test_local.py injects the faults on this machine, and tests/cluster/test_faults.py on a
cluster.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

COORDINATOR = "coordinator"
WORKERS = ("worker-0", "worker-1", "worker-2")
# the names of pods without the name of the run: train-worker-1, train-master-0,
# train-lead-0-0-x7k2p, train-worker-0-1-x7k2p, train-node-0-1-x7k2p
POD = re.compile(r"train-(worker|node|master|lead)-(\d+)(?:-(\d+)(?:-[a-z0-9]{5})?)?")
# long enough for the coordinator to treat a silent worker as lost
NETWORK_OUTAGE_S = 25.0
STORE_OUTAGE_S = 10.0


class Stage(Protocol):
    """A place where a training with the workers WORKERS runs, and the means to disturb it."""

    def terminate(self, *replicas: str) -> None:
        """Delete pods: each process gets SIGTERM, and then has time to leave."""
        ...

    def kill(self, *replicas: str) -> None:
        """Send SIGKILL to all processes of these pods, as if their node had lost its power."""
        ...

    def kill_executor(self) -> None:
        """Kill the process that watches the job for the workflow."""
        ...

    def restart_controllers(self) -> None:
        """Restart the controllers of workflows and of jobs."""
        ...

    def interrupt_store(self, seconds: float) -> None:
        """Make the object store unreachable, and return when it is reachable again."""
        ...

    def cut_network(self, replica: str, seconds: float) -> None:
        """Cut off a pod from its network, and return when it is connected again."""
        ...


@dataclass(frozen=True)
class Fault:
    """A disturbance of a training. `victims` are the replicas whose pods it affects; all other
    pods must keep running."""

    name: str
    inject: Callable[[Stage], None]
    victims: tuple[str, ...] = ()
    # False if the pods of the victims keep running
    ends_victims: bool = True
    # True if the fault reaches the process that watches the job, or the controllers
    reaches_controllers: bool = False
    # True if the fault needs root on a node of the cluster, or restarts its controllers
    needs_administrator: bool = False


def parse_replica(pod_name: str) -> str:
    """Return the replica of a training's pod of any kind of job, such as `worker-1`; "" for another
    pod."""
    match = POD.fullmatch(pod_name)
    if not match:
        return ""
    role, *numbers = match.groups(default="0")
    if role in ("master", "lead"):
        return COORDINATOR
    # a pod is numbered by its Job, or within its only Job
    return f"worker-{sum(int(number) for number in numbers)}"


def _kill_during_restart(stage: Stage) -> None:
    stage.kill(WORKERS[1])
    stage.restart_controllers()


FAULTS = (
    Fault("a worker is terminated", lambda stage: stage.terminate(WORKERS[1]), WORKERS[1:2]),
    Fault(
        "a worker is killed",
        lambda stage: stage.kill(WORKERS[2]),
        WORKERS[2:],
        needs_administrator=True,
    ),
    Fault(
        "two workers are killed at once",
        lambda stage: stage.kill(*WORKERS[:2]),
        WORKERS[:2],
        needs_administrator=True,
    ),
    Fault(
        "the coordinator is terminated", lambda stage: stage.terminate(COORDINATOR), (COORDINATOR,)
    ),
    Fault(
        "the coordinator is killed",
        lambda stage: stage.kill(COORDINATOR),
        (COORDINATOR,),
        needs_administrator=True,
    ),
    Fault("the executor is killed", lambda stage: stage.kill_executor(), reaches_controllers=True),
    Fault(
        "the controllers restart",
        lambda stage: stage.restart_controllers(),
        reaches_controllers=True,
        needs_administrator=True,
    ),
    Fault(
        "a worker is killed while the controllers restart",
        _kill_during_restart,
        WORKERS[1:2],
        reaches_controllers=True,
        needs_administrator=True,
    ),
    Fault("the object store is unreachable", lambda stage: stage.interrupt_store(STORE_OUTAGE_S)),
    Fault(
        "the network of a worker is cut",
        lambda stage: stage.cut_network(WORKERS[0], NETWORK_OUTAGE_S),
        WORKERS[:1],
        ends_victims=False,
        needs_administrator=True,
    ),
    Fault("all workers are terminated", lambda stage: stage.terminate(*WORKERS), WORKERS),
    Fault(
        "a node with all pods fails",
        lambda stage: stage.kill(COORDINATOR, *WORKERS),
        (COORDINATOR, *WORKERS),
        needs_administrator=True,
    ),
)
