"""Simulate cards, terminals and fraudsters. The same seed gives the same transactions.

    simulate://7                seed 7, and defaults for the other settings
    simulate://7?takeovers=2    with account takeovers
    simulate://7?cards=5000&terminals=10000&days=183&start=2018-04-01    as the published data set

The module implements the rules of the Fraud Detection Handbook, chapter 3 (Le Borgne et al.),
independently: a card pays at nearby terminals; (1) amounts above 220 are frauds; (2) all payments
at a compromised terminal are frauds for 28 days; (3) for 14 days, a third of the payments of a
leaked card are frauds, with 5 times the amount. In worlds of any size, a card has about as many
terminals nearby, and the fraction of frauds is the same.

`takeovers` adds a fourth kind of fraud: a fraudster tries a card with a tiny payment, and within
hours makes several payments at any terminals, whose amounts are usual for the card. Each payment of
a takeover looks genuine if it is considered alone. `takeovers` is the number of takeovers per 1,000
cards and day; the default is 0, as in the handbook.
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

    # card and day as one number: card * days + day
    slot: NDArray[np.int64]
    # time of the payment, in seconds since midnight
    second: NDArray[np.int64]
    terminal: NDArray[np.int64]
    amount: NDArray[np.float64]


Commit = Callable[[np.random.Generator, World, Payments], NDArray[np.uint8]]

# side length of the square with all cards and terminals
SIDE = 100
# maximum distance of a card's terminals times sqrt(number of terminals), so that a card has about
# 78 terminals
RADIUS = 500
# fraction of the terminals that are compromised each day, and the days until they recover
TERMINAL_FRAUDS_A_DAY = 2 / 10_000
TERMINAL_DAYS = 28
# fraction of the cards that are leaked each day, and the days until they recover
CARD_FRAUDS_A_DAY = 3 / 5_000
CARD_DAYS = 14
# number of the fraud scenario `takeover`
TAKEOVER = 4
# ranges of the number of payments of a takeover, and of the seconds between two of these payments
TAKEOVER_PAYMENTS = (4, 8)
TAKEOVER_GAP = (300, 3600)
# range of the first amount of a takeover, with which the fraudster tests the card
TRIAL_AMOUNT = (0.5, 2.0)


def simulate(simulated_world: World, commit_scenario: Commit | None = None) -> pl.DataFrame:
    """Generate the transactions of a world, in time order, with the columns that
    `row_checks.check` expects.

    `commit_scenario`: function that replaces `commit_frauds`, the fraud rules of the handbook.
    """
    random_generator = np.random.default_rng(simulated_world.seed)
    card_positions, terminal_positions = (
        random_generator.uniform(0, SIDE, (position_count, 2))
        for position_count in (simulated_world.cards, simulated_world.terminals)
    )
    mean_amounts = random_generator.uniform(5, 100, simulated_world.cards)
    payments_per_day = random_generator.uniform(0, 4, simulated_world.cards)
    near_terminals, near_terminal_starts = _find_terminals(
        card_positions, terminal_positions, RADIUS / np.sqrt(simulated_world.terminals)
    )
    near_terminal_counts = np.diff(near_terminal_starts)

    payment_counts = random_generator.poisson(
        np.where(near_terminal_counts > 0, payments_per_day, 0)[:, None],
        (simulated_world.cards, simulated_world.days),
    ).ravel()
    payment_slots = np.repeat(
        np.arange(payment_counts.size), payment_counts
    )  # card * days + day, ascending
    payment_seconds = random_generator.normal(43_200, 20_000, payment_slots.size).astype(np.int64)
    is_within_day = (payment_seconds > 0) & (payment_seconds < 86_400)
    payment_slots = payment_slots[is_within_day]
    payment_seconds = payment_seconds[is_within_day]
    payment_cards, payment_days = np.divmod(payment_slots, simulated_world.days)
    payment_amounts = _draw_amounts(random_generator, mean_amounts[payment_cards])
    payment_terminals = near_terminals[
        near_terminal_starts[payment_cards]
        + (
            random_generator.random(payment_slots.size) * near_terminal_counts[payment_cards]
        ).astype(np.int64)
    ]
    payments = Payments(payment_slots, payment_seconds, payment_terminals, payment_amounts)
    fraud_scenarios = (commit_scenario or commit_frauds)(
        random_generator, simulated_world, payments
    )
    takeover_payments = take_over(random_generator, simulated_world, mean_amounts)
    column_pairs = zip(astuple(payments), astuple(takeover_payments), strict=True)
    payment_slots, payment_seconds, payment_terminals, payment_amounts = (
        np.concatenate(column_pair) for column_pair in column_pairs
    )
    fraud_scenarios = np.append(
        fraud_scenarios, np.full(len(takeover_payments.slot), TAKEOVER, np.uint8)
    )

    payment_cards, payment_days = np.divmod(payment_slots, simulated_world.days)
    payment_times = (
        np.datetime64(simulated_world.start, "D").astype(np.int64) + payment_days
    ) * DAY + payment_seconds * 1_000_000
    time_order = np.argsort(payment_times, kind="stable")

    payment_columns = {
        "time": payment_times,
        "card": payment_cards,
        "terminal": payment_terminals,
        "amount": payment_amounts,
        "scenario": fraud_scenarios,
    }

    return pl.DataFrame(
        {"id": np.arange(payment_slots.size)}
        | {
            column_name: column_values[time_order]
            for column_name, column_values in payment_columns.items()
        }
    ).with_columns(
        pl.col("time").cast(pl.Datetime("us")), fraud=(pl.col("scenario") > 0).cast(pl.UInt8)
    )


def _draw_amounts(
    random_generator: np.random.Generator, mean_amounts: NDArray[np.float64]
) -> NDArray[np.float64]:
    """For each card's mean amount in `mean_amounts`, draw the amount of one payment."""
    drawn_amounts = random_generator.normal(mean_amounts, mean_amounts / 2)
    return np.where(
        drawn_amounts < 0, random_generator.uniform(0, 2 * mean_amounts), drawn_amounts
    ).round(2)


