"""The computation of a training step: samples, model, gradients of each virtual worker, update.

The result depends only on the spec and the dataset. loop.py adds the group, the checkpoints and the
object store.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rekindle import families
from rekindle.errors import ConfigError, DataError, in_one_line, to_number
from rekindle.sections import parse_section
from rekindle.training.numerics import make_autocast
from rekindle.training.sampler import Sampler, mix_seed
from rekindle.training.spec import TrainingSpec
from rekindle.training.training_state import State
from rekindle.training.validation import Subset, Validation, split_samples
from rekindle.workload import Workload, get_training_function

SPARSE_GRADIENTS = (
    "has sparse gradients, which are not supported: use dense gradients, such as"
    " Embedding(sparse=False)."
)


def open_samples(
    spec: TrainingSpec, workload: Workload, path: Path
) -> tuple[Subset, Subset | None]:
    """Return the training samples and the held-out samples of the dataset at `path`. Raises
    ConfigError, DataError."""
    data = workload.dataset(path, "train")

    missing_names = [name for name in ("__len__", "batch") if not hasattr(data, name)]
    if missing_names:
        raise ConfigError(
            f"dataset(path, split) returned {data!r}: it must have {' and '.join(missing_names)}."
        )

    if not len(data):
        raise DataError(
            "the training split of the dataset is empty: `prepare` selected no row for it. Use more"
            " data, or check the time window and the size of the test split."
        )

    return split_samples(spec, workload, data, path)


def model_section(spec: TrainingSpec, workload: Workload) -> Any:
    """Return the workload's `model` section. Raises ConfigError."""
    return parse_section(workload.Model, spec.model, "model")


def build_model(spec: TrainingSpec, workload: Workload, facts: dict[str, Any]) -> nn.Module:
    """Return a new model; its initial weights depend on train.seed. Raises ConfigError."""
    section = model_section(spec, workload)
    torch.manual_seed(mix_seed(spec.seed, 0, 0))
    model = families.build(workload, spec.family, section, facts)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model(section, facts) returned {model!r}: it must return a torch.nn.Module."
        )
    return model


def make_training_state(
    spec: TrainingSpec, workload: Workload, model: nn.Module, device: torch.device
) -> State:
    """Return the training state of a model, with the workload's optimizer if it defines one. Raises
    ConfigError."""
    return State(
        model,
        spec,
        device,
        get_training_function(workload, "optimizer", model_section(spec, workload)),
    )


class StepComputation:
    """Computes the loss and the gradients of micro-batches, and updates the state. `is_aborted`:
    see Validation."""

    def __init__(
        self,
        spec: TrainingSpec,
        workload: Workload,
        state: State,
        samples: Subset,
        held_out: Subset | None,
        is_aborted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.spec = spec
        self.workload = workload
        self.state = state
        self.samples = samples
        self.device = state.device

        # seeded directly: torch.manual_seed takes 0.1 ms per call and also handles devices that
        # this machine lacks
        self.generators = [torch.default_generator]
        if self.device.type == "cuda":
            self.generators.append(torch.cuda.default_generators[self.device.index])

        self.sampler = Sampler(len(samples), spec.batch_size, spec.virtual_workers, spec.seed)
        self.total = spec.total_steps(len(samples))
        section = model_section(spec, workload)
        self.schedule: Callable[[int, int], float] | None = get_training_function(
            workload, "schedule", section
        )
        self.precision = make_autocast(spec, self.device)
        self.validation = Validation(
            spec, workload, state, held_out, len(samples), self.load_batch, is_aborted
        )

    def compute_summands(self, step: int, virtual_worker: int) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of one micro-batch, and the tensors to be summed over all virtual
        workers: gradients, changes of buffers, validation sums.

        The result depends only on the state, the seed, the step and the virtual worker.
        """
        indices = self.sampler.sample_indices(step, virtual_worker)
        batch = self.load_batch(
            self.samples, indices, self.sampler.micro_batch_seed(step, virtual_worker)
        )
        state = self.state
        state.buffers.load_into_model()

        with self.precision:
            loss = self.workload.loss(state.model, batch)

        if (
            not isinstance(loss, Tensor)
            or loss.numel() != 1
            or not loss.requires_grad
            or loss.is_complex()
        ):
            if isinstance(loss, Tensor) and loss.is_complex():
                kind = "a complex tensor"
            else:
                kind = "a tensor"

            if isinstance(loss, Tensor):
                result = f"{kind} of shape {tuple(loss.shape)}"
            else:
                result = in_one_line(loss)

            raise ConfigError(
                f"loss(model, batch) returned {result}: it must return a tensor with one element"
                " that depends on the model's weights, such as the mean over the batch."
            )

        gradients = torch.autograd.grad(
            loss, state.parameters, allow_unused=True, materialize_grads=True
        )
        if any(gradient.layout != torch.strided for gradient in gradients):
            raise ConfigError(f"a layer of the model {SPARSE_GRADIENTS}")

        changes = state.buffers.collect_changes()
        return loss, [*gradients, *changes, *self.validation.compute_sums(step, virtual_worker)]

    def load_batch(self, samples: Subset, indices: Tensor, seed: int) -> tuple[Tensor, ...]:
        """Return the samples on the device, and seed the random numbers of the micro-batch."""
        batch = samples.batch(indices)
        if self.device.type != "cpu":
            batch = tuple(tensor.to(self.device) for tensor in batch)
        self.seed_generators(seed)
        return batch

    def seed_generators(self, seed: int) -> None:
        """Seed the generators of the CPU and the device."""
        for generator in self.generators:
            generator.manual_seed(seed)

    def update(self, step: int, total: Tensor) -> tuple[float, float]:
        """Make one update from the sum of the summands of all virtual workers; return the norm of
        the gradient and the learning rate."""
        rate = partial(self.learning_rate_at, step)
        # an optimizer of the workload may draw random numbers
        if hasattr(self.workload, "optimizer"):
            self.seed_generators(self.sampler.micro_batch_seed(step, self.spec.virtual_workers))
        norm = self.state.update(total, self.spec.virtual_workers, rate)
        return norm, rate(self.spec.learning_rate)

    def learning_rate_at(self, step: int, highest: float) -> float:
        """Return the learning rate of update `step`: by the workload's `schedule` if it defines
        one, else by train.schedule."""
        if not self.schedule:
            return self.spec.learning_rate_at(step, self.total, highest)

        share = to_number(self.schedule(step, self.total))
        if share is None or not math.isfinite(share):
            raise ConfigError(
                f"schedule(step, total) returned {share} for step {step}: it must return a finite"
                " number, the share of the highest learning rate."
            )
        return highest * share
