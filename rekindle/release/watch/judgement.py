"""Whether a version does worse than the one that serves: its errors, how long it takes, and what it predicts.

Each test is of a tolerance, so that more traffic finds no smaller faults than those that matter, and none needs more
than what `/metrics` shows. A good candidate is refused with a probability of at most `alpha` over all looks and tests
together: each gets its share of it (Bonferroni), however they depend on each other.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import exp, inf, lgamma, log

from rekindle.release.config import CanaryConfig
from rekindle.release.watch.scrape import Buckets, Side

QUANTILES = (0.5, 0.9)  # of the seconds
FAMILIES = 3  # errors, seconds, scores


def breach(candidate: Side, champion: Side, rule: CanaryConfig, alpha: float) -> str:
    """Why the candidate is worse, with the figures; empty unless it is. `alpha` is for this look."""
    if candidate.crashes > champion.crashes:
        return f"its servers ended {candidate.crashes} times, the champion's {champion.crashes} times"
    return next(_findings(candidate, champion, rule, alpha / FAMILIES), "")


def _findings(candidate: Side, champion: Side, rule: CanaryConfig, alpha: float) -> Iterator[str]:
    chance = more_errors(candidate.errors, candidate.requests, champion.errors, champion.requests)
    if chance <= alpha:
        yield (
            f"{candidate.errors:g} of its {candidate.requests:g} requests failed, of the champion's "
            f"{champion.errors:g} of {champion.requests:g}"
        )
    for q in QUANTILES:
        if slower(candidate.seconds, champion.seconds, q, rule.slower, alpha / len(QUANTILES)):
            ours, theirs = (1000 * quantile(side.seconds, q) for side in (candidate, champion))
            yield (
                f"{q:.0%} of its answers take up to {ours:.3g} ms, the champion's {theirs:.3g} ms: more than "
                f"{rule.slower:g} times as long"
            )
    for output in sorted(candidate.scores.keys() | champion.scores.keys()):
        ours, theirs = (side.scores.get(output, {}) for side in (candidate, champion))
        n, m = min(candidate.requests, count(ours)), min(champion.requests, count(theirs))
        distance = ks_distance(ours, theirs)
        if shifted(distance, n, m, rule.score_shift) <= alpha / len(candidate.scores | champion.scores):
            yield (
                f"what it predicts is distributed otherwise: {output} by {distance:.2f} (Kolmogorov-Smirnov), more "
                f"than {rule.score_shift:g}"
            )


def more_errors(errors: float, requests: float, other_errors: float, other_requests: float) -> float:
    """The chance of so many errors, or more, if both sides err equally often.

    Source: Fisher's exact test, one-sided: the tail of the hypergeometric distribution (Agresti, Categorical Data
    Analysis, 3.5.1).
    """
    total, wrong = round(requests + other_requests), round(errors + other_errors)
    drawn, k = round(requests), round(errors)
    if not drawn or not other_requests or k * total <= wrong * drawn:
        return 1.0
    whole, chance = _choices(total, drawn), 0.0
    for found in range(k, min(drawn, wrong) + 1):
        term = exp(_choices(wrong, found) + _choices(total - wrong, drawn - found) - whole)
        chance += term
        if term < 1e-9 * chance:
            break
    return min(1.0, chance)


def slower(ours: Buckets, theirs: Buckets, q: float, ratio: float, alpha: float) -> bool:
    """Whether the quantile `q` of our seconds is above `ratio` times theirs, beyond chance.

    Their quantile is taken at its upper confidence bound; then so many of ours above it are too many. Both by the
    Chernoff bound of the binomial distribution (Hoeffding 1963, Theorem 1), each at half of alpha.
    """
    n, m = count(ours), count(theirs)
    if not n or not m or (upper := _upper(q, log(2 / alpha) / m)) >= 1:
        return False
    below = _below(ours, ratio * quantile(theirs, upper))
    return below < q and n * _divergence(below, q) >= log(2 / alpha)


def shifted(distance: float, n: float, m: float, tolerance: float) -> float:
    """The chance of so large a distance of two samples whose distributions are at most `tolerance` apart.

    Source: the two-sample Dvoretzky-Kiefer-Wolfowitz inequality (Wei and Dudley 2012). Instances of one request are
    no independent sample: n and m are at most the numbers of requests. Buckets only make the distance smaller.
    """
    if not n or not m or distance <= tolerance:
        return 1.0
    return min(1.0, 2 * exp(-2 * (distance - tolerance) ** 2 * n * m / (n + m)))


def ks_distance(ours: Buckets, theirs: Buckets) -> float:
    """The largest difference of the two cumulative distributions at the bounds of the buckets."""
    n, m = count(ours), count(theirs)
    if not n or not m:
        return float(bool(n or m))  # an output that only one of them has
    return max(abs(ours.get(bound, 0) / n - theirs.get(bound, 0) / m) for bound in {**ours, **theirs})


def quantile(buckets: Buckets, q: float) -> float:
    """The value below which the part `q` lies; within a bucket, values are taken to be spread evenly."""
    rank = q * count(buckets)
    for (low, before), (high, upto) in pairwise([(0.0, 0.0), *sorted(buckets.items())]):
        if upto >= rank and upto > before:
            return low if high == inf else low + (high - low) * (rank - before) / (upto - before)
    return 0.0


def count(buckets: Buckets) -> float:
    """All of them."""
    return buckets.get(inf, 0)


def _below(buckets: Buckets, value: float) -> float:
    """The part of the values that is below `value`."""
    bounds: Sequence[tuple[float, float]] = [(0.0, 0.0), *sorted(buckets.items())]
    for (low, before), (high, upto) in pairwise(bounds):
        if value < high:
            inside = 0.0 if high == inf else (upto - before) * (value - low) / (high - low)
            return (before + inside) / count(buckets)
    return 1.0


def _upper(q: float, rate: float) -> float:
    """The least part above `q` that is further from it than chance, for an exponent `rate` per request."""
    low, high = q, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _divergence(middle, q) < rate else (low, middle)
    return high


def _divergence(part: float, q: float) -> float:
    """Kullback and Leibler's divergence of two coins."""
    return sum(a * log(a / b) for a, b in ((part, q), (1 - part, 1 - q)) if a > 0)


def _choices(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1) if 0 <= k <= n else -inf
