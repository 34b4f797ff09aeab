"""Statistical tests of whether the candidate is worse than the champion in its errors, response
times or predictions.

Each test has a tolerance, so that irrelevant differences do not become significant with more
traffic, and needs only the data of `/metrics`. Over all checks and tests, the probability of
rejecting a good candidate is at most serve.canary.false_alarms, since each test gets a part of this
probability as its `alpha` (Bonferroni correction).
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import exp, inf, lgamma, log

from rekindle.release.serve_config import CanaryConfig
from rekindle.release.watch.scrape import Buckets, VersionStats

QUANTILES = (0.5, 0.9)  # quantiles of the response time that are tested
MAX_EXACT_REQUESTS = 10**9  # limits the exact test to about 100,000 terms
TEST_KINDS = 3  # number of kinds of tests: errors, response times, prediction scores


def find_breach(
    candidate: VersionStats, champion: VersionStats, config: CanaryConfig, alpha: float
) -> str:
    """Return a sentence that says, with figures, in what the candidate is worse; "" if it is not
    worse.

    `alpha`: significance level of this check.
    """
    if candidate.crashes > champion.crashes:
        return (
            f"the candidate's servers restarted {candidate.crashes} times, the champion's"
            f" {champion.crashes} times"
        )
    return next(_find_breaches(candidate, champion, config, alpha / TEST_KINDS), "")


def _find_breaches(
    candidate: VersionStats, champion: VersionStats, config: CanaryConfig, alpha: float
) -> Iterator[str]:
    p_value = compute_errors_p_value(
        candidate.errors, candidate.requests, champion.errors, champion.requests
    )
    if p_value <= alpha:
        yield (
            f"{candidate.errors:g} of the candidate's {candidate.requests:g} requests failed, of"
            f" the champion's {champion.errors:g} of {champion.requests:g}"
        )

    for q in QUANTILES:
        if is_slower(candidate.seconds, champion.seconds, q, config.slower, alpha / len(QUANTILES)):
            candidate_milliseconds, champion_milliseconds = (
                1000 * compute_quantile(stats.seconds, q) for stats in (candidate, champion)
            )
            yield (
                f"{q:.0%} of the candidate's answers take up to {candidate_milliseconds:.3g} ms,"
                f" the champion's {champion_milliseconds:.3g} ms: more than {config.slower:g} times"
                " as long"
            )

    for output in sorted(candidate.scores.keys() | champion.scores.keys()):
        candidate_scores, champion_scores = (
            stats.scores.get(output, {}) for stats in (candidate, champion)
        )
        n = min(candidate.requests, count_values(candidate_scores))
        m = min(champion.requests, count_values(champion_scores))

        distance = compute_ks_distance(candidate_scores, champion_scores)
        if bound_shift_p_value(distance, n, m, config.score_shift) <= alpha / len(
            candidate.scores | champion.scores
        ):
            yield (
                f"the candidate's predictions have another distribution: {output} differs by"
                f" {distance:.2f} (Kolmogorov-Smirnov), more than {config.score_shift:g}"
            )


def compute_errors_p_value(
    errors: float, requests: float, other_errors: float, other_requests: float
) -> float:
    """Return the probability that the candidate has at least `errors` errors if its error rate
    equals the champion's.

    Source: Fisher's exact test, one-sided: the tail of the hypergeometric distribution (Agresti,
    Categorical Data Analysis, 3.5.1). For more than MAX_EXACT_REQUESTS, the result is the Chernoff
    bound of this tail, which is not smaller (Hoeffding 1963, Theorems 1 and 4).
    """
    n = round(requests)
    total = n + round(other_requests)
    total_errors = round(errors) + round(other_errors)

    k = round(errors)
    if not n or not other_requests or k * total <= total_errors * n:
        return 1.0

    if total > MAX_EXACT_REQUESTS:
        return exp(-n * _compute_divergence(k / n, total_errors / total))

    log_all = _compute_log_choices(total, n)
    probability = 0.0

    for number in range(k, min(n, total_errors) + 1):
        term = exp(
            _compute_log_choices(total_errors, number)
            + _compute_log_choices(total - total_errors, n - number)
            - log_all
        )
        probability += term
        # stop early, since the terms only decrease; a first term that underflows to 0 also ends the
        # loop
        if term <= 1e-9 * probability:
            break

    return min(1.0, probability)


def is_slower(candidate: Buckets, champion: Buckets, q: float, ratio: float, alpha: float) -> bool:
    """Return True if the candidate's quantile `q` is significantly above `ratio` times the
    champion's quantile.

    The test takes the upper confidence bound of the champion's quantile, and tests the share of the
    candidate's values above it. Both steps use the Chernoff bound of the binomial distribution
    (Hoeffding 1963, Theorem 1), each at the level alpha / 2.
    """
    n = count_values(candidate)

    m = count_values(champion)
    if not n or not m or (upper_quantile := _bound_share(q, log(2 / alpha) / m)) >= 1:
        return False

    share_below = _compute_share_below(
        candidate, ratio * compute_quantile(champion, upper_quantile)
    )
    return share_below < q and n * _compute_divergence(share_below, q) >= log(2 / alpha)


def bound_shift_p_value(distance: float, n: float, m: float, tolerance: float) -> float:
    """Return an upper bound of the probability of a Kolmogorov-Smirnov distance of at least
    `distance` between samples of n and m values if the distance of their distributions is at most
    `tolerance`.

    The bound follows from the two-sample Dvoretzky-Kiefer-Wolfowitz inequality (Wei and Dudley
    2012). The instances of a request are not independent, so n and m must not exceed the numbers of
    requests. The rounding of values to buckets can only reduce the distance.
    """
    if not n or not m or distance <= tolerance:
        return 1.0
    return min(1.0, 2 * exp(-2 * (distance - tolerance) ** 2 * n * m / (n + m)))


def compute_ks_distance(a: Buckets, b: Buckets) -> float:
    """Return the Kolmogorov-Smirnov distance: the largest difference of two cumulative
    distributions at the bounds of the buckets."""
    n = count_values(a)
    m = count_values(b)
    if not n or not m:
        return float(bool(n or m))  # 1 if only one version has this output, 0 if none has
    return max(abs(a.get(bound, 0) / n - b.get(bound, 0) / m) for bound in {**a, **b})


def compute_quantile(buckets: Buckets, q: float) -> float:
    """Return the quantile `q`, interpolated linearly within a bucket."""
    rank = q * count_values(buckets)
    for (low, count_low), (high, count_high) in pairwise([(0.0, 0.0), *sorted(buckets.items())]):
        if count_high >= rank and count_high > count_low:
            if high == inf:
                return low
            return low + (high - low) * (rank - count_low) / (count_high - count_low)
    return 0.0


def count_values(buckets: Buckets) -> float:
    return buckets.get(inf, 0)


def _compute_share_below(buckets: Buckets, value: float) -> float:
    """Return the share of a histogram's values that are below `value`."""
    bounds: Sequence[tuple[float, float]] = [(0.0, 0.0), *sorted(buckets.items())]
    for (low, count_low), (high, count_high) in pairwise(bounds):
        if value < high:
            if high == inf:
                count_inside = 0.0
            else:
                count_inside = (count_high - count_low) * (value - low) / (high - low)
            return (count_low + count_inside) / count_values(buckets)
    return 1.0


def _bound_share(q: float, rate: float) -> float:
    """Return the upper confidence bound of the share `q`: the larger share whose Kullback-Leibler
    divergence from `q` is `rate`."""
    low = q
    high = 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _compute_divergence(middle, q) < rate else (low, middle)
    return high


def _compute_divergence(p: float, q: float) -> float:
    """Return the Kullback-Leibler divergence of two Bernoulli distributions."""
    return sum(a * log(a / b) for a, b in ((p, q), (1 - p, 1 - q)) if a > 0)


def _compute_log_choices(n: int, k: int) -> float:
    if 0 <= k <= n:
        return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)
    return -inf
