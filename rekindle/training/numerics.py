"""What the bits of a result depend on beside the config: device, torch's settings, and the fingerprint of both."""

import ctypes
import os
import platform
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from rekindle.errors import ConfigError
from rekindle.training.spec import TrainingSpec

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def pick_device(spec: TrainingSpec) -> torch.device:
    """The device to compute on, with torch set to be deterministic. Raises ConfigError if there is no such device."""
    _keep_freed_memory()
    torch.set_num_threads(spec.threads)
    # what torch.use_deterministic_algorithms does, without its 1.8 s for importing the compiler
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False  # we never read uninitialized memory: no need to pay for filling it
    cuda = torch.cuda.is_available() if spec.device != "cpu" else False
    if spec.device == "cuda" and not cuda:
        raise ConfigError('train.device is "cuda": this machine has no usable GPU. Use "auto", or another machine.')
    if not cuda:
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cuda", torch.cuda.current_device())


def _keep_freed_memory() -> None:
    """Have malloc keep freed memory: it may return the heap's top each step, and fault the same pages in again."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc's
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)


def autocast(spec: TrainingSpec, device: torch.device) -> AbstractContextManager[Any]:
    """Within it, models compute in `train.precision`."""
    return torch.autocast(device.type, torch.bfloat16) if spec.precision == "bf16" else nullcontext()


def fingerprint(spec: TrainingSpec, device: torch.device) -> dict[str, Any]:
    """What must be equal in all workers, because the bits depend on it."""
    facts = {
        "torch": f"{torch.__version__} ({torch.version.git_version[:8]})",
        "instruction set": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": spec.threads,
        "config": spec.identity_hash(),
        "data": spec.digest,
    }
    if spec.precision == "bf16" and device.type == "cpu":  # oneDNN uses what there is
        units = {"avx512_bf16": torch.cpu._is_avx512_bf16_supported(), "amx": torch.cpu._is_amx_tile_supported()}
        facts["bfloat16"] = " ".join(name for name, exists in units.items() if exists) or "emulated"
    return facts
