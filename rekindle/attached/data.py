"""The position in the training data: an index into the stream of all samples of all epochs. The
position does not depend on the number of processes.

A batch is a range of the sample stream. The processes divide the samples of a batch among
themselves.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rekindle.errors import ConfigError
from rekindle.training.sampler import mix_seed


@dataclass
class Progress:
    """The position of a training in its data. `step`: number of completed steps; `epoch`: number of
    completed epochs; `offset`: number of samples of the current epoch that were used; `samples`:
    number of samples in an epoch, 0 if unknown."""

    step: int = 0
    epoch: int = 0
    offset: int = 0
    samples: int = 0

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def plan_batches(sample_count: int, offset: int, batch_size: int, drop_last: bool) -> list[int]:
    """Return the sizes of the batches from `offset` to the end of an epoch.

    Each batch has `batch_size` samples. If `batch_size` does not divide the epoch, the last two
    batches get equal numbers of samples, so that no batch is very small. With `drop_last`, the
    epoch ends before the incomplete batch.
    """
    batch_sizes: list[int] = []
    remaining_samples = sample_count - offset
    while remaining_samples >= batch_size and (drop_last or remaining_samples >= 2 * batch_size):
        batch_sizes.append(batch_size)
        remaining_samples = remaining_samples - batch_size

    if drop_last or not remaining_samples:
        return batch_sizes
    if remaining_samples <= batch_size:
        return [*batch_sizes, remaining_samples]
    return [*batch_sizes, remaining_samples - remaining_samples // 2, remaining_samples // 2]


def order_samples(sample_count: int, seed: int, epoch: int, *, shuffle: bool) -> list[int]:
    """Return the sample indices of an epoch in the order of their use, which depends only on the
    arguments."""
    if not shuffle:
        return list(range(sample_count))
    generator = torch.Generator().manual_seed(mix_seed(seed, epoch, 1))
    return torch.randperm(sample_count, generator=generator).tolist()


def split_batches(
    sample_order: list[int], epoch_offset: int, batch_sizes: list[int], rank: int, world_size: int
) -> Iterator[list[int]]:
    """Yield, for each batch, the indices of the samples of one rank."""
    for batch_size in batch_sizes:
        start_index = epoch_offset + batch_size * rank // world_size
        end_index = epoch_offset + batch_size * (rank + 1) // world_size
        yield sample_order[start_index:end_index]
        epoch_offset = epoch_offset + batch_size


def check_batch_sizes(batch_sizes: list[int], batch_size: int, world_size: int) -> None:
    """Raise ConfigError if a batch has fewer samples than there are processes."""
    smallest_batch_size = min(batch_sizes, default=world_size)
    if smallest_batch_size < world_size:
        raise ConfigError(
            f"a batch of this dataset has {smallest_batch_size} samples for {world_size}"
            f" processes: each process needs at least one. Raise batch_size ({batch_size}), which"
            " is the number of samples of all processes together, or start fewer processes."
        )


def check_dataset_length(progress: Progress, sample_count: int) -> None:
    """Raise ConfigError if the number of samples in the dataset has changed since the last
    start."""
    if progress.samples not in (0, sample_count):
        raise ConfigError(
            f"the dataset has {sample_count} samples, and had {progress.samples} before the"
            " restart: the position in it would be wrong. Restore the dataset, or give this"
            " program another checkpoint folder."
        )


def make_data_loader(
    dataset: Any, batch_indices: list[list[int]], seed: int, loader_options: dict[str, Any]
) -> Any:
    """Return a DataLoader for the batches `batch_indices`. The DataLoader has its own random
    generator, so that it does not advance the global generator."""
    from torch.utils.data import DataLoader

    generator = torch.Generator().manual_seed(seed)
    return DataLoader(dataset, batch_sampler=batch_indices, generator=generator, **loader_options)
