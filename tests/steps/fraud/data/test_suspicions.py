"""Data that looks wrong as a whole gives a warning with figures; simulated data gives no
warning."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from steps.fraud.data.row_checks import check
from steps.fraud.data.shards import labels_end
from steps.fraud.data.simulate import simulate
from steps.fraud.data.simulation_uri import parse
from steps.fraud.data.suspicions import suspicions
from steps.fraud.data.transactions import DAY
from steps.fraud.fraud_config import Columns, Data
from tests.steps.fraud.written import write

SIZES = ["cards=150&terminals=300&days=70", pytest.param("", marks=pytest.mark.slow)]
FRAUD = pl.col("fraud") == 1
NEVER_DAY = 10_000  # days


@cache
def simulate_world(seed: int, world_options: str = "") -> pl.DataFrame:
    return simulate(parse(f"simulate://{seed}?{world_options}"))


def warnings_of(frame: pl.DataFrame) -> list[str]:
    rows = check(frame, Columns(), 0).rows
    return suspicions(rows, Columns(), labels_end(rows, Data()))


def mask_days(first_day: int, last_day: int = NEVER_DAY) -> pl.Expr:
    """Return a mask of the rows from day `first_day` of the data to day `last_day`."""
    day = (pl.col("time").dt.date() - pl.col("time").dt.date().min()).dt.total_days()
    return day.is_between(first_day, last_day)


def change_column(
    column: str, value: pl.Expr, condition: pl.Expr = FRAUD
) -> Callable[[pl.DataFrame], pl.DataFrame]:
    return lambda frame: frame.with_columns(
        pl.when(condition).then(value).otherwise(column).alias(column)
    )


def thin_rows(keep: float, condition: pl.Expr) -> Callable[[pl.DataFrame], pl.DataFrame]:
    """Return the rows without a random part of the genuine rows."""
    drawn = pl.int_range(pl.len()).hash(seed=3) % 1000 < 1000 * keep
    return lambda frame: frame.filter(~condition | FRAUD | drawn)


AMOUNT, TIME, CARD, TERMINAL, LABEL = (
    pl.col(name) for name in ("amount", "time", "card", "terminal", "fraud")
)
HASH = (CARD.hash() % 2**62).cast(pl.Int64)
CORRUPTIONS = {
    "inverted labels": (
        change_column("fraud", 1 - LABEL, mask_days(0)),
        "99.* of the known labels are frauds: are they inverted",
    ),
    "few genuine rows": (
        thin_rows(0.1, mask_days(0)),
        "% of the known labels are frauds, but usually fewer than 1%",
    ),
    "amount is the label": (
        change_column("amount", LABEL.cast(pl.Float64), mask_days(0)),
        "_AMOUNT.* identifies 100% of the",
    ),
    "amount has the label": (
        change_column("amount", AMOUNT + 9000),
        "_AMOUNT.* identifies [89].% of the frauds",
    ),
    "terminal is the kind": (
        change_column("terminal", pl.col("scenario").cast(pl.Int64), mask_days(0)),
        "TERMINAL_.* 100% of",
    ),
    "terminal has the label": (
        change_column("terminal", -1 - TERMINAL % 9),
        "TERMINAL_.* identifies (9.|100)% of",
    ),
    "amounts without cents": (
        change_column("amount", AMOUNT.floor(), mask_days(45)),
        "equal cents in all .* 2024-02-15: does",
    ),
    "rounded amounts": (
        change_column("amount", AMOUNT.round(), mask_days(50, 60)),
        "equal cents in all rows of 11 of",
    ),
    "dates": (
        change_column("time", TIME.dt.truncate("1d"), mask_days(30)),
        "_DATETIME.* equal minutes and .* 2024-01-31",
    ),
    "only dates": (
        change_column("time", TIME.dt.truncate("1d"), mask_days(0)),
        "equal minutes and seconds in all rows",
    ),
    "hours": (
        change_column("time", TIME.dt.truncate("1h"), mask_days(0, 20)),
        "rows of 21 of .* of them 2024-01-01",
    ),
    "half the genuine rows": (
        thin_rows(0.5, mask_days(40)),
        "genuine rows per day change from .* on 2024-02-10, and",
    ),
    "thinned training rows": (
        thin_rows(0.3, mask_days(0, 39)),
        "genuine rows per day change from .* on 2024-02-10, and",
    ),
    "hardly a genuine row": (
        thin_rows(0.05, mask_days(40)),
        "genuine rows per day change from .* on 2024-02-10, and",
    ),
    "two thinned weeks": (
        thin_rows(0.2, mask_days(40, 53)),
        "genuine rows per day change from .* on 2024-02-(10|24), and",
    ),
    "labels inverted later": (
        change_column("fraud", 1 - LABEL, mask_days(50)),
        "change from .* on 2024-02-20.* inverted",
    ),
    "new cards": (
        change_column("card", CARD + 10**9, mask_days(45)),
        "CUSTOMER_.* no earlier day has in 100% of the rows",
    ),
    "new hashes": (
        change_column("card", HASH, mask_days(33)),
        "of the rows of 2024-02-03, and in 0.*: were the ids hashed",
    ),
    "new terminals": (
        change_column("terminal", TERMINAL + 10**9, mask_days(60)),
        "TERMINAL_.* history of each terminal is",
    ),
    "new at the end": (
        change_column("terminal", TERMINAL + 10**9, mask_days(67)),
        "TERMINAL_.* in 100% of the rows of 2024-03",
    ),
}


@pytest.mark.parametrize("world_options", SIZES)
def test_simulated_worlds_give_no_warning(world_options: str) -> None:
    for seed in range(20):
        assert warnings_of(simulate_world(seed, world_options)) == [], seed


@pytest.mark.parametrize("world_options", SIZES)
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corruption_gives_one_warning_with_figures(name: str, world_options: str) -> None:
    corrupt, message = CORRUPTIONS[name]
    for seed in range(3):
        [warning] = warnings_of(corrupt(simulate_world(seed, world_options)))
        assert re.search(message, warning)


def test_a_currency_without_cents_gives_no_warning() -> None:
    frame = simulate_world(0)
    assert warnings_of(change_column("amount", AMOUNT.round(), mask_days(0))(frame)) == []


def test_more_customers_or_more_frauds_are_not_missing_rows() -> None:
    frame = simulate_world(1)
    assert warnings_of(frame.filter((CARD % 3 == 0) | mask_days(45))) == []
    assert (
        warnings_of(frame.filter(~FRAUD | (pl.int_range(pl.len()) % 2 == 0) | mask_days(45))) == []
    )


LATE_LABELS: dict[str, Callable[[Any], Any]] = {
    "after two weeks": lambda draw: 14 + 0 * draw,
    "up to three weeks": lambda draw: 21 * draw,
    "two weeks on average": lambda draw: -14 * np.log(1 - draw),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("delay_text", [None, *LATE_LABELS])
def test_labels_that_arrive_after_the_delay_give_a_warning(
    delay_text: str | None, seed: int, tmp_path: Path
) -> None:
    frame = simulate_world(seed)
    if delay_text:
        wait = LATE_LABELS[delay_text](np.random.default_rng(seed).random(len(frame))) * DAY
    else:
        wait = np.zeros(len(frame))

    arrived = pl.col("time").dt.epoch("us") + pl.Series(wait) <= pl.col("time").max().dt.epoch("us")
    source = tmp_path / "late.parquet"
    frame.with_columns(fraud=pl.col("fraud") * arrived).rename(
        Columns().model_dump()
    ).write_parquet(source)
    warnings = write(Data(source=str(source), test_weeks=2), tmp_path / "dataset").warnings
    assert len(warnings) == bool(delay_text)
    assert (
        not delay_text
        or "of the frauds from 2024-03-18 to 2024-03-24 are not labelled" in warnings[0]
    )