def _find_terminals(
    card_positions: NDArray[np.float64], terminal_positions: NDArray[np.float64], radius: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return two arrays: the terminals near each card, concatenated, and the start of each card's
    terminals."""
    terminals_by_x = np.argsort(terminal_positions[:, 0])
    sorted_x = terminal_positions[terminals_by_x, 0]
    strip_edges = np.searchsorted(
        sorted_x, np.stack([card_positions[:, 0] - radius, card_positions[:, 0] + radius])
    )
    neighbour_lists = []
    for (strip_start, strip_end), card_position in zip(strip_edges.T, card_positions, strict=True):
        strip_terminals = terminals_by_x[strip_start:strip_end]
        neighbour_lists.append(
            strip_terminals[
                ((terminal_positions[strip_terminals] - card_position) ** 2).sum(1) < radius**2
            ]
        )
    return np.concatenate(neighbour_lists), np.cumsum([0, *map(len, neighbour_lists)])


def commit_frauds(
    random_generator: np.random.Generator, simulated_world: World, payments: Payments
) -> NDArray[np.uint8]:
    """Return the fraud scenario of each transaction (0: genuine). The amounts of the frauds in
    `payments` are changed, too."""
    payment_slots = payments.slot
    payment_terminals = payments.terminal
    payment_amounts = payments.amount
    fraud_scenarios = (payment_amounts > 220).astype(np.uint8)
    is_compromised = np.zeros((simulated_world.terminals, simulated_world.days), bool)
    leaked_payments: list[NDArray[np.int64]] = []
    slot_starts = np.searchsorted(
        payment_slots, np.arange(simulated_world.cards * simulated_world.days + 1)
    )

    for day in range(simulated_world.days - 1):
        chosen_terminals = random_generator.choice(
            simulated_world.terminals,
            _count_events(simulated_world.terminals * TERMINAL_FRAUDS_A_DAY, day),
            replace=False,
        )
        is_compromised[chosen_terminals, day : day + TERMINAL_DAYS] = True
        chosen_cards = random_generator.choice(
            simulated_world.cards,
            _count_events(simulated_world.cards * CARD_FRAUDS_A_DAY, day),
            replace=False,
        )
        first_slots = chosen_cards * simulated_world.days + day
        end_slots = chosen_cards * simulated_world.days + min(day + CARD_DAYS, simulated_world.days)

        payment_ranges = [
            np.arange(range_start, range_end)
            for range_start, range_end in zip(
                slot_starts[first_slots].tolist(), slot_starts[end_slots].tolist(), strict=True
            )
        ]
        if payment_ranges:
            all_payment_indices = np.concatenate(payment_ranges)
            leaked_payments.append(
                random_generator.choice(
                    all_payment_indices, len(all_payment_indices) // 3, replace=False
                )
            )

    fraud_scenarios[is_compromised[payment_terminals, payment_slots % simulated_world.days]] = 2
    for payment_indices in leaked_payments:
        payment_amounts[payment_indices] = (5 * payment_amounts[payment_indices]).round(2)
        fraud_scenarios[payment_indices] = 3

    return fraud_scenarios


def take_over(
    random_generator: np.random.Generator, simulated_world: World, mean_amounts: NDArray[np.float64]
) -> Payments:
    """Simulate takeovers, and return their fraudulent payments. `mean_amounts`: mean amount of each
    card."""
    takeover_count = random_generator.poisson(
        simulated_world.takeovers / 1000 * simulated_world.cards * simulated_world.days
    )
    payments_per_takeover = random_generator.integers(
        *TAKEOVER_PAYMENTS, takeover_count, endpoint=True
    )
    payment_slots = np.repeat(
        random_generator.integers(0, simulated_world.cards * simulated_world.days, takeover_count),
        payments_per_takeover,
    )
    is_first = np.diff(np.repeat(np.arange(takeover_count), payments_per_takeover), prepend=-1) > 0
    elapsed_seconds = np.cumsum(random_generator.integers(*TAKEOVER_GAP, len(payment_slots)))
    # start early enough for all payments to be on one day
    latest_start = 86_400 - TAKEOVER_PAYMENTS[1] * TAKEOVER_GAP[1]
    payment_seconds = elapsed_seconds + np.repeat(
        random_generator.integers(1, latest_start, takeover_count) - elapsed_seconds[is_first],
        payments_per_takeover,
    )
    payment_amounts = _draw_amounts(
        random_generator, mean_amounts[payment_slots // simulated_world.days]
    )
    payment_amounts[is_first] = random_generator.uniform(*TRIAL_AMOUNT, takeover_count).round(2)
    return Payments(
        payment_slots,
        payment_seconds,
        random_generator.integers(0, simulated_world.terminals, len(payment_slots)),
        payment_amounts,
    )


def _count_events(events_per_day: float, day: int) -> int:
    """Return the number of events on `day`: an integer whose average over many days is
    `events_per_day`."""
    return int((day + 1) * events_per_day + 1e-9) - int(day * events_per_day + 1e-9)
