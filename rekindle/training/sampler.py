"""Selects the samples of each micro-batch as a pure function of the seed, the step and the virtual
worker.

The samples form an endless stream, which contains one random permutation of all samples per epoch.
Each epoch contains each sample exactly once, and a micro-batch may span two epochs. In step s,
virtual worker v of V takes the `batch_size` samples of the stream from position (s·V +
v)·batch_size on.
"""

from functools import lru_cache

import torch

UINT64_MASK = (1 << 64) - 1


def mix_seed(*seed_parts: int) -> int:
    """Hash integers to a 63-bit seed (the finalizer of splitmix64), so that similar integers give
    unrelated seeds."""
    hash_state = 0
    for seed_part in seed_parts:
        hash_state = (hash_state + seed_part + 0x9E3779B97F4A7C15) & UINT64_MASK
        hash_state = ((hash_state ^ hash_state >> 30) * 0xBF58476D1CE4E5B9) & UINT64_MASK
        hash_state = ((hash_state ^ hash_state >> 27) * 0x94D049BB133111EB) & UINT64_MASK
        hash_state ^= hash_state >> 31
    return hash_state >> 1


class Sampler:
    """Random access to an endless shuffled stream of `sample_count` samples."""

    def __init__(
        self, sample_count: int, batch_size: int, virtual_worker_count: int, seed: int
    ) -> None:
        self.samples = sample_count
        self.batch_size = batch_size
        self.virtual_workers = virtual_worker_count
        self.seed = seed
        # two permutations are cached, because a micro-batch spans at most two epochs, unless the
        # dataset is smaller than the micro-batch
        self._permutation = lru_cache(maxsize=2)(self._make_permutation)

    def _make_permutation(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch, 1))
        return torch.randperm(self.samples, generator=generator, dtype=torch.int64)

    def select_sample_indices(self, step: int, virtual_worker: int) -> torch.Tensor:
        """Return the sample indices of one micro-batch, int64 [batch_size]."""
        stream_position = (step * self.virtual_workers + virtual_worker) * self.batch_size
        epoch, epoch_offset = divmod(stream_position, self.samples)
        index_pieces = [self._permutation(epoch)[epoch_offset : epoch_offset + self.batch_size]]
        missing_count = self.batch_size - len(index_pieces[0])
        while missing_count:
            epoch += 1
            index_pieces.append(self._permutation(epoch)[:missing_count])
            missing_count -= len(index_pieces[-1])
        if len(index_pieces) == 1:
            return index_pieces[0]
        return torch.cat(index_pieces)

    def compute_micro_batch_seed(self, step: int, virtual_worker: int) -> int:
        """Return the seed of the random numbers of one micro-batch (dropout, augmentation)."""
        return mix_seed(self.seed, step, virtual_worker + 2)
