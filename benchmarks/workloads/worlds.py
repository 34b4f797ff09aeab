"""Measure the quality of the fraud model when fraudsters follow other rules, compared with gradient
boosting.

    # all worlds: about two minutes each on two cores
    python -m benchmarks.workloads.worlds
    python -m benchmarks.workloads.worlds --world testers --json

Cards, terminals and genuine payments are simulated as for `simulate://` URIs. Frauds follow rules
for which the features were not designed. For each world (a set of fraud rules), configs/demo.yaml
prepares the data and trains and evaluates the model, without tuning. The figures are the average
precision (AP) on the test weeks of three models: of the transformer, of trees on the same features
(the baseline of the verdict), and of trees on the 15 features of the Fraud Detection Handbook.
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

from benchmarks.bars import Bar, bar, parser, report
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

SIZE: dict[str, Any] = {"cards": 1500, "terminals": 3000, "days": 120}
STOLEN_PER_DAY = 0.002  # share of all cards that are stolen per day
TRUTH = np.uint8(1)


def _stolen(
    rng: np.random.Generator, world: World, payments: Payments, days: int, share: float
) -> NDArray[np.int64]:
    """Return the indices of payments with a stolen card within `days` days after its theft, sorted
    by card and time.

    `share`: factor by which STOLEN_PER_DAY is multiplied.
    """
    count = rng.poisson(world.cards * STOLEN_PER_DAY * share, world.days)
    cards = rng.integers(0, world.cards, count.sum())
    start = cards * world.days + np.repeat(np.arange(world.days), count)
    end = np.minimum(start + days, (cards + 1) * world.days)
    ranges = zip(
        np.searchsorted(payments.slot, start), np.searchsorted(payments.slot, end), strict=True
    )

    return np.unique(np.concatenate([np.arange(first, last) for first, last in ranges]))


def testers(rng: np.random.Generator, world: World, payments: Payments) -> NDArray[np.uint8]:
    """Change the payments, and return their fraud labels. Thieves test a stolen card with a tiny
    payment, then use it for some days with the owner's usual amounts."""
    fraud = np.zeros(len(payments.slot), np.uint8)
    rows = _stolen(rng, world, payments, 5, 1)
    fraud[rows] = TRUTH
    first = rows[np.append(True, np.diff(rows) > 1)]
    payments.amount[first] = rng.uniform(0.5, 2, len(first)).round(2)
    return fraud


def nights(rng: np.random.Generator, world: World, payments: Payments) -> NDArray[np.uint8]:
    """Change the payments, and return their fraud labels. Thieves pay at night, and slightly more
    than the owner; a few owners also pay at night."""
    fraud = np.zeros(len(payments.slot), np.uint8)
    rows = _stolen(rng, world, payments, 10, 1)
    rows = rows[rng.random(len(rows)) < 0.6]
    fraud[rows] = TRUTH
    owners = rng.random(len(fraud)) < 0.02
    for night in (rows, np.flatnonzero(owners)):
        payments.second[night] = rng.integers(1, 5 * 3600, len(night))
    payments.amount[rows] = (payments.amount[rows] * rng.uniform(1, 2.5, len(rows))).round(2)
    return fraud


def skimmers(rng: np.random.Generator, world: World, payments: Payments) -> NDArray[np.uint8]:
    """Change the payments, and return their fraud labels. From two days after a card is used at a
    manipulated terminal, its payments are frauds of similar amounts."""
    fraud = np.zeros(len(payments.slot), np.uint8)
    bad = rng.permutation(world.terminals)[: world.terminals // 100]
    since = rng.integers(0, world.days, world.terminals // 100)
    day = payments.slot % world.days

    for terminal, start in zip(bad.tolist(), since.tolist(), strict=True):
        visits = np.flatnonzero(
            (payments.terminal == terminal) & (day >= start) & (day < start + 14)
        )
        for slot in payments.slot[visits].tolist():
            first, last = np.searchsorted(
                payments.slot, [slot + 2, min(slot + 6, (slot // world.days + 1) * world.days)]
            )
            rows = np.arange(first, last)
            fraud[rows] = TRUTH
            payments.amount[rows] = (rng.choice([19, 49, 99]) + rng.uniform(0, 1, len(rows))).round(
                2
            )

    return fraud


WORLDS: dict[str, Commit] = {"testers": testers, "nights": nights, "skimmers": skimmers}


def plain(data: Data, folder: Path) -> float:
    """Train trees on only the 15 features of the handbook, and return their AP on the pipeline's
    test weeks."""
    prepare(fraud, data, folder)
    rows = Rows(folder)
    transactions = Transactions.from_frame(pl.read_parquet(folder / "transactions.parquet"))
    pieces = list(
        features.tables(transactions, data.label_delay_days, names=features.HANDBOOK_NAMES)
    )
    # sorted like the rows of the dataset
    table = np.concatenate([piece for _, piece in pieces])
    training = (rows.times >= rows.facts.train_start) & (rows.times < rows.facts.train_end)
    sample = Sample(int(training.sum()))
    sample.add(table, rows.labels, rows.cards, training)
    boosting = sample.fit()
    later = np.zeros(len(rows), bool)
    weeks = [week.rows for week in judged_weeks(rows)]
    scores = [
        boosting.score(table[places], rows.cards[places], later[places]).astype(float)
        for places in weeks
    ]

    return fmean(
        average_precision(s, rows.labels[places]) for s, places in zip(scores, weeks, strict=True)
    )


def measure(name: str, seed: int, folder: Path, sets: list[str]) -> list[Bar]:
    """Return the AP of the model in one world as a figure, with the APs of the trees as limits."""
    source = folder / f"{name}.parquet"
    simulate(World(seed=seed, **SIZE), WORLDS[name]).rename(Columns().model_dump()).write_parquet(
        source
    )
    run = pipeline(
        str(source), str(folder / "home"), sets, config="configs/demo.yaml", test_weeks=4
    )
    model = run["metrics"]["ap"]
    trees = baseline_of(run)
    simple = plain(Data(source=str(source)), folder / name)

    return [
        bar(
            f"{name}: ap of the model (limit: ap of trees on the same features)",
            model,
            "",
            trees,
            "more",
        ),
        bar(
            f"{name}: ap of the model (limit: ap of trees on the 15 features of the handbook)",
            model,
            "",
            simple,
            "more",
        ),
    ]


def baseline_of(run: dict[str, Any]) -> float:
    """Parse the AP of the baseline from the reason text of a verdict."""
    [value] = re.findall(r"The baseline has ap (\d\.\d+)", run["reason"])
    return float(value)


def main() -> int:
    command = parser(__doc__)
    command.add_argument(
        "--world",
        choices=list(WORLDS),
        action="append",
        help="world to simulate (default: all); may be repeated",
    )

    command.add_argument(
        "--seed", type=int, default=11, help="seed of the simulated cards, payments and frauds"
    )
    command.add_argument(
        "--set", action="append", default=[], dest="sets", metavar="A.B=C", help=SET_HELP
    )
    options = command.parse_args()
    bars: list[Bar] = []

    with tempfile.TemporaryDirectory(dir=".") as name:
        # not below /tmp, because each pod has its own /tmp
        folder = Path(name).absolute()
        try:
            for world in options.world or WORLDS:
                bars += measure(world, options.seed, folder, options.sets)
        finally:
            stop_services(str(folder / "home"))

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
