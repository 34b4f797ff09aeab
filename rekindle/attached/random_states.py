"""Reads and restores the random number generators of one process (Python, NumPy, torch on the CPU
and on the GPU).

The states of the generators consist of plain values, so torch.load can read them without running
code.
"""

import random
import sys
from typing import Any

import torch

from rekindle.training.sampler import mix_seed

MAX_NUMPY_SEED = 1 << 32


def read_random_states() -> dict[str, Any]:
    """Return the states of the random number generators of this process."""
    generator_states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}

    # a program that has not imported NumPy does not use its generator
    if "numpy" in sys.modules:
        import numpy as np

        numpy_state: Any = np.random.get_state()
        numpy_generator_name, numpy_words, *remaining_fields = numpy_state
        generator_states["numpy"] = (
            numpy_generator_name,
            torch.from_numpy(numpy_words.astype("int64")),
            *remaining_fields,
        )

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generator_states["cuda"] = torch.cuda.get_rng_state()
    return generator_states


def restore_random_states(rank_states: list[dict[str, Any]], rank: int, step: int) -> None:
    """Set the random number generators of this process to the saved states of its rank. A rank
    without saved states gets new seeds, which differ from the seeds of the other ranks."""
    if rank < len(rank_states):
        _restore_generators(rank_states[rank])
        return

    seed = mix_seed(step, rank)
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(seed % MAX_NUMPY_SEED)


def _restore_generators(generator_states: dict[str, Any]) -> None:
    state_version, python_words, next_gauss = generator_states["python"]
    random.setstate((state_version, tuple(python_words), next_gauss))
    torch.set_rng_state(generator_states["torch"].clone())

    if "numpy" in generator_states:
        import numpy as np

        numpy_generator_name, numpy_words, *remaining_fields = generator_states["numpy"]
        np.random.set_state(
            (numpy_generator_name, numpy_words.numpy().astype("uint32"), *remaining_fields)
        )
    if "cuda" in generator_states and torch.cuda.is_available():
        torch.cuda.set_rng_state(generator_states["cuda"].clone())
