"""One step of a training, to find out in seconds whether it can work: no group, no checkpoints, no
object store."""

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
    Computation,
    build_model,
    make_state,
    open_samples,
)
from rekindle.training.numerics import pick_device
from rekindle.training.selection import choice, fitting
from rekindle.training.spec import TrainingSpec
from rekindle.training.training_state import State
from rekindle.training.validation import Subset
from rekindle.workload import Workload

MAX_PARAMETERS = 100_000_000  # a larger model is only built on the meta device, without memory
# more than two, since two virtual workers might change a buffer by the same amount by chance
MAX_VIRTUAL_WORKERS = 4
META = torch.device("meta")
Report = dict[str, Any]  # `stage`: the function of the workload that is being tried


def small_spec(
    train: dict[str, Any], workload: str, model: dict[str, Any], family: str
) -> TrainingSpec:
    """Return a training of one step with few virtual workers."""
    count = min(MAX_VIRTUAL_WORKERS, int(train["virtual_workers"]))
    return TrainingSpec.local(
        workload, model, train | {"virtual_workers": count, "steps": 1}, family
    )


def build(
    spec: TrainingSpec, workload: Workload, facts: dict[str, Any], report: Report, any_size: bool
) -> State:
    """Build model and state, and describe them; on the meta device if the model is too large
    (unless `any_size`)."""
    report["stage"] = "device"
    device = pick_device(spec)
    report["stage"] = "model"

    if not any_size and _count_on_meta(spec, workload, facts) > MAX_PARAMETERS:
        device = META

    with META if device is META else nullcontext():
        model = build_model(spec, workload, facts)

    report["stage"] = "optimizer"
    state = make_state(spec, workload, model, device)
    state.step = 0
    report.update(describe(model, {id(p) for p in state.parameters}))
    report["device"] = str(device)
    report["state_bytes"] = state.memory.numel() * state.memory.element_size()

    return state


def reject_sparse_layers(state: State) -> None:
    """Raise ConfigError for a layer whose gradients would be sparse, if no step shows them."""
    trained_ids = {id(parameter) for parameter in state.parameters}
    for name, layer in state.model.named_modules():
        is_sparse = isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse
        if is_sparse and id(layer.weight) in trained_ids:
            raise ConfigError(f'the layer "{name}" of the model {SPARSE_GRADIENTS}')


def fit(
    spec: TrainingSpec,
    workload: Workload,
    facts: dict[str, Any],
    dataset: Path | None,
    out: Path,
    report: Report,
) -> None:
    """Build a fitted family; with a dataset, fit it and write the model's files to `out`."""
    report["stage"] = "model"
    pick_device(spec)
    model = build_model(spec, workload, facts)

    if dataset:
        report["stage"] = "dataset"
        samples, _ = open_samples(spec, workload, dataset)
        report["samples"] = len(samples)
        report["stage"] = "fit"
        fitting.fit_model(spec, workload, model, samples)
        fitting.write(out, model, spec.identity())
        fitting.check_saved(spec, workload, dataset, model, samples, out)
        fitting.check_repeatable(spec, workload, model, samples, facts)
        report["stage"] = "loss"
        few = Subset(samples, torch.arange(min(len(samples), 4 * spec.batch_size)))
        report["validation"] = choice.validate(spec, workload, model, few, torch.device("cpu"))
        choice.best_of({spec.family: report["validation"]}, families.criterion(workload))

    report.update(describe(model, set()))


def describe(model: nn.Module, trained: set[int]) -> Report:
    """Describe the tensors of a model; `trained`: ids of its trained parameters."""
    return {
        "model": type(model).__name__,
        "parameters": [
            _describe(name, p) | {"trained": id(p) in trained}
            for name, p in model.named_parameters()
        ],
        "buffers": [_describe(name, buffer) for name, buffer in model.named_buffers()],
    }


def _count_on_meta(spec: TrainingSpec, workload: Workload, facts: dict[str, Any]) -> int:
    """Return the number of parameters; 0 if it cannot be built on the meta device."""
    try:
        with META:
            model: nn.Module = build_model(spec, workload, facts)
        return sum(p.numel() for p in model.parameters())
    except Exception:  # a fault of the workload also occurs on a real device, which reports it
        return 0


def _describe(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Tensor):
        return {"name": name, "shape": [], "dtype": type(value).__name__}
    return {
        "name": name,
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
    }


def step(
    spec: TrainingSpec, workload: Workload, state: State, dataset: Path, report: Report
) -> Computation:
    """Make one step and, if the config has validation, a validation."""
    report["stage"] = "dataset"
    samples, held_out = open_samples(spec, workload, dataset)
    computation = Computation(spec, workload, state, samples, held_out)
    batch = samples.batch(computation.sampler.indices(0, 0))
    report["samples"] = len(samples)
    report["batch"] = [_describe("", value) for value in batch]
    report["stage"] = "loss"
    losses, total = _sum(computation, 0)
    report["stage"] = "step" if total.isfinite().all() else "gradient"
    norm, _ = computation.update(0, total)
    report["loss"] = math.fsum(losses) / len(losses)
    report["gradient_norm"] = norm
    report["stage"] = "loss"
    _, total = _sum(computation, 1)

    if held_out:
        report["validation"] = computation.validation.result(total)
        if spec.family:
            choice.check_metric(spec.family, report["validation"], families.criterion(workload))

    return computation


def _sum(computation: Computation, step: int) -> tuple[list[float], Tensor]:
    """Return the losses of all virtual workers, and the sum of their summands."""
    state = computation.state
    losses = []
    total = state.weights.new_zeros(state.width)
    for virtual_worker in range(computation.spec.virtual_workers):
        loss, summands = computation.compute(step, virtual_worker)
        losses.append(loss.item())
        for view, value in zip(state.summands(total), summands, strict=True):
            view += value
    return losses, total


def count_flops(computation: Computation) -> int:
    """Return the floating-point operations of one micro-batch, forward and backward."""
    with FlopCounterMode(display=False) as counter:
        computation.compute(0, 0)
    return counter.get_total_flops()
