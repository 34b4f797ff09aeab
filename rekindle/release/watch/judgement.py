"""Statistical tests that decide whether the candidate is worse than the champion in its errors,
response times or predictions.

Each test has a tolerance, so that irrelevant differences do not become significant with more
traffic, and needs only the data of `/metrics`. Each test gets a part of serve.canary.false_alarms
as its significance level `alpha` (Bonferroni correction). Over all checks of a canary, the
probability that any test rejects a good candidate is therefore at most serve.canary.false_alarms.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import exp, inf, lgamma, log

from rekindle.release.serve_config import CanaryConfig
from rekindle.release.watch.scrape import Buckets, VersionStats

# quantiles of the response time that are tested
QUANTILES = (0.5, 0.9)
# maximum number of requests for the exact test, so that the test has at most about 100,000 terms
MAX_EXACT_REQUESTS = 10**9
# number of kinds of tests: errors, response times, prediction scores
TEST_KIND_COUNT = 3


def find_breach(
    candidate_stats: VersionStats,
    champion_stats: VersionStats,
    canary_config: CanaryConfig,
    alpha: float,
) -> str:
    """Return a sentence that says, with numbers, in which way the candidate is worse; "" if the
    candidate is not worse.

    `alpha`: significance level of the check.
    """
    if candidate_stats.crashes > champion_stats.crashes:
        return (
            f"the candidate's servers restarted {candidate_stats.crashes} times, the champion's"
            f" {champion_stats.crashes} times"
        )
    return next(
        _find_breaches(candidate_stats, champion_stats, canary_config, alpha / TEST_KIND_COUNT), ""
    )


def _find_breaches(
    candidate_stats: VersionStats,
    champion_stats: VersionStats,
    canary_config: CanaryConfig,
    alpha: float,
) -> Iterator[str]:
    p_value = compute_errors_p_value(
        candidate_stats.errors,
        candidate_stats.requests,
        champion_stats.errors,
        champion_stats.requests,
    )
    if p_value <= alpha:
        yield (
            f"{candidate_stats.errors:g} of the candidate's {candidate_stats.requests:g} requests"
            f" failed, of the champion's {champion_stats.errors:g} of {champion_stats.requests:g}"
        )

    for q in QUANTILES:
        if is_slower(
            candidate_stats.seconds,
            champion_stats.seconds,
            q,
            canary_config.slower,
            alpha / len(QUANTILES),
        ):
            candidate_milliseconds, champion_milliseconds = (
                1000 * compute_quantile(version_stats.seconds, q)
                for version_stats in (candidate_stats, champion_stats)
            )
            yield (
                f"{q:.0%} of the candidate's answers take up to {candidate_milliseconds:.3g} ms,"
                f" the champion's {champion_milliseconds:.3g} ms: more than"
                f" {canary_config.slower:g} times as long"
            )

    for output in sorted(candidate_stats.scores.keys() | champion_stats.scores.keys()):
        candidate_scores, champion_scores = (
            version_stats.scores.get(output, {})
            for version_stats in (candidate_stats, champion_stats)
        )
        candidate_count = min(candidate_stats.requests, count_values(candidate_scores))
        champion_count = min(champion_stats.requests, count_values(champion_scores))

        ks_distance = compute_ks_distance(candidate_scores, champion_scores)
        if bound_shift_p_value(
            ks_distance, candidate_count, champion_count, canary_config.score_shift
        ) <= alpha / len(candidate_stats.scores | champion_stats.scores):
            yield (
                f"the candidate's predictions have another distribution: {output} differs by"
                f" {ks_distance:.2f} (Kolmogorov-Smirnov), more than {canary_config.score_shift:g}"
            )


def compute_errors_p_value(
    errors: float, requests: float, other_errors: float, other_requests: float
) -> float:
    """Return the probability that the candidate has at least `errors` errors if its error rate
    equals the champion's.

    Source: the one-sided exact test of Fisher, which is the tail of the hypergeometric distribution
    (Agresti, Categorical Data Analysis, 3.5.1). For more than MAX_EXACT_REQUESTS, the result is the
    Chernoff bound of this tail, which is not smaller (Hoeffding 1963, Theorems 1 and 4).
    """
    request_count = round(requests)
    total_requests = request_count + round(other_requests)
    total_errors = round(errors) + round(other_errors)

    error_count = round(errors)
    if (
        not request_count
        or not other_requests
        or error_count * total_requests <= total_errors * request_count
    ):
        return 1.0

    if total_requests > MAX_EXACT_REQUESTS:
        return exp(
            -request_count
            * _compute_divergence(error_count / request_count, total_errors / total_requests)
        )

    log_all_choices = _compute_log_choices(total_requests, request_count)
    probability = 0.0

    for candidate_errors in range(error_count, min(request_count, total_errors) + 1):
        choice_probability = exp(
            _compute_log_choices(total_errors, candidate_errors)
            + _compute_log_choices(total_requests - total_errors, request_count - candidate_errors)
            - log_all_choices
        )
        probability += choice_probability
        # stop early, since the terms only decrease; a first term that underflows to 0 also ends the
        # loop
        if choice_probability <= 1e-9 * probability:
            break

    return min(1.0, probability)


def is_slower(
    candidate_buckets: Buckets, champion_buckets: Buckets, q: float, max_ratio: float, alpha: float
) -> bool:
    """Return True if the candidate's quantile `q` is significantly above `max_ratio` times the
    champion's quantile.

    The test takes the upper confidence bound of the champion's quantile, and tests the share of the
    candidate's values above this bound. Both steps of the test use the Chernoff bound of the
    binomial distribution (Hoeffding 1963, Theorem 1), each at the level alpha / 2.
    """
    candidate_count = count_values(candidate_buckets)

    champion_count = count_values(champion_buckets)
    if not candidate_count or not champion_count:
        return False

    upper_quantile = _compute_upper_share(q, log(2 / alpha) / champion_count)
    if upper_quantile >= 1:
        return False

    share_below = _compute_share_below(
        candidate_buckets, max_ratio * compute_quantile(champion_buckets, upper_quantile)
    )
    return share_below < q and candidate_count * _compute_divergence(share_below, q) >= log(
        2 / alpha
    )


def bound_shift_p_value(
    distance: float, candidate_count: float, champion_count: float, tolerance: float
) -> float:
    """Return an upper bound of the probability of a Kolmogorov-Smirnov distance of at least
    `distance` between samples of n and m values (`candidate_count` and `champion_count`), if the
    distance of their distributions is at most `tolerance`.

    The bound follows from the two-sample Dvoretzky-Kiefer-Wolfowitz inequality (Wei and Dudley
    2012). The instances of a request are not independent, so n and m must not exceed the numbers of
    requests. The rounding of values to buckets can only reduce the distance.
    """
    if not candidate_count or not champion_count or distance <= tolerance:
        return 1.0
    return min(
        1.0,
        2
        * exp(
            -2
            * (distance - tolerance) ** 2
            * candidate_count
            * champion_count
            / (candidate_count + champion_count)
        ),
    )


def compute_ks_distance(first_buckets: Buckets, second_buckets: Buckets) -> float:
    """Return the Kolmogorov-Smirnov distance: the largest difference of two cumulative
    distributions at the bounds of the buckets."""
    first_count = count_values(first_buckets)
    second_count = count_values(second_buckets)
    if not first_count or not second_count:
        # the distance is 1 if only one version has this output, and 0 if neither version has it
        return float(bool(first_count or second_count))
    return max(
        abs(
            first_buckets.get(bucket_bound, 0) / first_count
            - second_buckets.get(bucket_bound, 0) / second_count
        )
        for bucket_bound in {**first_buckets, **second_buckets}
    )


def compute_quantile(buckets: Buckets, q: float) -> float:
    """Return the quantile `q`, interpolated linearly within a bucket."""
    target_rank = q * count_values(buckets)
    for (lower_bound, lower_count), (upper_bound, upper_count) in pairwise(
        [(0.0, 0.0), *sorted(buckets.items())]
    ):
        if upper_count >= target_rank and upper_count > lower_count:
            if upper_bound == inf:
                return lower_bound
            return lower_bound + (upper_bound - lower_bound) * (target_rank - lower_count) / (
                upper_count - lower_count
            )
    return 0.0


def count_values(buckets: Buckets) -> float:
    """Return the number of values in a cumulative histogram."""
    return buckets.get(inf, 0)


def _compute_share_below(buckets: Buckets, threshold: float) -> float:
    """Return the share of a histogram's values that are below `threshold`."""
    bounds: Sequence[tuple[float, float]] = [(0.0, 0.0), *sorted(buckets.items())]
    for (lower_bound, lower_count), (upper_bound, upper_count) in pairwise(bounds):
        if threshold < upper_bound:
            if upper_bound == inf:
                count_inside = 0.0
            else:
                count_inside = (
                    (upper_count - lower_count)
                    * (threshold - lower_bound)
                    / (upper_bound - lower_bound)
                )
            return (lower_count + count_inside) / count_values(buckets)
    return 1.0


def _compute_upper_share(q: float, divergence_rate: float) -> float:
    """Return the upper confidence bound of the share `q`: the share above `q` whose
    Kullback-Leibler divergence from `q` is `divergence_rate`."""
    lower_share = q
    upper_share = 1.0
    for _ in range(60):
        middle_share = (lower_share + upper_share) / 2
        if _compute_divergence(middle_share, q) < divergence_rate:
            lower_share = middle_share
        else:
            upper_share = middle_share
    return upper_share


def _compute_divergence(p: float, q: float) -> float:
    """Return the Kullback-Leibler divergence of two Bernoulli distributions."""
    return sum(a * log(a / b) for a, b in ((p, q), (1 - p, 1 - q)) if a > 0)


def _compute_log_choices(n: int, k: int) -> float:
    """Return the logarithm of the binomial coefficient "n choose k"."""
    if 0 <= k <= n:
        return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)
    return -inf
