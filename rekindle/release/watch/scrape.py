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

from argolocal.common.checked_names import format_untrusted
from rekindle.errors import RekindleError, write_stderr
from rekindle.release.model_client import resolve_endpoint
from rekindle.release.watch.reference import FEATURE_METRIC
from rekindle.release.watch.scores import BUCKET_BOUNDS, SCORE_METRIC
from rekindle.release.watch.time_limit import call_with_time_limit

MAX_PAGE_BYTES = 64 << 20
USED_SAMPLES = {
    "process_start_time_seconds",
    "rekindle_instances_sum",
    "rekindle_requests_total",
    "rekindle_request_seconds_bucket",
    f"{SCORE_METRIC}_bucket",
    f"{FEATURE_METRIC}_bucket",
}
# time limit to connect, and to wait for further bytes
TIMEOUT_S = 10
TOTAL_TIMEOUT_S = 30
# upper bound of a bucket → number of values up to this bound (cumulative, as in Prometheus)
Buckets = dict[float, float]
# "rows": number of instances; "scores" and "features": histograms by name
Counts = dict[str, Any]


@dataclass
class VersionStats:
    """The statistics of the servers of one Deployment and version."""

    requests: float = 0
    # number of requests that were answered without a prediction
    errors: float = 0
    crashes: int = 0
    seconds: Buckets = field(default_factory=dict)
    # output → its histogram
    scores: dict[str, Buckets] = field(default_factory=dict)
    # feature → its histogram
    features: dict[str, Buckets] = field(default_factory=dict)
    # number of predicted instances
    instances: float = 0

    def add(self, current_stats: "VersionStats", earlier_stats: "VersionStats") -> None:
        """Add the increase of a process's statistics between two scrapes."""
        self.requests += current_stats.requests - earlier_stats.requests
        self.errors += current_stats.errors - earlier_stats.errors
        _add_increase(self.seconds, current_stats.seconds, earlier_stats.seconds)
        for output_name, buckets in current_stats.scores.items():
            _add_increase(
                self.scores.setdefault(output_name, {}),
                buckets,
                earlier_stats.scores.get(output_name, {}),
            )

    def counts(self) -> Counts:
        """Return the histograms with separate, not cumulative, counts per bucket."""
        histograms = {"scores": self.scores, "features": self.features}
        return {"rows": int(self.instances)} | {
            quantity_kind: {
                quantity_name: _count_per_bucket(buckets)
                for quantity_name, buckets in buckets_by_name.items()
            }
            for quantity_kind, buckets_by_name in histograms.items()
        }


# Deployment ("" if the server does not know its Deployment) and version
ServerKey = tuple[str, str]
# start time of a server's process, and its statistics
ServerAnswer = tuple[float, dict[ServerKey, VersionStats]]


class ServerWatch:
    """Sums the statistics of all servers by Deployment and version, since the creation of this
    object. When a server ends, its statistics after the last scrape are lost."""

    def __init__(self, *endpoints: str) -> None:
        self.endpoints = endpoints
        self.start_time = time.time()
        self.stats: dict[ServerKey, VersionStats] = {}
        # (address, start time of the process) → its statistics at the last scrape
        self.last_answers: dict[tuple[str, float], dict[ServerKey, VersionStats]] = {}
        # messages about servers that could not be read
        self.problems: set[str] = set()
        self.scrape()
        self.stats.clear()

    def scrape(self) -> dict[ServerKey, VersionStats]:
        """Scrape all servers, and return the statistics since the creation of this object."""
        loaded_addresses = {
            address for (address, _), version_stats in self.last_answers.items() if version_stats
        }

        for server_url, server_answer in read_servers(*self.endpoints).items():
            if not isinstance(server_answer, str):
                start_seconds, stats_by_key = server_answer
                earlier_stats = self.last_answers.get((server_url, start_seconds))
                was_restarted = server_url in loaded_addresses and not earlier_stats

                # if a process started before this object, count only the increase since its first
                # scrape
                if earlier_stats is None:
                    if was_restarted or start_seconds > self.start_time:
                        earlier_stats = {}
                    else:
                        earlier_stats = stats_by_key

                for server_key, current_stats in stats_by_key.items():
                    version_stats = self.stats.setdefault(server_key, VersionStats())
                    version_stats.add(current_stats, earlier_stats.get(server_key, VersionStats()))
                    if was_restarted:
                        version_stats.crashes += 1

                self.last_answers[server_url, start_seconds] = stats_by_key

            elif server_answer not in self.problems:
                self.problems.add(server_answer)
                write_stderr(server_answer)

        return self.stats


