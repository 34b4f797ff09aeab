"""A simulated set of transactions is reproducible and follows its rules."""

from datetime import date

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steps.fraud.data.simulate import simulate
from steps.fraud.data.simulation_uri import World, parse


@pytest.fixture(scope="module")
def world() -> pl.DataFrame:
    return simulate(World(seed=1, cards=2000, terminals=4000, days=100))


def test_the_same_seed_gives_the_same_world_and_another_seed_another(world: pl.DataFrame) -> None:
    repeated_world, other_world = (
        simulate(World(seed=seed, cards=2000, terminals=4000, days=100)) for seed in (1, 2)
    )
    assert world.equals(repeated_world)
    assert not world.equals(other_world)


def test_rates_equal_the_published_data(world: pl.DataFrame) -> None:
    days = world["time"].dt.date()
    assert days.min() == date(2024, 1, 1)
    assert days.n_unique() == 100
    assert len(world) / 100 / 2000 == pytest.approx(9586 / 5000, rel=0.05)
    later_rows = world.filter(pl.col("time") > pl.col("time").min().dt.offset_by("30d"))
    assert later_rows["fraud"].mean() == pytest.approx(84.8 / 9586, rel=0.25)
    by_scenario = dict(later_rows["scenario"].value_counts().iter_rows())
    assert by_scenario[2] > by_scenario[3] > by_scenario[1] > 0
    assert world["amount"].mean() == pytest.approx(53.6, rel=0.05)


def test_large_amounts_are_frauds_and_only_leaked_cards_exceed_them_by_much(
    world: pl.DataFrame,
) -> None:
    assert (world["amount"] >= 0).all()
    assert world.filter(pl.col("amount") > 220)["fraud"].min() == 1
    assert (world["fraud"] == (world["scenario"] > 0)).all()
    assert (world.filter(pl.col("scenario") == 1)["amount"] > 220).all()


def test_payments_at_a_compromised_terminal_are_frauds_for_four_weeks(world: pl.DataFrame) -> None:
    terminal_frauds = world.filter(pl.col("scenario") == 2)
    first = (
        terminal_frauds.sort("time")
        .group_by("terminal")
        .first()
        .select("terminal", day=pl.col("time").dt.date())
    )
    joined = world.join(first, on="terminal").filter(
        (pl.col("time").dt.date() >= pl.col("day"))
        & (pl.col("time").dt.date() < pl.col("day") + pl.duration(days=20))
    )
    assert joined["fraud"].mean() == 1.0


def test_takeovers_are_added_to_an_otherwise_equal_world(world: pl.DataFrame) -> None:
    more = simulate(World(seed=1, cards=2000, terminals=4000, days=100, takeovers=0.5))
    assert more.filter(pl.col("scenario") != 4).drop("id").equals(world.drop("id"))
    series = [
        rows.sort("time") for rows in more.filter(pl.col("scenario") == 4).partition_by("card")
    ]
    assert len(series) == pytest.approx(0.5 * 2 * 100, rel=0.3)
    days = [rows for rows in series if rows["time"].dt.date().n_unique() == 1]
    # the other cards were taken over twice
    assert len(days) > 0.9 * len(series)

    for rows in days:
        gaps = rows["time"].diff().dt.total_seconds().drop_nulls()
        assert 4 <= len(rows) <= 8
        assert gaps.min() >= 300  # type: ignore[operator]
        assert gaps.max() < 3600  # type: ignore[operator]
        assert rows["amount"][0] <= 2

    later_rows = pl.concat([rows[1:] for rows in days])
    assert later_rows["amount"].mean() == pytest.approx(53.6, rel=0.15)
    # the later payments are made at any terminal, while an owner pays at about 78 terminals
    assert later_rows["terminal"].n_unique() > 0.9 * len(later_rows)


@settings(max_examples=20)
@given(st.integers(0, 2**63), st.integers(1, 30), st.integers(1, 30), st.integers(1, 10))
def test_small_worlds_of_any_size_can_be_simulated(
    seed: int, cards: int, terminals: int, days: int
) -> None:
    world = simulate(
        World(seed=seed, cards=cards, terminals=terminals, days=days, takeovers=seed % 50)
    )
    assert world["time"].is_sorted()
    assert world["id"].to_list() == list(range(len(world)))
    assert np.isfinite(world["amount"].to_numpy()).all()


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("simulate://", "seed"),
        ("simulate://seven", "seed"),
        ("simulate://7?card=10", 'Did you mean "cards"?'),
        ("simulate://7?days=0", "days"),
        ("simulate://7?start=yesterday", "start"),
        ("simulate://7?takeovers=-1", "takeovers"),
    ],
)
def test_an_invalid_world_is_rejected_with_a_reason(uri: str, message: str) -> None:
    with pytest.raises(ValueError, match="simulate://7") as error:
        parse(uri)
    assert message in str(error.value)
