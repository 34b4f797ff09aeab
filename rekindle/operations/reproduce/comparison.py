"""Comparison of a model that was trained again with the model of the release."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.content.dataset_record import DATASET
from rekindle.documents import MODEL_FILE, ModelFile, read_object
from rekindle.errors import RekindleError
from rekindle.release.origin import Curve, Origin, read_curve
from rekindle.storage import Store

# entries of model.json on which the weights depend
SETTING_ENTRIES = ("workload", "family", "start", "model", "train")
# entries of a fingerprint that are derived from the settings and the dataset's digest
DERIVED_ENTRIES = ("config", "data")


@dataclass(frozen=True)
class Model:
    """A model that the run has trained. `prefix`: key prefix of its files; `description`: its
    model.json."""

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


def compare(origin: Origin, store: Store, run: str) -> Comparison:
    """Compare the release with the models of `run`. Raises RekindleError if the run has trained no
    model."""
    models = list(_models(store, run))
    if not models:
        raise RekindleError(f"the run {run} has not stored a model, so nothing can be compared.")

    model = max(models, key=lambda model: _similarity(origin, model))
    sha256 = model.description.sha256
    if sha256 == origin.sha256:
        return Comparison(sha256, _state_difference(origin, store, run))

    differences = _settings_differences(origin.model.as_json(), model.description.as_json())
    curve = curve_difference(origin.curve, read_curve(store, model.prefix))
    return Comparison(sha256, next(differences, curve))


def _models(store: Store, run: str) -> Iterator[Model]:
    for entry in store.list(f"{run}/"):
        prefix, _, file = entry.key.rpartition("/")
        if file == MODEL_FILE:
            description = read_object(ModelFile, store, entry.key)
            if not description.paused:
                yield Model(f"{prefix}/", description)


def _similarity(origin: Origin, model: Model) -> tuple[bool, int]:
    """Return a sort key for the similarity of a model to the release, because a run may train
    several models."""
    names = ("digest", *SETTING_ENTRIES)
    expected = origin.model.as_json()
    actual = model.description.as_json()
    equal_settings = sum(expected.get(name) == actual.get(name) for name in names)
    return model.description.sha256 == origin.sha256, equal_settings


def _settings_differences(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences of the dataset, then of the settings, then of the machine."""
    digest = expected.get("digest")
    other = actual.get("digest")
    if digest != other:
        yield (
            f"the digest of the dataset is {other}, and {digest} in the release: `prepare` made"
            " another dataset"
        )

    for name in SETTING_ENTRIES:
        yield from _value_differences(name, expected.get(name), actual.get(name))

    expected_facts = expected.get("fingerprint", {})
    actual_facts = actual.get("fingerprint", {})
    for name in sorted(expected_facts.keys() | actual_facts.keys()):
        if name not in DERIVED_ENTRIES:
            yield from _value_differences(name, expected_facts.get(name), actual_facts.get(name))


def _value_differences(name: str, expected: object, actual: object) -> Iterator[str]:
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        for key in sorted(expected.keys() | actual.keys()):
            yield from _value_differences(f"{name}.{key}", expected.get(key), actual.get(key))
    elif expected != actual:
        yield f"{name} is {actual!r}, and {expected!r} in the release"


def curve_difference(expected: Curve, actual: Curve) -> str:
    """Return the first step whose loss differs, as a sentence."""
    steps = sorted(expected.keys() & actual.keys())
    for step in steps:
        if expected[step] != actual[step]:
            losses = f"{actual[step]!r}, and {expected[step]!r} in the release"
            return f"the first recorded step with another loss is step {step}: {losses}"

    if not steps:
        return "the weights differ; losses of the same steps were not recorded"
    return (
        f"the losses of all {len(steps)} recorded steps up to step {steps[-1]} are equal, but the"
        " weights differ"
    )


def _state_difference(origin: Origin, store: Store, run: str) -> str:
    """Return a sentence that names the files of the serving state that differ; "" if all are
    equal."""
    from hashlib import sha256

    names = sorted(name for name in origin.files if name == DATASET or name.startswith("state/"))

    def is_equal(key: str, name: str) -> bool:
        if not store.head(key):
            return False
        content = store.get(key, max_bytes=None)
        return sha256(content).hexdigest() == origin.files[name]

    candidates = {
        entry.key.removesuffix(DATASET)
        for entry in store.list(f"{run}/")
        if entry.key.endswith(f"/{DATASET}")
    }
    differences = [
        [name for name in names if not is_equal(prefix + name, name)]
        for prefix in sorted(candidates)
    ]

    different_files = min(differences, key=len, default=names)
    if different_files:
        return (
            f"the weights are equal, but {', '.join(different_files[:3])} of the serving state"
            " differ"
        )

    return ""
