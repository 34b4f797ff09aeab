"""What the servers of a model have seen since the last look, from their /metrics."""

from collections.abc import Mapping
from typing import Any

from rekindle.errors import RekindleError, say
from rekindle.release.watch.scores import LE
from rekindle.release.watch.scrape import UNAVAILABLE, Buckets, Side, addresses, page, parsed

Counts = dict[str, Any]  # "rows", and "scores" and "features": histograms by name


def look(endpoint: str, version: str) -> dict[str, Counts]:
    """What each server behind the headless Service `endpoint` has seen as `version` of the model, by process.

    Raises RekindleError if none answers.
    """
    servers, problem = dict[str, Counts](), f"{endpoint} has no servers"
    for url in addresses(endpoint):
        try:
            start, versions = parsed(page(url))
            servers[f"{url} since {start}"] = counts(versions.get(version, Side()))
        except UNAVAILABLE as error:
            problem = f"{url} does not tell what it has seen ({error})"
            say(problem)
    if not servers:
        raise RekindleError(f"{problem}: is the model deployed? Look at the log of its servers.")
    return servers


def counts(side: Side) -> Counts:
    """What one process has seen, as counts of the buckets between the bounds LE."""
    seen = {"scores": side.scores, "features": side.features}
    return {"rows": int(side.instances)} | {
        kind: {name: _between(buckets) for name, buckets in named.items()} for kind, named in seen.items()
    }


def _between(buckets: Buckets) -> list[int]:
    values = [int(buckets[float(le)]) for le in LE]
    return [b - a for a, b in zip([0, *values], values, strict=False)]


def since(now: Mapping[str, Counts], before: Mapping[str, Counts]) -> Counts:
    """What all processes have added."""
    total: Counts = {"rows": 0, "scores": {}, "features": {}}
    for process, seen in now.items():
        earlier = before.get(process, {"rows": 0, "scores": {}, "features": {}})
        total["rows"] += seen["rows"] - earlier["rows"]
        for kind in ("scores", "features"):
            for name, buckets in seen[kind].items():
                nothing = [0] * len(buckets)
                parts = total[kind].get(name, nothing), buckets, earlier[kind].get(name, nothing)
                total[kind][name] = [a + b - c for a, b, c in zip(*parts, strict=True)]
    return total
