"""The position in the training data: an index into the stream of all samples of all epochs. The
index does not depend on the number of processes.

A batch is a range of this stream. The processes divide the samples of a batch among themselves.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rekindle.errors import ConfigError
from rekindle.training.sampler import mix_seed


@dataclass
class Progress:
    """`step`: number of completed steps; `epoch`: number of completed epochs; `offset`: number of
    samples of the current epoch that were used; `samples`: samples of an epoch, 0 if unknown."""

    step: int = 0
    epoch: int = 0
    offset: int = 0
    samples: int = 0

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def plan_batches(samples: int, offset: int, batch_size: int, drop_last: bool) -> list[int]:
    """Return the sizes of the batches from `offset` to the end of an epoch.

    Each batch has `batch_size` samples. If `batch_size` does not divide the epoch, the last two
    batches get equal numbers of samples, so that no batch is very small. With `drop_last`, the
    epoch ends before the incomplete batch.
    """
    sizes: list[int] = []
    missing = samples - offset
    while missing >= batch_size and (drop_last or missing >= 2 * batch_size):
        sizes.append(batch_size)
        missing = missing - batch_size

    if drop_last or not missing:
        return sizes
    if missing <= batch_size:
        return [*sizes, missing]
    return [*sizes, missing - missing // 2, missing // 2]


def order_samples(samples: int, seed: int, epoch: int, *, shuffle: bool) -> list[int]:
    """Return the order of an epoch's samples, which depends only on the arguments."""
    if not shuffle:
        return list(range(samples))
    generator = torch.Generator().manual_seed(mix_seed(seed, epoch, 1))
    return torch.randperm(samples, generator=generator).tolist()


def split_batches(
    order: list[int], offset: int, sizes: list[int], rank: int, world: int
) -> Iterator[list[int]]:
    """Yield, for each batch, the indices of the samples of one rank."""
    for size in sizes:
        first = offset + size * rank // world
        end = offset + size * (rank + 1) // world
        yield order[first:end]
        offset = offset + size


def check_sizes(sizes: list[int], batch_size: int, world: int) -> None:
    """Raise ConfigError if a batch has fewer samples than there are processes."""
    smallest = min(sizes, default=world)
    if smallest < world:
        raise ConfigError(
            f"a batch of this dataset has {smallest} samples for {world} processes: each process"
            f" needs at least one. Raise batch_size ({batch_size}), which is the number of samples"
            " of all processes together, or start fewer processes."
        )


def check_length(progress: Progress, samples: int) -> None:
    """Raise ConfigError if the number of samples in the dataset has changed since the last
    start."""
    if progress.samples not in (0, samples):
        raise ConfigError(
            f"the dataset has {samples} samples, and had {progress.samples} before the restart: the"
            " position in it would be wrong. Restore the dataset, or give this program another"
            " checkpoint folder."
        )


def make_loader(dataset: Any, batches: list[list[int]], seed: int, options: dict[str, Any]) -> Any:
    """Return a DataLoader for these batches. The loader does not use the global random
    generator."""
    from torch.utils.data import DataLoader

    generator = torch.Generator().manual_seed(seed)
    return DataLoader(dataset, batch_sampler=batches, generator=generator, **options)
