"""The metrics of the Fraud Detection Handbook (chapter 4).

AP and AUC are defined as in scikit-learn, which is not imported because the import takes longer
than the computation. CP@k is the fraction of compromised cards among the k cards that are checked
each day.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.integer[Any]]


def count_flagged(scores: Floats, labels: Ints) -> tuple[Ints, Ints]:
    """For each distinct score, highest first, return how many frauds, and how many transactions,
    have at least this score."""
    score_order = np.argsort(-scores, kind="stable")
    # True at the last position of each sequence of equal scores
    is_last_of_score = np.append(np.diff(scores[score_order]) != 0, True)
    return np.cumsum(labels[score_order], dtype=np.int64)[is_last_of_score], np.flatnonzero(
        is_last_of_score
    ) + 1


def average_precision(scores: Floats, labels: Ints) -> float:
    """Return the average precision: the sum of (increase in recall) * precision over all
    thresholds; at least one row must be a fraud."""
    fraud_counts, flagged_counts = count_flagged(scores, labels)
    return float(
        np.sum(np.diff(fraud_counts, prepend=0) * fraud_counts / flagged_counts) / fraud_counts[-1]
    )


def roc_auc(scores: Floats, labels: Ints) -> float:
    """Return the probability that a fraud has a higher score than a genuine transaction (ties count
    half); both kinds of rows must exist."""
    fraud_counts, flagged_counts = (
        np.append(0, count_column) for count_column in count_flagged(scores, labels)
    )
    return float(
        np.trapezoid(fraud_counts, flagged_counts - fraud_counts)
        / (fraud_counts[-1] * (flagged_counts[-1] - fraud_counts[-1]))
    )


def card_precision(
    scores: Floats, labels: Ints, cards: Ints, days: Ints, top_card_count: int = 100
) -> float:
    """Return CP@k, with k = `top_card_count`: the fraction of compromised cards among the k cards
    with the highest scores of a day, averaged over the days.

    The score and label of a card on a day are the maxima over the card's transactions. A
    compromised card that was checked on a day is excluded on later days. Cards with equal scores
    are ordered by card number.
    """
    compromised_cards: set[int] = set()
    daily_precisions = []

    for day in np.unique(days):
        is_today = days == day
        cards_of_day, card_index_by_row = np.unique(cards[is_today], return_inverse=True)
        card_scores = np.full(len(cards_of_day), -np.inf)
        card_labels = np.zeros(len(cards_of_day), np.int64)
        np.maximum.at(card_scores, card_index_by_row, scores[is_today])
        np.maximum.at(card_labels, card_index_by_row, labels[is_today])
        card_scores[np.isin(cards_of_day, list(compromised_cards))] = -np.inf
        flagged_card_indices = np.argsort(-card_scores, kind="stable")[:top_card_count]
        detected_cards = cards_of_day[flagged_card_indices][
            (card_labels[flagged_card_indices] == 1)
            & np.isfinite(card_scores[flagged_card_indices])
        ]
        compromised_cards.update(detected_cards.tolist())
        daily_precisions.append(len(detected_cards) / top_card_count)

    return float(np.mean(daily_precisions))


def weighted_ap(
    scores: Floats, labels: Ints, card_indices: Ints, resample_weights: NDArray[np.float32]
) -> Floats:
    """Return the average precision for each column of `resample_weights`, which contains one
    weight for each card."""
    from scipy.sparse import csr_array

    thresholds = np.unique(scores[labels == 1])
    # level 0 contains the rows with at least the highest threshold, and each further level the rows
    # between two thresholds
    threshold_level = len(thresholds) - np.searchsorted(thresholds, scores, side="right")
    matrix_shape = (len(thresholds) + 1, len(resample_weights))
    transaction_weights = (
        csr_array(
            (np.ones(len(threshold_level), np.float32), (threshold_level, card_indices)),
            matrix_shape,
        )[:-1]
        @ resample_weights
    )
    fraud_weights = (
        csr_array((labels.astype(np.float32), (threshold_level, card_indices)), matrix_shape)[:-1]
        @ resample_weights
    )
    precision = np.cumsum(fraud_weights, axis=0) / np.maximum(
        np.cumsum(transaction_weights, axis=0), 1
    )
    return (fraud_weights * precision).sum(axis=0) / np.maximum(fraud_weights.sum(axis=0), 1)
