"""Invalid rows are written to a separate file and never lost; valid rows are never rejected."""

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import polars as pl
import pytest

from rekindle.errors import DataError
from steps.fraud.data.row_checks import CheckedRows, check
from steps.fraud.data.suspicions import suspicions
from steps.fraud.data.transactions import UNKNOWN, Rows, identity
from steps.fraud.fraud_config import Columns

NOW = datetime(2024, 6, 1, tzinfo=UTC).timestamp()
DAY = datetime(2024, 1, 1)


def make_frame(n: int = 100, **columns: Any) -> pl.DataFrame:
    """Return n valid rows with some columns replaced."""
    valid_columns = {
        "id": list(range(n)),
        "time": [DAY + timedelta(minutes=i) for i in range(n)],
        "card": [i % 7 for i in range(n)],
        "terminal": [i % 5 for i in range(n)],
        "amount": [10.5 + i for i in range(n)],
        "fraud": [i % 9 == 0 for i in range(n)],
    }
    return pl.DataFrame(valid_columns | columns, strict=False).with_columns(
        pl.col("fraud").cast(pl.Int64, strict=False)
    )


def with_row(**values: Any) -> pl.DataFrame:
    """Return 100 valid rows, where row 3 has the given values."""
    valid_rows = make_frame()
    return valid_rows.with_columns(
        pl.when(pl.int_range(pl.len()) == 3).then(pl.lit(value)).otherwise(pl.col(name)).alias(name)
        for name, value in values.items()
    )


def check_rows(rows: pl.DataFrame, tolerated: float = 0.01) -> CheckedRows:
    return check(rows, Columns(), tolerated, now_seconds=NOW)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"id": None}, "id missing, or neither integer nor text"),
        ({"id": 50}, "id seen before"),
        ({"time": None}, "time missing or not a timestamp"),
        ({"time": datetime(1970, 1, 1)}, "time before the year 2000"),
        ({"time": datetime(2024, 6, 3)}, "time in the future"),
        ({"card": None}, "card missing, or neither integer nor text"),
        ({"terminal": None}, "terminal missing, or neither integer nor text"),
        ({"amount": None}, "amount missing or not a number"),
        ({"amount": float("nan")}, "amount missing or not a number"),
        ({"amount": float("inf")}, "amount above 1,000,000,000"),
        ({"amount": -0.01}, "amount negative"),
        ({"fraud": 2}, "label not 0 or 1"),
        ({"fraud": 0.5}, "label not 0 or 1"),
        ({"fraud": "maybe"}, "label not 0 or 1"),
        ({"amount": -1.0, "fraud": 2}, "amount negative"),
    ],
)
def test_an_invalid_row_is_set_aside_with_its_reason(values: dict[str, Any], reason: str) -> None:
    result = check_rows(with_row(**values))
    assert result.reasons() == {reason: 1}
    assert len(result.rows) == 99
    row = result.rejects.row(0, named=True)
    assert row["row"] == (50 if reason == "id seen before" else 3)
    assert {name: row[name] for name in make_frame().columns} == with_row(**values).row(
        row["row"], named=True
    ) or "nan" in str(row)


def test_valid_rows_pass_and_amounts_are_rounded_to_cents() -> None:
    result = check_rows(make_frame(amount=[0.1 + 0.2] * 100), tolerated=0)
    assert len(result.rows) == 100
    assert result.was_sorted
    assert result.rejects.is_empty()
    assert set(result.rows.cents) == {30}


def test_a_stray_late_row_is_rejected() -> None:
    result = check_rows(with_row(time=datetime(2024, 5, 1)))
    assert result.reasons() == {"time far after all other rows": 1}
    assert result.rows.time.max() < NOW * 1e6
    year = check_rows(
        make_frame(time=[DAY + timedelta(days=i if i < 50 else i + 40) for i in range(100)]),
        tolerated=0,
    )
    # rows after a gap, such as a closed season, do not count as stray rows
    assert len(year.rows) == 100


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, ""),
        (
            {"terminal": [3] * 100},
            'column "TERMINAL_ID" (data.columns.terminal) has only one value',
        ),
        (
            {"card": list(range(100))},
            'column "CUSTOMER_ID" (data.columns.card) differs in every row',
        ),
        (
            {
                "time": [DAY] * 100,
                "card": [1, 2] * 50,
                "terminal": [1, 2] * 50,
                "amount": [5.0, 6] * 50,
            },
            "98 rows equal another",
        ),
        (
            {"time": [DAY + timedelta(days=i + (i > 5)) for i in range(100)]},
            "without a transaction, the first of them 2024-01-07",
        ),
    ],
)
def test_suspicious_data_is_a_warning(columns: dict[str, Any], message: str) -> None:
    rows = check_rows(make_frame(**columns)).rows
    warnings = suspicions(rows, Columns(), labels_until=int(rows.time[0]))
    assert len(warnings) == bool(message)
    assert message in "".join(warnings)


