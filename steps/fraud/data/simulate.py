"""Simulate cards, terminals and fraudsters. The same seed gives the same transactions.

    simulate://7                seed 7, and defaults for the other settings
    simulate://7?takeovers=2    with account takeovers
    simulate://7?cards=5000&terminals=10000&days=183&start=2018-04-01    as the published data set

An independent implementation of the rules of the Fraud Detection Handbook, chapter 3 (Le Borgne et
al.): a card pays at nearby terminals; (1) amounts above 220 are frauds; (2) all payments at a
compromised terminal are frauds for 28 days; (3) for 14 days, a third of the payments of a leaked
card are frauds, with 5 times the amount. Smaller worlds have as many terminals near each card, and
the same fraction of frauds.

`takeovers` adds a fourth kind of fraud: a fraudster tries a card with a tiny payment, and within
hours makes several payments at any terminals, whose amounts are usual for the card. Each payment
alone looks genuine. `takeovers` is the number of takeovers per 1,000 cards and day; the default is
0, as in the handbook.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from steps.fraud.data.simulation_uri import World
from steps.fraud.data.transactions import DAY


@dataclass(frozen=True)
class Payments:
    """Payments as columns of equal length, sorted by card and day."""

    slot: NDArray[np.int64]  # card and day as one number: card * days + day
    second: NDArray[np.int64]  # time of the payment, in seconds since midnight
    terminal: NDArray[np.int64]
    amount: NDArray[np.float64]


Commit = Callable[[np.random.Generator, World, Payments], NDArray[np.uint8]]

SIDE = 100  # side length of the square with all cards and terminals
# maximum distance of a card's terminals times sqrt(number of terminals); gives a card about 78
# terminals
RADIUS = 500
TERMINAL_FRAUDS_A_DAY = 2 / 10_000
TERMINAL_DAYS = 28
CARD_FRAUDS_A_DAY = 3 / 5_000
CARD_DAYS = 14
TAKEOVER = 4  # number of the fraud scenario `takeover`
# ranges of the number of payments of a takeover, and of the seconds between two of these payments
TAKEOVER_PAYMENTS = (4, 8)
TAKEOVER_GAP = (300, 3600)
# range of the first amount of a takeover, with which the fraudster tests the card
TRIAL_AMOUNT = (0.5, 2.0)


def simulate(world: World, commit: Commit | None = None) -> pl.DataFrame:
    """Generate the transactions of a world, in time order, with the columns for `checks.check`.

    `commit` replaces the fraud rules of the handbook, see `commit_frauds`.
    """
    rng = np.random.default_rng(world.seed)
    home, shop = (rng.uniform(0, SIDE, (n, 2)) for n in (world.cards, world.terminals))
    mean = rng.uniform(5, 100, world.cards)
    rate = rng.uniform(0, 4, world.cards)
    near, near_start = _find_terminals(home, shop, RADIUS / np.sqrt(world.terminals))
    choices = np.diff(near_start)

    count = rng.poisson(np.where(choices > 0, rate, 0)[:, None], (world.cards, world.days)).ravel()
    slot = np.repeat(np.arange(count.size), count)  # card * days + day, ascending
    second = rng.normal(43_200, 20_000, slot.size).astype(np.int64)
    keep = (second > 0) & (second < 86_400)
    slot = slot[keep]
    second = second[keep]
    card, day = np.divmod(slot, world.days)
    amount = _draw_amounts(rng, mean[card])
    terminal = near[near_start[card] + (rng.random(slot.size) * choices[card]).astype(np.int64)]
    payments = Payments(slot, second, terminal, amount)
    scenario = (commit or commit_frauds)(rng, world, payments)
    added = take_over(rng, world, mean)
    columns = zip(astuple(payments), astuple(added), strict=True)
    slot, second, terminal, amount = (np.concatenate(pair) for pair in columns)
    scenario = np.append(scenario, np.full(len(added.slot), TAKEOVER, np.uint8))

    card, day = np.divmod(slot, world.days)
    time = (np.datetime64(world.start, "D").astype(np.int64) + day) * DAY + second * 1_000_000
    order = np.argsort(time, kind="stable")

    columns = {
        "time": time,
        "card": card,
        "terminal": terminal,
        "amount": amount,
        "scenario": scenario,
    }

    return pl.DataFrame(
        {"id": np.arange(slot.size)} | {k: v[order] for k, v in columns.items()}
    ).with_columns(
        pl.col("time").cast(pl.Datetime("us")), fraud=(pl.col("scenario") > 0).cast(pl.UInt8)
    )


def _draw_amounts(rng: np.random.Generator, mean: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each card's mean amount in `mean`, draw the amount of one payment."""
    amount = rng.normal(mean, mean / 2)
    return np.where(amount < 0, rng.uniform(0, 2 * mean), amount).round(2)


