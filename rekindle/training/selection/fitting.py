"""Fits a family without training steps, and writes its model to the same files as a training."""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import nn

from rekindle import families
from rekindle.content.dataset import verify_dataset
from rekindle.content.weights import WEIGHTS_FILE
from rekindle.documents import MODEL_FILE, describe_model
from rekindle.errors import ConfigError, say
from rekindle.training.computation import build_model, open_samples
from rekindle.training.numerics import compute_fingerprint, prepare_device
from rekindle.training.sampler import mix_seed
from rekindle.training.spec import TrainingSpec
from rekindle.training.training_state import weights_sha256
from rekindle.training.validation import Subset
from rekindle.workload import Workload, dataset_facts


def fit_family(spec: TrainingSpec, workload: Workload, dataset: Path, out: Path) -> str:
    """Fit the family `spec.family`, and write model.safetensors and model.json to `out`. Return the
    sha256 of the weights."""
    device = prepare_device(spec)
    verify_dataset(dataset, spec.digest)
    model = build_model(spec, workload, dataset_facts(dataset))
    samples, _ = open_samples(spec, workload, dataset)
    fit_model(spec, workload, model, samples)
    sha256 = write_model(
        out, model, spec.identity() | {"fingerprint": compute_fingerprint(spec, device)}
    )
    check_saved_model(spec, workload, dataset, model, samples, out)
    say(f"fitted {spec.family} to {len(samples):,} samples: model {sha256}")
    return sha256


def fit_model(spec: TrainingSpec, workload: Workload, model: nn.Module, samples: Subset) -> None:
    """Call the function `fit` of the family. Raises ConfigError if the family is trained step by
    step, or if `fit` returns a value."""
    fitted = families.get_families(workload)[spec.family]
    if not isinstance(fitted, families.Fitted):
        raise ConfigError(
            f'the family "{spec.family}" is not fitted: it must be trained by the step steps.train.'
        )

    torch.manual_seed(
        mix_seed(spec.seed, 0, 0, 3)
    )  # torch is seeded again, because the dataset may have drawn random numbers
    with torch.no_grad():
        result: Any = fitted.fit(model, samples)

    if result is not None:
        raise ConfigError(
            f"fit(model, samples) returned {type(result).__name__}: it must change `model` and"
            " return nothing."
        )


def check_saved_model(
    spec: TrainingSpec,
    workload: Workload,
    dataset: Path,
    model: nn.Module,
    samples: Subset,
    folder: Path,
) -> None:
    """Raise ConfigError if the model that `folder` contains cannot be loaded, or if its loss
    differs from that of `model`."""
    advice = (
        "Keep all that `fit` sets in parameters and buffers, or in the tensor that get_extra_state"
        " returns."
    )
    saved = build_model(spec, workload, dataset_facts(dataset))

    try:
        saved.load_state_dict(load_file(folder / WEIGHTS_FILE))
    except RuntimeError as error:
        raise ConfigError(
            f"the fitted model cannot be loaded ({' '.join(str(error).split())}). {advice}"
        ) from error

    loss = compute_loss(spec, workload, model, samples)
    saved_loss = compute_loss(spec, workload, saved, samples)
    if not _are_close(loss, saved_loss):
        raise ConfigError(
            f"the fitted model has a loss of {loss:.5g}, and {saved_loss:.5g} if it is loaded."
            f" {advice}"
        )


def check_repeatable(
    spec: TrainingSpec, workload: Workload, model: nn.Module, samples: Subset, facts: dict[str, Any]
) -> None:
    """Fit a second model to the same samples, and raise ConfigError if its loss differs from that
    of `model`."""
    second_model = build_model(spec, workload, facts)
    fit_model(spec, workload, second_model, samples)
    first, second = (compute_loss(spec, workload, each, samples) for each in (model, second_model))
    if not _are_close(first, second):
        raise ConfigError(
            f'the family "{spec.family}" was fitted twice to the same samples, and has a loss of'
            f" {first:.5g} and {second:.5g}: a fit is repeated after an interruption, so it needs a"
            " fixed seed."
        )


def compute_loss(
    spec: TrainingSpec, workload: Workload, model: nn.Module, samples: Subset
) -> float:
    """Return the loss of the first batch. Raises ConfigError if a second computation with the same
    seed gives a different loss."""
    indices = torch.arange(min(spec.batch_size, len(samples)))
    losses: list[float] = []
    model.eval()

    for _ in range(2):
        # set the same seed as `compute_validation` does, because the loss may draw random numbers
        torch.manual_seed(mix_seed(spec.seed, 0, 0, 2))
        with torch.no_grad():
            losses.append(float(workload.loss(model, samples.batch(indices))))

    first, second = losses
    if not _are_close(first, second):
        raise ConfigError(
            f"`loss` was {first:.5g} and {second:.5g} for the same model and the same samples: it"
            " must depend on these only, or draw its random numbers from torch, which the training"
            " seeds."
        )

    return first


def _are_close(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=1e-5) or math.isnan(first)


def write_model(out: Path, model: nn.Module, description: dict[str, Any]) -> str:
    """Write model.safetensors and model.json to `out`. Raises ConfigError if the state_dict
    contains anything but tensors."""
    state = model.state_dict()

    others = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ConfigError(
            f"{others[0]} of the model is {type(state[others[0]]).__name__}: a model is stored as"
            " tensors. Let get_extra_state return a tensor, such as"
            " torch.frombuffer(bytearray(data), dtype=torch.uint8)."
        )

    return write_tensors(
        out, {name: value.detach().cpu().clone() for name, value in state.items()}, description
    )


def write_tensors(out: Path, tensors: dict[str, torch.Tensor], description: dict[str, Any]) -> str:
    """Write model.safetensors and model.json to `out`; return the sha256 of the tensors."""
    sha256 = weights_sha256(tensors)
    out.mkdir(parents=True, exist_ok=True)
    (out / WEIGHTS_FILE).write_bytes(
        save({name: value.contiguous() for name, value in tensors.items()})
    )
    (out / MODEL_FILE).write_bytes(describe_model(description | {"sha256": sha256}))
    return sha256
