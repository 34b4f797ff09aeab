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
from rekindle.documents import MODEL_FILE, encode_model_description
from rekindle.errors import ConfigError, write_stderr
from rekindle.training.computation import build_model, open_samples
from rekindle.training.numerics import compute_fingerprint, prepare_device
from rekindle.training.sampler import mix_seed
from rekindle.training.spec import TrainingSpec
from rekindle.training.training_state import weights_sha256
from rekindle.training.validation import SampleSubset
from rekindle.workload import Workload, read_dataset_facts


def fit_family(
    training_spec: TrainingSpec, workload: Workload, dataset_path: Path, output_folder: Path
) -> str:
    """Fit the family `training_spec.family`, and write model.safetensors and model.json to
    `output_folder`. Return the sha256 of the weights."""
    device = prepare_device(training_spec)
    verify_dataset(dataset_path, training_spec.digest)
    model = build_model(training_spec, workload, read_dataset_facts(dataset_path))
    samples, _ = open_samples(training_spec, workload, dataset_path)
    fit_model(training_spec, workload, model, samples)
    sha256 = write_model(
        output_folder,
        model,
        training_spec.identity() | {"fingerprint": compute_fingerprint(training_spec, device)},
    )
    check_saved_model(training_spec, workload, dataset_path, model, samples, output_folder)
    write_stderr(f"fitted {training_spec.family} to {len(samples):,} samples: model {sha256}")
    return sha256


def fit_model(
    training_spec: TrainingSpec, workload: Workload, model: nn.Module, samples: SampleSubset
) -> None:
    """Call the function `fit` of the family. Raises ConfigError if the family is trained step by
    step, or if `fit` returns a value."""
    fitted_family = families.get_families(workload)[training_spec.family]
    if not isinstance(fitted_family, families.Fitted):
        raise ConfigError(
            f'the family "{training_spec.family}" is not fitted: it must be trained by the step'
            " steps.train."
        )

    # seed torch again, because the dataset may have drawn random numbers
    torch.manual_seed(mix_seed(training_spec.seed, 0, 0, 3))
    with torch.no_grad():
        fit_result: Any = fitted_family.fit(model, samples)

    if fit_result is not None:
        raise ConfigError(
            f"fit(model, samples) returned {type(fit_result).__name__}: it must change `model` and"
            " return nothing."
        )


def check_saved_model(
    training_spec: TrainingSpec,
    workload: Workload,
    dataset_path: Path,
    model: nn.Module,
    samples: SampleSubset,
    model_folder: Path,
) -> None:
    """Raise ConfigError if the model that `model_folder` contains cannot be loaded, or if the loss
    of the loaded model differs from the loss of `model`."""
    advice_text = (
        "Keep all that `fit` sets in parameters and buffers, or in the tensor that get_extra_state"
        " returns."
    )
    saved_model = build_model(training_spec, workload, read_dataset_facts(dataset_path))

    try:
        saved_model.load_state_dict(load_file(model_folder / WEIGHTS_FILE))
    except RuntimeError as error:
        raise ConfigError(
            f"the fitted model cannot be loaded ({' '.join(str(error).split())}). {advice_text}"
        ) from error

    loss = compute_loss(training_spec, workload, model, samples)
    saved_loss = compute_loss(training_spec, workload, saved_model, samples)
    if not _are_close(loss, saved_loss):
        raise ConfigError(
            f"the fitted model has a loss of {loss:.5g}, and {saved_loss:.5g} if it is loaded."
            f" {advice_text}"
        )


def check_repeatable(
    training_spec: TrainingSpec,
    workload: Workload,
    model: nn.Module,
    samples: SampleSubset,
    dataset_properties: dict[str, Any],
) -> None:
    """Fit a second model to the same samples, and raise ConfigError if the loss of the second model
    differs from the loss of `model`."""
    second_model = build_model(training_spec, workload, dataset_properties)
    fit_model(training_spec, workload, second_model, samples)
    first_loss, second_loss = (
        compute_loss(training_spec, workload, fitted_model, samples)
        for fitted_model in (model, second_model)
    )
    if not _are_close(first_loss, second_loss):
        raise ConfigError(
            f'the family "{training_spec.family}" was fitted twice to the same samples, and has a'
            f" loss of {first_loss:.5g} and {second_loss:.5g}: a fit is repeated after an"
            " interruption, so it needs a fixed seed."
        )


def compute_loss(
    training_spec: TrainingSpec, workload: Workload, model: nn.Module, samples: SampleSubset
) -> float:
    """Return the loss of the first batch. Raises ConfigError if a second computation with the same
    seed gives a different loss."""
    sample_indices = torch.arange(min(training_spec.batch_size, len(samples)))
    repeated_losses: list[float] = []
    model.eval()

    for _ in range(2):
        # set the same seed as `compute_validation` does, because the loss may draw random numbers
        torch.manual_seed(mix_seed(training_spec.seed, 0, 0, 2))
        with torch.no_grad():
            repeated_losses.append(float(workload.loss(model, samples.batch(sample_indices))))

    first_loss, second_loss = repeated_losses
    if not _are_close(first_loss, second_loss):
        raise ConfigError(
            f"`loss` was {first_loss:.5g} and {second_loss:.5g} for the same model and the same"
            " samples: it must depend on these only, or draw its random numbers from torch, which"
            " the training seeds."
        )

    return first_loss


def _are_close(first_loss: float, second_loss: float) -> bool:
    return math.isclose(first_loss, second_loss, rel_tol=1e-5) or math.isnan(first_loss)


def write_model(output_folder: Path, model: nn.Module, model_description: dict[str, Any]) -> str:
    """Write model.safetensors and model.json to `output_folder`. Raises ConfigError if the
    state_dict contains anything but tensors."""
    model_state = model.state_dict()

    non_tensor_names = [
        tensor_name
        for tensor_name, state_value in model_state.items()
        if not isinstance(state_value, torch.Tensor)
    ]
    if non_tensor_names:
        raise ConfigError(
            f"{non_tensor_names[0]} of the model is"
            f" {type(model_state[non_tensor_names[0]]).__name__}: a model is stored as"
            " tensors. Let get_extra_state return a tensor, such as"
            " torch.frombuffer(bytearray(data), dtype=torch.uint8)."
        )

    return write_tensors(
        output_folder,
        {
            tensor_name: state_value.detach().cpu().clone()
            for tensor_name, state_value in model_state.items()
        },
        model_description,
    )


def write_tensors(
    output_folder: Path, tensors: dict[str, torch.Tensor], model_description: dict[str, Any]
) -> str:
    """Write model.safetensors and model.json to `output_folder`; return the sha256 of the
    tensors."""
    sha256 = weights_sha256(tensors)
    output_folder.mkdir(parents=True, exist_ok=True)
    (output_folder / WEIGHTS_FILE).write_bytes(
        save(
            {
                tensor_name: tensor_value.contiguous()
                for tensor_name, tensor_value in tensors.items()
            }
        )
    )
    (output_folder / MODEL_FILE).write_bytes(
        encode_model_description(model_description | {"sha256": sha256})
    )
    return sha256