def test_too_many_invalid_rows_are_an_error_with_counts_and_examples() -> None:
    invalid_rows = make_frame(fraud=[5] * 3 + [0] * 97, amount=[1.0] * 50 + [-2.0] + [1.0] * 49)
    with pytest.raises(DataError) as error:
        check_rows(invalid_rows)
    message = str(error.value)
    assert "4 of 100 rows (4.00%)" in message
    assert "data.tolerated_rejects (1.00%)" in message
    assert "3 × label not 0 or 1 (the first: row 0, TX_FRAUD = 5)" in message
    assert "1 × amount negative (the first: row 50, TX_AMOUNT = -2.0)" in message
    assert error.value.exit_code == 65


def test_exactly_the_tolerated_share_passes() -> None:
    assert len(check_rows(with_row(amount=-1.0), tolerated=0.01).rows) == 99
    with pytest.raises(DataError):
        check_rows(with_row(amount=-1.0), tolerated=0.0099)


def test_no_valid_rows_are_an_error_at_any_tolerance() -> None:
    with pytest.raises(DataError, match="100 of 100 rows"):
        check_rows(make_frame(fraud=[7] * 100), tolerated=1)


def test_unsorted_rows_are_sorted_and_reported() -> None:
    shuffled = make_frame().sample(fraction=1, shuffle=True, seed=1)
    result = check_rows(shuffled)
    assert not result.was_sorted
    assert result.rows.id.tolist() == list(range(100))


def test_text_and_numbers_give_the_same_rows() -> None:
    text_frame = make_frame().select(pl.all().cast(pl.String))
    rows_of_text = check_rows(text_frame)
    rows_of_numbers = check_rows(make_frame())
    assert rows_of_text.rows.to_frame().equals(rows_of_numbers.rows.to_frame())


def test_labels_may_be_true_and_false() -> None:
    truth = make_frame().with_columns(pl.col("fraud") == 1)
    for rows in (truth, truth.with_columns(pl.col("fraud").cast(pl.String))):
        assert check_rows(rows).rows.fraud.tolist() == make_frame()["fraud"].to_list()


@pytest.mark.parametrize("label", [None, float("nan"), "", "NULL", " nan"])
def test_a_missing_label_is_not_rejected(label: Any) -> None:
    result = check_rows(with_row(fraud=label), tolerated=0)
    assert result.rows.fraud[3] == UNKNOWN
    assert set(np.delete(result.rows.fraud, 3)) == {0, 1}
    assert result.rows.to_frame()["fraud"].to_list()[3] is None
    assert np.array_equal(Rows.from_frame(result.rows.to_frame()).fraud, result.rows.fraud)


def test_text_ids_become_the_same_numbers_as_in_a_server() -> None:
    names = [f"card-{i % 7}" for i in range(99)] + ["12"]
    result = check_rows(make_frame(card=names))
    assert result.rows.card.tolist() == [identity(name) for name in names]
    assert identity("12") == 12
    assert len(set(result.rows.card)) == 8


@pytest.mark.parametrize("text", ["5_0", "+5", " 5", "٣", "9" * 30, "-" + "9" * 25, "1.0"])
def test_unusual_numbers_have_the_same_id_in_files_and_requests(text: str) -> None:
    result = check_rows(make_frame(card=[text] + ["x"] * 99))
    assert result.rows.card[0] == identity(text)


def test_time_zones_are_converted_to_utc() -> None:
    local = make_frame().with_columns(
        pl.col("time").dt.replace_time_zone("UTC").dt.convert_time_zone("Asia/Tokyo")
    )
    assert check_rows(local).rows.time.tolist() == check_rows(make_frame()).rows.time.tolist()
    text_frame = make_frame().with_columns(pl.col("time").dt.strftime("%Y-%m-%dT%H:%M:%SZ"))
    assert check_rows(text_frame).rows.time.tolist() == check_rows(make_frame()).rows.time.tolist()


@pytest.mark.parametrize(
    "text", ["garbage", "", "2024-13-45 00:00:00", "01/02/2024 10:00", "1711929600"]
)
def test_invalid_timestamps_are_rejected(text: str) -> None:
    times = make_frame()["time"].dt.strftime("%Y-%m-%d %H:%M:%S").to_list()
    assert check_rows(make_frame(time=[text, *times[1:]])).reasons() == {
        "time missing or not a timestamp": 1
    }
    if text[:2] not in ("01", "17"):
        with pytest.raises(DataError, match="100 × time missing"):
            check_rows(make_frame(time=[text] * 100))


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("time", [1.5] * 100, "TX_DATETIME.*timestamp"),
        ("card", [DAY] * 100, "CUSTOMER_ID.*number or a text"),
    ],
)
def test_a_column_of_the_wrong_type_is_named(column: str, values: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_rows(make_frame(100, **{column: values}))
