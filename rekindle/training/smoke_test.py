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
    SPARSE_GRADIENTS_PROBLEM,
    StepComputation,
    build_model,
    make_training_state,
    open_samples,
)
from rekindle.training.numerics import prepare_device
from rekindle.training.selection import choice, fitting
from rekindle.training.spec import TrainingSpec
from rekindle.training.training_state import TrainingState
from rekindle.training.validation import SampleSubset
from rekindle.workload import Workload

# number of parameters above which a model is built on the meta device, which allocates no memory
MAX_PARAMETERS = 100_000_000
# number of virtual workers of the test, which is more than two, because two virtual workers might
# by chance change a buffer by the same amount
MAX_VIRTUAL_WORKERS = 4
META_DEVICE = torch.device("meta")
# the results of the test; `stage` names the function of the workload that is being called
SmokeReport = dict[str, Any]


def make_one_step_spec(
    train_settings: dict[str, Any],
    workload_module: str,
    model_settings: dict[str, Any],
    family: str,
) -> TrainingSpec:
    """Return the spec of a training of one step with few virtual workers."""
    virtual_worker_count = min(MAX_VIRTUAL_WORKERS, int(train_settings["virtual_workers"]))
    return TrainingSpec.for_local_training(
        workload_module,
        model_settings,
        train_settings | {"virtual_workers": virtual_worker_count, "steps": 1},
        family,
    )


def build_state(
    training_spec: TrainingSpec,
    workload: Workload,
    dataset_properties: dict[str, Any],
    smoke_report: SmokeReport,
    is_any_size_allowed: bool,
) -> TrainingState:
    """Build the model and its training state, and describe both in `smoke_report`.

    A model above MAX_PARAMETERS is built on the meta device, unless `is_any_size_allowed` is set.
    """
    smoke_report["stage"] = "device"
    device = prepare_device(training_spec)
    smoke_report["stage"] = "model"

    if (
        not is_any_size_allowed
        and _count_meta_parameters(training_spec, workload, dataset_properties) > MAX_PARAMETERS
    ):
        device = META_DEVICE

    with META_DEVICE if device is META_DEVICE else nullcontext():
        model = build_model(training_spec, workload, dataset_properties)

    smoke_report["stage"] = "optimizer"
    training_state = make_training_state(training_spec, workload, model, device)
    training_state.step = 0
    smoke_report.update(
        describe_tensors(model, {id(parameter) for parameter in training_state.parameters})
    )
    smoke_report["device"] = str(device)
    smoke_report["state_bytes"] = (
        training_state.memory.numel() * training_state.memory.element_size()
    )

    return training_state


def reject_sparse_layers(training_state: TrainingState) -> None:
    """Raise ConfigError if a layer would have sparse gradients. The check is needed only for a
    model that is built without running a step, since a step would raise the error itself."""
    trained_ids = {id(parameter) for parameter in training_state.parameters}
    for layer_name, layer in training_state.model.named_modules():
        is_sparse = isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse
        if is_sparse and id(layer.weight) in trained_ids:
            raise ConfigError(f'the layer "{layer_name}" of the model {SPARSE_GRADIENTS_PROBLEM}')


def try_fit_model(
    training_spec: TrainingSpec,
    workload: Workload,
    dataset_properties: dict[str, Any],
    dataset_path: Path | None,
    output_folder: Path,
    smoke_report: SmokeReport,
) -> None:
    """Build the model of a family without training steps; if `dataset_path` is not None, fit the
    model and write its files to `output_folder`."""
    smoke_report["stage"] = "model"
    prepare_device(training_spec)
    model = build_model(training_spec, workload, dataset_properties)

    if dataset_path:
        smoke_report["stage"] = "dataset"
        samples, _ = open_samples(training_spec, workload, dataset_path)
        smoke_report["samples"] = len(samples)
        smoke_report["stage"] = "fit"
        fitting.fit_model(training_spec, workload, model, samples)
        fitting.write_model(output_folder, model, training_spec.identity())
        fitting.check_saved_model(
            training_spec, workload, dataset_path, model, samples, output_folder
        )
        fitting.check_repeatable(training_spec, workload, model, samples, dataset_properties)
        smoke_report["stage"] = "loss"
        few_samples = SampleSubset(
            samples, torch.arange(min(len(samples), 4 * training_spec.batch_size))
        )
        smoke_report["validation"] = choice.compute_validation(
            training_spec, workload, model, few_samples, torch.device("cpu")
        )
        choice.find_best_family(
            {training_spec.family: smoke_report["validation"]},
            families.get_selection_metric(workload),
        )

    smoke_report.update(describe_tensors(model, set()))


