"""Measure the quality of the fraud model when fraudsters follow other rules, compared with gradient
boosting.

    # all worlds: about two minutes each on two cores
    python -m benchmarks.workloads.worlds
    python -m benchmarks.workloads.worlds --world testers --json

Cards, terminals and genuine payments are simulated as for the `simulate://` URIs of the demo. The
simulated frauds of this benchmark follow rules for which the features were not designed. For each
world (a set of fraud rules), configs/demo.yaml prepares the data and trains and evaluates the
model, without tuning. The figures are the average precision (AP) on the test weeks of three models:
the transformer, gradient-boosted trees on the same features (the baseline of the verdict), and
gradient-boosted trees on the 15 features of the Fraud Detection Handbook.
"""

import re
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from benchmarks.bars import Bar, make_bar, make_parser, report
from benchmarks.workloads.handbook import SET_HELP, pipeline, stop_services
from rekindle.workload import prepare
from steps import fraud
from steps.fraud.data import features
from steps.fraud.data.boosting import Sample
from steps.fraud.data.sequences import Rows
from steps.fraud.data.simulate import Commit, Payments, simulate
from steps.fraud.data.simulation_uri import World
from steps.fraud.data.transactions import Rows as Transactions
from steps.fraud.fraud_config import Columns, Data
from steps.fraud.handbook_protocol import judged_weeks
from steps.fraud.ranking import average_precision

WORLD_SIZE: dict[str, Any] = {"cards": 1500, "terminals": 3000, "days": 120}
# share of all cards that are stolen per day
STOLEN_PER_DAY = 0.002
FRAUD_LABEL = np.uint8(1)


def _select_stolen_payments(
    random_generator: np.random.Generator,
    world: World,
    payments: Payments,
    stolen_days: int,
    stolen_share: float,
) -> NDArray[np.int64]:
    """Return the indices of payments with a stolen card within `stolen_days` days after its theft,
    sorted by card and time.

    `stolen_share`: factor by which STOLEN_PER_DAY is multiplied.
    """
    thefts_per_day = random_generator.poisson(
        world.cards * STOLEN_PER_DAY * stolen_share, world.days
    )
    stolen_cards = random_generator.integers(0, world.cards, thefts_per_day.sum())
    start_slots = stolen_cards * world.days + np.repeat(np.arange(world.days), thefts_per_day)
    end_slots = np.minimum(start_slots + stolen_days, (stolen_cards + 1) * world.days)
    payment_ranges = zip(
        np.searchsorted(payments.slot, start_slots),
        np.searchsorted(payments.slot, end_slots),
        strict=True,
    )

    return np.unique(
        np.concatenate(
            [
                np.arange(first_payment, last_payment)
                for first_payment, last_payment in payment_ranges
            ]
        )
    )


def commit_tester_fraud(
    random_generator: np.random.Generator, world: World, payments: Payments
) -> NDArray[np.uint8]:
    """Add frauds to the payments: change the payments of stolen cards, and return the fraud labels.
    Thieves of this world test a stolen card with a tiny payment, then use it for some days with the
    owner's usual amounts."""
    fraud_labels = np.zeros(len(payments.slot), np.uint8)
    stolen_payments = _select_stolen_payments(random_generator, world, payments, 5, 1)
    fraud_labels[stolen_payments] = FRAUD_LABEL
    first_payments = stolen_payments[np.append(True, np.diff(stolen_payments) > 1)]
    payments.amount[first_payments] = random_generator.uniform(0.5, 2, len(first_payments)).round(2)
    return fraud_labels


def commit_night_fraud(
    random_generator: np.random.Generator, world: World, payments: Payments
) -> NDArray[np.uint8]:
    """Add frauds to the payments: change payments at night, and return the fraud labels. Thieves of
    this world pay at night, and slightly more than the owner; a few owners also pay at night."""
    fraud_labels = np.zeros(len(payments.slot), np.uint8)
    stolen_payments = _select_stolen_payments(random_generator, world, payments, 10, 1)
    stolen_payments = stolen_payments[random_generator.random(len(stolen_payments)) < 0.6]
    fraud_labels[stolen_payments] = FRAUD_LABEL
    is_night_owner = random_generator.random(len(fraud_labels)) < 0.02
    for night_payments in (stolen_payments, np.flatnonzero(is_night_owner)):
        payments.second[night_payments] = random_generator.integers(
            1, 5 * 3600, len(night_payments)
        )
    payments.amount[stolen_payments] = (
        payments.amount[stolen_payments] * random_generator.uniform(1, 2.5, len(stolen_payments))
    ).round(2)
    return fraud_labels