def _find_terminals(
    home: NDArray[np.float64], shop: NDArray[np.float64], radius: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return two arrays: the terminals near each card, concatenated, and the start of each card's
    terminals."""
    by_x = np.argsort(shop[:, 0])
    x = shop[by_x, 0]
    edges = np.searchsorted(x, np.stack([home[:, 0] - radius, home[:, 0] + radius]))
    neighbours = []
    for (begin, end), center in zip(edges.T, home, strict=True):
        strip = by_x[begin:end]
        neighbours.append(strip[((shop[strip] - center) ** 2).sum(1) < radius**2])
    return np.concatenate(neighbours), np.cumsum([0, *map(len, neighbours)])


def commit_frauds(rng: np.random.Generator, world: World, payments: Payments) -> NDArray[np.uint8]:
    """Return the fraud scenario of each transaction (0: genuine). Also changes the amounts of
    frauds in `payments`."""
    slot = payments.slot
    terminal = payments.terminal
    amount = payments.amount
    scenario = (amount > 220).astype(np.uint8)
    compromised = np.zeros((world.terminals, world.days), bool)
    leaked: list[NDArray[np.int64]] = []
    start = np.searchsorted(slot, np.arange(world.cards * world.days + 1))

    for day in range(world.days - 1):
        terminals = rng.choice(
            world.terminals,
            _count_events(world.terminals * TERMINAL_FRAUDS_A_DAY, day),
            replace=False,
        )
        compromised[terminals, day : day + TERMINAL_DAYS] = True
        cards = rng.choice(
            world.cards, _count_events(world.cards * CARD_FRAUDS_A_DAY, day), replace=False
        )
        begin = cards * world.days + day
        end = cards * world.days + min(day + CARD_DAYS, world.days)

        rows = [
            np.arange(b, e) for b, e in zip(start[begin].tolist(), start[end].tolist(), strict=True)
        ]
        if rows:
            joint = np.concatenate(rows)
            leaked.append(rng.choice(joint, len(joint) // 3, replace=False))

    scenario[compromised[terminal, slot % world.days]] = 2
    for rows in leaked:
        amount[rows] = (5 * amount[rows]).round(2)
        scenario[rows] = 3

    return scenario


def take_over(rng: np.random.Generator, world: World, mean: NDArray[np.float64]) -> Payments:
    """Simulate takeovers, and return their fraudulent payments. `mean`: mean amount of each
    card."""
    count = rng.poisson(world.takeovers / 1000 * world.cards * world.days)
    size = rng.integers(*TAKEOVER_PAYMENTS, count, endpoint=True)
    slot = np.repeat(rng.integers(0, world.cards * world.days, count), size)
    is_first = np.diff(np.repeat(np.arange(count), size), prepend=-1) > 0
    elapsed = np.cumsum(rng.integers(*TAKEOVER_GAP, len(slot)))
    # start early enough for all payments to be on one day
    latest_start = 86_400 - TAKEOVER_PAYMENTS[1] * TAKEOVER_GAP[1]
    second = elapsed + np.repeat(rng.integers(1, latest_start, count) - elapsed[is_first], size)
    amount = _draw_amounts(rng, mean[slot // world.days])
    amount[is_first] = rng.uniform(*TRIAL_AMOUNT, count).round(2)
    return Payments(slot, second, rng.integers(0, world.terminals, len(slot)), amount)


def _count_events(rate: float, day: int) -> int:
    """Return the number of events on `day`: an integer whose average over many days is `rate`."""
    return int((day + 1) * rate + 1e-9) - int(day * rate + 1e-9)
