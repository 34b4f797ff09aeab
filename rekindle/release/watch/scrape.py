"""What the servers of a model have answered, read from their `/metrics` and added up by version."""

import http.client
import os
import socket
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from rekindle.release.client import resolve
from rekindle.release.watch.reference import FEATURES
from rekindle.release.watch.scores import NAME

UNAVAILABLE = (OSError, http.client.HTTPException, ValueError)
Buckets = dict[float, float]  # upper bound → how many were not above it, as Prometheus counts


@dataclass
class Side:
    """What one version has answered."""

    requests: float = 0
    errors: float = 0  # requests that got no prediction
    crashes: int = 0
    seconds: Buckets = field(default_factory=dict)
    scores: dict[str, Buckets] = field(default_factory=dict)  # by output
    features: dict[str, Buckets] = field(default_factory=dict)  # by name
    instances: float = 0  # of the requests that were predicted

    def add(self, now: "Side", before: "Side") -> None:
        """Add what was answered between two looks at one process."""
        self.requests += now.requests - before.requests
        self.errors += now.errors - before.errors
        _add(self.seconds, now.seconds, before.seconds)
        for output, buckets in now.scores.items():
            _add(self.scores.setdefault(output, {}), buckets, before.scores.get(output, {}))


class Watch:
    """Adds up what each version answers from now on. A server that ends loses only what came after the last look."""

    def __init__(self, *endpoints: str) -> None:
        self.endpoints = endpoints
        self.sides: dict[str, Side] = {}
        self.last: dict[tuple[str, float], dict[str, Side]] = {}  # (address, start of the process) → by version
        self.look()
        self.sides.clear()

    def look(self) -> dict[str, Side]:
        """What each version has answered by now."""
        known = {address for address, _ in self.last}
        urls = {url for endpoint in self.endpoints for url in addresses(endpoint)}
        with ThreadPoolExecutor(16) as pool:
            pages = list(pool.map(_page, urls))
        for url, text in zip(urls, pages, strict=True):
            if text:
                start, versions = parsed(text)
                again = url in known and (url, start) not in self.last
                before = self.last.get((url, start), {})
                for version, now in versions.items():
                    side = self.sides.setdefault(version, Side())
                    side.add(now, before.get(version, Side()))
                    side.crashes += again
                self.last[url, start] = versions
        return self.sides


def addresses(endpoint: str) -> Iterable[str]:
    """The URLs of the pods behind a headless Service: its DNS records, here a variable in place of them."""
    host, _, port = endpoint.removeprefix("http://").partition(":")
    listed = os.environ.get(f"{host.upper().replace('-', '_')}_SERVICE_ENDPOINTS")
    if listed is not None:
        return [f"http://{pod}:{port}" for pod in listed.split(",") if pod]
    if (url := resolve(endpoint)) != endpoint:
        return [url]
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)}
    except OSError:
        return []
    return [f"http://[{ip}]:{port}" if ":" in ip else f"http://{ip}:{port}" for ip in sorted(found)]


def parsed(text: str) -> tuple[float, dict[str, Side]]:
    """When the process started, and what it has answered since, by version. Raises ValueError if it is no metrics."""
    start, instances, sides = 0.0, 0.0, dict[str, Side]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "process_start_time_seconds":
                start = sample.value
            if sample.name == "rekindle_instances_sum":
                instances = sample.value
            if not (version := sample.labels.get("version")) or sample.name == "rekindle_model_info":
                continue
            side = sides.setdefault(version, Side())
            if sample.name == "rekindle_requests_total":
                side.requests += sample.value
                side.errors += 0 if sample.labels["status"].startswith("2") else sample.value
            elif sample.name == "rekindle_request_seconds_bucket":
                side.seconds[float(sample.labels["le"])] = sample.value
            elif sample.name == f"{NAME}_bucket":
                side.scores.setdefault(sample.labels["output"], {})[float(sample.labels["le"])] = sample.value
            elif sample.name == f"{FEATURES}_bucket":
                side.features.setdefault(sample.labels["feature"], {})[float(sample.labels["le"])] = sample.value
    for side in sides.values():
        side.instances = instances
    return start, sides


def page(url: str) -> str:
    """The text of a server's /metrics. Raises UNAVAILABLE."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:  # nosec B310  # the pipeline's
        return answer.read().decode()


def _page(url: str) -> str:
    try:
        return page(url)
    except UNAVAILABLE:
        return ""


def _add(total: Buckets, now: Buckets, before: Buckets) -> None:
    for bound, count in now.items():
        total[bound] = total.get(bound, 0) + count - before.get(bound, 0)
