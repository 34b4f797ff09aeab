"""The evaluation uses the same test rows as the handbook, the same rows for the candidate and the
champion, and reports skipped weeks."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from rekindle.content.dataset import FILE_LIST, record_files
from rekindle.content.weights import weights_sha256
from rekindle.errors import DataError
from rekindle.gate import Evaluation, Gate
from rekindle.release import evaluation
from rekindle.release.request_validation import parse_body as parse_request
from steps import fraud
from steps.fraud import handbook_protocol
from steps.fraud.data.sequences import Rows, TrainingWindows
from steps.fraud.data.serving_state import State
from steps.fraud.data.simulate import simulate
from steps.fraud.data.simulation_uri import parse
from steps.fraud.data.transactions import DAY
from steps.fraud.fraud_config import Columns, Data
from steps.fraud.handbook_protocol import (
    Boosted,
    Week,
    counted_rows,
    is_published,
    judged_weeks,
    score,
)
from steps.fraud.models import load
from steps.fraud.replays import replay
from steps.fraud.scoring import FraudPredictor
from tests.steps.conftest import WORLD
from tests.steps.fraud.written import write

DELAY = 7


def evaluate_candidate(
    candidate: Path, champion: Path | None, dataset: Path, report: Path, gate: Gate
) -> Evaluation:
    return evaluation.evaluate(fraud, candidate, champion, dataset, report, gate)


@pytest.mark.slow
def test_compromised_cards_are_left_out_day_by_day(small_dataset: Path):
    """The rule is the same as in the code of the handbook, which uses a set of compromised cards
    that grows each test day."""
    rows = Rows(small_dataset)
    start = rows.facts.test_weeks[0][0]
    day = (rows.times - start) // DAY
    compromised = set(
        rows.cards[(day >= -DELAY - 7) & (day < -DELAY) & (rows.labels == 1)].tolist()
    )
    expected: list[int] = []

    for k in range(7):
        if k:
            compromised.update(
                set(rows.cards[(day == k - 1 - DELAY) & (rows.labels == 1)].tolist())
            )

        expected += [
            n for n in np.flatnonzero(day == k).tolist() if rows.cards[n] not in compromised
        ]

    result = counted_rows(rows, start, DELAY)
    np.testing.assert_array_equal(result, np.sort(expected))
    assert 0 < len(result) < ((day >= 0) & (day < 7)).sum(), "the test needs cards to leave out"


def test_test_weeks_do_not_overlap_the_training_rows(small_dataset: Path):
    rows = Rows(small_dataset)
    weeks = judged_weeks(rows)
    assert len(weeks) == 2
    for week in weeks:
        assert rows.times[week.rows].min() >= rows.facts.train_end + DELAY * DAY
    assert not set(weeks[0].rows) & set(weeks[1].rows)
    assert not any(is_published(rows, week) for week in weeks)


def test_deviations_from_the_published_data_are_an_error(
    small_dataset: Path, monkeypatch: pytest.MonkeyPatch
):
    rows = Rows(small_dataset)
    week = judged_weeks(rows)[0]
    in_time = rows.times < week.start + 7 * DAY

    facts = (
        int(in_time.sum()),
        int(rows.labels[in_time].sum()),
        len(week.rows),
        int(rows.labels[week.rows].sum()),
    )

    monkeypatch.setattr(handbook_protocol, "PUBLISHED_FIRST", rows.times.min())
    monkeypatch.setattr(handbook_protocol, "PUBLISHED", {week.name: facts})
    assert len(judged_weeks(rows)) == 2
    monkeypatch.setattr(handbook_protocol, "PUBLISHED", {week.name: (*facts[:3], facts[3] + 1)})

    with pytest.raises(DataError, match=f"the test week {week.name} of the published data has"):
        judged_weeks(rows)


@pytest.fixture(scope="module")
def judged(
    expert: Path, novice: Path, small_dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    report = tmp_path_factory.mktemp("report")
    return evaluate_candidate(expert, novice, small_dataset, report, Gate(resamples=100)), report


def test_candidate_and_champion_are_evaluated_on_the_same_rows(judged: tuple[Any, Path]):
    result, report = judged
    table = pl.read_parquet(report / "scores.parquet")
    assert set(result.metrics) == {"candidate", "champion", "baseline"}
    assert table.columns == ["id", "week", "label", "score", "champion_score"]
    assert table["id"].n_unique() == len(table) == sum(week["rows"] for week in result.parts)
    assert table["score"].is_between(0, 1).all()

    for week in result.parts:
        rows = table.filter(pl.col("week") == week["name"])
        assert len(rows) == week["rows"]
        assert rows["label"].sum() == week["frauds"]

    assert result.metrics["candidate"]["ap"] == pytest.approx(
        np.mean([p["candidate"]["ap"] for p in result.parts])
    )
    gap = result.difference
    assert gap.mean == pytest.approx(
        result.metrics["candidate"]["ap"] - result.metrics["champion"]["ap"]
    )
    assert gap.low <= gap.mean <= gap.high


def test_all_plots_are_written(judged: tuple[Any, Path]):
    _, report = judged
    names = {file.name for file in report.glob("*.png") if file.read_bytes().startswith(b"\x89PNG")}
    assert names == {
        f"{name}.png"
        for name in ("scores", "precision_recall", "calibration", "scenarios", "weeks")
    }


@pytest.mark.slow
def test_a_candidate_is_evaluated_without_a_champion(
    expert: Path, small_dataset: Path, tmp_path: Path
):
    result = evaluate_candidate(expert, None, small_dataset, tmp_path, Gate())
    assert set(result.metrics) == {"candidate", "baseline"}
    assert result.difference is None
    assert result.incomparable == ""


def with_other_features(dataset: Path, copy: Path) -> Path:
    """Copy the dataset with a renamed feature."""
    shutil.copytree(dataset, copy)
    facts = copy / "dataset.json"
    facts.write_text(facts.read_text().replace('"night"', '"dusk"'))
    record_files(copy)
    return copy


@pytest.mark.slow
def test_a_champion_with_other_features_is_incomparable(
    expert: Path, novice: Path, small_dataset: Path, tmp_path: Path
):
    other = with_other_features(small_dataset, tmp_path / "data")
    with pytest.raises(
        DataError, match=r"candidate does not fit this dataset: .*missing: night; new: dusk"
    ):
        evaluate_candidate(expert, None, other, tmp_path, Gate())
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.json").write_text(json.dumps({"model": {}}))
    for name in ("dataset.json", FILE_LIST):
        shutil.copy(small_dataset / name, tmp_path / "broken")
    result = evaluate_candidate(expert, tmp_path / "broken", small_dataset, tmp_path, Gate())
    assert "is not a model of this workload" in result.incomparable
    assert set(result.metrics) == {"candidate", "baseline"}


@pytest.mark.slow
def test_a_champion_is_not_evaluated_on_its_training_rows(
    expert: Path, novice: Path, small_dataset: Path, tmp_path: Path
):
    first_week, second_week = Rows(small_dataset).facts.test_weeks
    record = json.loads((small_dataset / "dataset.json").read_text())
    champion = shutil.copytree(novice, tmp_path / "champion")

    for train_end, weeks in ((second_week[0], 1), (second_week[1], 0)):
        older_dataset = {"digest": "older", "facts": {"train_end": train_end}}
        (champion / "dataset.json").write_text(json.dumps(record | older_dataset))
        result = evaluate_candidate(
            expert, champion, small_dataset, tmp_path / str(weeks), Gate(resamples=50)
        )
        assert len(result.parts) == (weeks or 2)
        assert (result.incomparable == "") == ("champion" in result.metrics) == bool(weeks)

    assert result.incomparable == "the model was trained on rows of every test week."
    assert first_week[0] < second_week[0]


@pytest.mark.slow
def test_a_champion_is_evaluated_with_its_own_trees(
    expert: Path, boosted: Path, small_dataset: Path, tmp_path: Path, judged: tuple[Any, Path]
):
    champion = shutil.copytree(boosted, tmp_path / "champion")
    rows = Rows(small_dataset)
    state = State.load(champion / "state")
    index = np.sort(np.concatenate([week.rows for week in judged_weeks(rows)]))
    served, offline = (
        score(load(boosted), rows, index, trees) for trees in (Boosted.load(champion), None)
    )
    assert np.array_equal(served, offline), "with the trees of the dataset, it is the same model"
    replace(state.trees, value=-state.trees.value).save(champion / "state/trees.npz")
    result = evaluate_candidate(expert, champion, small_dataset, tmp_path, Gate(resamples=50))
    assert result.metrics["champion"]["auc"] < 0.5 < result.metrics["baseline"]["auc"]
    assert result.metrics["candidate"] == judged[0].metrics["candidate"]


def refresh_release(release: Path, data: Data, out: Path) -> Path:
    """Copy the release and update its serving state with `data`."""
    (out / "refreshed").mkdir(parents=True)
    result = fraud.refresh(release, data, out / "refreshed")
    assert result
    copy = shutil.copytree(release, out / "release", ignore=shutil.ignore_patterns("state"))
    shutil.copytree(out / "refreshed/state", copy / "state")
    record = json.loads((copy / "dataset.json").read_text())
    (copy / "dataset.json").write_text(json.dumps(record | {"facts": result.facts}))
    return copy


@pytest.fixture(scope="module")
def newer_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with one more week of training data than `small_dataset`, so that its trees differ;
    the last test week is the same."""
    path = tmp_path_factory.mktemp("newer") / "dataset"
    write(Data(source=WORLD, test_weeks=1), path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "refreshes", [[], [61], [70], [50, 61, 70]], ids=lambda days: f"until {days}"
)
def test_a_refreshed_champion_is_evaluated_by_its_served_scores(
    refreshes: list[int],
    expert: Path,
    novice: Path,
    full_table: pl.DataFrame,
    small_dataset: Path,
    newer_dataset: Path,
    tmp_path: Path,
):
    champion = expert
    for day in refreshes:
        first_time = full_table["TX_DATETIME"].min()
        until_day = full_table.filter(
            pl.col("TX_DATETIME").dt.date() < pl.lit(first_time).dt.date() + timedelta(days=day)
        )
        until_day.write_parquet(source := tmp_path / f"{day}.parquet")
        champion = refresh_release(champion, Data(source=str(source)), tmp_path / str(day))

    result = evaluate_candidate(
        novice, champion, newer_dataset, tmp_path / "judged", Gate(resamples=50)
    )
    scores = pl.read_parquet(tmp_path / "judged/scores.parquet")
    assert result.incomparable == ""
    assert len(scores) > 1000

    # send requests to the release before any refresh, with all transactions since its training as
    # history
    (tmp_path / "champion").mkdir()
    scores.select("id", "week", "label", score="champion_score").write_parquet(
        tmp_path / "champion/scores.parquet"
    )
    server = FraudPredictor(expert)
    differences = []

    for request, judged_scores in replay(
        small_dataset, tmp_path / "champion", 2 * len(scores), random_seed=0
    ):
        [served] = server.predict(
            [parse_request(FraudPredictor.Request, json.dumps(request).encode())]
        )
        differences += [abs(a - b) for a, b in zip(served, judged_scores, strict=True)]

    assert len(differences) == len(scores)
    assert max(differences) < 1e-5


