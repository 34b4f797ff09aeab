"""Validation during training: loss and measures of held-out samples, in eval mode, by the weights as released now.

The micro-batches of the held-out samples are dealt out to the virtual workers, and their sums travel with the gradients
of the next step: no number of workers changes a bit of them, and a validation costs no exchange of its own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rekindle.errors import ConfigError, DataError
from rekindle.training.numerics import autocast
from rekindle.training.sampler import mix
from rekindle.training.spec import TrainingSpec
from rekindle.training.state import ROOM, State
from rekindle.workload import Workload

Batch = tuple[Tensor, ...]


class Subset:
    """Some samples of a dataset."""

    def __init__(self, data: Any, indices: Tensor | None) -> None:
        """`indices`, int64; None: all."""
        self.data, self.indices = data, indices

    def __len__(self) -> int:
        return len(self.data) if self.indices is None else len(self.indices)

    def batch(self, indices: Tensor) -> Batch:
        """The samples at these places of the subset."""
        return self.data.batch(indices if self.indices is None else self.indices[indices])


def split(spec: TrainingSpec, workload: Workload, data: Any, path: Path) -> tuple[Subset, Subset | None]:
    """The samples to train with, and those held out. Raises DataError if one of both would be empty."""
    if spec.validation == "workload":
        held_out = Subset(workload.dataset(path, "validation"), None)
        if not len(held_out):
            raise DataError("the dataset has no validation samples: let train.validation be a share, such as 0.1.")
        return Subset(data, None), held_out
    count = round(float(spec.validation) * len(data))
    if not spec.validation:
        return Subset(data, None), None
    if not 0 < count < len(data):
        raise DataError(
            f"train.validation is {spec.validation}: of {len(data)} samples that holds out {count}, but at least one "
            "must be held out, and one left to train with. Change the share, or give more data."
        )
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(mix(spec.seed, 0, 0, 1)))
    return Subset(data, order[count:].sort().values), Subset(data, order[:count].sort().values)


class Validation:
    """The validations of a run. `fetch(samples, indices, seed)` gives a micro-batch on the device; once `aborted`, the
    group will repeat the step, and no result is needed."""

    def __init__(
        self,
        spec: TrainingSpec,
        workload: Workload,
        state: State,
        samples: Subset | None,
        training_samples: int,
        fetch: Callable[[Subset, Tensor, int], Batch],
        aborted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.spec, self.workload, self.state, self.samples, self.fetch = spec, workload, state, samples, fetch
        self.aborted = aborted
        self.measures: Callable[..., dict[str, Any]] = getattr(workload, "measures", lambda model, batch: {})
        self.total = spec.total_steps(training_samples)
        self.every = spec.validation_every(training_samples)
        self.names: list[str] | None = None
        self._nothing = [torch.zeros(1 + ROOM, device=state.device)] if samples else []

    def due(self, step: int) -> bool:
        """Whether to validate the weights that `step` updates made."""
        return self.samples is not None and step > 0 and (step % self.every == 0 or step == self.total)

    def sums(self, step: int, virtual_worker: int) -> list[Tensor]:
        """One virtual worker's share: [1 + ROOM] sums over its samples of the loss and the measures; [] without a
        validation in this run."""
        if self.samples is None or not self.due(step):
            return self._nothing
        sums = [0.0] * (1 + ROOM)
        count, size = len(self.samples), self.spec.batch_size
        with self.state.released(), autocast(self.spec, self.state.device):
            for number in range(virtual_worker, -(-count // size), self.spec.virtual_workers):
                if self.aborted():
                    break
                indices = torch.arange(number * size, min(count, (number + 1) * size))
                batch = self.fetch(self.samples, indices, mix(self.spec.seed, number, 0, 2))
                for place, value in enumerate(self._values(batch)):
                    sums[place] += value * len(indices)
        return [torch.tensor(sums, device=self.state.device)]

    def _values(self, batch: Batch) -> list[float]:
        """Loss and measures of one micro-batch. Raises ConfigError."""
        loss = float(self.workload.loss(self.state.model, batch))
        measures = {name: float(value) for name, value in self.measures(self.state.model, batch).items()}
        names = list(measures)
        if self.names is None:
            if len(names) > ROOM or "loss" in names:
                raise ConfigError(f'the workload\'s measures are {names}: at most {ROOM}, none of which is "loss".')
            self.names = names
        elif names != self.names:
            raise ConfigError(
                f"the workload's measures are {names}, before they were {self.names}: they must not change."
            )
        return [loss, *measures.values()]

    def result(self, total: Tensor) -> dict[str, float]:
        """Means over all samples, from the sum over all virtual workers (see `State.width`); the measures' names are
        known where virtual worker 0 is: to rank 0."""
        assert self.samples is not None
        names = ["loss", *(self.names or [])]
        sums: list[float] = total[-(1 + ROOM) :][: len(names)].tolist()
        return {name: value / len(self.samples) for name, value in zip(names, sums, strict=True)}
