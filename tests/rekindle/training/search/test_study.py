"""A search whose every decision may be repeated: by a step that was killed, or by two at once."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rekindle.errors import ConfigError
from rekindle.storage import Store
from rekindle.training.search import report
from rekindle.training.search.config import Settings, Sweep
from rekindle.training.search.study import Study

SPACE = {
    "train": {"learning_rate": {"low": 1e-4, "high": 1e-1, "log": True}, "batch_size": {"low": 8, "high": 64}},
    "model": {"shape": [[8, 16], [16, 32]]},
}
WHOLE = {"train.batch_size": True}
DEFAULT = {"train.learning_rate": 0.01, "train.batch_size": 32, "model.shape": [8, 16]}


@pytest.fixture
def study(s3: Store, request: pytest.FixtureRequest) -> Study:
    sweep = Sweep.model_validate({"space": SPACE, "trials": 9, "rungs": 2, "seed": 5})
    return Study(s3, f"{request.node.name}/search", sweep)


def loss(settings: Settings) -> float:
    return abs(settings.get("train.learning_rate", 0.02) - 0.02) + settings["train.batch_size"] / 1000


def train(study: Study, record: dict[str, Any]) -> None:
    """As if the pods had: the last trial first."""
    trials = {trial.number: trial for trial in study.read()}
    for number in reversed(record["run"]):
        place = study.place(number, record["rung"])
        measured = json.dumps({"step": 1, "loss": loss(trials[number].settings) / (1 + record["rung"])})
        study.store.put(f"{place}/validation.json", measured.encode())
        model = {"step": 10 * (1 + record["rung"]), "sha256": f"{number}"}
        study.store.put(f"{place}/model.json", json.dumps(model).encode())


def searched(study: Study, twice: bool = False, default: Settings = DEFAULT) -> Iterator[dict[str, Any]]:
    """The rounds; `twice`: each is decided by several at once, and again by others that know nothing of it."""
    for number in range(len(study.plan)):
        fresh = [Study(study.store, study.root, study.sweep) for _ in range(4 if twice else 1)]
        with ThreadPoolExecutor(4) as pool:
            records = list(pool.map(lambda other, n=number: other.decide(n, default, WHOLE), fresh))
        assert all(record == records[0] for record in records)
        train(study, records[0])
        yield records[0]


def test_deciding_again_and_at_once_gives_the_same_study(study: Study, s3: Store) -> None:
    once = list(searched(study))
    assert list(searched(Study(s3, "others/search", study.sweep), twice=True)) == once
    assert list(searched(study)) == once
    trials = study.read()
    assert trials[0].settings == DEFAULT and [trial.number for trial in trials] == list(range(9))
    assert all(isinstance(trial.settings["train.batch_size"], int) for trial in trials)
    assert once[-1]["run"] == sorted(range(9), key=lambda number: (loss(trials[number].settings), number))[:3]
    assert report.rows(study)[0]["trial"] == once[-1]["run"][0] and len(report.table(study)) == 10


def test_a_trial_that_failed_is_the_worst_and_ends_nothing(study: Study) -> None:
    record = study.decide(0, DEFAULT, WHOLE)
    train(study, record)
    failed = json.dumps({"value": None, "why": "training has diverged"}).encode()
    study.store.delete([f"{study.place(record['run'][0], 0)}/model.json"])
    study.store.put(f"{study.place(record['run'][0], 0)}/failed.json", failed)
    for number in (1, 2):
        train(study, study.decide(number, {}, WHOLE))
    assert record["run"][0] not in study.decide(3, {}, WHOLE)["run"]
    assert report.rows(study)[-1]["state"] == "failed"


def test_a_search_in_which_all_fail_says_why(study: Study) -> None:
    for number in range(3):
        for trial in study.decide(number, DEFAULT, WHOLE)["run"]:
            failed = json.dumps({"value": None, "why": "training has diverged"}).encode()
            study.store.put(f"{study.place(trial, 0)}/failed.json", failed)
    with pytest.raises(ConfigError, match="of 9 trials none has a loss: training has diverged"):
        study.decide(3, DEFAULT, WHOLE)


@pytest.mark.parametrize("sampler", ["random", "grid"])
def test_a_sampler_gives_other_settings_in_each_round(s3: Store, sampler: str) -> None:
    space = {"train": {"batch_size": {"low": 8, "high": 16, "step": 8}}, "model": {"shape": [1, 2, 3]}}
    settings = {"space": space, "trials": 6, "batch": 2, "sampler": sampler, "rungs": 1}
    study = Study(s3, f"{sampler}/search", Sweep.model_validate(settings))
    list(searched(study, default={}))
    trials = study.read()
    known = {json.dumps(trial.settings) for trial in trials}
    assert len(trials) == 6 and (len(known) == 6 or sampler == "random")
