"""Every decision of a sweep may be repeated: by a restarted pod, or by several pods at the same
time."""

import json
import random
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from argolocal.common.json_text import to_json
from argolocal.errors import InvalidDocument
from rekindle.errors import ConfigError
from rekindle.storage import Store
from rekindle.training.sweep import sweep_report
from rekindle.training.sweep.budget import compute_step_share
from rekindle.training.sweep.halving import Trial, TrialJob
from rekindle.training.sweep.study import SweepStudy
from rekindle.training.sweep.sweep_config import Settings, Sweep, SweepBudget

SPACE = {
    "train": {
        "learning_rate": {"low": 1e-4, "high": 1e-1, "log": True},
        "batch_size": {"low": 8, "high": 64},
    },
    "model": {"shape": [[8, 16], [16, 32]]},
}
INTEGER_SETTINGS = {"train.batch_size": True}
DEFAULT = {"train.learning_rate": 0.01, "train.batch_size": 32, "model.shape": [8, 16]}


@pytest.fixture
def study(s3: Store, request: pytest.FixtureRequest) -> SweepStudy:
    sweep = Sweep.model_validate({"space": SPACE, "trials": 9, "rungs": 2, "seed": 5})
    return SweepStudy(s3, f"{request.node.name}/search", sweep)


def compute_loss(settings: Settings) -> float:
    return (
        abs(settings.get("train.learning_rate", 0.02) - 0.02) + settings["train.batch_size"] / 1000
    )


def write_result(study: SweepStudy, trial: Trial, rung: int, why: str = "") -> None:
    """Write the result of a trial in the way that the pod of the trial writes it."""
    output = study.make_output_prefix(trial.number, rung)
    if why:
        study.store.put(f"{output}/failed.json", json.dumps({"value": None, "why": why}).encode())
        return
    measured = json.dumps({"step": 1, "loss": compute_loss(trial.settings) / (1 + rung)})
    study.store.put(f"{output}/validation.json", measured.encode())
    model = {"step": 10 * (1 + rung), "sha256": f"{trial.number}"}
    study.store.put(f"{output}/model.json", json.dumps(model).encode())


def run_pod(
    study: SweepStudy, pod: int, default: Settings = DEFAULT, killed: random.Random | None = None
) -> None:
    """Train the trials of a pod, which is `killed` and replaced at random moments."""
    study = SweepStudy(study.store, study.root, study.sweep)
    while claim := study.claim_trial(pod, default, INTEGER_SETTINGS):
        if killed and killed.random() < 0.5:
            study = SweepStudy(study.store, study.root, study.sweep)
            assert study.claim_trial(pod, default, INTEGER_SETTINGS) == claim
        write_result(study, *claim)


@pytest.mark.slow
def test_killed_and_concurrent_pods_give_the_same_sweep(study: SweepStudy, s3: Store) -> None:
    run_pod(study, 0)
    trials = study.read()
    other = SweepStudy(s3, "others/search", study.sweep)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda pod: run_pod(other, pod, killed=random.Random(pod)), range(3)))

    assert other.read() == trials
    assert other.jobs == study.jobs
    assert trials[0].settings == DEFAULT
    assert [trial.number for trial in trials] == list(range(9))
    assert all(isinstance(trial.settings["train.batch_size"], int) for trial in trials)
    assert study.find_winner().number == min(
        range(9), key=lambda number: (compute_loss(trials[number].settings), number)
    )
    assert sweep_report.build_rows(study)[0]["trial"] == study.find_winner().number
    assert len(sweep_report.format_table(study)) == 10
    assert not sweep_report.describe_untried_trials(study)


@pytest.mark.slow
def test_a_pod_ends_when_the_running_pods_can_train_all_other_trials(
    study: SweepStudy, s3: Store
) -> None:
    while (claim := study.claim_trial(0, DEFAULT, INTEGER_SETTINGS)) and claim[0].number < 8:
        write_result(study, *claim)

    assert claim
    assert study.jobs[-1] == TrialJob(8, 0)
    with ThreadPoolExecutor(1) as pool:
        other_pod = pool.submit(run_pod, study, 1)
        try:
            other_pod.result(30)
        finally:
            write_result(study, *claim)

    run_pod(study, 0)
    undisturbed = SweepStudy(s3, "alone/search", study.sweep)
    run_pod(undisturbed, 0)
    assert study.read() == undisturbed.read()
    assert study.jobs == undisturbed.jobs


