"""What the servers of a model have seen since the last look, from their /metrics."""

from collections.abc import Mapping
from typing import Any

from rekindle.errors import RekindleError, say
from rekindle.release.watch.reference import FEATURES
from rekindle.release.watch.scores import LE, NAME
from rekindle.release.watch.scrape import UNAVAILABLE, addresses, page

KINDS = {NAME: ("scores", "output"), FEATURES: ("features", "feature")}  # metric → its key here, and its label
Counts = dict[str, Any]  # "rows", and "scores" and "features": histograms by name


def look(endpoint: str, version: str) -> dict[str, Counts]:
    """What each server behind the headless Service `endpoint` has seen as `version` of the model, by process.

    Raises RekindleError if none answers.
    """
    servers, problem = dict[str, Counts](), f"{endpoint} has no servers"
    for url in addresses(endpoint):
        try:
            start, seen = counts(page(url), version)
            servers[f"{url} since {start}"] = seen
        except UNAVAILABLE as error:
            problem = f"{url} does not tell what it has seen ({error})"
            say(problem)
    if not servers:
        raise RekindleError(f"{problem}: is the model deployed? Look at the log of its servers.")
    return servers


def counts(metrics: str, version: str) -> tuple[float, Counts]:
    """When the process started, and its counts, in the text of /metrics; none of other versions."""
    from prometheus_client.parser import text_string_to_metric_families

    start, found = 0.0, {"rows": 0, "scores": {}, "features": {}}
    for family in text_string_to_metric_families(metrics):
        if family.name == "process_start_time_seconds":
            start = family.samples[0].value
        if family.name == "rekindle_instances":
            found["rows"] = next(int(s.value) for s in family.samples if s.name.endswith("_sum"))
        if family.name not in KINDS:
            continue
        kind, label = KINDS[family.name]
        sums: dict[str, dict[str, int]] = {}
        for sample in family.samples:
            if sample.name.endswith("_bucket") and sample.labels["version"] == version:
                sums.setdefault(sample.labels[label], {})[sample.labels["le"]] = int(sample.value)
        for name, cumulated in sums.items():
            values = [cumulated[le] for le in LE]
            found[kind][name] = [b - a for a, b in zip([0, *values], values, strict=False)]
    return start, found


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