def test_the_baseline_is_better_than_chance(judged: tuple[Any, Path]):
    result, _ = judged
    assert result.metrics["baseline"]["auc"] > 0.7


@pytest.mark.slow
def test_a_diverged_model_is_rejected(expert: Path, small_dataset: Path, tmp_path: Path):
    import torch
    from safetensors.torch import load_file, save_file

    diverged = shutil.copytree(expert, tmp_path / "diverged")
    weights = load_file(diverged / "model.safetensors")
    weights["head.bias"] = torch.full((1,), float("nan"))
    save_file(weights, diverged / "model.safetensors")
    description = json.loads((diverged / "model.json").read_text()) | {
        "sha256": weights_sha256(weights)
    }
    (diverged / "model.json").write_text(json.dumps(description))

    with pytest.raises(
        DataError, match=r"not numbers: its training diverged\. Lower train\.learning_rate"
    ):
        evaluate_candidate(diverged, None, small_dataset, tmp_path, Gate())

    result = evaluate_candidate(expert, diverged, small_dataset, tmp_path, Gate())
    assert set(result.metrics) == {"candidate", "baseline"}
    assert result.incomparable == "the scores of the model are not numbers."


@pytest.mark.slow
def test_a_week_without_frauds_is_named(expert: Path, small_dataset: Path, tmp_path: Path):
    copy = tmp_path / "data"
    shutil.copytree(small_dataset, copy)
    first_week, second_week = judged_weeks(Rows(small_dataset))

    def without_frauds(week: Week) -> None:
        for file in (copy / "shards").glob("labels-*.npy"):
            labels = np.load(file)
            times = np.load(file.with_name(file.name.replace("labels", "times")))
            labels[(times >= week.start) & (times < week.start + 7 * DAY)] = 0
            np.save(file, labels)
        record_files(copy)

    without_frauds(first_week)
    result = evaluate_candidate(expert, None, copy, tmp_path, Gate())
    assert result.warnings == [
        f"test week {first_week.name} does not contain frauds, so it does not count."
    ]
    assert [week["name"] for week in result.parts] == [second_week.name]
    without_frauds(second_week)

    with pytest.raises(DataError, match="no test week holds frauds"):
        evaluate_candidate(expert, None, copy, tmp_path, Gate())


