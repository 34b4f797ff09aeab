"""The canary finds a worse candidate with the traffic that docs/serving.md requires, and accepts a
good candidate."""

from functools import cache
from math import inf
from typing import Any

import numpy as np
import pytest

from rekindle.release.serve_config import CanaryConfig
from rekindle.release.watch.canary import CHECK_COUNT
from rekindle.release.watch.judgement import (
    bound_shift_p_value,
    compute_errors_p_value,
    compute_ks_distance,
    compute_quantile,
    find_breach,
)
from rekindle.release.watch.scores import BUCKET_EDGES
from rekindle.release.watch.scrape import Buckets, VersionStats
from rekindle.serving.model_server import SECONDS_BUCKETS

CONFIG = CanaryConfig()
ALPHA = CONFIG.false_alarms / (2 * (CHECK_COUNT + 1))


def make_buckets(values: np.ndarray, bounds: tuple[float, ...]) -> Buckets:
    counts = np.searchsorted(np.sort(values), bounds, side="right")
    return {**dict(zip(bounds, map(float, counts), strict=True)), inf: float(len(values))}


@cache
def compute_shares(kind: str, bounds: tuple[float, ...], slow: float = 1) -> np.ndarray:
    """Return the share of each bucket among 100,000 latencies, scores or wrong scores."""
    draw = np.random.default_rng(0)
    if kind == "seconds":
        values = slow * draw.lognormal(-5, 0.5, 100_000)
    else:
        values = draw.beta(0.5, 3, 100_000)
    counts = make_buckets(1 - values if kind == "wrong" else values, bounds)
    return np.diff([*counts.values()], prepend=0) / 100_000


def draw_buckets(
    draw: np.random.Generator, requests: int, chances: np.ndarray, bounds: tuple[float, ...]
) -> Buckets:
    """Draw the buckets of the given number of requests."""
    counts = np.cumsum(draw.multinomial(requests, chances))
    return dict(zip([*bounds, inf], map(float, counts), strict=True))


def draw_stats(
    draw: np.random.Generator,
    requests: int,
    errors: float = 0.001,
    slow: float = 1,
    wrong: float = 0,
) -> VersionStats:
    shares_of_scores = (1 - wrong) * compute_shares(
        "scores", BUCKET_EDGES
    ) + wrong * compute_shares("wrong", BUCKET_EDGES)
    scores = {"score": draw_buckets(draw, requests, shares_of_scores, BUCKET_EDGES)}
    error_count = int(draw.binomial(requests, errors))
    return VersionStats(
        requests,
        error_count,
        0,
        draw_buckets(
            draw, requests, compute_shares("seconds", SECONDS_BUCKETS, slow), SECONDS_BUCKETS
        ),
        scores,
    )


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"errors": 0.011}, "requests failed"),
        ({"slow": 2}, "more than 1.5 times as long"),
        ({"wrong": 0.5}, "score differs by 0"),
        ({}, ""),
        ({"slow": 1.2, "wrong": 0.1}, ""),
    ],
)
@pytest.mark.parametrize("percent", [5, 25])
def test_a_hundred_canaries_reject_bad_candidates_and_accept_good_candidates(
    fault: dict[str, Any], reason: str, percent: int
) -> None:
    draw = np.random.default_rng(percent)
    # enough requests to distinguish ten errors per thousand from one error per thousand
    requests = 2 * CONFIG.requests
    champion_requests = requests * (100 - percent) // percent
    breaches = [
        find_breach(
            draw_stats(draw, requests, **fault), draw_stats(draw, champion_requests), CONFIG, ALPHA
        )
        for _ in range(100)
    ]
    assert sum(bool(text) for text in breaches) == (100 if reason else 0)
    assert all(reason in text for text in breaches)


@pytest.mark.parametrize("factor", [1.0, 1e6, 1e9, 1e302])
def test_any_number_of_requests_is_judged(factor: float) -> None:
    """The first term of the tail is too small for a float, and the tail has many terms."""
    many = (600_000 * factor, 1_000_000 * factor, 400_000 * factor, 1_000_000 * factor)
    assert compute_errors_p_value(*many) == 0


def test_few_errors_more_among_many_requests_are_not_significant() -> None:
    assert compute_errors_p_value(1001, 10**6, 1000, 10**6) > 0.4
    assert compute_errors_p_value(10**6 + 1, 10**12, 10**6, 10**12) > 0.4
    assert compute_errors_p_value(10**6 + 10**4, 10**12, 10**6, 10**12) < 1e-5


def test_the_false_alarm_rates_are_as_promised() -> None:
    draw = np.random.default_rng(1)
    errors = [
        compute_errors_p_value(draw.binomial(500, 0.02), 500, draw.binomial(4000, 0.02), 4000)
        for _ in range(2000)
    ]
    assert 0.01 < np.mean(np.array(errors) <= 0.05) <= 0.06
    assert compute_errors_p_value(5, 500, 0, 4500) == pytest.approx(
        0.1**5, rel=0.1
    )  # scipy: 9.8e-6
    bounds = tuple(np.linspace(0.01, 0.99, 99))
    pairs = [
        (make_buckets(draw.random(400), bounds), make_buckets(draw.random(900), bounds))
        for _ in range(1000)
    ]
    assert (
        np.mean(
            [bound_shift_p_value(compute_ks_distance(*pair), 400, 900, 0) <= 0.05 for pair in pairs]
        )
        <= 0.06
    )


def test_quantiles_of_buckets_approximate_the_quantiles_of_the_values() -> None:
    values = np.random.default_rng(2).lognormal(-5, 0.7, 50_000)
    for q in (0.5, 0.9, 0.99):
        assert compute_quantile(make_buckets(values, SECONDS_BUCKETS), q) == pytest.approx(
            np.quantile(values, q), rel=0.05
        )


def test_a_canary_without_traffic_is_judged_only_by_restarts() -> None:
    draw = np.random.default_rng(3)
    empty = VersionStats()
    assert (
        find_breach(empty, empty, CONFIG, ALPHA)
        == find_breach(draw_stats(draw, 10), empty, CONFIG, ALPHA)
        == ""
    )
    reason = find_breach(VersionStats(crashes=1), draw_stats(draw, 10), CONFIG, ALPHA)
    assert reason.startswith("the candidate's servers restarted 1 times")
