"""How fraud models are compared: the protocol of the Fraud Detection Handbook (chapter 5), week by week.

A test week starts `label_delay_days` after a reference week (which ends where training may end). From each of its
days, cards are left out that are already known as compromised then: those with a fraud in the reference week or
later whose label has arrived. Metrics are means over the test weeks; all of them use the same rows for every model.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rekindle.errors import DataError
from rekindle.gate import Difference, Evaluation, Gate
from rekindle.release.watch.reference import record_reference
from rekindle.workload import dataset_facts
from steps.fraud import measures
from steps.fraud.data.boosting import BOOSTED, Trees
from steps.fraud.data.features import NAMES
from steps.fraud.data.schema import DAY, UNKNOWN
from steps.fraud.data.sequences import SCORED, Rows, scoring_windows
from steps.fraud.data.state import State, trained
from steps.fraud.transformer import FraudModel, load, score_all

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

WEEK = 7 * DAY
BATCH = 64  # windows scored at once

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
        return str(np.datetime64(self.start, "us").astype("datetime64[D]"))


def judged_weeks(rows: Rows) -> list[Week]:
    """The dataset's test weeks, oldest first. Raises DataError if the published rows are not those they must be."""
    delay = rows.facts["label_delay_days"]
    weeks = [Week(start, counted_rows(rows, start, delay)) for start, _ in rows.facts["test_weeks"]]
    for week in weeks:
        _check_published(rows, week, delay)
    return weeks


def counted_rows(rows: Rows, start: int, delay_days: int) -> Ints:
    """Places of the week's rows whose label is known, without the cards known as compromised by then."""
    day = (rows.times - start) // DAY
    reference = start - delay_days * DAY - WEEK
    fraud = (rows.labels == 1) & (rows.times >= reference)
    counted = np.zeros(len(rows), bool)
    for number in range(7):
        known = rows.cards[fraud & (rows.times < start + (number - delay_days) * DAY)]
        counted |= (day == number) & ~np.isin(rows.cards, np.unique(known))
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


def evaluate(candidate: Path, champion: Path | None, dataset: Path, report: Path, gate: Gate) -> Evaluation:
    """Score the candidate (and the champion) on the test weeks; leaves scores.parquet and pictures in `report`.

    Raises DataError if the candidate does not fit the data, or no week can be judged.
    """
    from steps.fraud import pictures

    rows = Rows(dataset)
    models, served, incomparable = _models(candidate, champion, rows)
    every = judged_weeks(rows)
    weeks = [week for week in every if 0 < rows.labels[week.rows].sum() < len(week.rows)]
    if not weeks:
        raise DataError("no test week holds frauds and genuine transactions: nothing can be judged. Give more data.")
    warnings = [f"test week {week.name} has no frauds and does not count." for week in every if week not in weeks]
    if "champion" in models and champion:
        weeks, incomparable = _unseen(weeks, champion, warnings)
        if incomparable:
            del models["champion"]
    wanted = np.unique(np.concatenate([week.rows for week in weeks]))
    scores = {
        name: score(model, rows, wanted, served if name == "champion" else None) for name, model in models.items()
    }
    scores["baseline"] = 1 / (1 + np.exp(-rows.boosted(wanted)))
    if not np.isfinite(scores["candidate"]).all():
        raise DataError("the candidate's scores are not numbers: its training diverged. Lower train.learning_rate.")
    if "champion" in scores and not np.isfinite(scores["champion"]).all():
        del scores["champion"]
        incomparable = "its scores are not numbers."
    by_week = {name: [s[np.searchsorted(wanted, week.rows)] for week in weeks] for name, s in scores.items()}

    parts = [_part(rows, week, {name: by_week[name][n] for name in scores}) for n, week in enumerate(weeks)]
    means = {name: {k: float(np.mean([p[name][k] for p in parts])) for k in parts[0][name]} for name in scores}
    _write_scores(report / "scores.parquet", rows, weeks, by_week)
    record_reference(report, [float(probability) for probability in scores["candidate"]])
    pictures.draw(report, rows.labels[wanted], rows.scenarios[wanted], scores, parts)
    return Evaluation(
        metrics=means,
        rows=len(wanted),
        parts=parts,
        difference=_difference(rows, weeks, by_week, gate),
        incomparable=incomparable,
        warnings=warnings + _leakage(rows, weeks, means["candidate"]),
    )


