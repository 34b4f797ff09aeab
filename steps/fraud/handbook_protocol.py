"""Evaluate fraud models week by week, by the protocol of the Fraud Detection Handbook (chapter 5).

A test week starts `label_delay_days` after a reference week; training may use data up to the end of
the reference week. On each day of the test week, cards that are already known to be compromised are
excluded: those with a fraud in or after the reference week whose label is known by then. Metrics
are means over the test weeks; all models are evaluated on the same rows.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rekindle.errors import DataError
from rekindle.gate import Evaluation, Gate
from rekindle.release.bootstrap import weighted_bootstrap
from rekindle.release.examples import Examples
from rekindle.release.release_files import record_predictions
from rekindle.release.watch.reference import record_reference
from rekindle.workload import dataset_facts
from steps.fraud.data.boosting import BOOSTED, Trees
from steps.fraud.data.features import NAMES
from steps.fraud.data.sequences import SCORED, Rows, scoring_windows
from steps.fraud.data.serving_state import State, load_trained
from steps.fraud.data.transactions import DAY, UNKNOWN, Ints, format_day
from steps.fraud.models import FraudModel, TreesModel, load, score_all
from steps.fraud.ranking import average_precision, weighted_ap

Floats = NDArray[np.float64]

WEEK = 7 * DAY
BATCH = 64  # windows per forward pass
REPLAY_ROWS = 200  # approximate number of test rows that `verify` replays

# The published data of 2018: first day of each test week → (number of transactions until the end of
# the week, number of frauds among them, number of test rows, number of frauds among these).
PUBLISHED_FIRST = 1_522_540_831_000_000
PUBLISHED = {
    "2018-07-04": (968_731, 7_698, 57_182, 416),
    "2018-07-11": (1_035_659, 8_331, 57_800, 411),
    "2018-07-18": (1_102_483, 8_867, 57_931, 351),
    "2018-07-25": (1_169_723, 9_465, 58_505, 374),
    "2018-08-08": (1_303_778, 10_659, 58_264, 385),
    "2018-08-15": (1_370_827, 11_253, 57_937, 387),
    "2018-08-22": (1_437_958, 11_857, 58_337, 408),
    "2018-08-29": (1_504_628, 12_484, 57_604, 422),
}
# limits above which metrics are implausible for real card payments
TOO_GOOD = {"ap": 0.97, "auc": 0.997}
# number of random orders; the AP in a further random order exceeds the maximum of 39 with a
# probability of 2.5%
RANDOM_ORDERS = 39
# upper bounds of the metrics on the published test weeks, reached by an observer who knows the
# rules of the simulation (rounded up)
IDEAL = {"ap": 0.775, "auc": 0.900, "cp100": 0.325}


@dataclass(frozen=True)
class Week:
    """The rows of one test week that models are evaluated on."""

    start: int  # µs since the epoch
    rows: Ints  # ascending indices into Rows

    @property
    def name(self) -> str:
        """First day of the week."""
        return format_day(self.start)


def judged_weeks(rows: Rows) -> list[Week]:
    """Return the test weeks, oldest first. Raises DataError if a week of the published data does
    not have the published counts of rows and frauds."""
    delay = rows.facts.label_delay_days
    weeks = [Week(start, counted_rows(rows, start, delay)) for start, _ in rows.facts.test_weeks]
    for week in weeks:
        _verify_published(rows, week, delay)
    return weeks


def counted_rows(rows: Rows, start: int, delay_days: int) -> Ints:
    """Return the indices of the week's rows with known labels, without rows of cards known to be
    compromised."""
    number_of_day = (rows.times - start) // DAY
    reference = start - delay_days * DAY - WEEK
    fraud = (rows.labels == 1) & (rows.times >= reference)
    counted = np.zeros(len(rows), bool)
    for number in range(7):
        compromised = rows.cards[fraud & (rows.times < start + (number - delay_days) * DAY)]
        counted |= (number_of_day == number) & ~np.isin(rows.cards, np.unique(compromised))
    return np.flatnonzero(counted & (rows.labels != UNKNOWN))


def is_published(rows: Rows, week: Week) -> bool:
    """Return True if the rows until the end of the week match the published data in start time and
    counts."""
    if week.name not in PUBLISHED or rows.times.min() != PUBLISHED_FIRST:
        return False
    in_time = rows.times < week.start + WEEK
    return PUBLISHED[week.name][:2] == (int(in_time.sum()), int((rows.labels[in_time] == 1).sum()))


def _verify_published(rows: Rows, week: Week, delay_days: int) -> None:
    if delay_days != 7 or not is_published(rows, week):
        return
    actual = (len(week.rows), int(rows.labels[week.rows].sum()))
    expected = PUBLISHED[week.name][2:]
    if actual != expected:
        raise DataError(
            f"the test week {week.name} of the published data has {actual[0]} rows with {actual[1]}"
            f" frauds, but published are {expected[0]} rows with {expected[1]} frauds, so metrics"
            " are not comparable. Restore the rules of the protocol."
        )


@dataclass(frozen=True)
class Boosted:
    """The log-odds that the trees in the servers of a release give to single transactions."""

    trees: Trees
    train_end: int  # end of training; trees score all later rows, also after a refresh
    ids: Ints  # ids of the last training rows of the release, ascending
    values: Floats  # log-odds of the rows in `ids`

    @classmethod
    def load(cls, release: Path) -> "Boosted":
        """Read the log-odds from a release. Raises DataError."""
        state = State.load(release / "state")
        log_odds = load_trained(release / "state")
        train_end = dataset_facts(release).get(
            "train_end", state.train_end
        )  # take train_end from the dataset's facts, since a refresh changes train_end in the state
        order = np.argsort(log_odds["id"])
        return cls(state.trees, train_end, log_odds["id"][order], log_odds["boosted"][order])

    def replace(self, rows: Rows, index: Ints, features: Tensor) -> None:
        """Replace the log-odds in the features [B, L, F] of the rows `index` [B, L]."""
        # exclude rows of other cards, since a window may extend beyond its card
        same_card = rows.first[index] == rows.first[index[:, :1]]
        later = same_card & (rows.times[index] >= self.train_end)
        position = np.minimum(np.searchsorted(self.ids, rows.ids[index]), len(self.ids) - 1)
        earlier = same_card & ~later & (self.ids[position] == rows.ids[index])
        column = rows.facts.features.index(BOOSTED)
        scores = self.trees.score(features[torch.from_numpy(later)][:, : len(NAMES)].numpy())
        features[..., column][torch.from_numpy(later)] = torch.from_numpy(scores)
        features[..., column][torch.from_numpy(earlier)] = torch.from_numpy(
            self.values[position[earlier]]
        )


def score(
    model: TreesModel | FraudModel, rows: Rows, index: Ints, served: Boosted | None = None
) -> Floats:
    """Return the probability of fraud of each of the rows `index` (ascending), as a server would.

    The dataset contains the log-odds of its own trees. For a model of another dataset, `served`
    provides the log-odds that its servers compute.
    """
    starts, window, position = scoring_windows(rows.first, index)
    offset = torch.from_numpy(rows.offsets[starts])
    table = np.empty((len(starts), SCORED))

    for first in range(0, len(starts), BATCH):
        batch = slice(first, first + BATCH)
        features = rows.windows(offset[batch], SCORED)
        if served:
            positions = np.minimum(starts[batch, None] + np.arange(SCORED), len(rows) - 1)
            served.replace(rows, positions, features)

        table[batch] = score_all(model, features).numpy()

    return table[window, position]


class Weekly(Examples):
    """Rows of the test weeks: those at the positions `index` (ascending) in the dataset at
    `path`."""

    def __init__(self, path: Path, rows: Rows, weeks: list[Week], warnings: list[str]) -> None:
        self.path = path
        self.rows = rows
        self.weeks = weeks
        self.index = index = np.unique(np.concatenate([week.rows for week in weeks]))
        week = np.searchsorted([week.start for week in weeks], rows.times[index], side="right") - 1

        super().__init__(
            truths=np.column_stack(
                [rows.labels[index].astype(np.int64), rows.cards[index], rows.times[index] // DAY]
            ),
            groups=rows.cards[index],
            baseline=1 / (1 + np.exp(-rows.boosted(index))),
            parts=np.array([week.name for week in weeks])[week],
            warnings=warnings,
        )

    def score(self, model: Path, dataset: Path) -> Floats:
        """Score all rows at once, because one request for each row would have to contain thousands
        of earlier transactions."""
        loaded = load(model)
        is_candidate = dataset == self.path

        problem = _compare_features(loaded, self.rows)
        if problem:
            does_not_fit = (
                f"the candidate does not fit this dataset: {problem} Train on the dataset that is"
                " evaluated."
            )
            raise DataError(does_not_fit if is_candidate else problem)

        scores = score(
            loaded, self.rows, self.index, None if is_candidate else Boosted.load(dataset)
        )
        if not np.isfinite(scores).all():
            diverged = (
                "the candidate's scores are not numbers: its training diverged. Lower"
                " train.learning_rate."
            )
            raise DataError(
                diverged if is_candidate else "the scores of the model are not numbers."
            )

        return scores

    def report(self, out: Path, predictions: dict[str, Any], evaluation: Evaluation) -> Evaluation:
        """Write the scores, the requests that `verify` replays, and plots; return the evaluation
        with warnings."""
        from steps.fraud import pictures
        from steps.fraud.replays import replay

        labels = self.rows.labels[self.index]
        _write_scores(out / "scores.parquet", self, predictions)
        record_predictions(out, replay(self.path, out, REPLAY_ROWS, seed=0))
        record_reference(out, predictions["candidate"].tolist())
        pictures.draw(out, labels, self.rows.scenarios[self.index], predictions, evaluation.parts)
        frauds = {week.name: int(self.rows.labels[week.rows].sum()) for week in self.weeks}
        parts = [week | {"frauds": frauds[week["name"]]} for week in evaluation.parts]
        warnings = evaluation.warnings + _warn_of_leakage(self.rows, self.weeks, evaluation.metrics)
        warnings += self._warn_of_chance(
            predictions["candidate"], evaluation.metrics["candidate"]["ap"]
        )

        return replace(evaluation, parts=parts, warnings=warnings)

    def _warn_of_chance(self, scores: Floats, ap: float) -> list[str]:
        """Return a warning if the candidate's AP is not clearly better than the AP of its scores
        after random shuffling."""
        labels = self.rows.labels[self.index]
        weeks = [self.parts == week.name for week in self.weeks]

        def bootstrap(card: Ints, draws: NDArray[np.float32]) -> Floats:
            return np.mean(
                [weighted_ap(scores[rows], labels[rows], card[rows], draws) for rows in weeks],
                axis=0,
            )

        low, high = weighted_bootstrap(
            bootstrap, len(self), self.groups, Gate().resamples, Gate().confidence
        )
        random: Any = np.random.default_rng(0)

        chance = [
            np.mean(
                [
                    average_precision(random.permutation(scores[rows]), labels[rows])
                    for rows in weeks
                ]
            )
            for _ in range(RANDOM_ORDERS)
        ]
        if low > np.mean(chance) and ap > max(chance):
            return []

        return [
            f"the candidate may be no better than chance: its ap is {ap:.4f} (interval {low:.4f} to"
            f" {high:.4f}), and {np.mean(chance):.4f} (up to {max(chance):.4f}) with its scores in"
            " random order. Do the labels belong to their rows (data.columns.fraud)? If so, train"
            " longer or on more data."
        ]


def open_examples(path: Path, champion: dict[str, Any] | None) -> Weekly:
    """Open the test weeks; if the facts of a champion's dataset are given, only the weeks that the
    champion was not trained on.

    Raises DataError if no week remains.
    """
    rows = Rows(path)
    all_weeks = judged_weeks(rows)

    weeks = [week for week in all_weeks if 0 < rows.labels[week.rows].sum() < len(week.rows)]
    if not weeks:
        raise DataError(
            "no test week holds frauds and genuine transactions, so no model can be evaluated. Give"
            " more data."
        )

    warnings = [
        f"test week {week.name} does not contain frauds, so it does not count."
        for week in all_weeks
        if week not in weeks
    ]
    if champion is not None:
        unseen = [week for week in weeks if week.start >= champion.get("train_end", 0)]
        if not unseen:
            raise DataError("the model was trained on rows of every test week.")

        if len(unseen) < len(weeks):
            counted = f"{len(unseen)} of {len(weeks)}"
            warnings.append(
                f"only the test weeks that the champion was not trained on count: {counted}."
            )

        weeks = unseen

    return Weekly(path, rows, weeks, warnings)


def _compare_features(model: TreesModel | FraudModel, rows: Rows) -> str:
    of_model = model.feature_names
    of_data = rows.facts.features
    if of_model == of_data:
        return ""
    missing = sorted(set(of_model) - set(of_data))
    new = sorted(set(of_data) - set(of_model))
    names = f"missing: {', '.join(missing) or 'none'}; new: {', '.join(new) or 'none'}"
    return f"the features of the model and of the dataset differ ({names})."


def _warn_of_leakage(
    rows: Rows, weeks: list[Week], metrics: dict[str, dict[str, float]]
) -> list[str]:
    result = []
    means = metrics["candidate"]

    if len(weeks) >= 4 and all(is_published(rows, week) for week in weeks):
        high = [
            f"{name} {means[name]:.4f} > {limit:g}"
            for name, limit in IDEAL.items()
            if means[name] > limit
        ]
        if high:
            result.append(
                "the candidate is better than an ideal observer of the published data"
                f" ({', '.join(high)}): look for leakage."
            )

    for model in ("candidate", "baseline"):
        if any(metrics[model][name] > limit for name, limit in TOO_GOOD.items()):
            figures = " and ".join(f"{name} {metrics[model][name]:.4f}" for name in TOO_GOOD)
            result.append(
                f"the {model} is too good to be true ({figures}): does a column contain the label,"
                " or facts from after the transaction? Check data.columns."
            )
            break

    return result


def _write_scores(path: Path, examples: Weekly, scores: dict[str, Floats]) -> None:
    import polars as pl

    rows = examples.rows
    weeks = examples.weeks
    index = np.concatenate([week.rows for week in weeks])
    position = np.searchsorted(examples.index, index)

    table = {
        "id": rows.ids[index],
        "week": np.repeat([w.name for w in weeks], [len(w.rows) for w in weeks]),
        "label": rows.labels[index],
        "score": scores["candidate"][position],
    }

    if "champion" in scores:
        table["champion_score"] = scores["champion"][position]

    pl.DataFrame(table).write_parquet(path)
