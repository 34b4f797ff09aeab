"""A refreshed serving state gives the same scores as the previous state with the newer data as
history."""

import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rekindle.errors import DataError
from rekindle.release.request_validation import parse_body
from rekindle.workload import Refreshed, read_data_until
from steps import fraud
from steps.fraud.data.serving_state import State
from steps.fraud.data.source import read
from steps.fraud.data.transactions import DAY
from steps.fraud.fraud_config import Data
from steps.fraud.scoring import FraudPredictor
from tests.steps.conftest import WORLD


@pytest.fixture(scope="module")
def refreshed(expert: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Refreshed, Path]:
    """The result of `refresh`, and the release with the new serving state."""
    out = tmp_path_factory.mktemp("out")
    release = tmp_path_factory.mktemp("release")
    result = fraud.refresh(expert, Data(source=WORLD), out)
    assert result
    shutil.copytree(expert, release, dirs_exist_ok=True)
    shutil.rmtree(release / "state")
    shutil.copytree(out / "state", release / "state")
    return result, release


def predict_scores(predictor: FraudPredictor, request: dict[str, Any]) -> list[float]:
    [prediction] = predictor.predict([parse_body(predictor.Request, json.dumps(request).encode())])
    return prediction


@pytest.mark.slow
def test_a_refreshed_state_replaces_the_history(
    expert: Path, small_dataset: Path, refreshed: tuple[Refreshed, Path]
) -> None:
    current = FraudPredictor(expert)
    newer_predictor = FraudPredictor(refreshed[1])
    table = pl.read_parquet(small_dataset / "transactions.parquet")
    later_rows = table.filter(pl.col("time").dt.epoch("us") >= current.state.train_end)
    later_rows = later_rows.filter(pl.col("time").dt.epoch("us") < newer_predictor.state.train_end)
    assert len(later_rows) == refreshed[0].rows > 1000
    differing = 0

    for instance in refreshed[0].instances[:25]:
        same_card = pl.col("card") == instance["card"]
        terminals = {instance["terminal"], *later_rows.filter(same_card)["terminal"]}
        past = later_rows.filter(same_card | pl.col("terminal").is_in(terminals))

        names = {
            "transaction_id": "id",
            "card": "card",
            "terminal": "terminal",
            "amount": "amount",
            "fraud": "fraud",
        }

        history = [
            {key: row[name] for key, name in names.items()} | {"time": row["time"].isoformat()}
            for row in past.iter_rows(named=True)
        ]
        instance = instance | {"transaction_id": "new"}
        [with_history] = predict_scores(current, {"instances": [instance], "history": history})
        [refreshed_score] = predict_scores(newer_predictor, {"instances": [instance]})
        assert refreshed_score == with_history, instance
        differing += predict_scores(current, {"instances": [instance]}) != [with_history]

    assert differing > 5, "the history must change scores"


def test_the_facts_show_how_recent_the_data_is(
    expert: Path, refreshed: tuple[Refreshed, Path]
) -> None:
    facts = refreshed[0].facts
    assert facts["data_until"] > read_data_until(expert)
    assert facts["train_end"] < FraudPredictor(refreshed[1]).state.train_end, (
        "the end of training does not change"
    )


def test_a_second_refresh_with_the_same_data_does_nothing(
    refreshed: tuple[Refreshed, Path], tmp_path: Path
) -> None:
    assert fraud.refresh(refreshed[1], Data(source=WORLD), tmp_path) is None


NAMES = {name: name for name in ("id", "time", "card", "terminal", "amount", "fraud", "scenario")}


def write_rows(path: Path, begin: int, end: int) -> Data:
    """Write the rows from `begin` to before `end` to a file."""
    unix_time_us = pl.col("time").cast(pl.Datetime("us")).dt.epoch("us")
    read(Data(source=WORLD), path.parent).filter(
        (unix_time_us >= begin) & (unix_time_us < end)
    ).write_parquet(path)
    return Data.model_validate({"source": str(path), "columns": NAMES})


def test_two_refreshes_give_the_state_of_one_refresh(
    expert: Path, refreshed: tuple[Refreshed, Path], tmp_path: Path
) -> None:
    first_days = write_rows(
        tmp_path / "part.parquet", 0, State.load(expert / "state").train_end + 9 * DAY
    )
    half = shutil.copytree(expert, tmp_path / "half")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    assert fraud.refresh(expert, first_days, tmp_path / "first")
    shutil.rmtree(half / "state")
    shutil.copytree(tmp_path / "first/state", half / "state")
    assert fraud.refresh(half, Data(source=WORLD), tmp_path / "second")
    for file in (refreshed[1] / "state").iterdir():
        assert file.read_bytes() == (tmp_path / "second/state" / file.name).read_bytes(), file.name


def test_a_gap_between_state_and_data_is_an_error(expert: Path, tmp_path: Path) -> None:
    late_file = write_rows(
        tmp_path / "late.parquet", State.load(expert / "state").train_end + 3 * DAY, 1 << 62
    )
    with pytest.raises(
        DataError, match=r"late.parquet begins at .* the transactions in between are missing"
    ):
        fraud.refresh(expert, late_file, tmp_path)
