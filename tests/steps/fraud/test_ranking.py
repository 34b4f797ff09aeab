"""Metrics agree with published definitions, and intervals distinguish differences from chance."""

import numpy as np
import pytest

from rekindle.release.bootstrap import compute_weighted_bootstrap
from steps import fraud
from steps.fraud.ranking import average_precision, card_precision, roc_auc, weighted_ap


def test_card_precision_counts_cards_and_checks_compromised_ones_once():
    #        day 0                day 1
    days = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    cards = np.array([1, 1, 2, 3, 1, 2, 3, 4])
    scores = np.array([0.1, 0.9, 0.8, 0.2, 0.99, 0.5, 0.4, 0.3])
    labels = np.array([0, 1, 0, 0, 1, 0, 1, 1])
    # on day 0, the cards 1 (fraud) and 2 are checked; on day 1, card 1 must not be checked again,
    # but the cards 2 and 3 (fraud)
    assert card_precision(scores, labels, cards, days, top_card_count=2) == pytest.approx(
        (1 / 2 + 1 / 2) / 2
    )
    # the score of a card is its highest score; card 1 would not be checked for its first
    # transaction alone
    assert card_precision(scores, labels, cards, days, top_card_count=1) == pytest.approx(
        (1 + 0) / 2
    )


def test_card_precision_counts_checks_without_a_card_as_misses():
    single_value = np.array([1])
    assert (
        card_precision(
            np.array([0.5]), single_value, single_value, np.array([0]), top_card_count=100
        )
        == 0.01
    )


def test_metrics_of_a_perfect_and_a_constant_model_have_known_values():
    generator = np.random.default_rng(0)
    labels = (generator.random(5000) < 0.05).astype(np.int64)
    cards = generator.integers(50, size=5000)
    days = np.sort(generator.integers(7, size=5000))
    truths = np.column_stack([labels, cards, days])

    perfect, blind = (
        {
            metric.name: metric.function(scores, truths)
            for metric in fraud.metrics
            if metric.function
        }
        for scores in (labels.astype(float), np.zeros(5000))
    )

    assert perfect["ap"] == perfect["auc"] == 1
    assert blind["ap"] == pytest.approx(labels.mean())
    assert blind["auc"] == 0.5


def test_ap_and_auc_equal_scikit_learn():
    from sklearn.metrics import average_precision_score, roc_auc_score

    generator = np.random.default_rng(3)
    labels = (generator.random(4000) < 0.02).astype(np.uint8)
    smooth = generator.random(4000) + 0.3 * labels
    for scores in (smooth, smooth.round(1), -smooth, np.full(4000, 0.5)):
        assert average_precision(scores, labels) == pytest.approx(
            average_precision_score(labels, scores), rel=1e-12
        )
        assert roc_auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), rel=1e-12)


def test_weighted_ap_equals_scikit_learn():
    from sklearn.metrics import average_precision_score

    generator = np.random.default_rng(1)
    n = 3000
    cards = 200
    labels = (generator.random(n) < 0.1).astype(np.int64)
    card = generator.integers(cards, size=n)
    draws = generator.integers(0, 4, size=(cards, 5)).astype(np.float32)

    smooth = generator.random(n) + 0.5 * labels
    # the expected values with and without ties
    for scores in (smooth, smooth.round(1), np.zeros(n)):
        expected = [
            average_precision_score(labels, scores, sample_weight=draws[card, k]) for k in range(5)
        ]
        np.testing.assert_allclose(weighted_ap(scores, labels, card, draws), expected, rtol=1e-5)


def test_the_interval_of_a_difference_contains_the_truth():
    from sklearn.metrics import average_precision_score

    generator = np.random.default_rng(2)
    n = 8000
    cards = 400
    labels = (generator.random(n) < 0.05).astype(np.int64)
    names = generator.integers(10**12, 10**12 + cards, size=n)
    good_scores = generator.normal(size=n) + 2 * labels
    twin = good_scores + 0.05 * generator.normal(size=n)
    bad_scores = generator.normal(size=n) + labels

    def interval(
        left_scores: np.ndarray, right_scores: np.ndarray, resamples: int
    ) -> tuple[float, float]:
        def difference(card: np.ndarray, draws: np.ndarray) -> np.ndarray:
            return weighted_ap(left_scores, labels, card, draws) - weighted_ap(
                right_scores, labels, card, draws
            )

        return compute_weighted_bootstrap(difference, n, names, resamples)

    assert interval(good_scores, good_scores, 100) == (0, 0)
    low, high = interval(good_scores, twin, 200)
    assert low < 0 < high
    truth = average_precision_score(labels, good_scores) - average_precision_score(
        labels, bad_scores
    )
    low, high = interval(good_scores, bad_scores, 200)
    assert 0 < low < truth < high
    assert interval(good_scores, bad_scores, 200) == (low, high), "a retried step must agree"
