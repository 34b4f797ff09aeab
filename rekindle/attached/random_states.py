"""Reads and restores the random number generators of one process: Python, NumPy, torch on the CPU
and on the GPU.

The states consist of plain values, so torch.load can read them without running code.
"""

import random
import sys
from typing import Any

import torch

from rekindle.training.sampler import mix_seed

MAX_NUMPY_SEED = 1 << 32


def read_random_states() -> dict[str, Any]:
    """Return the states of the generators of this process."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}

    # a program that has not imported NumPy does not use its generator
    if "numpy" in sys.modules:
        import numpy as np

        state: Any = np.random.get_state()
        name, keys, *others = state
        states["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *others)

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: list[dict[str, Any]], rank: int, step: int) -> None:
    """Set the generators of this process to the state of its rank. A rank without a saved state
    gets new seeds, which differ from those of the other ranks."""
    if rank < len(states):
        _restore(states[rank])
        return

    seed = mix_seed(step, rank)
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(seed % MAX_NUMPY_SEED)


def _restore(states: dict[str, Any]) -> None:
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    torch.set_rng_state(states["torch"].clone())

    if "numpy" in states:
        import numpy as np

        name, words, *others = states["numpy"]
        np.random.set_state((name, words.numpy().astype("uint32"), *others))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].clone())