def _models(candidate: Path, champion: Path | None, rows: Rows) -> tuple[dict[str, FraudModel], Boosted | None, str]:
    """The models by name, the log-odds that the champion serves with, and why there is no champion."""
    models = {"candidate": load(candidate)}
    if problem := _misfit(models["candidate"], rows):
        raise DataError(f"the candidate does not fit this dataset: {problem} Train on the dataset that is evaluated.")
    if champion is None:
        return models, None, ""
    try:
        loaded, served = load(champion), Boosted.load(champion)
    except DataError as error:
        return models, None, str(error)
    if problem := _misfit(loaded, rows):
        return models, None, problem
    return models | {"champion": loaded}, served, ""


def _misfit(model: FraudModel, rows: Rows) -> str:
    ours, theirs = model.feature_names, rows.facts["features"]
    if ours == theirs:
        return ""
    gone, new = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
    return f"its features are others (gone: {', '.join(gone) or 'none'}; new: {', '.join(new) or 'none'})."


def _part(rows: Rows, week: Week, scores: dict[str, Floats]) -> dict[str, Any]:
    labels, cards = rows.labels[week.rows].astype(np.int64), rows.cards[week.rows]
    days = (rows.times[week.rows] - week.start) // DAY
    counts: dict[str, Any] = {"name": week.name, "rows": len(week.rows), "frauds": int(labels.sum())}
    return counts | {name: measures.all_metrics(s, labels, cards, days) for name, s in scores.items()}


def _difference(rows: Rows, weeks: list[Week], scores: dict[str, list[Floats]], gate: Gate) -> Difference | None:
    if "champion" not in scores:
        return None
    a, b = scores["candidate"], scores["champion"]
    data = [(a[n], b[n], rows.labels[w.rows].astype(np.int64), rows.cards[w.rows]) for n, w in enumerate(weeks)]
    draws = measures.bootstrap_difference(data, gate.resamples)
    mean = np.mean([measures.average_precision(x, y) - measures.average_precision(z, y) for x, z, y, _ in data])
    low, high = np.quantile(draws, [(1 - gate.confidence) / 2, (1 + gate.confidence) / 2])
    return Difference("ap", float(mean), float(low), float(high))


def _unseen(weeks: list[Week], champion: Path, warnings: list[str]) -> tuple[list[Week], str]:
    """The weeks that the champion was not trained on, or all of them and why it cannot be compared."""
    train_end = dataset_facts(champion).get("train_end", 0)
    unseen = [week for week in weeks if week.start >= train_end]
    if not unseen:
        return weeks, "it was trained on rows of every test week."
    if len(unseen) < len(weeks):
        warnings.append(
            f"only the test weeks that the champion was not trained on count: {len(unseen)} of {len(weeks)}."
        )
    return unseen, ""


def _leakage(rows: Rows, weeks: list[Week], means: dict[str, float]) -> list[str]:
    result = []
    if len(weeks) >= 4 and all(is_published(rows, week) for week in weeks):
        high = [f"{name} {means[name]:.4f} > {limit:g}" for name, limit in IDEAL.items() if means[name] > limit]
        if high:
            result.append(f"better than an ideal observer of the published data ({', '.join(high)}): look for leakage.")
    return result


def _write_scores(path: Path, rows: Rows, weeks: list[Week], scores: dict[str, list[Floats]]) -> None:
    import polars as pl

    place = np.concatenate([week.rows for week in weeks])
    table = {"id": rows.ids[place], "week": np.repeat([w.name for w in weeks], [len(w.rows) for w in weeks])}
    table |= {"label": rows.labels[place], "score": np.concatenate(scores["candidate"])}
    if "champion" in scores:
        table["champion_score"] = np.concatenate(scores["champion"])
    path.parent.mkdir(parents=True, exist_ok=True)
    pl.DataFrame(table).write_parquet(path)
