"""Validation during training: loss and measures of the held-out samples, in eval mode, with the
weights to release.

The micro-batches of the held-out samples are divided among the virtual workers, whose sums are
reduced together with the gradients of the next step. Because of this division, the number of
workers does not change the bits of the validation sums, and a validation needs no extra
communication.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rekindle.errors import ConfigError, DataError, format_in_one_line, to_number
from rekindle.training.numerics import make_autocast
from rekindle.training.sampler import mix_seed
from rekindle.training.spec import TrainingSpec
from rekindle.training.training_state import MAX_MEASURES, TrainingState
from rekindle.workload import Dataset, Workload

TensorBatch = tuple[Tensor, ...]


class SampleSubset:
    """The samples of a dataset at `indices` (int64), or all samples if `indices` is None."""

    def __init__(self, dataset: Dataset, sample_indices: Tensor | None) -> None:
        self.data = dataset
        self.indices = sample_indices

    def __len__(self) -> int:
        if self.indices is None:
            return len(self.data)
        return len(self.indices)

    def batch(self, indices: Tensor) -> TensorBatch:
        return self.data.batch(indices if self.indices is None else self.indices[indices])


def split_samples(
    training_spec: TrainingSpec, workload: Workload, dataset: Dataset, dataset_path: Path
) -> tuple[SampleSubset, SampleSubset | None]:
    """Return the training samples and the held-out samples (None if no validation is configured).
    Raises DataError if no training samples or no held-out samples would be left."""
    if training_spec.validation == "workload":
        held_out = SampleSubset(workload.dataset(dataset_path, "validation"), None)
        if not len(held_out):
            raise DataError(
                "the validation split is empty: set train.validation to a share of the samples,"
                " such as 0.1."
            )

        return SampleSubset(dataset, None), held_out

    held_out_count = round(float(training_spec.validation) * len(dataset))
    if not training_spec.validation:
        return SampleSubset(dataset, None), None

    if not 0 < held_out_count < len(dataset):
        raise DataError(
            f"train.validation is {training_spec.validation}, which holds out {held_out_count} of"
            f" {len(dataset)} samples: at least one must be held out, and one must remain for"
            " training. Change the share, or use more data."
        )

    sample_order = torch.randperm(
        len(dataset), generator=torch.Generator().manual_seed(mix_seed(training_spec.seed, 0, 0, 1))
    )
    return SampleSubset(dataset, sample_order[held_out_count:].sort().values), SampleSubset(
        dataset, sample_order[:held_out_count].sort().values
    )


def parse_measures(workload_measures: object) -> dict[str, float]:
    """Convert the result of a workload's `measures` to numbers by name. Raises ConfigError."""
    if isinstance(workload_measures, dict):
        measure_values = {
            measure_name: to_number(measure_value)
            for measure_name, measure_value in workload_measures.items()
        }
    else:
        measure_values = {"": None}
    if None in measure_values.values():
        raise ConfigError(
            f"measures(model, batch) returned {format_in_one_line(workload_measures)}: it must"
            " return a dict with a number for each name."
        )
    return {
        measure_name: measure_value
        for measure_name, measure_value in measure_values.items()
        if measure_value is not None
    }


class Validation:
    """Computes the validations of a run.

    `load_batch(samples, indices, seed)` returns a micro-batch on the device. `is_aborted()` returns
    True if the group will repeat the step, so that its result is not needed.
    """

    def __init__(
        self,
        training_spec: TrainingSpec,
        workload: Workload,
        training_state: TrainingState,
        samples: SampleSubset | None,
        training_sample_count: int,
        load_batch: Callable[[SampleSubset, Tensor, int], TensorBatch],
        is_aborted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.spec = training_spec
        self.workload = workload
        self.state = training_state
        self.samples = samples
        self.load_batch = load_batch
        self.is_aborted = is_aborted
        self.measures: Callable[..., dict[str, Any]] = getattr(
            workload, "measures", lambda model, batch: {}
        )
        self.total = training_spec.total_steps(training_sample_count)
        self.interval_steps = training_spec.count_validation_interval(training_sample_count)
        # names of the workload's measures; None before the first validation
        self.measure_names: list[str] | None = None
        self._zero_sums = (
            [torch.zeros(1 + MAX_MEASURES, device=training_state.device)] if samples else []
        )

    def is_due(self, step: int) -> bool:
        """Return True if the weights after `step` updates must be validated."""
        return (
            self.samples is not None
            and step > 0
            and (step % self.interval_steps == 0 or step == self.total)
        )

    def compute_sums(self, step: int, virtual_worker: int) -> list[Tensor]:
        """Return the sums of the loss and the measures over one virtual worker's part of the
        held-out samples, as a tensor [1 + MAX_MEASURES].

        The sums are zeros if no validation is due, and the result is [] if the config has no
        validation.
        """
        if self.samples is None or not self.is_due(step):
            return self._zero_sums

        value_sums = [0.0] * (1 + MAX_MEASURES)
        sample_count = len(self.samples)
        batch_size = self.spec.batch_size

        with self.state.use_released_weights(), make_autocast(self.spec, self.state.device):
            for batch_number in range(
                virtual_worker, -(-sample_count // batch_size), self.spec.virtual_workers
            ):
                if self.is_aborted():
                    break

                sample_indices = torch.arange(
                    batch_number * batch_size, min(sample_count, (batch_number + 1) * batch_size)
                )
                batch = self.load_batch(
                    self.samples, sample_indices, mix_seed(self.spec.seed, batch_number, 0, 2)
                )
                for value_index, batch_value in enumerate(self._compute_values(batch)):
                    value_sums[value_index] += batch_value * len(sample_indices)

        return [torch.tensor(value_sums, device=self.state.device)]

    def _compute_values(self, batch: TensorBatch) -> list[float]:
        """Return the loss and the measures of one micro-batch. Raises ConfigError."""
        loss = float(self.workload.loss(self.state.model, batch))
        measure_values = parse_measures(self.measures(self.state.model, batch))
        measure_names = list(measure_values)

        if self.measure_names is None:
            if len(measure_names) > MAX_MEASURES or "loss" in measure_names:
                raise ConfigError(
                    f"the workload's measures are {measure_names}: at most {MAX_MEASURES} are"
                    ' allowed, and "loss" is reserved.'
                )

            self.measure_names = measure_names
        elif measure_names != self.measure_names:
            raise ConfigError(
                f"the workload's measures are {measure_names}, but were {self.measure_names}"
                " before: the measures must not change."
            )

        return [loss, *measure_values.values()]

    def compute_means(self, summed_summands: Tensor) -> dict[str, float]:
        """Return the means of the loss and the measures over all held-out samples.

        `summed_summands`: sum of the summands of all virtual workers (see
        `TrainingState.view_summands`). Only rank 0, which has virtual worker 0, knows the names of
        the measures; other ranks return only the loss.
        """
        assert self.samples is not None
        value_names = ["loss", *(self.measure_names or [])]
        value_sums: list[float] = summed_summands[-(1 + MAX_MEASURES) :][
            : len(value_names)
        ].tolist()
        return {
            value_name: value_sum / len(self.samples)
            for value_name, value_sum in zip(value_names, value_sums, strict=True)
        }
