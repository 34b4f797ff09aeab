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
from rekindle.documents import MODEL_FILE, encode_model_description
from rekindle.errors import ConfigError, DataError, write_stderr
from rekindle.gate import Metric
from rekindle.training.computation import build_model, open_samples
from rekindle.training.numerics import make_autocast, prepare_device
from rekindle.training.sampler import mix_seed
from rekindle.training.spec import TrainConfig, TrainingSpec
from rekindle.training.validation import SampleSubset, parse_measures
from rekindle.workload import Workload, read_dataset_facts

# validation results of a model on the held-out samples, with the name `loss` or the name of a
# measure of the workload as key
ValueByMetric = dict[str, float]


def choose_family(
    training_spec: TrainingSpec,
    workload: Workload,
    folder_by_family: Mapping[str, Path],
    dataset_path: Path,
    output_folder: Path,
) -> str:
    """Copy the best of `folder_by_family` to `output_folder`, and add the validation results of all
    models to its model.json; return the name of the best family.

    Of equally good models, the first in `folder_by_family` is chosen. Raises DataError if no model
    has a finite value of the metric.
    """
    device = prepare_device(training_spec)
    verify_dataset(dataset_path, training_spec.digest)

    _, held_out = open_samples(training_spec, workload, dataset_path)
    if held_out is None:
        raise ConfigError("families are chosen by validation: set train.validation, such as 0.1.")

    dataset_properties = read_dataset_facts(dataset_path)
    selection_metric = families.get_selection_metric(workload)
    values_by_family: dict[str, ValueByMetric] = {}

    for family_name, model_folder in folder_by_family.items():
        model_description = verify_weights(model_folder)
        check_same_held_out(family_name, model_description.train, training_spec)
        family_spec = training_spec.model_copy(
            update={"model": model_description.model, "family": model_description.family}
        )
        model = build_model(family_spec, workload, dataset_properties)
        model.load_state_dict(load_file(model_folder / WEIGHTS_FILE))
        values_by_family[family_name] = compute_validation(
            training_spec, workload, model.to(device), held_out, device
        )
        write_stderr(
            f"{family_name}: "
            + ", ".join(
                f"{metric_name} {metric_value:.5g}"
                for metric_name, metric_value in values_by_family[family_name].items()
            )
        )

    best_family = find_best_family(values_by_family, selection_metric)
    shutil.copytree(folder_by_family[best_family], output_folder)

    choice_record = {
        "family": best_family,
        "by": selection_metric.name,
        "better": selection_metric.better,
        "validation": replace_nan(values_by_family),
    }

    chosen_description = read_description(output_folder).as_json() | {"chosen": choice_record}
    (output_folder / MODEL_FILE).write_bytes(encode_model_description(chosen_description))

    return best_family


def check_same_held_out(
    model_name: str, train_settings: Mapping[str, Any], training_spec: TrainingSpec
) -> None:
    """Raise ConfigError if the model `model_name` had other held-out samples than
    `training_spec`, because it may have been trained on the held-out samples of `training_spec`."""
    for setting_name in TrainConfig.HELD_OUT_SETTINGS:
        if setting_name in train_settings and train_settings[setting_name] != getattr(
            training_spec, setting_name
        ):
            raise ConfigError(
                f"{model_name} was trained with train.{setting_name}"
                f" {train_settings[setting_name]}, and is compared with"
                f" {getattr(training_spec, setting_name)}: train all models with the same"
                " validation and seed, so that none has seen the held-out samples."
            )


def find_best_family(
    values_by_family: Mapping[str, ValueByMetric], selection_metric: Metric
) -> str:
    """Return the family with the best finite value of the metric.

    Raises ConfigError for an unknown metric, DataError if no value is finite.
    """
    for family_name, family_values in values_by_family.items():
        check_has_metric(family_name, family_values, selection_metric)

    finite_values = {
        family_name: metric_value
        for family_name in values_by_family
        if math.isfinite(metric_value := values_by_family[family_name][selection_metric.name])
    }
    if not finite_values:
        raise DataError(
            f"{selection_metric.name} of {', '.join(values_by_family)} is not a number on the"
            " held-out samples: lower train.learning_rate of a training that diverged, or correct"
            " `fit`, `loss` or `measures`."
        )

    return max(
        finite_values, key=lambda family_name: selection_metric.gain(finite_values[family_name])
    )


def check_has_metric(
    family_name: str, metric_values: ValueByMetric, selection_metric: Metric
) -> None:
    """Raise ConfigError unless the validation of the family `family_name` has the metric by
    which families are compared."""
    if selection_metric.name not in metric_values:
        raise ConfigError(
            f'chosen_by is Metric("{selection_metric.name}"), but validation of {family_name} has'
            f" {', '.join(metric_values)}: choose one of them, or let `measures` return it."
        )


def compute_validation(
    training_spec: TrainingSpec,
    workload: Workload,
    model: nn.Module,
    samples: SampleSubset,
    device: torch.device,
) -> ValueByMetric:
    """Return the means of the loss and the measures over `samples`, in batches of
    train.batch_size."""
    measures = getattr(workload, "measures", lambda model, batch: {})
    weighted_sums: ValueByMetric = {}
    model.eval()

    with torch.no_grad(), make_autocast(training_spec, device):
        for batch_number, batch_start in enumerate(
            range(0, len(samples), training_spec.batch_size)
        ):
            sample_indices = torch.arange(
                batch_start, min(len(samples), batch_start + training_spec.batch_size)
            )
            batch = tuple(batch_tensor.to(device) for batch_tensor in samples.batch(sample_indices))
            torch.manual_seed(mix_seed(training_spec.seed, batch_number, 0, 2))

            for metric_name, metric_value in {
                "loss": workload.loss(model, batch),
                **parse_measures(measures(model, batch)),
            }.items():
                weighted_sums[metric_name] = weighted_sums.get(metric_name, 0.0) + float(
                    metric_value
                ) * len(sample_indices)

    return {
        metric_name: weighted_sum / len(samples)
        for metric_name, weighted_sum in weighted_sums.items()
    }
