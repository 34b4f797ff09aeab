"""Comparison of a model that was trained again with the model of the release."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.errors import RekindleError
from rekindle.release.origin import Curve, Origin, read_curve
from rekindle.storage import Store

SETTINGS = ("workload", "family", "start", "model", "train")  # entries of model.json that the weights depend on
DERIVED = ("config", "data")  # entries of a fingerprint that repeat the settings and the digest


@dataclass(frozen=True)
class Model:
    """A model of the run: `prefix` of its files, and model.json."""

    prefix: str
    description: dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """The result. `difference` is the first difference, in the order in which a run makes its results; "" if equal."""

    sha256: str
    difference: str = ""

    @property
    def equal(self) -> bool:
        return not self.difference


def compare(origin: Origin, store: Store, run: str) -> Comparison:
    """Compare the release with the models of `run`. Raises RekindleError if the run has trained no model."""
    models = list(_models(store, run))
    if not models:
        raise RekindleError(f"the run {run} has not stored a model, so nothing can be compared.")
    model = max(models, key=lambda model: _likeness(origin, model))
    sha256 = str(model.description["sha256"])
    if sha256 == origin.sha256:
        return Comparison(sha256, _state_difference(origin, store, run))
    differences = _settings_differences(origin.model, model.description)
    curve = curve_difference(origin.curve, read_curve(store, model.prefix))
    return Comparison(sha256, next(differences, curve))


def _models(store: Store, run: str) -> Iterator[Model]:
    for entry in store.list(f"{run}/"):
        prefix, _, file = entry.key.rpartition("/")
        if file == "model.json":
            description = json.loads(store.get(entry.key))
            if not description.get("paused"):
                yield Model(f"{prefix}/", description)


def _likeness(origin: Origin, model: Model) -> tuple[bool, int]:
    """Order models by equality with the release: a run may train several."""
    names = ("digest", *SETTINGS)
    equal_settings = sum(origin.model.get(name) == model.description.get(name) for name in names)
    return model.description["sha256"] == origin.sha256, equal_settings


def _settings_differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences of the dataset, then of the settings, then of the machine."""
    if (digest := wanted.get("digest")) != (other := found.get("digest")):
        yield f"the dataset has the digest {other}, and that of the release {digest}: `prepare` made another dataset"
    for name in SETTINGS:
        yield from _value_differences(name, wanted.get(name), found.get(name))
    wanted_facts, found_facts = wanted.get("fingerprint", {}), found.get("fingerprint", {})
    for name in sorted(wanted_facts.keys() | found_facts.keys()):
        if name not in DERIVED:
            yield from _value_differences(name, wanted_facts.get(name), found_facts.get(name))


def _value_differences(name: str, wanted: Any, found: Any) -> Iterator[str]:
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        for key in sorted(wanted.keys() | found.keys()):
            yield from _value_differences(f"{name}.{key}", wanted.get(key), found.get(key))
    elif wanted != found:
        yield f"{name} is {found!r}, and {wanted!r} in the release"


def curve_difference(wanted: Curve, found: Curve) -> str:
    """Return the first step whose loss differs, as a sentence."""
    steps = sorted(wanted.keys() & found.keys())
    for step in steps:
        if wanted[step] != found[step]:
            losses = f"{found[step]!r}, and {wanted[step]!r} in the release"
            return f"the first recorded step with another loss is step {step}: {losses}"
    if not steps:
        return "the weights differ; losses of the same steps were not recorded"
    return f"the losses of all {len(steps)} recorded steps up to step {steps[-1]} are equal, but the weights differ"


def _state_difference(origin: Origin, store: Store, run: str) -> str:
    """Return the first file of the serving state that no dataset of the run has, for equal weights."""
    from hashlib import sha256

    names = sorted(name for name in origin.files if name == "dataset.json" or name.startswith("state/"))
    wanted = {name: origin.files[name] for name in names}
    candidates = {
        entry.key.removesuffix("dataset.json") for entry in store.list(f"{run}/") if entry.key.endswith("/dataset.json")
    }
    differing = [
        [
            name
            for name in names
            if not store.head(prefix + name) or sha256(store.get(prefix + name)).hexdigest() != wanted[name]
        ]
        for prefix in sorted(candidates)
    ]
    fewest = min(differing, key=len, default=names)
    return f"the weights are equal, but {', '.join(fewest[:3])} of the serving state differ" if fewest else ""