def commit_skimmer_fraud(
    random_generator: np.random.Generator, world: World, payments: Payments
) -> NDArray[np.uint8]:
    """Add frauds to the payments: change payments with copied cards, and return the fraud labels.
    In this world, from two days after a card is used at a manipulated terminal, the payments with
    the card are frauds of similar amounts."""
    fraud_labels = np.zeros(len(payments.slot), np.uint8)
    manipulated_terminals = random_generator.permutation(world.terminals)[: world.terminals // 100]
    manipulation_days = random_generator.integers(0, world.days, world.terminals // 100)
    payment_days = payments.slot % world.days

    for manipulated_terminal, manipulation_day in zip(
        manipulated_terminals.tolist(), manipulation_days.tolist(), strict=True
    ):
        visit_payments = np.flatnonzero(
            (payments.terminal == manipulated_terminal)
            & (payment_days >= manipulation_day)
            & (payment_days < manipulation_day + 14)
        )
        for visit_slot in payments.slot[visit_payments].tolist():
            first_payment, last_payment = np.searchsorted(
                payments.slot,
                [visit_slot + 2, min(visit_slot + 6, (visit_slot // world.days + 1) * world.days)],
            )
            later_payments = np.arange(first_payment, last_payment)
            fraud_labels[later_payments] = FRAUD_LABEL
            payments.amount[later_payments] = (
                random_generator.choice([19, 49, 99])
                + random_generator.uniform(0, 1, len(later_payments))
            ).round(2)

    return fraud_labels


FRAUD_BY_WORLD: dict[str, Commit] = {
    "testers": commit_tester_fraud,
    "nights": commit_night_fraud,
    "skimmers": commit_skimmer_fraud,
}


def measure_plain_trees(data_spec: Data, dataset_folder: Path) -> float:
    """Train trees on only the 15 features of the handbook, and return their AP on the pipeline's
    test weeks."""
    prepare(fraud, data_spec, dataset_folder)
    dataset_rows = Rows(dataset_folder)
    transactions = Transactions.from_frame(pl.read_parquet(dataset_folder / "transactions.parquet"))
    feature_pieces = list(
        features.tables(
            transactions, data_spec.label_delay_days, feature_names=features.HANDBOOK_NAMES
        )
    )
    # sort the features like the rows of the dataset
    feature_table = np.concatenate([piece_features for _, piece_features in feature_pieces])
    is_training_row = (dataset_rows.times >= dataset_rows.facts.train_start) & (
        dataset_rows.times < dataset_rows.facts.train_end
    )
    training_sample = Sample(int(is_training_row.sum()))
    training_sample.add(feature_table, dataset_rows.labels, dataset_rows.cards, is_training_row)
    fitted_boosting = training_sample.fit()
    is_later_row = np.zeros(len(dataset_rows), bool)
    week_rows = [judged_week.rows for judged_week in judged_weeks(dataset_rows)]
    week_scores = [
        fitted_boosting.score(
            feature_table[row_indexes], dataset_rows.cards[row_indexes], is_later_row[row_indexes]
        ).astype(float)
        for row_indexes in week_rows
    ]

    return fmean(
        average_precision(scores_of_week, dataset_rows.labels[row_indexes])
        for scores_of_week, row_indexes in zip(week_scores, week_rows, strict=True)
    )


def measure_world(
    world_name: str, world_seed: int, working_folder: Path, set_options: list[str]
) -> list[Bar]:
    """Return the average precision (AP) of the model in one world as a figure, with the APs of the
    trees as its limits."""
    world_path = working_folder / f"{world_name}.parquet"
    simulate(World(seed=world_seed, **WORLD_SIZE), FRAUD_BY_WORLD[world_name]).rename(
        Columns().model_dump()
    ).write_parquet(world_path)
    run_output = pipeline(
        str(world_path),
        str(working_folder / "home"),
        set_options,
        config="configs/demo.yaml",
        test_weeks=4,
    )
    model_ap = run_output["metrics"]["ap"]
    trees_ap = read_baseline_ap(run_output)
    plain_trees_ap = measure_plain_trees(Data(source=str(world_path)), working_folder / world_name)

    return [
        make_bar(
            f"{world_name}: ap of the model (limit: ap of trees on the same features)",
            model_ap,
            "",
            trees_ap,
            "more",
        ),
        make_bar(
            f"{world_name}: ap of the model (limit: ap of trees on the 15 features of the"
            " handbook)",
            model_ap,
            "",
            plain_trees_ap,
            "more",
        ),
    ]


def read_baseline_ap(run_output: dict[str, Any]) -> float:
    """Parse the average precision of the baseline from the reason text of a verdict."""
    [baseline_values] = re.findall(r"The baseline has ap (\d\.\d+)", run_output["reason"])
    return float(baseline_values)


def main() -> int:
    argument_parser = make_parser(__doc__)
    argument_parser.add_argument(
        "--world",
        choices=list(FRAUD_BY_WORLD),
        action="append",
        help="world to simulate (default: all); may be repeated",
    )

    argument_parser.add_argument(
        "--seed", type=int, default=11, help="seed of the simulated cards, payments and frauds"
    )
    argument_parser.add_argument(
        "--set", action="append", default=[], dest="sets", metavar="A.B=C", help=SET_HELP
    )
    options = argument_parser.parse_args()
    bars: list[Bar] = []

    with tempfile.TemporaryDirectory(dir=".") as temporary_folder:
        # do not use a folder below /tmp, because each pod has its own /tmp
        working_folder = Path(temporary_folder).absolute()
        try:
            for world_name in options.world or FRAUD_BY_WORLD:
                bars += measure_world(world_name, options.seed, working_folder, options.sets)
        finally:
            stop_services(str(working_folder / "home"))

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
