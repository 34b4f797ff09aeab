"""Fits a family without training steps, and writes its model as a training does."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from rekindle import families
from rekindle.errors import ConfigError, say
from rekindle.training.computation import build_model, open_samples
from rekindle.training.numerics import fingerprint, pick_device
from rekindle.training.spec import TrainingSpec
from rekindle.training.state import weights_sha256
from rekindle.training.validation import Subset
from rekindle.workload import Workload, dataset_facts


def fit(spec: TrainingSpec, workload: Workload, dataset: Path, out: Path) -> str:
    """Fit the family `spec.family`, and write model.safetensors and model.json to `out`; return the sha256."""
    device = pick_device(spec)
    model = build_model(spec, workload, dataset_facts(dataset))
    samples, _ = open_samples(spec, workload, dataset)
    fit_model(workload, spec.family, model, samples)
    sha256 = write(out, model, spec.identity() | {"fingerprint": fingerprint(spec, device)})
    say(f"fitted {spec.family} to {len(samples):,} samples: model {sha256}")
    return sha256


def fit_model(workload: Workload, family: str, model: nn.Module, samples: Subset) -> None:
    """Call the function `fit` of a family. Raises ConfigError if the family is trained step by step."""
    fitted = families.of(workload)[family]
    if not isinstance(fitted, families.Fitted):
        raise ConfigError(f'the family "{family}" is not fitted: it must be trained by the step steps.train.')
    with torch.no_grad():
        fitted.fit(model, samples)


def write(out: Path, model: nn.Module, description: dict[str, Any]) -> str:
    """Write the files of a trained model to `out`. Raises ConfigError if its state is not tensors."""
    state = model.state_dict()
    if others := [name for name, value in state.items() if not isinstance(value, torch.Tensor)]:
        raise ConfigError(
            f"{others[0]} of the model is {type(state[others[0]]).__name__}: a model is stored as tensors. Let "
            "get_extra_state return a tensor, such as torch.frombuffer(bytearray(data), dtype=torch.uint8)."
        )
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in state.items()}
    sha256 = weights_sha256(tensors)
    out.mkdir(parents=True, exist_ok=True)
    (out / "model.safetensors").write_bytes(save(tensors))
    (out / "model.json").write_text(json.dumps(description | {"sha256": sha256}, indent=1))
    return sha256