def describe_tensors(model: nn.Module, trained_ids: set[int]) -> SmokeReport:
    """Describe the tensors of a model; `trained_ids`: ids of its trained parameters."""
    return {
        "model": type(model).__name__,
        "parameters": [
            _describe_tensor(parameter_name, parameter) | {"trained": id(parameter) in trained_ids}
            for parameter_name, parameter in model.named_parameters()
        ],
        "buffers": [
            _describe_tensor(parameter_name, buffer)
            for parameter_name, buffer in model.named_buffers()
        ],
    }


def _count_meta_parameters(
    training_spec: TrainingSpec, workload: Workload, dataset_properties: dict[str, Any]
) -> int:
    """Return the number of parameters of the model, or 0 if the model cannot be built on the meta
    device."""
    try:
        with META_DEVICE:
            model: nn.Module = build_model(training_spec, workload, dataset_properties)
        return sum(parameter.numel() for parameter in model.parameters())
    # ignore the exception: if the workload is at fault, building the model on a real device raises
    # the exception again
    except Exception:
        return 0


def _describe_tensor(tensor_name: str, tensor: object) -> dict[str, Any]:
    if not isinstance(tensor, Tensor):
        return {"name": tensor_name, "shape": [], "dtype": type(tensor).__name__}
    return {
        "name": tensor_name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }


def try_training_step(
    training_spec: TrainingSpec,
    workload: Workload,
    training_state: TrainingState,
    dataset_path: Path,
    smoke_report: SmokeReport,
) -> StepComputation:
    """Run one training step and, if the config has validation, one validation."""
    smoke_report["stage"] = "dataset"
    samples, held_out = open_samples(training_spec, workload, dataset_path)
    step_computation = StepComputation(training_spec, workload, training_state, samples, held_out)
    batch = samples.batch(step_computation.sampler.select_sample_indices(0, 0))
    smoke_report["samples"] = len(samples)
    smoke_report["batch"] = [_describe_tensor("", batch_tensor) for batch_tensor in batch]
    smoke_report["stage"] = "loss"
    virtual_worker_losses, summed_summands = _sum_over_virtual_workers(step_computation, 0)
    smoke_report["stage"] = "step" if summed_summands.isfinite().all() else "gradient"
    gradient_norm, _ = step_computation.update(0, summed_summands)
    smoke_report["loss"] = math.fsum(virtual_worker_losses) / len(virtual_worker_losses)
    smoke_report["gradient_norm"] = gradient_norm
    smoke_report["stage"] = "loss"
    _, summed_summands = _sum_over_virtual_workers(step_computation, 1)

    if held_out:
        smoke_report["validation"] = step_computation.validation.compute_means(summed_summands)
        if training_spec.family:
            choice.check_has_metric(
                training_spec.family,
                smoke_report["validation"],
                families.get_selection_metric(workload),
            )

    return step_computation


def _sum_over_virtual_workers(
    step_computation: StepComputation, step: int
) -> tuple[list[float], Tensor]:
    """Return the losses of all virtual workers, and the sum of their gradients and other
    summands."""
    training_state = step_computation.state
    virtual_worker_losses = []
    summed_summands = training_state.weights.new_zeros(training_state.width)
    for virtual_worker in range(step_computation.spec.virtual_workers):
        loss, summands = step_computation.compute_summands(step, virtual_worker)
        virtual_worker_losses.append(loss.item())
        for summand_view, summand in zip(
            training_state.view_summands(summed_summands), summands, strict=True
        ):
            summand_view += summand
    return virtual_worker_losses, summed_summands


def count_flops(step_computation: StepComputation) -> int:
    """Return the floating-point operations of one micro-batch, forward and backward."""
    with FlopCounterMode(display=False) as flop_counter:
        step_computation.compute_summands(0, 0)
    return flop_counter.get_total_flops()
