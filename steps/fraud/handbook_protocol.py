"""Evaluate fraud models week by week, by the protocol of the Fraud Detection Handbook (chapter 5).

A test week starts `label_delay_days` after a reference week; training may use data up to the end of
the reference week. On each day of the test week, cards that are already known to be compromised are
excluded, that is, cards with a fraud in or after the reference week whose label is known on the
day. Metrics are means over the test weeks; all models are evaluated on the same rows.
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
from rekindle.release.bootstrap import compute_weighted_bootstrap
from rekindle.release.examples import Examples
from rekindle.release.release_files import record_predictions
from rekindle.release.watch.reference import record_reference
from rekindle.workload import read_dataset_facts
from steps.fraud.data.boosting import BOOSTED, Trees
from steps.fraud.data.features import NAMES
from steps.fraud.data.sequences import SCORED, Rows, scoring_windows
from steps.fraud.data.serving_state import State, load_trained
from steps.fraud.data.transactions import DAY, UNKNOWN, Ints, format_day
from steps.fraud.models import FraudModel, TreesModel, load, score_all
from steps.fraud.ranking import average_precision, weighted_ap

Floats = NDArray[np.float64]

WEEK = 7 * DAY
# number of windows in one forward pass
BATCH = 64
# approximate number of test rows that `verify` replays
REPLAY_ROWS = 200

# The published data of 2018: first day of each test week → (number of transactions until the end of
# the week, number of frauds among them, number of test rows, number of frauds among the test rows).
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
# upper bounds of the metrics on the published test weeks (rounded up): the metrics of an ideal
# observer, who knows the rules of the simulation
IDEAL = {"ap": 0.775, "auc": 0.900, "cp100": 0.325}


@dataclass(frozen=True)
class Week:
    """The rows of one test week that models are evaluated on."""

    # µs since the epoch
    start: int
    # ascending indices into Rows
    rows: Ints

    @property
    def name(self) -> str:
        """First day of the week."""
        return format_day(self.start)


def judged_weeks(dataset_rows: Rows) -> list[Week]:
    """Return the test weeks, oldest first. Raises DataError if a week of the published data does
    not have the published counts of rows and frauds."""
    label_delay_days = dataset_rows.facts.label_delay_days
    test_weeks = [
        Week(week_start, counted_rows(dataset_rows, week_start, label_delay_days))
        for week_start, _ in dataset_rows.facts.test_weeks
    ]
    for test_week in test_weeks:
        _verify_published(dataset_rows, test_week, label_delay_days)
    return test_weeks


def counted_rows(dataset_rows: Rows, week_start: int, delay_days: int) -> Ints:
    """Return the indices of the week's rows with known labels, without rows of cards known to be
    compromised."""
    day_numbers = (dataset_rows.times - week_start) // DAY
    reference_week_start = week_start - delay_days * DAY - WEEK
    is_earlier_fraud = (dataset_rows.labels == 1) & (dataset_rows.times >= reference_week_start)
    is_counted = np.zeros(len(dataset_rows), bool)
    for day_number in range(7):
        compromised_cards = dataset_rows.cards[
            is_earlier_fraud & (dataset_rows.times < week_start + (day_number - delay_days) * DAY)
        ]
        is_counted |= (day_numbers == day_number) & ~np.isin(
            dataset_rows.cards, np.unique(compromised_cards)
        )
    return np.flatnonzero(is_counted & (dataset_rows.labels != UNKNOWN))


def is_published(dataset_rows: Rows, test_week: Week) -> bool:
    """Return True if the rows until the end of the week match the published data in start time and
    counts."""
    if test_week.name not in PUBLISHED or dataset_rows.times.min() != PUBLISHED_FIRST:
        return False
    is_before_week_end = dataset_rows.times < test_week.start + WEEK
    return PUBLISHED[test_week.name][:2] == (
        int(is_before_week_end.sum()),
        int((dataset_rows.labels[is_before_week_end] == 1).sum()),
    )


def _verify_published(dataset_rows: Rows, test_week: Week, delay_days: int) -> None:
    if delay_days != 7 or not is_published(dataset_rows, test_week):
        return
    actual_counts = (len(test_week.rows), int(dataset_rows.labels[test_week.rows].sum()))
    expected_counts = PUBLISHED[test_week.name][2:]
    if actual_counts != expected_counts:
        raise DataError(
            f"the test week {test_week.name} of the published data has {actual_counts[0]} rows"
            f" with {actual_counts[1]} frauds, but published are {expected_counts[0]} rows with"
            f" {expected_counts[1]} frauds, so metrics are not comparable. Restore the rules of"
            " the protocol."
        )


@dataclass(frozen=True)
class Boosted:
    """The log-odds that the servers of a release compute for single transactions with their
    trees."""

    trees: Trees
    # end of training; trees score all rows after this time, also after a refresh
    train_end: int
    # ids of the last training rows of the release, ascending
    ids: Ints
    # log-odds of the rows in `ids`
    values: Floats

    @classmethod
    def load(cls, release_folder: Path) -> "Boosted":
        """Read the log-odds from a release. Raises DataError."""
        serving_state = State.load(release_folder / "state")
        trained_log_odds = load_trained(release_folder / "state")
        train_end = read_dataset_facts(release_folder).get(
            "train_end", serving_state.train_end
        )  # take train_end from the dataset's facts, since a refresh changes train_end in the state
        id_order = np.argsort(trained_log_odds["id"])
        return cls(
            serving_state.trees,
            train_end,
            trained_log_odds["id"][id_order],
            trained_log_odds["boosted"][id_order],
        )

    def replace(self, dataset_rows: Rows, row_indices: Ints, feature_windows: Tensor) -> None:
        """Replace the log-odds in the features [B, L, F] of the rows `row_indices` [B, L]."""
        # exclude rows of other cards, since a window may extend beyond its card
        is_same_card = dataset_rows.first[row_indices] == dataset_rows.first[row_indices[:, :1]]
        is_later_row = is_same_card & (dataset_rows.times[row_indices] >= self.train_end)
        id_positions = np.minimum(
            np.searchsorted(self.ids, dataset_rows.ids[row_indices]), len(self.ids) - 1
        )
        is_earlier_row = (
            is_same_card & ~is_later_row & (self.ids[id_positions] == dataset_rows.ids[row_indices])
        )
        boosted_column = dataset_rows.facts.features.index(BOOSTED)
        tree_scores = self.trees.score(
            feature_windows[torch.from_numpy(is_later_row)][:, : len(NAMES)].numpy()
        )
        feature_windows[..., boosted_column][torch.from_numpy(is_later_row)] = torch.from_numpy(
            tree_scores
        )
        feature_windows[..., boosted_column][torch.from_numpy(is_earlier_row)] = torch.from_numpy(
            self.values[id_positions[is_earlier_row]]
        )


def score(
    model: TreesModel | FraudModel,
    dataset_rows: Rows,
    row_indices: Ints,
    served_log_odds: Boosted | None = None,
) -> Floats:
    """Return the probability of fraud of each of the rows `row_indices` (ascending), equal to the
    prediction of a server.

    The dataset contains the log-odds of its own trees. For a model that was trained on another
    dataset, `served_log_odds` contains the log-odds that the model's servers compute.
    """
    window_starts, window_by_row, position_by_row = scoring_windows(dataset_rows.first, row_indices)
    feature_offsets = torch.from_numpy(dataset_rows.offsets[window_starts])
    score_table = np.empty((len(window_starts), SCORED))

    for batch_start in range(0, len(window_starts), BATCH):
        batch_slice = slice(batch_start, batch_start + BATCH)
        feature_windows = dataset_rows.windows(feature_offsets[batch_slice], SCORED)
        if served_log_odds:
            window_row_indices = np.minimum(
                window_starts[batch_slice, None] + np.arange(SCORED), len(dataset_rows) - 1
            )
            served_log_odds.replace(dataset_rows, window_row_indices, feature_windows)

        score_table[batch_slice] = score_all(model, feature_windows).numpy()

    return score_table[window_by_row, position_by_row]


class Weekly(Examples):
    """The rows of the test weeks. `index` contains the positions of these rows in the dataset at
    `path`, in ascending order."""

    def __init__(
        self, dataset_folder: Path, dataset_rows: Rows, test_weeks: list[Week], warnings: list[str]
    ) -> None:
        self.path = dataset_folder
        self.rows = dataset_rows
        self.weeks = test_weeks
        self.index = judged_rows = np.unique(
            np.concatenate([test_week.rows for test_week in test_weeks])
        )
        week_starts = [test_week.start for test_week in test_weeks]
        week_by_row = (
            np.searchsorted(week_starts, dataset_rows.times[judged_rows], side="right") - 1
        )

        super().__init__(
            truths=np.column_stack(
                [
                    dataset_rows.labels[judged_rows].astype(np.int64),
                    dataset_rows.cards[judged_rows],
                    dataset_rows.times[judged_rows] // DAY,
                ]
            ),
            groups=dataset_rows.cards[judged_rows],
            baseline=1 / (1 + np.exp(-dataset_rows.boosted(judged_rows))),
            parts=np.array([test_week.name for test_week in test_weeks])[week_by_row],
            warnings=warnings,
        )

    def score(self, model: Path, dataset: Path) -> Floats:
        """Score all rows at once, because one request for each row would have to contain thousands
        of earlier transactions."""
        loaded_model = load(model)
        is_candidate = dataset == self.path

        mismatch_sentence = _compare_features(loaded_model, self.rows)
        if mismatch_sentence:
            mismatch_message = (
                f"the candidate does not fit this dataset: {mismatch_sentence} Train on the"
                " dataset that is evaluated."
            )
            raise DataError(mismatch_message if is_candidate else mismatch_sentence)

        fraud_probabilities = score(
            loaded_model, self.rows, self.index, None if is_candidate else Boosted.load(dataset)
        )
        if not np.isfinite(fraud_probabilities).all():
            divergence_message = (
                "the candidate's scores are not numbers: its training diverged. Lower"
                " train.learning_rate."
            )
            raise DataError(
                divergence_message if is_candidate else "the scores of the model are not numbers."
            )

        return fraud_probabilities

    def report(self, out: Path, predictions: dict[str, Any], evaluation: Evaluation) -> Evaluation:
        """Write the scores, the requests that `verify` replays, and plots; return the evaluation
        with warnings."""
        from steps.fraud import pictures
        from steps.fraud.replays import replay

        fraud_labels = self.rows.labels[self.index]
        _write_scores(out / "scores.parquet", self, predictions)
        record_predictions(out, replay(self.path, out, REPLAY_ROWS, random_seed=0))
        record_reference(out, predictions["candidate"].tolist())
        pictures.draw(
            out, fraud_labels, self.rows.scenarios[self.index], predictions, evaluation.parts
        )
        fraud_counts_by_week = {
            test_week.name: int(self.rows.labels[test_week.rows].sum()) for test_week in self.weeks
        }
        evaluated_parts = [
            test_week | {"frauds": fraud_counts_by_week[test_week["name"]]}
            for test_week in evaluation.parts
        ]
        warnings = evaluation.warnings + _warn_of_leakage(self.rows, self.weeks, evaluation.metrics)
        warnings += self._warn_of_chance(
            predictions["candidate"], evaluation.metrics["candidate"]["ap"]
        )

        return replace(evaluation, parts=evaluated_parts, warnings=warnings)

    def _warn_of_chance(self, scores: Floats, candidate_ap: float) -> list[str]:
        """Return a warning if the candidate's AP is not clearly better than the AP of its scores
        after random shuffling."""
        fraud_labels = self.rows.labels[self.index]
        week_masks = [self.parts == test_week.name for test_week in self.weeks]

        def bootstrap(card_ids: Ints, resample_weights: NDArray[np.float32]) -> Floats:
            return np.mean(
                [
                    weighted_ap(
                        scores[week_mask],
                        fraud_labels[week_mask],
                        card_ids[week_mask],
                        resample_weights,
                    )
                    for week_mask in week_masks
                ],
                axis=0,
            )

        lowest_ap, highest_ap = compute_weighted_bootstrap(
            bootstrap, len(self), self.groups, Gate().resamples, Gate().confidence
        )
        random_generator: Any = np.random.default_rng(0)

        random_order_aps = [
            np.mean(
                [
                    average_precision(
                        random_generator.permutation(scores[week_mask]), fraud_labels[week_mask]
                    )
                    for week_mask in week_masks
                ]
            )
            for _ in range(RANDOM_ORDERS)
        ]
        if lowest_ap > np.mean(random_order_aps) and candidate_ap > max(random_order_aps):
            return []

        return [
            f"the candidate may be no better than chance: its ap is {candidate_ap:.4f} (interval"
            f" {lowest_ap:.4f} to {highest_ap:.4f}), and {np.mean(random_order_aps):.4f} (up to"
            f" {max(random_order_aps):.4f}) with its scores in random order. Do the labels belong"
            " to their rows (data.columns.fraud)? If so, train longer or on more data."
        ]


def open_examples(dataset_folder: Path, champion_facts: dict[str, Any] | None) -> Weekly:
    """Open the test weeks. If the facts of a champion's dataset are given, open only the weeks that
    the champion was not trained on.

    Raises DataError if no week remains.
    """
    dataset_rows = Rows(dataset_folder)
    all_weeks = judged_weeks(dataset_rows)

    judgeable_weeks = [
        test_week
        for test_week in all_weeks
        if 0 < dataset_rows.labels[test_week.rows].sum() < len(test_week.rows)
    ]
    if not judgeable_weeks:
        raise DataError(
            "no test week holds frauds and genuine transactions, so no model can be evaluated. Give"
            " more data."
        )

    warnings = [
        f"test week {test_week.name} does not contain frauds, so it does not count."
        for test_week in all_weeks
        if test_week not in judgeable_weeks
    ]
    if champion_facts is not None:
        unseen_weeks = [
            test_week
            for test_week in judgeable_weeks
            if test_week.start >= champion_facts.get("train_end", 0)
        ]
        if not unseen_weeks:
            raise DataError("the model was trained on rows of every test week.")

        if len(unseen_weeks) < len(judgeable_weeks):
            week_count_text = f"{len(unseen_weeks)} of {len(judgeable_weeks)}"
            warnings.append(
                "only the test weeks that the champion was not trained on count:"
                f" {week_count_text}."
            )

        judgeable_weeks = unseen_weeks

    return Weekly(dataset_folder, dataset_rows, judgeable_weeks, warnings)


def _compare_features(model: TreesModel | FraudModel, dataset_rows: Rows) -> str:
    model_features = model.feature_names
    dataset_features = dataset_rows.facts.features
    if model_features == dataset_features:
        return ""
    missing_features = sorted(set(model_features) - set(dataset_features))
    new_features = sorted(set(dataset_features) - set(model_features))
    difference_text = (
        f"missing: {', '.join(missing_features) or 'none'}; new:"
        f" {', '.join(new_features) or 'none'}"
    )
    return f"the features of the model and of the dataset differ ({difference_text})."


def _warn_of_leakage(
    dataset_rows: Rows, test_weeks: list[Week], metrics_by_model: dict[str, dict[str, float]]
) -> list[str]:
    warning_sentences = []
    candidate_metrics = metrics_by_model["candidate"]

    if len(test_weeks) >= 4 and all(
        is_published(dataset_rows, test_week) for test_week in test_weeks
    ):
        suspicious_metrics = [
            f"{metric_name} {candidate_metrics[metric_name]:.4f} > {metric_limit:g}"
            for metric_name, metric_limit in IDEAL.items()
            if candidate_metrics[metric_name] > metric_limit
        ]
        if suspicious_metrics:
            warning_sentences.append(
                "the candidate is better than an ideal observer of the published data"
                f" ({', '.join(suspicious_metrics)}): look for leakage."
            )

    for model_name in ("candidate", "baseline"):
        if any(
            metrics_by_model[model_name][metric_name] > metric_limit
            for metric_name, metric_limit in TOO_GOOD.items()
        ):
            metric_texts = " and ".join(
                f"{metric_name} {metrics_by_model[model_name][metric_name]:.4f}"
                for metric_name in TOO_GOOD
            )
            warning_sentences.append(
                f"the {model_name} is too good to be true ({metric_texts}): does a column contain"
                " the label, or facts from after the transaction? Check data.columns."
            )
            break

    return warning_sentences


def _write_scores(
    scores_path: Path, weekly_examples: Weekly, scores_by_model: dict[str, Floats]
) -> None:
    import polars as pl

    dataset_rows = weekly_examples.rows
    test_weeks = weekly_examples.weeks
    row_indices = np.concatenate([test_week.rows for test_week in test_weeks])
    score_positions = np.searchsorted(weekly_examples.index, row_indices)

    score_columns = {
        "id": dataset_rows.ids[row_indices],
        "week": np.repeat(
            [test_week.name for test_week in test_weeks],
            [len(test_week.rows) for test_week in test_weeks],
        ),
        "label": dataset_rows.labels[row_indices],
        "score": scores_by_model["candidate"][score_positions],
    }

    if "champion" in scores_by_model:
        score_columns["champion_score"] = scores_by_model["champion"][score_positions]

    pl.DataFrame(score_columns).write_parquet(scores_path)