def with_changed_arrays(
    dataset: Path, copy: Path, name: str, change: Callable[[Any, Any], Any]
) -> Path:
    """Copy the dataset; `change` gets the array `name` of each shard and the labels."""
    shutil.copytree(dataset, copy)
    for file in (copy / "shards").glob(f"{name}-*.npy"):
        np.save(
            file, change(np.load(file), np.load(file.with_name(file.name.replace(name, "labels"))))
        )
    record_files(copy)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_model_that_is_not_better_than_chance_gives_a_warning(
    seed: int, judged: tuple[Any, Path], expert: Path, small_dataset: Path, tmp_path: Path
):
    random = np.random.default_rng(seed)
    other_rows = with_changed_arrays(
        small_dataset, tmp_path / "data", "labels", lambda _, y: random.permutation(y)
    )
    [warning] = evaluate_candidate(expert, None, other_rows, tmp_path / "report", Gate()).warnings
    assert re.search(
        r"no better than chance: its ap is 0\.0.* Do the labels belong to their rows", warning
    )
    assert judged[0].warnings == []


@pytest.mark.slow
def test_a_model_that_is_too_good_gives_a_warning(
    expert: Path, small_dataset: Path, tmp_path: Path
):
    def leak(table: Any, labels: Any) -> Any:
        return np.column_stack([table[:, :-1], np.where(labels == 1, 9, -9)]).astype(np.float32)

    leaky = with_changed_arrays(small_dataset, tmp_path / "data", "features", leak)
    [warning] = evaluate_candidate(expert, None, leaky, tmp_path / "report", Gate()).warnings
    assert re.search(
        r"too good to be true \(ap 0\.\d+ and auc 0\.99\d*\): does a column contain the label",
        warning,
    )


