"""Reads the `/metrics` of a model's servers, and sums their statistics by Deployment and
version."""

import http.client
import math
import os
import socket
import time
import urllib.request
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from argolocal.common.checked_names import show
from rekindle.errors import RekindleError, say
from rekindle.release.model_client import resolve
from rekindle.release.watch.reference import FEATURE_METRIC
from rekindle.release.watch.scores import BUCKET_BOUNDS, SCORE_METRIC
from rekindle.release.watch.time_limit import call_within

MAX_PAGE_BYTES = 64 << 20
USED_SAMPLES = {
    "process_start_time_seconds",
    "rekindle_instances_sum",
    "rekindle_requests_total",
    "rekindle_request_seconds_bucket",
    f"{SCORE_METRIC}_bucket",
    f"{FEATURE_METRIC}_bucket",
}
TIMEOUT_S = 10  # time limit to connect, and to wait for further bytes
TOTAL_TIMEOUT_S = 30
# upper bound → number of values up to it (cumulative, as in Prometheus)
Buckets = dict[float, float]
Counts = dict[str, Any]  # "rows": number of instances; "scores" and "features": histograms by name


@dataclass
class VersionStats:
    """The statistics of the servers of one Deployment and version."""

    requests: float = 0
    errors: float = 0  # number of requests without a prediction
    crashes: int = 0
    seconds: Buckets = field(default_factory=dict)
    scores: dict[str, Buckets] = field(default_factory=dict)  # output → its histogram
    features: dict[str, Buckets] = field(default_factory=dict)  # feature → its histogram
    instances: float = 0  # number of predicted instances

    def add(self, current_stats: "VersionStats", earlier_stats: "VersionStats") -> None:
        """Add the increase of a process's statistics between two scrapes."""
        self.requests += current_stats.requests - earlier_stats.requests
        self.errors += current_stats.errors - earlier_stats.errors
        _add_increase(self.seconds, current_stats.seconds, earlier_stats.seconds)
        for output, buckets in current_stats.scores.items():
            _add_increase(
                self.scores.setdefault(output, {}), buckets, earlier_stats.scores.get(output, {})
            )

    def counts(self) -> Counts:
        """Return the histograms with separate, not cumulative, counts per bucket."""
        histograms = {"scores": self.scores, "features": self.features}
        return {"rows": int(self.instances)} | {
            kind: {name: _per_bucket(buckets) for name, buckets in histogram_by_name.items()}
            for kind, histogram_by_name in histograms.items()
        }


Key = tuple[str, str]  # Deployment ("" if the server does not know its Deployment) and version
# start time of a server's process, and its statistics
Answer = tuple[float, dict[Key, VersionStats]]


class ServerWatch:
    """Sums the statistics of all servers since the creation of this object, by Deployment and
    version. When a server ends, its statistics since the last scrape are lost."""

    def __init__(self, *endpoints: str) -> None:
        self.endpoints = endpoints
        self.start_time = time.time()
        self.stats: dict[Key, VersionStats] = {}
        # (address, start of the process) → its statistics
        self.last_answers: dict[tuple[str, float], dict[Key, VersionStats]] = {}
        # messages about servers that could not be read
        self.problems: set[str] = set()
        self.scrape()
        self.stats.clear()

    def scrape(self) -> dict[Key, VersionStats]:
        """Read all servers, and return the statistics until now."""
        loaded_addresses = {address for (address, _), stats in self.last_answers.items() if stats}

        for url, answer in read(*self.endpoints).items():
            if not isinstance(answer, str):
                start, stats_by_key = answer
                earlier_stats = self.last_answers.get((url, start))
                restarted = url in loaded_addresses and not earlier_stats

                # if a process started before this object, count only the increase since its first
                # scrape
                if earlier_stats is None:
                    if restarted or start > self.start_time:
                        earlier_stats = {}
                    else:
                        earlier_stats = stats_by_key

                for key, current_stats in stats_by_key.items():
                    stats = self.stats.setdefault(key, VersionStats())
                    stats.add(current_stats, earlier_stats.get(key, VersionStats()))
                    stats.crashes += restarted

                self.last_answers[url, start] = stats_by_key

            elif answer not in self.problems:
                self.problems.add(answer)
                say(answer)

        return self.stats


def scrape(endpoint: str, version: str, earlier_counts: Mapping[str, Counts]) -> dict[str, Counts]:
    """Return the counts of `version` of each server process behind a headless Service, by "URL
    since START".

    For a server that cannot be read, its entry in `earlier_counts` is returned. Raises
    RekindleError if no server can be read.
    """
    servers = dict[str, Counts]()
    kept = dict[str, Counts]()
    problem = f"{endpoint} does not have servers"

    for url, answer in read(endpoint).items():
        if isinstance(answer, str):
            problem = answer
            say(problem)
            kept.update(
                {
                    process: counts
                    for process, counts in earlier_counts.items()
                    if process.startswith(f"{url} ")
                }
            )
        else:
            start, stats_by_key = answer
            stats = next(
                (stats for key, stats in stats_by_key.items() if key[1] == version), VersionStats()
            )
            servers[f"{url} since {start}"] = stats.counts()

    if not servers:
        raise RekindleError(f"{problem}: is the model deployed? See the log of its servers.")

    return kept | servers


