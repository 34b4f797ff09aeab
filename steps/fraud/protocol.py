"""How fraud models are compared: the protocol of the Fraud Detection Handbook (chapter 5), week by week.

A test week starts `label_delay_days` after a reference week (which ends where training may end). From each of its
days, cards are left out that are already known as compromised then: those with a fraud in the reference week or
later whose label has arrived. Metrics are means over the test weeks; all of them use the same rows for every model.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rekindle.errors import DataError
from rekindle.gate import Evaluation
from rekindle.release.examples import Examples
from rekindle.release.files import record_predictions
from rekindle.release.watch.reference import record_reference
from rekindle.workload import dataset_facts
from steps.fraud.data.boosting import BOOSTED, Trees
from steps.fraud.data.features import NAMES
from steps.fraud.data.schema import DAY, UNKNOWN, Ints, day
from steps.fraud.data.sequences import SCORED, Rows, scoring_windows
from steps.fraud.data.state import State, trained
from steps.fraud.transformer import FraudModel, load, score_all

Floats = NDArray[np.float64]

WEEK = 7 * DAY
BATCH = 64  # windows scored at once
REPLAYED = 200  # test rows that `verify` replays, about

# The published data, 2018: first day of a test week → (transactions, frauds) up to its end, then of its test rows.
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
# What an ideal observer who knows the simulation reaches on the published weeks, rounded up.
IDEAL = {"ap": 0.775, "auc": 0.900, "cp100": 0.325}


@dataclass(frozen=True)
class Week:
    """The rows of one test week that count."""

    start: int  # µs since the epoch
    rows: Ints  # ascending places in Rows

    @property
    def name(self) -> str:
        """Its first day."""
        return day(self.start)


def judged_weeks(rows: Rows) -> list[Week]:
    """The dataset's test weeks, oldest first. Raises DataError if the published rows are not those they must be."""
    delay = rows.facts["label_delay_days"]
    weeks = [Week(start, counted_rows(rows, start, delay)) for start, _ in rows.facts["test_weeks"]]
    for week in weeks:
        _check_published(rows, week, delay)
    return weeks


def counted_rows(rows: Rows, start: int, delay_days: int) -> Ints:
    """Places of the week's rows whose label is known, without the cards known as compromised by then."""
    number_of_day = (rows.times - start) // DAY
    reference = start - delay_days * DAY - WEEK
    fraud = (rows.labels == 1) & (rows.times >= reference)
    counted = np.zeros(len(rows), bool)
    for number in range(7):
        known = rows.cards[fraud & (rows.times < start + (number - delay_days) * DAY)]
        counted |= (number_of_day == number) & ~np.isin(rows.cards, np.unique(known))
    return np.flatnonzero(counted & (rows.labels != UNKNOWN))


def is_published(rows: Rows, week: Week) -> bool:
    """Whether the rows up to the end of the week are those of the published data."""
    if week.name not in PUBLISHED or rows.times.min() != PUBLISHED_FIRST:
        return False
    before = rows.times < week.start + WEEK
    return PUBLISHED[week.name][:2] == (int(before.sum()), int((rows.labels[before] == 1).sum()))


def _check_published(rows: Rows, week: Week, delay_days: int) -> None:
    if delay_days != 7 or not is_published(rows, week):
        return
    actual = (len(week.rows), int(rows.labels[week.rows].sum()))
    expected = PUBLISHED[week.name][2:]
    if actual != expected:
        raise DataError(
            f"the test week {week.name} of the published data has {actual[0]} rows with {actual[1]} frauds: it must "
            f"have {expected[0]} with {expected[1]}, or figures cannot be compared. Was the protocol changed?"
        )


@dataclass(frozen=True)
class Boosted:
    """The log-odds that the servers of a release have of single transactions: those of the trees that it has."""

    trees: Trees
    train_end: int  # the trees score rows from then on, whatever was refreshed since
    ids: Ints  # ascending: the last rows of its training
    values: Floats  # their log-odds

    @classmethod
    def load(cls, release: Path) -> "Boosted":
        """Read a release's own. Raises DataError."""
        state, known = State.load(release / "state"), trained(release / "state")
        train_end = dataset_facts(release).get("train_end", state.train_end)  # a refresh moves that of the state
        order = np.argsort(known["id"])
        return cls(state.trees, train_end, known["id"][order], known["boosted"][order])

    def replace(self, rows: Rows, index: Ints, features: Tensor) -> None:
        """Write them into the features [B, L, F] of the rows `index` [B, L]."""
        own = rows.first[index] == rows.first[index[:, :1]]  # the rest of a window is another card's
        later = own & (rows.times[index] >= self.train_end)
        place = np.minimum(np.searchsorted(self.ids, rows.ids[index]), len(self.ids) - 1)
        earlier = own & ~later & (self.ids[place] == rows.ids[index])
        column = rows.facts["features"].index(BOOSTED)
        scores = self.trees.score(features[torch.from_numpy(later)][:, : len(NAMES)].numpy())
        features[..., column][torch.from_numpy(later)] = torch.from_numpy(scores)
        features[..., column][torch.from_numpy(earlier)] = torch.from_numpy(self.values[place[earlier]])