def scrape_counts(
    endpoint: str, version: str, earlier_counts: Mapping[str, Counts]
) -> dict[str, Counts]:
    """Return the counts of `version` in each server process behind a headless Service. The key of a
    process is "URL since START".

    The counts of a server that cannot be read are taken from `earlier_counts`. Raises RekindleError
    if no server can be read.
    """
    counts_by_process = dict[str, Counts]()
    kept_counts = dict[str, Counts]()
    problem_text = f"{endpoint} does not have servers"

    for server_url, server_answer in read_servers(endpoint).items():
        if isinstance(server_answer, str):
            problem_text = server_answer
            write_stderr(problem_text)
            kept_counts.update(
                {
                    process_name: counts
                    for process_name, counts in earlier_counts.items()
                    if process_name.startswith(f"{server_url} ")
                }
            )
        else:
            start_seconds, stats_by_key = server_answer
            version_stats = next(
                (
                    version_stats
                    for server_key, version_stats in stats_by_key.items()
                    if server_key[1] == version
                ),
                VersionStats(),
            )
            counts_by_process[f"{server_url} since {start_seconds}"] = version_stats.counts()

    if not counts_by_process:
        raise RekindleError(f"{problem_text}: is the model deployed? See the log of its servers.")

    return kept_counts | counts_by_process


def subtract_counts(
    current_counts: Mapping[str, Counts], earlier_counts: Mapping[str, Counts]
) -> Counts:
    """Return the increase of the counts of all processes between two scrapes."""
    count_increase: Counts = {"rows": 0, "scores": {}, "features": {}}

    for process_name, counts in current_counts.items():
        previous_counts = earlier_counts.get(
            process_name, {"rows": 0, "scores": {}, "features": {}}
        )
        count_increase["rows"] += max(0, counts["rows"] - previous_counts["rows"])

        for quantity_kind in ("scores", "features"):
            for quantity_name, buckets in counts[quantity_kind].items():
                zero_counts = [0] * len(buckets)
                count_columns = (
                    count_increase[quantity_kind].get(quantity_name, zero_counts),
                    buckets,
                    previous_counts[quantity_kind].get(quantity_name, zero_counts),
                )
                count_increase[quantity_kind][quantity_name] = [
                    total_count + max(0, current_count - previous_count)
                    for total_count, current_count, previous_count in zip(
                        *count_columns, strict=True
                    )
                ]

    return count_increase


def read_servers(*endpoints: str) -> dict[str, ServerAnswer | str]:
    """Return the answer of each server behind the given Services, by the URL of the server. For a
    server that cannot be read, the answer is a text, the error message."""
    server_urls = list(
        dict.fromkeys(
            server_url for endpoint in endpoints for server_url in list_pod_urls(endpoint)
        )
    )
    with ThreadPoolExecutor(16) as thread_pool:
        return dict(zip(server_urls, thread_pool.map(_read_server, server_urls), strict=True))


def _read_server(server_url: str) -> ServerAnswer | str:
    try:
        page_bytes = call_with_time_limit(
            TOTAL_TIMEOUT_S, lambda: _fetch_page(f"{server_url}/metrics")
        )
        if len(page_bytes) > MAX_PAGE_BYTES:
            raise ValueError(f"it has more than {MAX_PAGE_BYTES:,} bytes")
        return parse_metrics(page_bytes.decode())
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"{server_url}/metrics cannot be read ({error})"


def _fetch_page(page_url: str) -> bytes:
    with urllib.request.urlopen(page_url, timeout=TIMEOUT_S) as http_response:  # nosec B310  # an address in the pipeline
        return http_response.read(MAX_PAGE_BYTES + 1)


def list_pod_urls(endpoint: str) -> Iterable[str]:
    """Return the URLs of the pods behind a headless Service.

    On this machine, an environment variable replaces the DNS records.
    """
    host_name, _, port_text = endpoint.removeprefix("http://").partition(":")

    pod_addresses = os.environ.get(f"{host_name.upper().replace('-', '_')}_SERVICE_ENDPOINTS")
    if pod_addresses is not None:
        return [
            f"http://{pod_address}:{port_text}"
            for pod_address in pod_addresses.split(",")
            if pod_address
        ]

    service_url = resolve_endpoint(endpoint)
    if service_url != endpoint:
        return [service_url]

    try:
        ip_addresses = {
            str(address_info[4][0])
            for address_info in socket.getaddrinfo(
                host_name, int(port_text), type=socket.SOCK_STREAM
            )
        }
    except OSError:
        return []

    return [
        f"http://[{ip_address}]:{port_text}"
        if ":" in ip_address
        else f"http://{ip_address}:{port_text}"
        for ip_address in sorted(ip_addresses)
    ]


