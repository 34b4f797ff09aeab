"""What the servers of a model have answered, read from their `/metrics` and added up by version."""

import http.client
import os
import socket
import urllib.request
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from rekindle.errors import RekindleError, say
from rekindle.release.client import resolve
from rekindle.release.watch.reference import FEATURES
from rekindle.release.watch.scores import LE, NAME

Buckets = dict[float, float]  # upper bound → how many were not above it, as Prometheus counts
Counts = dict[str, Any]  # "rows", and "scores" and "features": histograms by name


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

    def counts(self) -> Counts:
        """What drift is judged by: counts of the buckets between the bounds LE."""
        seen = {"scores": self.scores, "features": self.features}
        return {"rows": int(self.instances)} | {
            kind: {name: _between(buckets) for name, buckets in named.items()} for kind, named in seen.items()
        }


Answer = tuple[float, dict[str, Side]]  # of a server: when its process started, and what it answered, by version


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
        for url, answer in read(*self.endpoints).items():
            if not isinstance(answer, str):
                start, versions = answer
                again = url in known and (url, start) not in self.last
                before = self.last.get((url, start), {})
                for version, now in versions.items():
                    side = self.sides.setdefault(version, Side())
                    side.add(now, before.get(version, Side()))
                    side.crashes += again
                self.last[url, start] = versions
        return self.sides


def look(endpoint: str, version: str) -> dict[str, Counts]:
    """What each server behind the headless Service `endpoint` has seen as `version` of the model, by process.

    Raises RekindleError if none answers.
    """
    servers, problem = dict[str, Counts](), f"{endpoint} has no servers"
    for url, answer in read(endpoint).items():
        if isinstance(answer, str):
            problem = answer
            say(problem)
        else:
            start, versions = answer
            servers[f"{url} since {start}"] = versions.get(version, Side()).counts()
    if not servers:
        raise RekindleError(f"{problem}: is the model deployed? Look at the log of its servers.")
    return servers


def since(now: Mapping[str, Counts], before: Mapping[str, Counts]) -> Counts:
    """What all processes have added between two looks."""
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


def read(*endpoints: str) -> dict[str, Answer | str]:
    """The answer of each server behind these Services, by its URL; a text says why it gives none."""
    urls = list(dict.fromkeys(url for endpoint in endpoints for url in addresses(endpoint)))
    with ThreadPoolExecutor(16) as pool:
        return dict(zip(urls, pool.map(_read, urls), strict=True))


def _read(url: str) -> Answer | str:
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:  # nosec B310  # the pipeline's
            return parsed(answer.read().decode())
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"{url} does not tell what it has seen ({error})"


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


def parsed(text: str) -> Answer:
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


def _between(buckets: Buckets) -> list[int]:
    values = [int(buckets[float(le)]) for le in LE]
    return [b - a for a, b in zip([0, *values], values, strict=False)]


def _add(total: Buckets, now: Buckets, before: Buckets) -> None:
    for bound, count in now.items():
        total[bound] = total.get(bound, 0) + count - before.get(bound, 0)