def subtract_counts(
    current_counts: Mapping[str, Counts], earlier_counts: Mapping[str, Counts]
) -> Counts:
    """Return the increase of the counts of all processes between two scrapes."""
    total: Counts = {"rows": 0, "scores": {}, "features": {}}

    for process, counts in current_counts.items():
        previous_counts = earlier_counts.get(process, {"rows": 0, "scores": {}, "features": {}})
        total["rows"] += max(0, counts["rows"] - previous_counts["rows"])

        for kind in ("scores", "features"):
            for name, buckets in counts[kind].items():
                zeros = [0] * len(buckets)
                columns = (
                    total[kind].get(name, zeros),
                    buckets,
                    previous_counts[kind].get(name, zeros),
                )
                total[kind][name] = [a + max(0, b - c) for a, b, c in zip(*columns, strict=True)]

    return total


def read(*endpoints: str) -> dict[str, Answer | str]:
    """Return {URL: answer} of all servers behind these Services; an answer that is a text is an
    error message."""
    urls = list(dict.fromkeys(url for endpoint in endpoints for url in addresses(endpoint)))
    with ThreadPoolExecutor(16) as pool:
        return dict(zip(urls, pool.map(_read, urls), strict=True))


def _read(url: str) -> Answer | str:
    try:
        data = call_within(TOTAL_TIMEOUT_S, lambda: _fetch(f"{url}/metrics"))
        if len(data) > MAX_PAGE_BYTES:
            raise ValueError(f"it has more than {MAX_PAGE_BYTES:,} bytes")
        return parse_metrics(data.decode())
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"{url}/metrics cannot be read ({error})"


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # nosec B310  # an address in the pipeline
        return answer.read(MAX_PAGE_BYTES + 1)


def addresses(endpoint: str) -> Iterable[str]:
    """Return the URLs of the pods behind a headless Service.

    Locally, an environment variable replaces the DNS records.
    """
    host, _, port = endpoint.removeprefix("http://").partition(":")

    pods = os.environ.get(f"{host.upper().replace('-', '_')}_SERVICE_ENDPOINTS")
    if pods is not None:
        return [f"http://{pod}:{port}" for pod in pods.split(",") if pod]

    url = resolve(endpoint)
    if url != endpoint:
        return [url]

    try:
        records = {
            str(info[4][0]) for info in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        }
    except OSError:
        return []

    return [
        f"http://[{ip}]:{port}" if ":" in ip else f"http://{ip}:{port}" for ip in sorted(records)
    ]


def parse_metrics(text: str) -> Answer:
    """Return the start time of the process, and its statistics. Raises ValueError if `text` is
    invalid."""
    try:
        answer = _parse(text)
    except KeyError as error:
        raise ValueError(f"a metric lacks the label {error}") from None

    bounds = {float(bound) for bound in BUCKET_BOUNDS}
    for stats in answer[1].values():
        for name, buckets in [*stats.scores.items(), *stats.features.items()]:
            if not bounds <= buckets.keys():
                raise ValueError(f"the histogram of {show(name)} lacks buckets")

    return answer


def _parse(text: str) -> Answer:
    """Return the answer of a server. Raises ValueError, or KeyError with the name of a missing
    label."""
    start_time = 0.0
    instances = 0.0
    deployment = ""
    stats_by_version = dict[str, VersionStats]()

    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # other metrics may be NaN, as the age of data that is unknown
            if sample.name in USED_SAMPLES and not 0 <= sample.value < math.inf:
                raise ValueError(f"{show(sample.name)} is {sample.value}")

            if sample.name == "process_start_time_seconds":
                start_time = sample.value
            if sample.name == "rekindle_instances_sum":
                instances = sample.value

            if sample.name == "rekindle_model_info":
                deployment = sample.labels.get("deployment", "")
                continue

            version = sample.labels.get("version")
            if not version:
                continue

            stats = stats_by_version.setdefault(version, VersionStats())
            if sample.name == "rekindle_requests_total":
                stats.requests += sample.value
                stats.errors += 0 if sample.labels["status"].startswith("2") else sample.value
            elif sample.name == "rekindle_request_seconds_bucket":
                stats.seconds[float(sample.labels["le"])] = sample.value
            elif sample.name == f"{SCORE_METRIC}_bucket":
                stats.scores.setdefault(sample.labels["output"], {})[float(sample.labels["le"])] = (
                    sample.value
                )
            elif sample.name == f"{FEATURE_METRIC}_bucket":
                stats.features.setdefault(sample.labels["feature"], {})[
                    float(sample.labels["le"])
                ] = sample.value

    for stats in stats_by_version.values():
        stats.instances = instances

    return start_time, {(deployment, version): stats for version, stats in stats_by_version.items()}


def _per_bucket(buckets: Buckets) -> list[int]:
    values = [int(buckets[float(le)]) for le in BUCKET_BOUNDS]
    return [b - a for a, b in zip([0, *values], values, strict=False)]


def _add_increase(total: Buckets, now: Buckets, earlier: Buckets) -> None:
    for bound, count in now.items():
        total[bound] = total.get(bound, 0) + count - earlier.get(bound, 0)
