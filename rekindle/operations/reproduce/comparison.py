"""Comparison of a model that was trained again with the model of the release."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.content.dataset_record import DATASET
from rekindle.documents import MODEL_FILE, ModelFile, read_object
from rekindle.errors import RekindleError
from rekindle.release.origin import LossCurve, Origin, read_curve
from rekindle.storage import Store

# fields of model.json on which the weights depend
SETTING_NAMES = ("workload", "family", "start", "model", "train")
# fields of a fingerprint that are derived from the settings and from the dataset's digest
DERIVED_FACTS = ("config", "data")


@dataclass(frozen=True)
class TrainedModel:
    """A model that the run has trained again. `prefix`: key prefix of the model's files;
    `description`: content of its model.json."""

    prefix: str
    description: ModelFile


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison. `difference`: the first difference, in the order in which a run
    produces its results; "" if the weights are equal."""

    sha256: str
    difference: str = ""

    @property
    def equal(self) -> bool:
        return not self.difference


def compare(origin: Origin, object_store: Store, run_name: str) -> Comparison:
    """Compare the release with the models of `run_name`. Raises RekindleError if the run `run_name`
    has trained no model."""
    trained_models = list(_list_models(object_store, run_name))
    if not trained_models:
        raise RekindleError(
            f"the run {run_name} has not stored a model, so nothing can be compared."
        )

    trained_model = max(
        trained_models, key=lambda trained_model: _rank_similarity(origin, trained_model)
    )
    sha256 = trained_model.description.sha256
    if sha256 == origin.sha256:
        return Comparison(sha256, _describe_state_difference(origin, object_store, run_name))

    differences = _list_settings_differences(
        origin.model.as_json(), trained_model.description.as_json()
    )
    loss_difference = describe_curve_difference(
        origin.curve, read_curve(object_store, trained_model.prefix)
    )
    return Comparison(sha256, next(differences, loss_difference))


def _list_models(object_store: Store, run_name: str) -> Iterator[TrainedModel]:
    for object_entry in object_store.list(f"{run_name}/"):
        key_prefix, _, file_name = object_entry.key.rpartition("/")
        if file_name == MODEL_FILE:
            model_description = read_object(ModelFile, object_store, object_entry.key)
            if not model_description.paused:
                yield TrainedModel(f"{key_prefix}/", model_description)


def _rank_similarity(origin: Origin, trained_model: TrainedModel) -> tuple[bool, int]:
    """Return a sort key by which the model that is most similar to the release comes last. A run
    may have trained several models."""
    compared_names = ("digest", *SETTING_NAMES)
    expected_model = origin.model.as_json()
    actual_model = trained_model.description.as_json()
    equal_count = sum(expected_model.get(name) == actual_model.get(name) for name in compared_names)
    return trained_model.description.sha256 == origin.sha256, equal_count


def _list_settings_differences(
    expected_model: Mapping[str, Any], actual_model: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the differences between two models in the dataset, then in the settings, then in the
    machine."""
    expected_digest = expected_model.get("digest")
    actual_digest = actual_model.get("digest")
    if expected_digest != actual_digest:
        yield (
            f"the digest of the dataset is {actual_digest}, and {expected_digest} in the release:"
            " `prepare` made another dataset"
        )

    for setting_name in SETTING_NAMES:
        yield from _list_value_differences(
            setting_name, expected_model.get(setting_name), actual_model.get(setting_name)
        )

    expected_facts = expected_model.get("fingerprint", {})
    actual_facts = actual_model.get("fingerprint", {})
    for fact_name in sorted(expected_facts.keys() | actual_facts.keys()):
        if fact_name not in DERIVED_FACTS:
            yield from _list_value_differences(
                fact_name, expected_facts.get(fact_name), actual_facts.get(fact_name)
            )


def _list_value_differences(
    setting_name: str, expected_value: object, actual_value: object
) -> Iterator[str]:
    if isinstance(expected_value, Mapping) and isinstance(actual_value, Mapping):
        for key in sorted(expected_value.keys() | actual_value.keys()):
            yield from _list_value_differences(
                f"{setting_name}.{key}", expected_value.get(key), actual_value.get(key)
            )
    elif expected_value != actual_value:
        yield f"{setting_name} is {actual_value!r}, and {expected_value!r} in the release"


def describe_curve_difference(expected_curve: LossCurve, actual_curve: LossCurve) -> str:
    """Return a sentence about the first training step whose loss differs."""
    common_steps = sorted(expected_curve.keys() & actual_curve.keys())
    for step_number in common_steps:
        if expected_curve[step_number] != actual_curve[step_number]:
            losses_text = (
                f"{actual_curve[step_number]!r}, and {expected_curve[step_number]!r} in the release"
            )
            return f"the first recorded step with another loss is step {step_number}: {losses_text}"

    if not common_steps:
        return "the weights differ; losses of the same steps were not recorded"
    return (
        f"the losses of all {len(common_steps)} recorded steps up to step {common_steps[-1]} are"
        " equal, but the weights differ"
    )


def _describe_state_difference(origin: Origin, object_store: Store, run_name: str) -> str:
    """Return a sentence that names the files of the serving state that differ; "" if all files are
    equal."""
    from hashlib import sha256

    file_names = sorted(
        name for name in origin.files if name == DATASET or name.startswith("state/")
    )

    def is_equal(key: str, file_name: str) -> bool:
        if not object_store.head(key):
            return False
        file_content = object_store.get(key, max_bytes=None)
        return sha256(file_content).hexdigest() == origin.files[file_name]

    candidate_prefixes = {
        object_entry.key.removesuffix(DATASET)
        for object_entry in object_store.list(f"{run_name}/")
        if object_entry.key.endswith(f"/{DATASET}")
    }
    differing_names_by_dataset = [
        [name for name in file_names if not is_equal(candidate_prefix + name, name)]
        for candidate_prefix in sorted(candidate_prefixes)
    ]

    fewest_differing_names = min(differing_names_by_dataset, key=len, default=file_names)
    if fewest_differing_names:
        return (
            f"the weights are equal, but {', '.join(fewest_differing_names[:3])} of the serving"
            " state differ"
        )

    return ""
