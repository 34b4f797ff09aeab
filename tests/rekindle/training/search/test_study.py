"""Every decision of a sweep may be repeated: by a restarted step, or by two processes at the same time."""

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
    """Write the results of a round like its pods, last trial first."""
    trials = {trial.number: trial for trial in study.read()}
    for number in reversed(record["run"]):
        output = study.output(number, record["rung"])
        measured = json.dumps({"step": 1, "loss": loss(trials[number].settings) / (1 + record["rung"])})
        study.store.put(f"{output}/validation.json", measured.encode())
        model = {"step": 10 * (1 + record["rung"]), "sha256": f"{number}"}
        study.store.put(f"{output}/model.json", json.dumps(model).encode())


def run_rounds(study: Study, twice: bool = False, default: Settings = DEFAULT) -> Iterator[dict[str, Any]]:
    """Yield the rounds; `twice`: several processes decide each at the same time, and others decide it again."""
    for number in range(len(study.plan)):
        fresh = [Study(study.store, study.root, study.sweep) for _ in range(4 if twice else 1)]
        with ThreadPoolExecutor(4) as pool:
            records = list(pool.map(lambda other, n=number: other.decide(n, default, WHOLE), fresh))
        assert all(record == records[0] for record in records)
        train(study, records[0])
        yield records[0]


def test_repeated_and_concurrent_decisions_give_the_same_sweep(study: Study, s3: Store) -> None:
    once = list(run_rounds(study))
    assert list(run_rounds(Study(s3, "others/search", study.sweep), twice=True)) == once
    assert list(run_rounds(study)) == once
    trials = study.read()
    assert trials[0].settings == DEFAULT and [trial.number for trial in trials] == list(range(9))
    assert all(isinstance(trial.settings["train.batch_size"], int) for trial in trials)
    assert once[-1]["run"] == sorted(range(9), key=lambda number: (loss(trials[number].settings), number))[:3]
    assert report.rows(study)[0]["trial"] == once[-1]["run"][0] and len(report.table(study)) == 10


def test_a_failed_trial_is_the_worst_and_does_not_end_the_sweep(study: Study) -> None:
    record = study.decide(0, DEFAULT, WHOLE)
    train(study, record)
    failed = json.dumps({"value": None, "why": "training has diverged"}).encode()
    study.store.delete([f"{study.output(record['run'][0], 0)}/model.json"])
    study.store.put(f"{study.output(record['run'][0], 0)}/failed.json", failed)
    for number in (1, 2):
        train(study, study.decide(number, {}, WHOLE))
    assert record["run"][0] not in study.decide(3, {}, WHOLE)["run"]
    assert report.rows(study)[-1]["state"] == "failed"


def test_a_sweep_whose_trials_all_fail_reports_the_reason(study: Study) -> None:
    for number in range(3):
        for trial in study.decide(number, DEFAULT, WHOLE)["run"]:
            failed = json.dumps({"value": None, "why": "training has diverged"}).encode()
            study.store.put(f"{study.output(trial, 0)}/failed.json", failed)
    with pytest.raises(ConfigError, match="all 9 trials lack a loss: training has diverged"):
        study.decide(3, DEFAULT, WHOLE)


@pytest.mark.parametrize("sampler", ["random", "grid"])
def test_a_sampler_chooses_other_settings_in_each_round(s3: Store, sampler: str) -> None:
    space = {"train": {"batch_size": {"low": 8, "high": 16, "step": 8}}, "model": {"shape": [1, 2, 3]}}
    settings = {"space": space, "trials": 6, "batch": 2, "sampler": sampler, "rungs": 1}
    study = Study(s3, f"{sampler}/search", Sweep.model_validate(settings))
    list(run_rounds(study, default={}))
    trials = study.read()
    distinct = {json.dumps(trial.settings) for trial in trials}
    assert len(trials) == 6 and (len(distinct) == 6 or sampler == "random")
