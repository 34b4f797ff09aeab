"""A dataset is complete or absent and reproducible, and its calendar separates training and
tests."""

import os
import shutil
import subprocess
import sys
from datetime import date, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from rekindle.errors import DataError, RekindleError
from rekindle.workload import read_dataset_digest
from steps.fraud.data.boosting import BOOSTING_SETTINGS
from steps.fraud.data.sequences import Rows as Mapped
from steps.fraud.data.shards import ARRAYS, calendar, labels_end
from steps.fraud.data.simulate import simulate
from steps.fraud.data.simulation_uri import World
from steps.fraud.data.transactions import DAY, Rows
from steps.fraud.fraud_config import Columns, Data
from tests.steps.fraud.written import Written, write

WORLD = "simulate://5?cards=60&terminals=120&days=75"


def day_of(us: int) -> date:
    return datetime.fromisoformat(str(np.datetime64(us, "us"))).date()


def daily_rows(first_day: str, days: int, last_hour: int = 23) -> Rows:
    """Return a fraud at noon and a genuine transaction at 23:00 of each day; the last day ends at
    `last_hour`."""
    start = int(np.datetime64(first_day, "us").astype(np.int64))
    noon = [start + i * DAY + DAY // 2 for i in range(days)]
    late_times = [start + i * DAY + 23 * (DAY // 24) for i in range(days - 1)] + [
        start + (days - 1) * DAY + last_hour * (DAY // 24)
    ]
    time = np.sort(np.array(noon + late_times))
    n = len(time)
    return Rows.of(np.arange(n), time, np.zeros(n), np.zeros(n), np.ones(n), np.arange(n) % 2)


def plan_splits(rows: Rows, **settings: Any) -> dict[str, Any]:
    data = Data(**settings)
    return calendar(rows, data, labels_end(rows, data))


def test_test_weeks_end_where_the_label_delay_begins() -> None:
    for delay, end in ((7, date(2024, 2, 24)), (20, date(2024, 2, 11))):
        facts = plan_splits(daily_rows("2024-01-01", 61), test_weeks=1, label_delay_days=delay)
        assert day_of(facts["test_weeks"][-1][1]) == end
    archive = plan_splits(
        daily_rows("2024-01-01", 61), test_weeks=1, labels_until=date(2024, 2, 25)
    )
    assert day_of(archive["test_weeks"][-1][1]) == date(2024, 2, 26)


def test_the_published_weeks_are_the_test_weeks() -> None:
    # up to 2018-09-04
    facts = plan_splits(daily_rows("2018-04-01", 157), labels_until=date(2018, 9, 30))
    weeks = [(day_of(a), day_of(b)) for a, b in facts["test_weeks"]]
    assert weeks[0] == (date(2018, 8, 8), date(2018, 8, 15))
    assert weeks[-1] == (
        date(2018, 8, 29),
        date(2018, 9, 5),
    )
    assert day_of(facts["train_end"]) == date(2018, 8, 1)
    assert facts["train_rows"] == 2 * 122
    assert facts["test_rows"] == [[14, 7]] * 4


def test_an_incomplete_last_day_is_not_a_test_day() -> None:
    for hour, end in ((23, date(2024, 3, 2)), (14, date(2024, 3, 1))):
        facts = plan_splits(
            daily_rows("2024-01-01", 61, hour), test_weeks=1, labels_until=date(2024, 3, 9)
        )
        assert day_of(facts["test_weeks"][-1][1]) == end


def test_too_little_training_data_is_a_clear_error() -> None:
    with pytest.raises(DataError, match=r"nothing to learn from: 0 transactions.*data\.test_weeks"):
        plan_splits(daily_rows("2024-01-01", 30))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "dataset"
    write(Data(source=WORLD, shard_rows=1000), path)
    return path


def test_shards_contain_every_row_once_and_each_card_in_one(dataset: Path) -> None:
    shards = Written(dataset)
    rows = pl.read_parquet(dataset / "transactions.parquet").sort("card", "time", "id")
    assert len(shards.parts["ids"]) > 3
    assert len(shards) == len(rows) == sum(shards.facts["shards"])

    for name, column in (
        ("ids", "id"),
        ("cards", "card"),
        ("labels", "fraud"),
        ("scenarios", "scenario"),
    ):
        assert shards.column(name).tolist() == rows[column].to_list()

    assert shards.column("times").tolist() == rows["time"].dt.epoch("us").to_list()
    cards = [set(shard) for shard in shards.parts["cards"]]
    assert sum(map(len, cards)) == len(set.union(*cards))
    amount = shards.facts["features"].index("amount")
    assert np.allclose(shards.column("features")[:, amount], rows["amount"].to_numpy())
    assert all(shards.parts[name][0].dtype == kind for name, kind in ARRAYS.items())


def test_statistics_are_computed_from_training_rows_only(dataset: Path) -> None:
    shards = Written(dataset)
    train = shards.column("features")[shards.column("times") < shards.facts["train_end"]].astype(
        np.float64
    )
    assert len(train) == shards.facts["train_rows"] < len(shards)
    np.testing.assert_allclose(train.mean(0), shards.facts["mean"], rtol=1e-6)
    np.testing.assert_allclose(train.std(0), shards.facts["std"], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_digest_depends_on_the_rows_not_on_order_format_or_threads(
    dataset: Path, tmp_path: Path
) -> None:
    digest = read_dataset_digest(dataset)
    published = simulate(World(seed=5, cards=60, terminals=120, days=75)).rename(
        Columns().model_dump()
    )
    published.sample(fraction=1, shuffle=True, seed=1).write_csv(tmp_path / "shuffled.csv")
    shuffled = write(Data(source=str(tmp_path / "shuffled.csv"), shard_rows=1000), tmp_path / "one")
    assert read_dataset_digest(tmp_path / "one") == digest
    assert not shuffled.tags["was_sorted"]

    program = (
        "import sys; from pathlib import Path; from steps import fraud; from rekindle.workload"
        " import prepare;"
    )
    program += (
        "from steps.fraud.data.boosting import BOOSTING_SETTINGS;"
        f" BOOSTING_SETTINGS.update({BOOSTING_SETTINGS});"
    )
    program += (
        "print(prepare(fraud, fraud.Data(source=sys.argv[1], shard_rows=1000),"
        " Path(sys.argv[2]))[1])"
    )
    threads = os.environ | {"POLARS_MAX_THREADS": "3", "OMP_NUM_THREADS": "3"}
    command = [sys.executable, "-c", program, WORLD, str(tmp_path / "two")]
    second_process = subprocess.run(
        command, env=threads, capture_output=True, text=True, check=True
    )
    assert second_process.stdout.strip() == digest

    cent = pl.when(pl.col("TRANSACTION_ID") == 9).then(0.01).otherwise(0)
    published.with_columns(pl.col("TX_AMOUNT") + cent).write_parquet(tmp_path / "cent.parquet")
    write(Data(source=str(tmp_path / "cent.parquet"), shard_rows=1000), tmp_path / "three")
    assert read_dataset_digest(tmp_path / "three") != digest


def test_labels_after_the_end_of_training_do_not_change_training_rows(
    dataset: Path, tmp_path: Path
) -> None:
    original_shards = Written(dataset)
    end = original_shards.facts["train_end"]
    published = simulate(World(seed=5, cards=60, terminals=120, days=75)).rename(
        Columns().model_dump()
    )

    flipped = (
        pl.when(pl.col("TX_DATETIME").dt.epoch("us") < end)
        .then("TX_FRAUD")
        .otherwise(1 - pl.col("TX_FRAUD"))
    )

    published.with_columns(TX_FRAUD=flipped).write_parquet(tmp_path / "flipped.parquet")
    write(Data(source=str(tmp_path / "flipped.parquet"), shard_rows=1000), tmp_path / "after")
    changed_shards = Written(tmp_path / "after")
    train = original_shards.column("times") < end
    assert (original_shards.column("labels") != changed_shards.column("labels"))[~train].all()

    for name in ARRAYS:
        assert (
            original_shards.column(name)[train].tobytes()
            == changed_shards.column(name)[train].tobytes()
        )

    assert [original_shards.facts[n] for n in ("mean", "std")] == [
        changed_shards.facts[n] for n in ("mean", "std")
    ]


def test_rejected_rows_are_in_a_file_and_counted(tmp_path: Path) -> None:
    published = simulate(World(seed=5, cards=60, terminals=120, days=75)).rename(
        Columns().model_dump()
    )
    invalid_rows = published.with_columns(
        TX_FRAUD=pl.when(pl.col("TRANSACTION_ID") == 4).then(9).otherwise("TX_FRAUD")
    )
    invalid_rows.write_parquet(tmp_path / "raw.parquet")
    prepared = write(Data(source=str(tmp_path / "raw.parquet")), tmp_path / "out")
    assert prepared.rejected == 1
    assert prepared.rows == len(published) - 1
    rejects = pl.read_parquet(tmp_path / "out" / "rejects.parquet")
    assert rejects.select("row", "fraud", "reason").rows() == [(4, 9, "label not 0 or 1")]


def test_transactions_of_days_outside_the_config_are_left_out(tmp_path: Path) -> None:
    # the source is longer, so labels up to seven days before its end are known
    prepared = write(
        Data(source=WORLD, first_day=date(2024, 1, 5), last_day=date(2024, 2, 28), test_weeks=1),
        tmp_path / "d",
    )
    facts = Written(tmp_path / "d").facts
    assert day_of(facts["first_time"]) == date(2024, 1, 5)
    assert day_of(facts["last_time"]) == date(2024, 2, 28)
    assert prepared.tags["train_end"] == "2024-02-15"
    with pytest.raises(DataError, match=r"the data is from 2024-01-01 to"):
        write(Data(source=WORLD, first_day=date(2025, 1, 1)), tmp_path / "none")


def test_a_disk_that_is_too_small_is_an_error_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100_000))
    with pytest.raises(
        RekindleError,
        match=r"the dataset of [0-9,]+ rows needs about .* GB left: free space, or set TMPDIR",
    ):
        write(Data(source=WORLD), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_and_leaves_no_dataset(tmp_path: Path) -> None:
    program = """
import resource, sys
from pathlib import Path
from rekindle.errors import RekindleError
from rekindle.workload import prepare
from steps import fraud
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))  # every larger file fails, as on a full disk
try:
    prepare(fraud, fraud.Data(source=sys.argv[1]), Path(sys.argv[2]))
except RekindleError as error:
    print(error)
"""

    command = [sys.executable, "-c", program, WORLD, str(tmp_path / "out")]
    message = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "cannot be written" in message
    assert "TMPDIR" in message
    assert list(tmp_path.iterdir()) == []


def test_an_incomplete_dataset_is_rejected(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a complete dataset"):
        Mapped(tmp_path)

    shutil.copytree(dataset, tmp_path / "torn")
    (tmp_path / "torn" / "shards" / "features-00001.npy").unlink()
    with pytest.raises(DataError, match="not a complete dataset"):
        Mapped(tmp_path / "torn")

    shutil.copy(
        dataset / "shards" / "times-00000.npy", tmp_path / "torn" / "shards" / "times-00001.npy"
    )
    shutil.copy(
        dataset / "shards" / "features-00000.npy",
        tmp_path / "torn" / "shards" / "features-00001.npy",
    )
    with pytest.raises(DataError, match="the rows of its shards differ"):
        Mapped(tmp_path / "torn")
