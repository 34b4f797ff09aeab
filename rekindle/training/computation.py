"""The computation of a training step: samples, model, gradients of each virtual worker, update.

The result of a training depends only on the spec (the inputs) and the dataset. loop.py adds the
group of workers, the checkpoints and the object store.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rekindle import families
from rekindle.errors import ConfigError, DataError, format_in_one_line, to_number
from rekindle.sections import parse_section
from rekindle.training.numerics import make_autocast
from rekindle.training.sampler import Sampler, mix_seed
from rekindle.training.spec import TrainingSpec
from rekindle.training.training_state import TrainingState
from rekindle.training.validation import SampleSubset, Validation, split_samples
from rekindle.workload import Workload, get_training_function

SPARSE_GRADIENTS_PROBLEM = (
    "has sparse gradients, which are not supported: use dense gradients, such as"
    " Embedding(sparse=False)."
)


def open_samples(
    training_spec: TrainingSpec, workload: Workload, dataset_path: Path
) -> tuple[SampleSubset, SampleSubset | None]:
    """Return the training samples and the held-out samples of the dataset at `dataset_path`. Raises
    ConfigError, DataError."""
    dataset = workload.dataset(dataset_path, "train")

    missing_names = [
        attribute_name
        for attribute_name in ("__len__", "batch")
        if not hasattr(dataset, attribute_name)
    ]
    if missing_names:
        raise ConfigError(
            f"dataset(path, split) returned {dataset!r}: it must have"
            f" {' and '.join(missing_names)}."
        )

    if not len(dataset):
        raise DataError(
            "the training split of the dataset is empty: `prepare` selected no row for it. Use more"
            " data, or check the time window and the size of the test split."
        )

    return split_samples(training_spec, workload, dataset, dataset_path)


def read_model_section(training_spec: TrainingSpec, workload: Workload) -> Any:
    """Validate the section `model` of the config with the workload's type, and return it. Raises
    ConfigError."""
    return parse_section(workload.Model, training_spec.model, "model")


def build_model(
    training_spec: TrainingSpec, workload: Workload, dataset_properties: dict[str, Any]
) -> nn.Module:
    """Return a new model; its initial weights depend on train.seed. Raises ConfigError."""
    model_settings = read_model_section(training_spec, workload)
    torch.manual_seed(mix_seed(training_spec.seed, 0, 0))
    model = families.build(workload, training_spec.family, model_settings, dataset_properties)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model(section, facts) returned {model!r}: it must return a torch.nn.Module."
        )
    return model


def make_training_state(
    training_spec: TrainingSpec, workload: Workload, model: nn.Module, device: torch.device
) -> TrainingState:
    """Return the training state of a model, with the workload's optimizer if it defines one. Raises
    ConfigError."""
    return TrainingState(
        model,
        training_spec,
        device,
        get_training_function(workload, "optimizer", read_model_section(training_spec, workload)),
    )


class StepComputation:
    """Computes the loss and the gradients of micro-batches, and updates the state. `is_aborted()`
    returns True if the group will repeat the step, so that its result is not needed."""

    def __init__(
        self,
        training_spec: TrainingSpec,
        workload: Workload,
        training_state: TrainingState,
        samples: SampleSubset,
        held_out: SampleSubset | None,
        is_aborted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.spec = training_spec
        self.workload = workload
        self.state = training_state
        self.samples = samples
        self.device = training_state.device

        # the generators are seeded directly, because torch.manual_seed takes 0.1 ms per call and
        # also handles devices that this machine lacks
        self.generators = [torch.default_generator]
        if self.device.type == "cuda":
            self.generators.append(torch.cuda.default_generators[self.device.index])

        self.sampler = Sampler(
            len(samples),
            training_spec.batch_size,
            training_spec.virtual_workers,
            training_spec.seed,
        )
        self.total = training_spec.total_steps(len(samples))
        model_settings = read_model_section(training_spec, workload)
        self.schedule: Callable[[int, int], float] | None = get_training_function(
            workload, "schedule", model_settings
        )
        self.precision = make_autocast(training_spec, self.device)
        self.validation = Validation(
            training_spec,
            workload,
            training_state,
            held_out,
            len(samples),
            self.load_batch,
            is_aborted,
        )

    def compute_summands(self, step: int, virtual_worker: int) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of one micro-batch, and the tensors to be summed over all virtual
        workers: gradients, changes of buffers, validation sums.

        The returned values depend only on the state, the seed, the step and the virtual worker.
        """
        sample_indices = self.sampler.select_sample_indices(step, virtual_worker)
        batch = self.load_batch(
            self.samples,
            sample_indices,
            self.sampler.compute_micro_batch_seed(step, virtual_worker),
        )
        training_state = self.state
        training_state.buffers.load_into_model()

        with self.precision:
            loss = self.workload.loss(training_state.model, batch)

        if (
            not isinstance(loss, Tensor)
            or loss.numel() != 1
            or not loss.requires_grad
            or loss.is_complex()
        ):
            if isinstance(loss, Tensor) and loss.is_complex():
                returned_kind = "a complex tensor"
            else:
                returned_kind = "a tensor"

            if isinstance(loss, Tensor):
                returned_description = f"{returned_kind} of shape {tuple(loss.shape)}"
            else:
                returned_description = format_in_one_line(loss)

            raise ConfigError(
                f"loss(model, batch) returned {returned_description}: it must return a tensor with"
                " one element that depends on the model's weights, such as the mean over the"
                " batch."
            )

        gradients = torch.autograd.grad(
            loss, training_state.parameters, allow_unused=True, materialize_grads=True
        )
        if any(gradient.layout != torch.strided for gradient in gradients):
            raise ConfigError(f"a layer of the model {SPARSE_GRADIENTS_PROBLEM}")

        buffer_changes = training_state.buffers.collect_changes()
        return loss, [
            *gradients,
            *buffer_changes,
            *self.validation.compute_sums(step, virtual_worker),
        ]

    def load_batch(
        self, samples: SampleSubset, sample_indices: Tensor, seed: int
    ) -> tuple[Tensor, ...]:
        """Return the samples of a micro-batch on the device, and seed the random numbers of the
        micro-batch."""
        batch = samples.batch(sample_indices)
        if self.device.type != "cpu":
            batch = tuple(batch_tensor.to(self.device) for batch_tensor in batch)
        self.seed_generators(seed)
        return batch

    def seed_generators(self, seed: int) -> None:
        """Seed the random number generators of the CPU and the device."""
        for generator in self.generators:
            generator.manual_seed(seed)

    def update(self, step: int, summed_summands: Tensor) -> tuple[float, float]:
        """Make one update of the training state from the sum of the summands of all virtual
        workers; return the norm of the gradient and the learning rate."""
        learning_rate_function = partial(self.compute_learning_rate, step)
        # an optimizer of the workload may draw random numbers
        if hasattr(self.workload, "optimizer"):
            self.seed_generators(
                self.sampler.compute_micro_batch_seed(step, self.spec.virtual_workers)
            )
        gradient_norm = self.state.update(
            summed_summands, self.spec.virtual_workers, learning_rate_function
        )
        return gradient_norm, learning_rate_function(self.spec.learning_rate)

    def compute_learning_rate(self, step: int, highest_learning_rate: float) -> float:
        """Return the learning rate of update `step`: by the workload's `schedule` if it defines
        one, else by train.schedule."""
        if not self.schedule:
            return self.spec.compute_learning_rate(step, self.total, highest_learning_rate)

        learning_rate_share = to_number(self.schedule(step, self.total))
        if learning_rate_share is None or not math.isfinite(learning_rate_share):
            raise ConfigError(
                f"schedule(step, total) returned {learning_rate_share} for step {step}: it must"
                " return a finite number, the share of the highest learning rate."
            )
        return highest_learning_rate * learning_rate_share
