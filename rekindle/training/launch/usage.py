"""Measures how much CPU, memory and GPU the processes of a pod use, for the event `usage` of the
ledger.

    sampler = UsageSampler()
    sampler.next_sample_time          # when `sample` does something next
    sampler.sample()                  # the fields of the event about once a minute, else None

The sampler starts no threads or processes, because the first process of a pod forks workers and
reaps all of its children. The GPUs are read by NVML, if NVIDIA's library for it exists.
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
FIRST_REPORT_AFTER_S = 10.0
REPORT_INTERVAL_S = 60.0
NVML_LIBRARY = "libnvidia-ml.so.1"
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MAX_GPUS = 64

# key of a process: its pid and its start time
ProcessId = tuple[int, int]


@dataclass(frozen=True)
class ProcessUsage:
    """CPU seconds since the start of a process, and its resident memory."""

    cpu_s: float
    memory_bytes: int


@dataclass
class UsageSamples:
    """Mean and maximum of the samples of one quantity."""

    values: list[float] = field(default_factory=list)

    def summarize(self, quantity_name: str, unit: str, decimal_digits: int) -> dict[str, float]:
        """Return the mean and the maximum of the samples; {} without samples."""
        if not self.values:
            return {}
        mean_value = sum(self.values) / len(self.values)
        return {
            f"{quantity_name}_{unit}_mean": round(mean_value, decimal_digits),
            f"{quantity_name}_{unit}_max": round(max(self.values), decimal_digits),
        }


class UsageSampler:
    """Samples the processes of a pod: this process and its descendants."""

    def __init__(self) -> None:
        now_s = time.monotonic()
        self.next_sample_time = now_s
        self._next_report_time = now_s + FIRST_REPORT_AFTER_S
        self._period_start = now_s
        self._last_sample_time = now_s
        self._processes: dict[ProcessId, ProcessUsage] = {}
        self._gpus = GpuReader()
        self._clear_samples()

    def _clear_samples(self) -> None:
        self._cpu = UsageSamples()
        self._memory = UsageSamples()
        self._gpu = UsageSamples()
        self._gpu_memory = UsageSamples()

    def sample(self) -> dict[str, float] | None:
        """Take a sample if a sample is due. At the end of a period, return the fields of an event,
        else None."""
        now_s = time.monotonic()
        if now_s < self.next_sample_time:
            return None

        elapsed_s = now_s - self._last_sample_time
        usage_by_process = dict(_read_processes())
        if elapsed_s > 0 and self._processes:
            used_cpu_s = sum(
                process_usage.cpu_s - self._processes.get(process_id, ProcessUsage(0.0, 0)).cpu_s
                for process_id, process_usage in usage_by_process.items()
            )
            self._cpu.values.append(max(0.0, used_cpu_s) / elapsed_s)
        self._memory.values.append(
            float(sum(process_usage.memory_bytes for process_usage in usage_by_process.values()))
        )
        for gpu_percent, gpu_memory_bytes in self._gpus.read():
            self._gpu.values.append(gpu_percent)
            self._gpu_memory.values.append(gpu_memory_bytes)

        self._processes = usage_by_process
        self._last_sample_time = now_s
        self.next_sample_time = now_s + SAMPLE_INTERVAL_S
        if now_s < self._next_report_time:
            return None

        event_fields = {
            "seconds": round(now_s - self._period_start, 3),
            **self._cpu.summarize("cpu", "cores", 3),
            **self._memory.summarize("memory", "bytes", 0),
            **self._gpu.summarize("gpu", "percent", 1),
            **self._gpu_memory.summarize("gpu_memory", "bytes", 0),
        }
        self._period_start = now_s
        self._next_report_time = now_s + REPORT_INTERVAL_S
        self._clear_samples()
        return event_fields


def _read_processes() -> Iterator[tuple[ProcessId, ProcessUsage]]:
    """Yield the id and the usage of this process and of each of its descendants."""
    usage_by_pid: dict[int, tuple[int, ProcessId, ProcessUsage]] = {}
    for pid_text in os.listdir("/proc"):
        if not pid_text.isdecimal():
            continue
        with suppress(OSError, ValueError, IndexError):
            stat_text = Path(f"/proc/{pid_text}/stat").read_text()
            # skip the name of the command, which may contain spaces and brackets
            stat_fields = stat_text.rpartition(")")[2].split()
            cpu_s = (int(stat_fields[11]) + int(stat_fields[12])) / CLOCK_TICKS_PER_S
            process_id = int(pid_text), int(stat_fields[19])
            usage_by_pid[int(pid_text)] = (
                int(stat_fields[1]),
                process_id,
                ProcessUsage(cpu_s, int(stat_fields[21]) * PAGE_BYTES),
            )

    for _, process_id, process_usage in usage_by_pid.values():
        pid = process_id[0]
        while pid != os.getpid() and pid in usage_by_pid:
            pid = usage_by_pid[pid][0]
        if pid == os.getpid():
            yield process_id, process_usage


class _NvmlUtilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _NvmlMemory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class GpuReader:
    """Reads the GPUs of the pod. Source: the NVML API Reference, nvmlDeviceGetUtilizationRates and
    nvmlDeviceGetMemoryInfo."""

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        with suppress(OSError):
            nvml_library = ctypes.CDLL(NVML_LIBRARY)
            if nvml_library.nvmlInit_v2() == 0:
                self._library = nvml_library

    def read(self) -> Iterator[tuple[float, float]]:
        """Yield the percentage of busy time and the used bytes of each GPU."""
        nvml_library = self._library
        gpu_count = ctypes.c_uint()
        if not nvml_library or nvml_library.nvmlDeviceGetCount_v2(ctypes.byref(gpu_count)) != 0:
            return

        for gpu_index in range(min(gpu_count.value, MAX_GPUS)):
            device = ctypes.c_void_p()
            gpu_utilization = _NvmlUtilization()
            gpu_memory = _NvmlMemory()
            if (
                nvml_library.nvmlDeviceGetHandleByIndex_v2(gpu_index, ctypes.byref(device)) == 0
                and nvml_library.nvmlDeviceGetUtilizationRates(
                    device, ctypes.byref(gpu_utilization)
                )
                == 0
                and nvml_library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(gpu_memory)) == 0
            ):
                yield float(gpu_utilization.gpu), float(gpu_memory.used)
