"""Measures how much CPU, memory and GPU the processes of a pod use, for the event `usage` of the
ledger.

    sampler = UsageSampler()
    sampler.next_sample_time          # when `sample` does something next
    sampler.sample()                  # the fields of the event about once a minute, else None

The sampler starts no threads or processes, because the first process of a pod forks workers and
reaps all of its children. The GPUs are read by NVML, if its library exists.
"""

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

SAMPLE_INTERVAL_S = 5.0
# the first period is short, so that a short training has an event, too
FIRST_REPORT_S = 10.0
REPORT_INTERVAL_S = 60.0
NVML = "libnvidia-ml.so.1"
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MAX_GPUS = 64

ProcessId = tuple[int, int]  # pid and start time


@dataclass(frozen=True)
class ProcessUse:
    """CPU seconds since the start of a process, and its resident memory."""

    cpu_s: float
    memory_bytes: int


@dataclass
class Figures:
    """Mean and maximum of the samples of one quantity."""

    values: list[float] = field(default_factory=list)

    def summarize(self, name: str, unit: str, digits: int) -> dict[str, float]:
        """Return the mean and the maximum; {} without samples."""
        if not self.values:
            return {}
        mean = sum(self.values) / len(self.values)
        return {
            f"{name}_{unit}_mean": round(mean, digits),
            f"{name}_{unit}_max": round(max(self.values), digits),
        }


class UsageSampler:
    """Samples the processes of a pod: this process and its descendants."""

    def __init__(self) -> None:
        now = time.monotonic()
        self.next_sample_time = now
        self._next_report_time = now + FIRST_REPORT_S
        self._period_start = now
        self._last_sample_time = now
        self._processes: dict[ProcessId, ProcessUse] = {}
        self._gpus = GpuReader()
        self._clear()

    def _clear(self) -> None:
        self._cpu = Figures()
        self._memory = Figures()
        self._gpu = Figures()
        self._gpu_memory = Figures()

    def sample(self) -> dict[str, float] | None:
        """Take a sample if one is due. At the end of a period, return the fields of an event, else
        None."""
        now = time.monotonic()
        if now < self.next_sample_time:
            return None

        elapsed_s = now - self._last_sample_time
        processes = dict(_read_processes())
        if elapsed_s > 0 and self._processes:
            used_s = sum(
                use.cpu_s - self._processes.get(key, ProcessUse(0.0, 0)).cpu_s
                for key, use in processes.items()
            )
            self._cpu.values.append(max(0.0, used_s) / elapsed_s)
        self._memory.values.append(float(sum(use.memory_bytes for use in processes.values())))
        for percent, memory_bytes in self._gpus.read():
            self._gpu.values.append(percent)
            self._gpu_memory.values.append(memory_bytes)

        self._processes = processes
        self._last_sample_time = now
        self.next_sample_time = now + SAMPLE_INTERVAL_S
        if now < self._next_report_time:
            return None

        fields = {
            "seconds": round(now - self._period_start, 3),
            **self._cpu.summarize("cpu", "cores", 3),
            **self._memory.summarize("memory", "bytes", 0),
            **self._gpu.summarize("gpu", "percent", 1),
            **self._gpu_memory.summarize("gpu_memory", "bytes", 0),
        }
        self._period_start = now
        self._next_report_time = now + REPORT_INTERVAL_S
        self._clear()
        return fields


def _read_processes() -> Iterator[tuple[ProcessId, ProcessUse]]:
    """Yield this process and its descendants."""
    uses: dict[int, tuple[int, ProcessId, ProcessUse]] = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        with suppress(OSError, ValueError, IndexError):
            text = Path(f"/proc/{name}/stat").read_text()
            # the command may contain spaces and brackets
            values = text.rpartition(")")[2].split()
            cpu_s = (int(values[11]) + int(values[12])) / CLOCK_TICKS
            key = int(name), int(values[19])
            uses[int(name)] = int(values[1]), key, ProcessUse(cpu_s, int(values[21]) * PAGE_BYTES)

    for _, key, use in uses.values():
        pid = key[0]
        while pid != os.getpid() and pid in uses:
            pid = uses[pid][0]
        if pid == os.getpid():
            yield key, use


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class GpuReader:
    """Reads the GPUs of the pod. Source: NVML API Reference, nvmlDeviceGetUtilizationRates and
    nvmlDeviceGetMemoryInfo."""

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        with suppress(OSError):
            library = ctypes.CDLL(NVML)
            if library.nvmlInit_v2() == 0:
                self._library = library

    def read(self) -> Iterator[tuple[float, float]]:
        """Yield the percentage of busy time and the used bytes of each GPU."""
        library = self._library
        count = ctypes.c_uint()
        if not library or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return

        for index in range(min(count.value, MAX_GPUS)):
            device = ctypes.c_void_p()
            use = _Utilization()
            memory = _Memory()
            if (
                library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0
                and library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(use)) == 0
                and library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
            ):
                yield float(use.gpu), float(memory.used)
