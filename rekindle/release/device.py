"""Runs a released model on a device. The model is moved to the device once; each call copies its
inputs to the device and its outputs to the CPU.

All copies and kernels use the current stream, so the CPU waits only when it reads the outputs.
Inputs are copied to a GPU from pinned memory, while the CPU prepares the next operations.
"""

import platform
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CPU_INFO_FILE = Path("/proc/cpuinfo")


def find_torch() -> Any:
    """Return the module torch if this process has imported it, else None. Only models that are a
    torch.nn.Module need torch, so torch may not be installed."""
    return sys.modules.get("torch")


def use_one_thread() -> None:
    """If torch is imported, limit torch to one thread, as servers do by default. With several
    threads, small layers are slow on a busy machine."""
    torch = find_torch()
    if torch:
        torch.set_num_threads(1)


def pick_device() -> "torch.device":
    """Return the GPU if the process has one, else the CPU."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    # TF32 is disabled, because its rounding errors exceed the tolerance of `verify`
    torch.backends.cudnn.allow_tf32 = False
    return torch.device("cuda", torch.cuda.current_device())


def move_model(model: "torch.nn.Module", device: "torch.device") -> "torch.nn.Module":
    """Move the model to `device`. After the move, calls of the model still accept and return CPU
    tensors, also inside lists and dicts."""
    import torch

    if device.type == "cpu":
        return model
    model.to(device)
    model.register_forward_pre_hook(
        lambda _, *inputs: move_tensors(inputs, device), with_kwargs=True
    )
    model.register_forward_hook(lambda _, inputs, output: move_tensors(output, torch.device("cpu")))
    return model


def move_tensors(nested_values: object, device: "torch.device") -> Any:
    """Return `nested_values`, a nested structure of lists and dicts, with all tensors on
    `device`."""
    import torch
    from torch.utils._pytree import tree_map

    def move_tensor(nested_value: object) -> object:
        if not isinstance(nested_value, torch.Tensor) or nested_value.device == device:
            return nested_value
        if device.type == "cuda":
            return nested_value.pin_memory().to(device, non_blocking=True)
        return nested_value.to(device)

    return tree_map(move_tensor, nested_values)


def describe_numerics(device: "torch.device") -> str:
    """Describe the software and hardware that, together with model, instance and batch, determine
    each bit of a prediction."""
    import torch

    if device.type == "cuda":
        return f"torch {torch.__version__}, {torch.cuda.get_device_name(device)}"
    instruction_set = torch.backends.cpu.get_cpu_capability()
    thread_count = torch.get_num_threads()
    plural_suffix = "s" if thread_count > 1 else ""
    return (
        f"torch {torch.__version__}, {_read_cpu_name()} {instruction_set}, {thread_count}"
        f" thread{plural_suffix}"
    )


@cache
def _read_cpu_name() -> str:
    """Return the name of the CPU."""
    cpu_info_lines = CPU_INFO_FILE.read_text().splitlines() if CPU_INFO_FILE.exists() else []
    cpu_names = (
        line.partition(": ")[2] for line in cpu_info_lines if line.startswith("model name")
    )
    return next(cpu_names, platform.processor() or platform.machine())
