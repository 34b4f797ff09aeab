"""Different weights are explained by the first difference between the two trainings."""

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from rekindle.documents import ModelFile, parse
from rekindle.errors import RekindleError
from rekindle.operations.reproduce.comparison import compare
from rekindle.release.origin import LossCurve, Origin, RunFile
from rekindle.storage import Store, file_sha256

MODEL: dict[str, Any] = {
    "sha256": "aa",
    "digest": "d1",
    "workload": "steps.digits",
    "model": {"channels": 8},
    "train": {"seed": 1},
    "fingerprint": {"torch": "2.8", "data": "d1"},
}
CURVE: LossCurve = {1: 2.5, 2: 1 / 3}
# task → changes of model.json, curve
Models = dict[str, tuple[dict[str, Any], LossCurve]]


def store_run(s3: Store, models: Models) -> str:
    run = f"run-{uuid4().hex[:8]}"
    for task, (changes, curve) in models.items():
        s3.put(f"{run}/{task}/model/model.json", json.dumps(MODEL | changes).encode())
        s3.put(f"{run}/{task}/model/curve.json", json.dumps(sorted(curve.items())).encode())
    return run


def make_origin(files: dict[str, str] | None = None) -> Origin:
    model = parse(ModelFile, json.dumps(MODEL), "model.json")
    run = RunFile(parameters={}, manifest={}, python="", packages=[], modules=[], code={})
    return Origin("digits", "1", "releases/digits/1/", "aa", {}, files or {}, model, run, CURVE)


@pytest.mark.parametrize(
    ("changes", "curve", "difference"),
    [
        ({}, CURVE, ""),
        (
            {"sha256": "bb", "digest": "d2", "model": {"channels": 9}},
            {},
            "the digest of the dataset is d2",
        ),
        (
            {"sha256": "bb", "model": {"channels": 9}},
            {},
            "model.channels is 9, and 8 in the release",
        ),
        ({"sha256": "bb", "train": {"seed": 2}}, {}, "train.seed is 2"),
        (
            {"sha256": "bb", "fingerprint": {"torch": "2.9"}},
            {},
            "torch is '2.9', and '2.8' in the release",
        ),
        (
            {"sha256": "bb"},
            {1: 2.5, 2: 0.3333333333333334},
            "step 2: 0.3333333333333334, and 0.3333333333333333 in",
        ),
        (
            {"sha256": "bb"},
            {2: 1 / 3},
            "losses of all 1 recorded steps up to step 2 are equal, but the weights differ",
        ),
        ({"sha256": "bb"}, {}, "losses of the same steps were not recorded"),
    ],
)
def test_the_first_difference_is_named(
    s3: Store, changes: dict[str, Any], curve: LossCurve, difference: str
) -> None:
    result = compare(make_origin(), s3, store_run(s3, {"train": (changes, curve)}))
    assert difference in result.difference
    assert bool(difference) is not result.equal


def test_the_model_of_the_release_is_found_among_several(s3: Store) -> None:
    diverged: Models = {"train-small": ({"sha256": "bb"}, {1: 3.0})}
    other_models: Models = {
        "train-wide": ({"sha256": "cc", "model": {"channels": 16}}, {}),
        "rung": ({"paused": True}, {}),
    }
    assert compare(
        make_origin(), s3, store_run(s3, other_models | {"train-small": ({}, CURVE)})
    ).equal
    diverged_comparison = compare(make_origin(), s3, store_run(s3, other_models | diverged))
    assert diverged_comparison.sha256 == "bb"
    assert "step 1" in diverged_comparison.difference


def test_equal_weights_with_another_serving_state_differ(s3: Store, tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("state")

    files = {
        "dataset.json": file_sha256(file),
        "state/a.npy": file_sha256(file),
        "model.safetensors": "1",
    }

    run = store_run(s3, {"train": ({}, CURVE)})

    for name in ("dataset.json", "state/a.npy"):
        s3.put(f"{run}/prepare/dataset/{name}", b"state")

    assert compare(make_origin(files), s3, run).equal
    s3.put(f"{run}/prepare/dataset/state/a.npy", b"other")
    assert "state/a.npy of the serving state" in compare(make_origin(files), s3, run).difference


def test_a_run_without_a_model_cannot_be_compared(s3: Store) -> None:
    with pytest.raises(RekindleError, match="has not stored a model"):
        compare(make_origin(), s3, "run-without-model")
