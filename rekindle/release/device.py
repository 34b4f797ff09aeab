"""The device of a released model: the model is moved to it once; inputs are copied to it, and
outputs to the CPU.

All copies and kernels are in the current stream of the process, so nothing waits before the outputs
are read. Inputs are copied to a GPU from pinned memory, while the CPU prepares the next operations.
"""

import platform
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CPU_INFO = Path("/proc/cpuinfo")


def pick_device() -> "torch.device":
    """Return the GPU if the process has one, else the CPU."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    # the errors of TF32 are larger than the tolerance of `verify`
    torch.backends.cudnn.allow_tf32 = False
    return torch.device("cuda", torch.cuda.current_device())


def place(model: Any, device: "torch.device") -> Any:
    """Move the model to `device`. Calls of the model accept and return tensors of the CPU, also in
    lists and dicts."""
    import torch

    if device.type == "cpu":
        return model
    model.to(device)
    model.register_forward_pre_hook(lambda _, *inputs: move(inputs, device), with_kwargs=True)
    model.register_forward_hook(lambda _, inputs, output: move(output, torch.device("cpu")))
    return model


def move(values: Any, device: "torch.device") -> Any:
    """Return the values with all tensors on `device`."""
    import torch
    from torch.utils._pytree import tree_map

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device == device:
            return value
        if device.type == "cuda":
            return value.pin_memory().to(device, non_blocking=True)
        return value.to(device)

    return tree_map(copy, values)


def describe_numerics(device: "torch.device") -> str:
    """Return the software and hardware that determine the last bits of a prediction, with model,
    instance and batch."""
    import torch

    if device.type == "cuda":
        return f"torch {torch.__version__}, {torch.cuda.get_device_name(device)}"
    units = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    return (
        f"torch {torch.__version__}, {_processor()} {units}, {threads} thread{'s' * (threads > 1)}"
    )


@cache
def _processor() -> str:
    """Return the name of the CPU."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    names = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
