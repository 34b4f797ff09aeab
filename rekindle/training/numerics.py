"""The device and the settings of torch, which, like the config, determine the bits of a trained
model."""

import ctypes
import platform
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from argolocal.common.environment import read_integer
from rekindle.errors import ConfigError
from rekindle.training.spec import TrainingSpec

# parameters of mallopt(3)
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


def prepare_device(training_spec: TrainingSpec) -> torch.device:
    """Make torch deterministic, and return the device to train on. Raises ConfigError if
    train.device does not exist."""
    _keep_freed_memory()
    torch.set_num_threads(training_spec.threads)
    # the call has the effect of torch.use_deterministic_algorithms, but does not import torch's
    # compiler (1.8 s)
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    deterministic_settings: Any = torch.utils.deterministic
    # by default, deterministic torch fills new memory, which costs time and is unnecessary, since
    # this code never reads uninitialized memory
    deterministic_settings.fill_uninitialized_memory = False

    has_cuda = torch.cuda.is_available() if training_spec.device != "cpu" else False
    if training_spec.device == "cuda" and not has_cuda:
        raise ConfigError(
            'train.device is "cuda", but the machine lacks a usable GPU. Use "auto" or another'
            " machine."
        )

    if not has_cuda:
        return torch.device("cpu")

    torch.cuda.set_device(read_integer("LOCAL_RANK", 0, 0, torch.cuda.device_count() - 1))
    return torch.device("cuda", torch.cuda.current_device())


def _keep_freed_memory() -> None:
    """Let malloc reuse freed memory, because each training step may otherwise return its pages to
    the kernel and fault them in again."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)


def make_autocast(training_spec: TrainingSpec, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager that sets the precision of models to `train.precision`."""
    if training_spec.precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def compute_fingerprint(training_spec: TrainingSpec, device: torch.device) -> dict[str, Any]:
    """Return the properties of this machine that the bits of a trained model depend on. The
    properties must be equal in all workers."""
    machine_facts = {
        "torch": f"{torch.__version__} ({torch.version.git_version[:8]})",
        "instruction set": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": training_spec.threads,
        "config": training_spec.identity_hash(),
        "data": training_spec.digest,
    }
    # add the vector units of the CPU, by which oneDNN chooses its kernels
    if training_spec.precision == "bf16" and device.type == "cpu":
        cpu_features = {
            "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
            "amx": torch.cpu._is_amx_tile_supported(),
        }
        machine_facts["bfloat16"] = (
            " ".join(
                feature_name for feature_name, is_supported in cpu_features.items() if is_supported
            )
            or "emulated"
        )

    return machine_facts