def score(model: FraudModel, rows: Rows, wanted: Ints, served: Boosted | None = None) -> Floats:
    """Return the probability of fraud of each of the rows `wanted` (ascending places), as a server would.

    The dataset has the log-odds of its own trees; a model of another dataset serves with those in `served`.
    """
    starts, window, position = scoring_windows(rows.first, wanted)
    place = torch.from_numpy(rows.place[starts])
    table = np.empty((len(starts), SCORED))
    for at in range(0, len(starts), BATCH):
        features = rows.windows(place[at : at + BATCH], SCORED)
        if served:
            index = np.minimum(starts[at : at + BATCH, None] + np.arange(SCORED), len(rows) - 1)
            served.replace(rows, index, features)
        table[at : at + BATCH] = score_all(model, features).numpy()
    return table[window, position]


class Weekly(Examples):
    """The rows of the test weeks, at the places `wanted` (ascending) of the dataset in `path`."""

    def __init__(self, path: Path, rows: Rows, weeks: list[Week], warnings: list[str]) -> None:
        self.path, self.rows, self.weeks = path, rows, weeks
        self.wanted = wanted = np.unique(np.concatenate([week.rows for week in weeks]))
        week = np.searchsorted([week.start for week in weeks], rows.times[wanted], side="right") - 1
        super().__init__(
            truths=np.column_stack(
                [rows.labels[wanted].astype(np.int64), rows.cards[wanted], rows.times[wanted] // DAY]
            ),
            groups=rows.cards[wanted],
            baseline=1 / (1 + np.exp(-rows.boosted(wanted))),
            parts=np.array([week.name for week in weeks])[week],
            warnings=warnings,
        )

    def score(self, model: Path, origin: Path) -> Floats:
        """All rows at once: a request for each would hold thousands of transactions of the past."""
        loaded, fresh = load(model), origin == self.path
        if problem := _misfit(loaded, self.rows):
            does_not_fit = f"the candidate does not fit this dataset: {problem} Train on the dataset that is evaluated."
            raise DataError(does_not_fit if fresh else problem)
        scores = score(loaded, self.rows, self.wanted, None if fresh else Boosted.load(origin))
        if not np.isfinite(scores).all():
            diverged = "the candidate's scores are not numbers: its training diverged. Lower train.learning_rate."
            raise DataError(diverged if fresh else "its scores are not numbers.")
        return scores

    def report(self, out: Path, predictions: dict[str, Any], evaluation: Evaluation) -> Evaluation:
        """Leaves the scores, requests with the past that they need, and pictures."""
        from steps.fraud import pictures
        from steps.fraud.replays import replay

        labels = self.rows.labels[self.wanted]
        _write_scores(out / "scores.parquet", self, predictions)
        record_predictions(out, replay(self.path, out, REPLAYED, seed=0))
        record_reference(out, predictions["candidate"].tolist())
        pictures.draw(out, labels, self.rows.scenarios[self.wanted], predictions, evaluation.parts)
        frauds = {week.name: int(self.rows.labels[week.rows].sum()) for week in self.weeks}
        parts = [part | {"frauds": frauds[part["name"]]} for part in evaluation.parts]
        warnings = evaluation.warnings + _leakage(self.rows, self.weeks, evaluation.metrics["candidate"])
        return replace(evaluation, parts=parts, warnings=warnings)


def open_examples(path: Path, champion: dict[str, Any] | None) -> Weekly:
    """The rows of the test weeks; with the facts of a champion's dataset, of those that it was not trained on.

    Raises DataError if no week can be judged.
    """
    rows = Rows(path)
    every = judged_weeks(rows)
    weeks = [week for week in every if 0 < rows.labels[week.rows].sum() < len(week.rows)]
    if not weeks:
        raise DataError("no test week holds frauds and genuine transactions: nothing can be judged. Give more data.")
    warnings = [f"test week {week.name} has no frauds and does not count." for week in every if week not in weeks]
    if champion is not None:
        unseen = [week for week in weeks if week.start >= champion.get("train_end", 0)]
        if not unseen:
            raise DataError("it was trained on rows of every test week.")
        if len(unseen) < len(weeks):
            counted = f"{len(unseen)} of {len(weeks)}"
            warnings.append(f"only the test weeks that the champion was not trained on count: {counted}.")
        weeks = unseen
    return Weekly(path, rows, weeks, warnings)


def _misfit(model: FraudModel, rows: Rows) -> str:
    ours, theirs = model.feature_names, rows.facts["features"]
    if ours == theirs:
        return ""
    gone, new = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
    return f"its features are others (gone: {', '.join(gone) or 'none'}; new: {', '.join(new) or 'none'})."


def _leakage(rows: Rows, weeks: list[Week], means: dict[str, float]) -> list[str]:
    result = []
    if len(weeks) >= 4 and all(is_published(rows, week) for week in weeks):
        high = [f"{name} {means[name]:.4f} > {limit:g}" for name, limit in IDEAL.items() if means[name] > limit]
        if high:
            result.append(f"better than an ideal observer of the published data ({', '.join(high)}): look for leakage.")
    return result


def _write_scores(path: Path, examples: Weekly, scores: dict[str, Floats]) -> None:
    import polars as pl

    rows, weeks = examples.rows, examples.weeks
    place = np.concatenate([week.rows for week in weeks])
    among = np.searchsorted(examples.wanted, place)
    table = {"id": rows.ids[place], "week": np.repeat([w.name for w in weeks], [len(w.rows) for w in weeks])}
    table |= {"label": rows.labels[place], "score": scores["candidate"][among]}
    if "champion" in scores:
        table["champion_score"] = scores["champion"][among]
    pl.DataFrame(table).write_parquet(path)
