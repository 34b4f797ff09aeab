"""Runs one step of a training, without a group, checkpoints or the object store, to find errors of
the workload within seconds."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from rekindle import families
from rekindle.errors import ConfigError
from rekindle.training.computation import (
    SPARSE_GRADIENTS,
    StepComputation,
    build_model,
    make_training_state,
    open_samples,
)
from rekindle.training.numerics import prepare_device
from rekindle.training.selection import choice, fitting
from rekindle.training.spec import TrainingSpec
from rekindle.training.training_state import State
from rekindle.training.validation import Subset
from rekindle.workload import Workload

# number of parameters above which a model is built on the meta device, which allocates no memory
MAX_PARAMETERS = 100_000_000
# this is more than two, because two virtual workers might by chance change a buffer by the same
# amount
MAX_VIRTUAL_WORKERS = 4
META_DEVICE = torch.device("meta")
# the results of the test; `stage` names the function of the workload that is being called
Report = dict[str, Any]


def make_one_step_spec(
    train: dict[str, Any], workload: str, model: dict[str, Any], family: str
) -> TrainingSpec:
    """Return the spec of a training of one step with few virtual workers."""
    count = min(MAX_VIRTUAL_WORKERS, int(train["virtual_workers"]))
    return TrainingSpec.for_local_training(
        workload, model, train | {"virtual_workers": count, "steps": 1}, family
    )


def build_state(
    spec: TrainingSpec,
    workload: Workload,
    facts: dict[str, Any],
    report: Report,
    allow_any_size: bool,
) -> State:
    """Build the model and its training state, and describe both in `report`.

    A model above MAX_PARAMETERS is built on the meta device, unless `allow_any_size` is set.
    """
    report["stage"] = "device"
    device = prepare_device(spec)
    report["stage"] = "model"

    if not allow_any_size and _count_on_meta(spec, workload, facts) > MAX_PARAMETERS:
        device = META_DEVICE

    with META_DEVICE if device is META_DEVICE else nullcontext():
        model = build_model(spec, workload, facts)

    report["stage"] = "optimizer"
    state = make_training_state(spec, workload, model, device)
    state.step = 0
    report.update(describe_tensors(model, {id(p) for p in state.parameters}))
    report["device"] = str(device)
    report["state_bytes"] = state.memory.numel() * state.memory.element_size()

    return state


def reject_sparse_layers(state: State) -> None:
    """Raise ConfigError if a layer would have sparse gradients. Only a model that is built without
    running a step needs this check, since a step would raise the error itself."""
    trained_ids = {id(parameter) for parameter in state.parameters}
    for name, layer in state.model.named_modules():
        is_sparse = isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse
        if is_sparse and id(layer.weight) in trained_ids:
            raise ConfigError(f'the layer "{name}" of the model {SPARSE_GRADIENTS}')


def try_fit(
    spec: TrainingSpec,
    workload: Workload,
    facts: dict[str, Any],
    dataset: Path | None,
    out: Path,
    report: Report,
) -> None:
    """Build the model of a family without training steps; if `dataset` is not None, fit the model
    and write its files to `out`."""
    report["stage"] = "model"
    prepare_device(spec)
    model = build_model(spec, workload, facts)

    if dataset:
        report["stage"] = "dataset"
        samples, _ = open_samples(spec, workload, dataset)
        report["samples"] = len(samples)
        report["stage"] = "fit"
        fitting.fit_model(spec, workload, model, samples)
        fitting.write_model(out, model, spec.identity())
        fitting.check_saved_model(spec, workload, dataset, model, samples, out)
        fitting.check_repeatable(spec, workload, model, samples, facts)
        report["stage"] = "loss"
        few = Subset(samples, torch.arange(min(len(samples), 4 * spec.batch_size)))
        report["validation"] = choice.compute_validation(
            spec, workload, model, few, torch.device("cpu")
        )
        choice.find_best_family(
            {spec.family: report["validation"]}, families.get_selection_metric(workload)
        )

    report.update(describe_tensors(model, set()))


def describe_tensors(model: nn.Module, trained_ids: set[int]) -> Report:
    """Describe the tensors of a model; `trained_ids`: ids of its trained parameters."""
    return {
        "model": type(model).__name__,
        "parameters": [
            _describe_tensor(name, p) | {"trained": id(p) in trained_ids}
            for name, p in model.named_parameters()
        ],
        "buffers": [_describe_tensor(name, buffer) for name, buffer in model.named_buffers()],
    }


def _count_on_meta(spec: TrainingSpec, workload: Workload, facts: dict[str, Any]) -> int:
    """Return the number of parameters of the model, or 0 if the model cannot be built on the meta
    device."""
    try:
        with META_DEVICE:
            model: nn.Module = build_model(spec, workload, facts)
        return sum(p.numel() for p in model.parameters())
    except (
        Exception
        # the exception is ignored: if the workload is at fault, building the model on a real device
        # raises the exception again
    ):
        return 0


def _describe_tensor(name: str, tensor: object) -> dict[str, Any]:
    if not isinstance(tensor, Tensor):
        return {"name": name, "shape": [], "dtype": type(tensor).__name__}
    return {
        "name": name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }


def try_step(
    spec: TrainingSpec, workload: Workload, state: State, dataset: Path, report: Report
) -> StepComputation:
    """Run one training step and, if the config has validation, one validation."""
    report["stage"] = "dataset"
    samples, held_out = open_samples(spec, workload, dataset)
    computation = StepComputation(spec, workload, state, samples, held_out)
    batch = samples.batch(computation.sampler.sample_indices(0, 0))
    report["samples"] = len(samples)
    report["batch"] = [_describe_tensor("", value) for value in batch]
    report["stage"] = "loss"
    losses, total = _sum_over_virtual_workers(computation, 0)
    report["stage"] = "step" if total.isfinite().all() else "gradient"
    norm, _ = computation.update(0, total)
    report["loss"] = math.fsum(losses) / len(losses)
    report["gradient_norm"] = norm
    report["stage"] = "loss"
    _, total = _sum_over_virtual_workers(computation, 1)

    if held_out:
        report["validation"] = computation.validation.compute_means(total)
        if spec.family:
            choice.check_metric(
                spec.family, report["validation"], families.get_selection_metric(workload)
            )

    return computation


def _sum_over_virtual_workers(
    computation: StepComputation, step: int
) -> tuple[list[float], Tensor]:
    """Return the losses of all virtual workers, and the sum of their gradients and other
    summands."""
    state = computation.state
    losses = []
    total = state.weights.new_zeros(state.width)
    for virtual_worker in range(computation.spec.virtual_workers):
        loss, summands = computation.compute_summands(step, virtual_worker)
        losses.append(loss.item())
        for view, value in zip(state.view_summands(total), summands, strict=True):
            view += value
    return losses, total


def count_flops(computation: StepComputation) -> int:
    """Return the floating-point operations of one micro-batch, forward and backward."""
    with FlopCounterMode(display=False) as counter:
        computation.compute_summands(0, 0)
    return counter.get_total_flops()
