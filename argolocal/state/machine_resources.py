"""The GPUs and the memory of this machine, which all runs in one home (a directory of runs) share.

    resources = MachineResources(home, gpus=1, memory_bytes=64 << 30)
    allocation = resources.acquire("train-1", PodRequest(gpus=1, memory_bytes=8 << 30))
    allocation.variables    # {"CUDA_VISIBLE_DEVICES": "0", ...}
    resources.release("train-1")

For each GPU, and for each of the equal parts of the memory, a run locks a file with flock, so the
kernel releases the lock when the process of the run exits for any reason. The pods of one run share
the resources that their run has acquired. Since the pods of a run share its resources, a pod waits
only for other runs, and a run never waits for itself.
"""

import fcntl
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argolocal.common import program
from argolocal.errors import ConfigError
from argolocal.language.quantity import parse_quantity

GPU = "nvidia.com/gpu"
GPU_FOLDER = Path("/proc/driver/nvidia/gpus")
GPUS_VARIABLE = "GPUS"
# number of equal parts into which the memory is divided
MEMORY_PARTS = 128


@dataclass(frozen=True)
class PodRequest:
    """The GPUs and the memory that the containers of a pod request in total."""

    gpus: int = 0
    memory_bytes: int = 0

    def __str__(self) -> str:
        memory = f"{self.memory_bytes / 1e9:.1f} GB of memory" if self.memory_bytes else ""
        gpus = f"GPUs: {self.gpus}" if self.gpus else ""
        return " and ".join(filter(None, (gpus, memory)))


@dataclass(frozen=True)
class Allocation:
    """The resources that a pod may use. `variables`: environment variables that tell the pod's
    containers which GPUs to use."""

    variables: Mapping[str, str] = field(default_factory=dict)


def count_gpus() -> int:
    """Return the number of GPUs that runs may use: the value of $ARGOLOCAL_GPUS or $REKINDLE_GPUS
    or, if the variable is not set, the number of NVIDIA GPUs of this machine. Raises ConfigError
    for an invalid value."""
    variable = program.environment_variable(GPUS_VARIABLE)
    count_text = os.environ.get(variable)
    if count_text is not None:
        if not count_text.isdecimal() or len(count_text) > 4:
            raise ConfigError(
                f"{variable} is {count_text!r:.50}: it must be a number of GPUs, such as 1."
            )
        return int(count_text)

    try:
        return len(os.listdir(GPU_FOLDER))
    except OSError:
        return 0


def find_memory() -> int:
    """Return the size of the memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def sum_requests(containers: Iterable[Mapping[str, Any]]) -> PodRequest:
    """Return the total request of containers. As in Kubernetes, the default of a container's
    request is its limit. Raises ValueError for a malformed quantity."""
    gpus = 0
    memory_bytes = 0
    for container in containers:
        resources = container.get("resources") or {}
        limits = resources.get("limits") or {}
        requested = resources.get("requests") or {}
        gpus += int(parse_quantity(limits.get(GPU) or requested.get(GPU) or 0))
        memory = requested.get("memory") or limits.get("memory") or 0
        memory_bytes += int(parse_quantity(memory))

    return PodRequest(gpus, memory_bytes)


class MachineResources:
    """The GPUs and the parts of the memory that the run of this process has acquired."""

    def __init__(self, home: Path, gpus: int, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.gpu_locks = UnitLocks(home / "locks/gpus", gpus)
        self.memory_locks = UnitLocks(home / "locks/memory", MEMORY_PARTS)

    def acquire(self, pod: str, request: PodRequest) -> Allocation | None:
        """Acquire the GPUs and the memory that a pod requests. A request for more GPUs or memory
        than this machine has counts as a request for all of them. Return None if other runs use too
        many GPUs or too much memory."""
        gpus = self.gpu_locks.acquire(pod, request.gpus)
        if gpus is None:
            return None

        # the number of parts, rounded up
        part_count = -(-request.memory_bytes * MEMORY_PARTS // self.memory_bytes)
        if self.memory_locks.acquire(pod, part_count) is None:
            self.gpu_locks.release(pod)
            return None

        if not gpus:
            return Allocation()
        gpu_indexes = ",".join(map(str, gpus))
        return Allocation({"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": gpu_indexes})

    def release(self, pod: str) -> None:
        """Release the resources that only this pod of the run uses."""
        self.gpu_locks.release(pod)
        self.memory_locks.release(pod)


class UnitLocks:
    """The equal units of a resource, such as the GPUs. Each unit is a file in `folder`. The pods of
    this run share the units that the run has locked. `descriptors`: unit → descriptor of its locked
    file."""

    def __init__(self, folder: Path, total: int) -> None:
        self.folder = folder
        self.total = total
        self.descriptors: dict[int, int] = {}
        # unit that this run has locked → pods that use the unit
        self.users: dict[int, set[str]] = {}

    def acquire(self, pod: str, count: int) -> list[int] | None:
        """Acquire `count` units of the resource for a pod, or all units if the resource has fewer,
        and return them. Units that this run has not locked yet are preferred, then the units with
        the fewest pods. Return None if other runs have locked too many units."""
        unit_count = min(count, self.total)
        new_units: list[int] = []
        for unit in range(self.total):
            if len(new_units) == unit_count:
                break
            if unit not in self.descriptors and self._try_lock(unit):
                new_units.append(unit)

        least_used_units = sorted(self.users, key=lambda unit: len(self.users[unit]))
        units = [*new_units, *least_used_units[: unit_count - len(new_units)]]
        if len(units) < unit_count:
            for unit in new_units:
                os.close(self.descriptors.pop(unit))
            return None

        for unit in units:
            self.users.setdefault(unit, set()).add(pod)
        return sorted(units)

    def release(self, pod: str) -> None:
        """Remove a pod from its units, and release the units that no other pod uses."""
        for unit, pods in list(self.users.items()):
            pods.discard(pod)
            if not pods:
                del self.users[unit]
                os.close(self.descriptors.pop(unit))

    def _try_lock(self, unit: int) -> bool:
        """Lock a unit. Return False if another run has locked the unit."""
        self.folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self.folder / str(unit), flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self.descriptors[unit] = descriptor
        return True
