"""Selects the samples of each virtual worker: a pure function of (seed, step, virtual worker),
without other state.

Positions 0, 1, 2, … run through one random permutation of the samples after another: each epoch
visits each sample exactly once, and a micro-batch may straddle two epochs. Virtual worker v of step
s reads `batch_size` positions, starting at (s·V + v)·batch_size.
"""

from functools import lru_cache

import torch

UINT64_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Return a 63-bit seed that differs widely for similar integers (the finalizer of splitmix64,
    applied to each)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & UINT64_MASK
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & UINT64_MASK
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & UINT64_MASK
        state ^= state >> 31
    return state >> 1


class Sampler:
    """Random access to an endless shuffled stream of `samples` samples."""

    def __init__(self, samples: int, batch_size: int, virtual_workers: int, seed: int) -> None:
        self.samples = samples
        self.batch_size = batch_size
        self.virtual_workers = virtual_workers
        self.seed = seed
        # a micro-batch spans at most two epochs, unless it is larger than an epoch
        self._order = lru_cache(maxsize=2)(self._permutation)

    def _permutation(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(mix(self.seed, epoch, 1))
        return torch.randperm(self.samples, generator=generator, dtype=torch.int64)

    def indices(self, step: int, virtual_worker: int) -> torch.Tensor:
        """Return the sample indices of one micro-batch, int64 [batch_size]."""
        start = (step * self.virtual_workers + virtual_worker) * self.batch_size
        epoch, offset = divmod(start, self.samples)
        pieces = [self._order(epoch)[offset : offset + self.batch_size]]
        missing_count = self.batch_size - len(pieces[0])
        while missing_count:
            epoch += 1
            pieces.append(self._order(epoch)[:missing_count])
            missing_count -= len(pieces[-1])
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces)

    def randomness(self, step: int, virtual_worker: int) -> int:
        """Return the seed for all randomness of one micro-batch (dropout, augmentation)."""
        return mix(self.seed, step, virtual_worker + 2)