@pytest.mark.slow
def test_the_trial_of_a_lost_pod_is_taken_over(
    study: SweepStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.training.sweep.study.CHECK_INTERVAL_S", 0.1)
    monkeypatch.setattr("rekindle.training.sweep.study.TAKEOVER_TIMEOUT_S", 0.5)
    lost = study.claim_trial(1, DEFAULT, INTEGER_SETTINGS)
    assert lost
    assert lost[0].number == 0
    study.record_seconds("1", {TrialJob(0, 0): 20.0})
    run_pod(study, 0)
    assert len(study.read()) == 9
    assert study.find_winner().rung == 1
    assert TrialJob(0, 0) in study.results


def test_a_failed_trial_is_the_worst_and_does_not_end_the_sweep(study: SweepStudy) -> None:
    while claim := study.claim_trial(0, DEFAULT, INTEGER_SETTINGS):
        write_result(study, *claim, why="training has diverged" if claim[0].number == 4 else "")
    assert [job.rung for job in study.jobs if job.trial == 4] == [0]
    assert study.find_winner().number != 4
    assert sweep_report.build_rows(study)[-1]["state"] == "failed"


def test_a_trial_with_an_undefined_metric_has_failed(study: SweepStudy) -> None:
    while claim := study.claim_trial(0, DEFAULT, INTEGER_SETTINGS):
        write_result(study, *claim)
        if claim[0].number == 4:
            validation = b'{"step": 1, "loss": null}'
            study.store.put(
                f"{study.make_output_prefix(claim[0].number, claim[1])}/validation.json", validation
            )
    assert [job.rung for job in study.jobs if job.trial == 4] == [0]
    assert study.find_winner().number != 4
    row = sweep_report.build_rows(study)[-1]
    assert row["trial"] == 4
    assert row["state"] == "failed"
    assert row["loss"] is None
    assert row["why"].startswith("its loss is not a number: ")
    assert "NaN" not in to_json(sweep_report.build_rows(study))


def test_the_best_weights_count_if_the_last_validation_is_undefined(study: SweepStudy) -> None:
    claim = study.claim_trial(0, DEFAULT, INTEGER_SETTINGS)
    assert claim
    write_result(study, *claim)
    output = study.make_output_prefix(claim[0].number, claim[1])

    best = {
        "best": {"step": 3, "validation_loss": 0.25, "released": True},
        "step": 10,
        "sha256": "0",
    }

    study.store.put(f"{output}/model.json", json.dumps(best).encode())
    study.store.put(f"{output}/validation.json", b'{"step": 1, "loss": null}')

    assert study.read_result(TrialJob(claim[0].number, claim[1])) == {
        "value": 0.25,
        "steps": 10,
        "sha256": "0",
    }


def test_a_sweep_whose_trials_all_fail_reports_the_reason(study: SweepStudy) -> None:
    while claim := study.claim_trial(0, DEFAULT, INTEGER_SETTINGS):
        write_result(study, *claim, why="training has diverged")
    with pytest.raises(ConfigError, match="all 9 trials lack a loss: training has diverged"):
        study.find_winner()


@pytest.mark.parametrize("sampler", ["random", "grid"])
def test_a_sampler_chooses_other_settings_for_each_trial(s3: Store, sampler: str) -> None:
    space = {
        "train": {"batch_size": {"low": 8, "high": 16, "step": 8}},
        "model": {"shape": [1, 2, 3]},
    }
    settings = {"space": space, "trials": 6, "lag": 2, "sampler": sampler, "rungs": 1}
    study = SweepStudy(s3, f"{sampler}/search", Sweep.model_validate(settings))
    run_pod(study, 0, default={})
    trials = study.read()
    distinct_settings = {json.dumps(trial.settings) for trial in trials}
    assert len(trials) == 6
    assert len(distinct_settings) == 6 or sampler == "random"


def test_a_sweep_ends_at_its_budget_and_reports_what_was_not_tried(study: SweepStudy) -> None:
    # training a trial to the end takes an hour
    budget = SweepBudget.model_validate({"hours": 3.0})
    study.sweep = study.sweep.model_copy(update={"budget": budget})
    seconds: dict[TrialJob, float] = {}

    while claim := study.claim_trial(0, DEFAULT, INTEGER_SETTINGS):
        job = TrialJob(claim[0].number, claim[1])
        write_result(study, *claim)
        seconds[job] = 3600 * compute_step_share(study.sweep, job, study.jobs)
        study.record_seconds("a", {job: used for job, used in seconds.items() if job.trial % 2})
        study.record_seconds("b", {job: used for job, used in seconds.items() if not job.trial % 2})

    assert study.read_hours() == pytest.approx(sum(seconds.values()) / 3600)
    assert 2 <= study.read_hours() <= 3
    assert study.find_winner().rung == 1
    first_sentence, *other_sentences = sweep_report.describe_untried_trials(study)
    assert f"{len(study.read())} of 9 trials were started" in first_sentence, other_sentences
    assert len(other_sentences) >= 2, other_sentences
    assert any(line.startswith("train.learning_rate: 0.") for line in other_sentences), (
        other_sentences
    )


WRONG_DECISIONS: list[dict[str, Any]] = [
    {"trial": 1, "rung": 0, "settings": {"model.width": "1; touch X"}, "attrs": {}},
    {"trial": 1, "rung": 0, "settings": {"model.width": [1]}, "attrs": {}},
    {"trial": 1, "rung": 0, "settings": {"model.width": 10**90}, "attrs": {}},
    {"trial": 1, "rung": 0, "settings": {"model.width": True}, "attrs": {}},
    {"trial": 1, "rung": 0, "settings": {}, "attrs": {}},
    {"trial": 1, "rung": 0, "settings": {"model.width": 8, "model.other": 1}, "attrs": {}},
    {"trial": 0, "rung": 0, "settings": {"model.width": 8}, "attrs": {}},
    {"trial": 2, "rung": 0, "settings": {"model.width": 8}, "attrs": {}},
    {"trial": 10**90, "rung": 0, "settings": {"model.width": 8}, "attrs": {}},
    {"trial": 1, "rung": 1, "settings": {"model.width": 8}},
    {"trial": 0, "rung": 1, "settings": None},
    {"trial": 0, "rung": 2},
    {"trial": 1, "stop": {"limit": 1, "hours": 2, "expected": 3}},
    {"settings": {}, "stop": {"limit": 1, "hours": 2, "expected": 3}},
]


@pytest.mark.parametrize("decision", WRONG_DECISIONS)
def test_a_decision_that_the_sweep_could_not_have_made_is_refused(
    s3: Store, decision: dict[str, Any]
) -> None:
    space = {"model": {"width": {"low": 4, "high": 16}}}
    sweep = Sweep.model_validate({"space": space, "trials": 3, "rungs": 2})
    root = f"{uuid.uuid4().hex}/search"
    first_record = {"trial": 0, "rung": 0, "pod": 0, "settings": {"model.width": 8}, "attrs": {}}
    for number, record in enumerate((first_record, decision)):
        s3.put(f"{root}/jobs/{number:05d}.json", json.dumps(record).encode())

    study = SweepStudy(s3, root, sweep)
    with pytest.raises(InvalidDocument, match=r"00001\.json is malformed"):
        study.read()

    assert [trial.settings for trial in study.trials()] == [{"model.width": 8}]
    assert sweep_report.format_table(study)


@pytest.mark.parametrize("seconds", [1e308, -1.0])
def test_impossible_seconds_of_a_trial_are_refused(s3: Store, seconds: float) -> None:
    sweep = Sweep.model_validate({"space": SPACE})
    study = SweepStudy(s3, f"{uuid.uuid4().hex}/search", sweep)
    s3.put(f"{study.root}/seconds/a.json", json.dumps({"0/0": seconds}).encode())
    with pytest.raises(InvalidDocument, match=r"seconds/a\.json is malformed"):
        study.read_hours()
