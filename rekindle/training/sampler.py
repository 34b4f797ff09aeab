"""Selects the samples of each micro-batch as a pure function of the seed, the step and the virtual
worker.

The samples form an endless stream: one random permutation of all samples per epoch. Each epoch
contains each sample exactly once, and a micro-batch may span two epochs. In step s, virtual worker
v of V takes the `batch_size` samples of the stream from position (s·V + v)·batch_size on.
"""

from functools import lru_cache

import torch

UINT64_MASK = (1 << 64) - 1


def mix_seed(*numbers: int) -> int:
    """Hash integers to a 63-bit seed (the finalizer of splitmix64), so that similar integers give
    unrelated seeds."""
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
        # two permutations are cached, because a micro-batch spans at most two epochs, unless the
        # dataset is smaller than the micro-batch
        self._order = lru_cache(maxsize=2)(self._permutation)

    def _permutation(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch, 1))
        return torch.randperm(self.samples, generator=generator, dtype=torch.int64)

    def sample_indices(self, step: int, virtual_worker: int) -> torch.Tensor:
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

    def micro_batch_seed(self, step: int, virtual_worker: int) -> int:
        """Return the seed of the random numbers of one micro-batch (dropout, augmentation)."""
        return mix_seed(self.seed, step, virtual_worker + 2)
