"""The metrics of the Fraud Detection Handbook (chapter 4).

AP and AUC are defined as in scikit-learn, which is not imported because that takes longer than the
computation. CP@k is the fraction of compromised cards among the k cards that are checked each day.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.integer[Any]]


def counts(scores: Floats, labels: Ints) -> tuple[Ints, Ints]:
    """For each distinct score, highest first, return how many frauds, and how many transactions,
    have at least this score."""
    order = np.argsort(-scores, kind="stable")
    # True at the last position of each sequence of equal scores
    last = np.append(np.diff(scores[order]) != 0, True)
    return np.cumsum(labels[order], dtype=np.int64)[last], np.flatnonzero(last) + 1


def average_precision(scores: Floats, labels: Ints) -> float:
    """Return the average precision: the sum of (increase in recall) * precision over all
    thresholds; at least one row must be a fraud."""
    frauds, called = counts(scores, labels)
    return float(np.sum(np.diff(frauds, prepend=0) * frauds / called) / frauds[-1])


def roc_auc(scores: Floats, labels: Ints) -> float:
    """Return the probability that a fraud has a higher score than a genuine transaction (ties count
    half); both kinds of rows must exist."""
    frauds, called = (np.append(0, column) for column in counts(scores, labels))
    return float(np.trapezoid(frauds, called - frauds) / (frauds[-1] * (called[-1] - frauds[-1])))


def card_precision(scores: Floats, labels: Ints, cards: Ints, days: Ints, top: int = 100) -> float:
    """Return CP@top: the fraction of compromised cards among the `top` cards with the highest
    scores of a day, averaged over the days.

    The score and label of a card on a day are the maxima over its transactions. A compromised card
    that was checked on a day is excluded on later days. Ties are ordered by card number.
    """
    compromised: set[int] = set()
    shares = []

    for day in np.unique(days):
        today = days == day
        names, index = np.unique(cards[today], return_inverse=True)
        score = np.full(len(names), -np.inf)
        label = np.zeros(len(names), np.int64)
        np.maximum.at(score, index, scores[today])
        np.maximum.at(label, index, labels[today])
        score[np.isin(names, list(compromised))] = -np.inf
        called = np.argsort(-score, kind="stable")[:top]
        hits = names[called][(label[called] == 1) & np.isfinite(score[called])]
        compromised.update(hits.tolist())
        shares.append(len(hits) / top)

    return float(np.mean(shares))


def weighted_ap(scores: Floats, labels: Ints, card: Ints, draws: NDArray[np.float32]) -> Floats:
    """Return the average precision for each column of `draws`, which contains one weight for each
    card."""
    from scipy.sparse import csr_array

    thresholds = np.unique(scores[labels == 1])
    # level 0: rows with at least the highest threshold; each further level: rows between two
    # thresholds
    level = len(thresholds) - np.searchsorted(thresholds, scores, side="right")
    shape = (len(thresholds) + 1, len(draws))
    every = csr_array((np.ones(len(level), np.float32), (level, card)), shape)[:-1] @ draws
    fraud = csr_array((labels.astype(np.float32), (level, card)), shape)[:-1] @ draws
    precision = np.cumsum(fraud, axis=0) / np.maximum(np.cumsum(every, axis=0), 1)
    return (fraud * precision).sum(axis=0) / np.maximum(fraud.sum(axis=0), 1)
