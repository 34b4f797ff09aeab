"""Validation during training: loss and measures of the held-out samples, in eval mode, with the
weights to release.

The micro-batches of the held-out samples are divided among the virtual workers, whose sums are
reduced together with the gradients of the next step. So the number of workers does not change the
bits of the validation sums, and a validation needs no extra communication.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rekindle.errors import ConfigError, DataError, in_one_line, to_number
from rekindle.training.numerics import make_autocast
from rekindle.training.sampler import mix_seed
from rekindle.training.spec import TrainingSpec
from rekindle.training.training_state import MAX_MEASURES, State
from rekindle.workload import Dataset, Workload

Batch = tuple[Tensor, ...]


class Subset:
    """The samples of a dataset at `indices` (int64), or all samples if `indices` is None."""

    def __init__(self, data: Dataset, indices: Tensor | None) -> None:
        self.data = data
        self.indices = indices

    def __len__(self) -> int:
        if self.indices is None:
            return len(self.data)
        return len(self.indices)

    def batch(self, indices: Tensor) -> Batch:
        return self.data.batch(indices if self.indices is None else self.indices[indices])


def split_samples(
    spec: TrainingSpec, workload: Workload, data: Dataset, path: Path
) -> tuple[Subset, Subset | None]:
    """Return the training samples and the held-out samples (None if no validation is configured).
    Raises DataError if one of the two sets would be empty."""
    if spec.validation == "workload":
        held_out = Subset(workload.dataset(path, "validation"), None)
        if not len(held_out):
            raise DataError(
                "the validation split is empty: set train.validation to a share of the samples,"
                " such as 0.1."
            )

        return Subset(data, None), held_out

    count = round(float(spec.validation) * len(data))
    if not spec.validation:
        return Subset(data, None), None

    if not 0 < count < len(data):
        raise DataError(
            f"train.validation is {spec.validation}, which holds out {count} of {len(data)}"
            " samples: at least one must be held out, and one must remain for training. Change the"
            " share, or use more data."
        )

    order = torch.randperm(
        len(data), generator=torch.Generator().manual_seed(mix_seed(spec.seed, 0, 0, 1))
    )
    return Subset(data, order[count:].sort().values), Subset(data, order[:count].sort().values)


def parse_measures(result: object) -> dict[str, float]:
    """Convert the result of a workload's `measures` to numbers by name. Raises ConfigError."""
    if isinstance(result, dict):
        values = {name: to_number(value) for name, value in result.items()}
    else:
        values = {"": None}
    if None in values.values():
        raise ConfigError(
            f"measures(model, batch) returned {in_one_line(result)}: it must return a dict with a"
            " number for each name."
        )
    return {name: value for name, value in values.items() if value is not None}


class Validation:
    """Computes the validations of a run.

    `load_batch(samples, indices, seed)` returns a micro-batch on the device. `is_aborted()` returns
    True if the group will repeat the step, so that its result is not needed.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        workload: Workload,
        state: State,
        samples: Subset | None,
        training_samples: int,
        load_batch: Callable[[Subset, Tensor, int], Batch],
        is_aborted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.spec = spec
        self.workload = workload
        self.state = state
        self.samples = samples
        self.fetch = load_batch
        self.aborted = is_aborted
        self.measures: Callable[..., dict[str, Any]] = getattr(
            workload, "measures", lambda model, batch: {}
        )
        self.total = spec.total_steps(training_samples)
        self.every = spec.validation_interval(training_samples)
        self.names: list[str] | None = None
        self._zero_sums = [torch.zeros(1 + MAX_MEASURES, device=state.device)] if samples else []

    def is_due(self, step: int) -> bool:
        """Return True if the weights after `step` updates must be validated."""
        return (
            self.samples is not None and step > 0 and (step % self.every == 0 or step == self.total)
        )

    def compute_sums(self, step: int, virtual_worker: int) -> list[Tensor]:
        """Return the sums of the loss and the measures over one virtual worker's part of the
        held-out samples, as a tensor [1 + MAX_MEASURES].

        Returns zeros if no validation is due, and [] if the config has no validation.
        """
        if self.samples is None or not self.is_due(step):
            return self._zero_sums

        sums = [0.0] * (1 + MAX_MEASURES)
        count = len(self.samples)
        size = self.spec.batch_size

        with self.state.use_released_weights(), make_autocast(self.spec, self.state.device):
            for number in range(virtual_worker, -(-count // size), self.spec.virtual_workers):
                if self.aborted():
                    break

                indices = torch.arange(number * size, min(count, (number + 1) * size))
                batch = self.fetch(self.samples, indices, mix_seed(self.spec.seed, number, 0, 2))
                for index, value in enumerate(self._values(batch)):
                    sums[index] += value * len(indices)

        return [torch.tensor(sums, device=self.state.device)]

    def _values(self, batch: Batch) -> list[float]:
        """Return the loss and the measures of one micro-batch. Raises ConfigError."""
        loss = float(self.workload.loss(self.state.model, batch))
        measures = parse_measures(self.measures(self.state.model, batch))
        names = list(measures)

        if self.names is None:
            if len(names) > MAX_MEASURES or "loss" in names:
                raise ConfigError(
                    f"the workload's measures are {names}: at most {MAX_MEASURES} are allowed, and"
                    ' "loss" is reserved.'
                )

            self.names = names
        elif names != self.names:
            raise ConfigError(
                f"the workload's measures are {names}, but were {self.names} before: the measures"
                " must not change."
            )

        return [loss, *measures.values()]

    def compute_means(self, total: Tensor) -> dict[str, float]:
        """Return the means of the loss and the measures over all held-out samples.

        `total`: sum of the summands of all virtual workers (see `State.view_summands`). Only rank
        0, which has virtual worker 0, knows the names of the measures; other ranks return only the
        loss.
        """
        assert self.samples is not None
        names = ["loss", *(self.names or [])]
        sums: list[float] = total[-(1 + MAX_MEASURES) :][: len(names)].tolist()
        return {name: value / len(self.samples) for name, value in zip(names, sums, strict=True)}
