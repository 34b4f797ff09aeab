"""Chooses one of the trained families of a workload by its validation loss or a validation
metric."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from argolocal.common.json_text import replace_nan
from rekindle import families
from rekindle.content.dataset import verify_dataset
from rekindle.content.weights import WEIGHTS_FILE, read_description, verify_weights
from rekindle.documents import MODEL_FILE, describe_model
from rekindle.errors import ConfigError, DataError, say
from rekindle.gate import Metric
from rekindle.training.computation import build_model, open_samples
from rekindle.training.numerics import make_autocast, prepare_device
from rekindle.training.sampler import mix_seed
from rekindle.training.spec import TrainConfig, TrainingSpec
from rekindle.training.validation import Subset, parse_measures
from rekindle.workload import Workload, dataset_facts

# validation results of a model on the held-out samples, by name: `loss` and the workload's measures
Values = dict[str, float]


def choose_family(
    spec: TrainingSpec, workload: Workload, models: Mapping[str, Path], dataset: Path, out: Path
) -> str:
    """Copy the best of `models` to `out`, and add the validation results of all models to its
    model.json; return the name of the best family.

    Of equal models, the first in `models` is chosen. Raises DataError if no model has a finite
    value.
    """
    device = prepare_device(spec)
    verify_dataset(dataset, spec.digest)

    _, held_out = open_samples(spec, workload, dataset)
    if held_out is None:
        raise ConfigError("families are chosen by validation: set train.validation, such as 0.1.")

    facts = dataset_facts(dataset)
    metric = families.get_selection_metric(workload)
    values: dict[str, Values] = {}

    for name, folder in models.items():
        description = verify_weights(folder)
        check_held_out(name, description.train, spec)
        family_spec = spec.model_copy(
            update={"model": description.model, "family": description.family}
        )
        model = build_model(family_spec, workload, facts)
        model.load_state_dict(load_file(folder / WEIGHTS_FILE))
        values[name] = compute_validation(spec, workload, model.to(device), held_out, device)
        say(f"{name}: " + ", ".join(f"{key} {value:.5g}" for key, value in values[name].items()))

    best_family = find_best_family(values, metric)
    shutil.copytree(models[best_family], out)

    chosen = {
        "family": best_family,
        "by": metric.name,
        "better": metric.better,
        "validation": replace_nan(values),
    }

    description = read_description(out).as_json() | {"chosen": chosen}
    (out / MODEL_FILE).write_bytes(describe_model(description))

    return best_family


def check_held_out(name: str, train: Mapping[str, Any], spec: TrainingSpec) -> None:
    """Raise ConfigError if the model `name` had other held-out samples than `spec`, because it may
    have been trained on the held-out samples of `spec`."""
    for key in TrainConfig.HELD_OUT_SETTINGS:
        if key in train and train[key] != getattr(spec, key):
            raise ConfigError(
                f"{name} was trained with train.{key} {train[key]}, and is compared with"
                f" {getattr(spec, key)}: train all models with the same validation and seed, so"
                " that none has seen the held-out samples."
            )


def find_best_family(values: Mapping[str, Values], metric: Metric) -> str:
    """Return the family with the best finite value.

    Raises ConfigError for an unknown metric, DataError if no value is finite.
    """
    for name, family_values in values.items():
        check_metric(name, family_values, metric)

    finite_values = {
        name: value for name in values if math.isfinite(value := values[name][metric.name])
    }
    if not finite_values:
        raise DataError(
            f"{metric.name} of {', '.join(values)} is not a number on the held-out samples: lower"
            " train.learning_rate of a training that diverged, or correct `fit`, `loss` or"
            " `measures`."
        )

    return max(finite_values, key=lambda name: metric.gain(finite_values[name]))


def check_metric(name: str, values: Values, metric: Metric) -> None:
    """Raise ConfigError unless the validation of the family `name` has the metric by which families
    are compared."""
    if metric.name not in values:
        raise ConfigError(
            f'chosen_by is Metric("{metric.name}"), but validation of {name} has'
            f" {', '.join(values)}: choose one of them, or let `measures` return it."
        )


def compute_validation(
    spec: TrainingSpec, workload: Workload, model: nn.Module, samples: Subset, device: torch.device
) -> Values:
    """Return the means of the loss and the measures over `samples`, in batches of
    train.batch_size."""
    measures = getattr(workload, "measures", lambda model, batch: {})
    sums: Values = {}
    model.eval()

    with torch.no_grad(), make_autocast(spec, device):
        for number, start in enumerate(range(0, len(samples), spec.batch_size)):
            indices = torch.arange(start, min(len(samples), start + spec.batch_size))
            batch = tuple(tensor.to(device) for tensor in samples.batch(indices))
            torch.manual_seed(mix_seed(spec.seed, number, 0, 2))

            for key, value in {
                "loss": workload.loss(model, batch),
                **parse_measures(measures(model, batch)),
            }.items():
                sums[key] = sums.get(key, 0.0) + float(value) * len(indices)

    return {key: value / len(samples) for key, value in sums.items()}