def parse_metrics(metrics_text: str) -> ServerAnswer:
    """Return the start time of a server's process and the process's statistics from the text of
    `/metrics`. Raises ValueError if `metrics_text` is invalid."""
    try:
        server_answer = _parse_answer(metrics_text)
    except KeyError as error:
        raise ValueError(f"a metric lacks the label {error}") from None

    expected_bounds = {float(bound_text) for bound_text in BUCKET_BOUNDS}
    for version_stats in server_answer[1].values():
        for quantity_name, buckets in [
            *version_stats.scores.items(),
            *version_stats.features.items(),
        ]:
            if not expected_bounds <= buckets.keys():
                raise ValueError(
                    f"the histogram of {format_untrusted(quantity_name)} lacks buckets"
                )

    return server_answer


def _parse_answer(metrics_text: str) -> ServerAnswer:
    """Parse the answer of a server to a scrape. Raises ValueError, or KeyError with the name of a
    missing label."""
    start_time = 0.0
    instance_count = 0.0
    deployment_name = ""
    stats_by_version = dict[str, VersionStats]()

    for metric_family in text_string_to_metric_families(metrics_text):
        for metric_sample in metric_family.samples:
            # only USED_SAMPLES are checked, because other metrics may be NaN, such as an unknown
            # age of the data
            if metric_sample.name in USED_SAMPLES and not 0 <= metric_sample.value < math.inf:
                raise ValueError(f"{format_untrusted(metric_sample.name)} is {metric_sample.value}")

            if metric_sample.name == "process_start_time_seconds":
                start_time = metric_sample.value
            if metric_sample.name == "rekindle_instances_sum":
                instance_count = metric_sample.value

            if metric_sample.name == "rekindle_model_info":
                deployment_name = metric_sample.labels.get("deployment", "")
                continue

            version_label = metric_sample.labels.get("version")
            if not version_label:
                continue

            version_stats = stats_by_version.setdefault(version_label, VersionStats())
            if metric_sample.name == "rekindle_requests_total":
                version_stats.requests += metric_sample.value
                version_stats.errors += (
                    0 if metric_sample.labels["status"].startswith("2") else metric_sample.value
                )
            elif metric_sample.name == "rekindle_request_seconds_bucket":
                version_stats.seconds[float(metric_sample.labels["le"])] = metric_sample.value
            elif metric_sample.name == f"{SCORE_METRIC}_bucket":
                version_stats.scores.setdefault(metric_sample.labels["output"], {})[
                    float(metric_sample.labels["le"])
                ] = metric_sample.value
            elif metric_sample.name == f"{FEATURE_METRIC}_bucket":
                version_stats.features.setdefault(metric_sample.labels["feature"], {})[
                    float(metric_sample.labels["le"])
                ] = metric_sample.value

    for version_stats in stats_by_version.values():
        version_stats.instances = instance_count

    return start_time, {
        (deployment_name, version_label): version_stats
        for version_label, version_stats in stats_by_version.items()
    }


def _count_per_bucket(cumulative_buckets: Buckets) -> list[int]:
    """Convert the cumulative counts of a histogram to the count of each bucket."""
    cumulative_counts = [
        int(cumulative_buckets[float(upper_bound)]) for upper_bound in BUCKET_BOUNDS
    ]
    return [
        upper_count - lower_count
        for lower_count, upper_count in zip(
            [0, *cumulative_counts], cumulative_counts, strict=False
        )
    ]


def _add_increase(
    total_buckets: Buckets, current_buckets: Buckets, earlier_buckets: Buckets
) -> None:
    """Add the increase from `earlier_buckets` to `current_buckets` to `total_buckets`."""
    for bucket_bound, bucket_count in current_buckets.items():
        total_buckets[bucket_bound] = (
            total_buckets.get(bucket_bound, 0) + bucket_count - earlier_buckets.get(bucket_bound, 0)
        )
