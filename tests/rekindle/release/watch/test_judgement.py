"""A candidate that does worse is found with the traffic that docs/serving.md asks for, and a good one is left alone."""

from functools import cache
from math import inf
from typing import Any

import numpy as np
import pytest

from rekindle.release.config import CanaryConfig
from rekindle.release.watch.canary import LOOKS
from rekindle.release.watch.judgement import breach, ks_distance, more_errors, quantile, shifted
from rekindle.release.watch.scores import EDGES
from rekindle.release.watch.scrape import Buckets, Side
from rekindle.serving.server import SECONDS

RULE = CanaryConfig()
ALPHA = RULE.false_alarms / (2 * (LOOKS + 1))


def buckets(values: np.ndarray, bounds: tuple[float, ...]) -> Buckets:
    counts = np.searchsorted(np.sort(values), bounds, side="right")
    return {**dict(zip(bounds, map(float, counts), strict=True)), inf: float(len(values))}


@cache
def shares(of: str, bounds: tuple[float, ...], slow: float = 1) -> np.ndarray:
    """How many of a hundred thousand latencies, scores or wrong scores fall into each bucket, as shares."""
    draw = np.random.default_rng(0)
    values = slow * draw.lognormal(-5, 0.5, 100_000) if of == "seconds" else draw.beta(0.5, 3, 100_000)
    counts = buckets(1 - values if of == "wrong" else values, bounds)
    return np.diff([*counts.values()], prepend=0) / 100_000


def drawn(draw: np.random.Generator, requests: int, chances: np.ndarray, bounds: tuple[float, ...]) -> Buckets:
    """Buckets of that many requests: drawn at once, as each value alone would fall into one of them."""
    counts = np.cumsum(draw.multinomial(requests, chances))
    return dict(zip([*bounds, inf], map(float, counts), strict=True))


def side(draw: np.random.Generator, requests: int, errors: float = 0.001, slow: float = 1, wrong: float = 0) -> Side:
    scores = (1 - wrong) * shares("scores", EDGES) + wrong * shares("wrong", EDGES)
    seconds, shown = shares("seconds", SECONDS, slow), {"score": drawn(draw, requests, scores, EDGES)}
    return Side(requests, int(draw.binomial(requests, errors)), 0, drawn(draw, requests, seconds, SECONDS), shown)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"errors": 0.011}, "requests failed"),
        ({"slow": 2}, "more than 1.5 times as long"),
        ({"wrong": 0.5}, "score by 0"),
        ({}, ""),
        ({"slow": 1.2, "wrong": 0.1}, ""),
    ],
)
@pytest.mark.parametrize("percent", [5, 25])
def test_a_bad_candidate_is_found_in_each_of_a_hundred_canaries_and_a_good_one_in_none(
    fault: dict[str, Any], reason: str, percent: int
) -> None:
    draw = np.random.default_rng(percent)
    requests = 2 * RULE.requests  # of ten in a thousand, and one in a thousand on the other side
    others = requests * (100 - percent) // percent
    found = [breach(side(draw, requests, **fault), side(draw, others), RULE, ALPHA) for _ in range(100)]
    assert sum(bool(why) for why in found) == (100 if reason else 0)
    assert all(reason in why for why in found)


def test_tests_err_no_more_often_than_they_say() -> None:
    draw = np.random.default_rng(1)
    errors = [more_errors(draw.binomial(500, 0.02), 500, draw.binomial(4000, 0.02), 4000) for _ in range(2000)]
    assert 0.01 < np.mean(np.array(errors) <= 0.05) <= 0.06
    assert more_errors(5, 500, 0, 4500) == pytest.approx(0.1**5, rel=0.1)  # scipy: 9.8e-6
    bounds = tuple(np.linspace(0.01, 0.99, 99))
    pairs = [(buckets(draw.random(400), bounds), buckets(draw.random(900), bounds)) for _ in range(1000)]
    assert np.mean([shifted(ks_distance(*pair), 400, 900, 0) <= 0.05 for pair in pairs]) <= 0.06


def test_quantiles_are_those_of_the_values() -> None:
    values = np.random.default_rng(2).lognormal(-5, 0.7, 50_000)
    for q in (0.5, 0.9, 0.99):
        assert quantile(buckets(values, SECONDS), q) == pytest.approx(np.quantile(values, q), rel=0.05)


def test_without_traffic_nothing_is_found_but_a_server_that_ends_is() -> None:
    draw = np.random.default_rng(3)
    assert breach(Side(), Side(), RULE, ALPHA) == breach(side(draw, 10), Side(), RULE, ALPHA) == ""
    assert breach(Side(crashes=1), side(draw, 10), RULE, ALPHA).startswith("its servers ended 1 times")