@pytest.fixture(scope="module")
def full_table() -> pl.DataFrame:
    return simulate(parse(WORLD)).rename(Columns().model_dump())


@pytest.mark.slow
@pytest.mark.parametrize("missing", [0, pytest.param(None, marks=pytest.mark.slow)])
def test_labels_that_arrive_a_week_late_change_neither_training_nor_evaluation(
    missing: int | None, full_table: pl.DataFrame, expert: Path, small_dataset: Path, tmp_path: Path
):
    """Labels arrive up to seven days after their transaction; until then, they are 0 or empty."""
    newest = pl.col("TX_DATETIME").max().dt.epoch("us")
    wait = pl.int_range(pl.len()).hash(seed=1) % (7 * DAY)
    arrived = pl.col("TX_DATETIME").dt.epoch("us") + wait <= newest
    late_table = full_table.with_columns(
        TX_FRAUD=pl.when(arrived).then("TX_FRAUD").otherwise(pl.lit(missing, pl.UInt8))
    )
    assert (
        late_table.select((pl.col("TX_FRAUD").fill_null(0)).sum()).item()
        < full_table["TX_FRAUD"].sum()
    )
    late_table.write_parquet(tmp_path / "late.parquet")
    prepared = write(
        Data(source=str(tmp_path / "late.parquet"), test_weeks=2, shard_rows=7000),
        tmp_path / "data",
    )
    assert prepared.rejected == 0

    complete = evaluate_candidate(expert, None, small_dataset, tmp_path / "a", Gate())
    result = evaluate_candidate(expert, None, tmp_path / "data", tmp_path / "b", Gate())
    assert result.metrics == complete.metrics
    assert result.parts == complete.parts
    windows = [TrainingWindows(Rows(path)) for path in (small_dataset, tmp_path / "data")]
    batch, late_batch = (samples.batch(torch.arange(len(samples))) for samples in windows)
    assert torch.equal(batch[0], late_batch[0])
    assert torch.equal(batch[2], late_batch[2])
    assert torch.equal(batch[1][batch[2]], late_batch[1][late_batch[2]])


@pytest.mark.slow
def test_rows_without_labels_are_not_used(
    full_table: pl.DataFrame, expert: Path, small_dataset: Path, tmp_path: Path
):
    gone = pl.col("TRANSACTION_ID").is_in(full_table["TRANSACTION_ID"].gather_every(10).implode())
    full_table.with_columns(TX_FRAUD=pl.when(~gone).then("TX_FRAUD")).write_parquet(
        tmp_path / "gaps.parquet"
    )
    prepared = write(Data(source=str(tmp_path / "gaps.parquet"), test_weeks=2), tmp_path / "data")
    rows = Rows(tmp_path / "data")
    all_rows = Rows(small_dataset)
    assert prepared.facts["unknown"] > 0.08 * len(full_table)
    samples = TrainingWindows(rows)
    _, labels, counted = samples.batch(torch.arange(len(samples)))
    assert labels[counted].max() == 1
    assert counted.sum() < (all_rows.times < all_rows.facts.train_end).sum()
    judged = np.concatenate([week.rows for week in judged_weeks(rows)])
    assert len(judged)
    assert not (rows.ids[judged] % 10 == 0).any()
    assert evaluate_candidate(expert, None, tmp_path / "data", tmp_path / "r", Gate()).rows == len(
        judged
    )
