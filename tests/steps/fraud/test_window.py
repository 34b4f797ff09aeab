"""Tests of a moving window: a late run must not use data that arrived after its scheduled time."""

from datetime import UTC, date, datetime
from pathlib import Path

import polars as pl
import pytest
from pydantic import ValidationError

from rekindle.workload import prepare
from steps import fraud
from steps.fraud.data.simulate import simulate
from steps.fraud.data.simulation_uri import parse
from steps.fraud.fraud_config import Data

NOON = datetime(2024, 3, 18, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("window", "first_day"),
    [("14d", date(2024, 3, 4)), ("2w", date(2024, 3, 4)), ("1d", date(2024, 3, 17))],
)
def test_a_window_ends_before_the_scheduled_day(window: str, first_day: date) -> None:
    data = Data(window=window).at(NOON)
    assert data.first_day == first_day
    assert data.last_day == date(2024, 3, 17)
    assert data.labels_until == date(2024, 3, 10)


def test_a_late_run_uses_the_data_of_its_week(tmp_path: Path) -> None:
    rows = simulate(parse("simulate://5?cards=60&terminals=90&days=100"))
    late_rows = rows.rename(
        {
            "id": "TRANSACTION_ID",
            "time": "TX_DATETIME",
            "card": "CUSTOMER_ID",
            "terminal": "TERMINAL_ID",
        }
    )

    late_rows = late_rows.rename({"amount": "TX_AMOUNT", "fraud": "TX_FRAUD"}).drop(
        "scenario", strict=False
    )
    has_label = pl.col("TX_DATETIME") < datetime(2024, 3, 11)
    in_time = late_rows.filter(pl.col("TX_DATETIME") < datetime(2024, 3, 18, 11))
    in_time = in_time.with_columns(pl.when(has_label).then("TX_FRAUD").alias("TX_FRAUD"))
    digests = set[str]()

    for name, source in (("in time", in_time), ("late", late_rows)):
        source.write_parquet(tmp_path / f"{name}.parquet")
        data = Data(source=str(tmp_path / f"{name}.parquet"), window="8w", test_weeks=1)
        prepared, digest = prepare(fraud, data.at(NOON), tmp_path / name)
        assert prepared.tags["last_time"] == "2024-03-17"
        digests.add(digest)

    assert len(digests) == 1


def test_a_window_excludes_fixed_days() -> None:
    with pytest.raises(ValidationError, match="the window sets it"):
        Data(window="90d", last_day=date(2024, 1, 1))
