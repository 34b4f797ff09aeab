"""See that what serves is what was judged: replay test transactions, compare with the offline scores, then promote.

    rekindle step steps.verify --name=fraud --endpoint=http://127.0.0.1:8080 --dataset=dataset/ --report=report/ \\
        --model-sha256=... --version=3

Only if every score agrees does the version become the `champion`. Otherwise the step fails, and the pipeline puts the
release that served before back.
"""

import http.client
import json
import math
import os
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field

from rekindle.errors import DataError, RekindleError
from rekindle.step import Artifact, StepInputs, StepOutputs

ENDPOINT = "REKINDLE_ENDPOINT"  # environment: where the service is reached from here, whatever its name
POLL = 0.1  # seconds between two looks at a server that is not there yet
AWAY = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)


class Inputs(StepInputs):
    workload: str = Field(default="steps.fraud", description="module that knows how to replay its test data")
    name: str = Field(description="registered model")
    endpoint: str = Field(
        default="", description="URL of the service (default: http://NAME:8080; $REKINDLE_ENDPOINT wins)"
    )
    dataset: Artifact = Field(description="what prepare made")
    report: Artifact = Field(description="what evaluate made, with the offline scores")
    model_sha256: str = Field(description="weights that must serve")
    version: str = Field(description="version to promote")
    run_id: str = Field(default="", description="MLflow run to record it on (empty: none)")
    sample: int = Field(default=200, ge=1, description="test transactions to replay, about")
    tolerance: float = Field(default=1e-5, ge=0, description="largest difference between a served and an offline score")
    max_batch: int = Field(default=1000, ge=1, description="what the server takes: serve.max_batch")
    max_history: int = Field(default=100_000, ge=0, description="what the server takes: serve.max_history")
    wait_seconds: float = Field(default=180.0, gt=0, description="for the service to serve these weights")


class Outputs(StepOutputs):
    max_difference: float = Field(description="largest difference found")
    replayed: int = Field(description="transactions replayed")
    endpoint: str = Field(description="URL of the service")


@dataclass
class Comparison:
    """Served against offline scores, so far."""

    tolerance: float
    replayed: int = 0
    wrong: int = 0
    left_out: int = 0  # more than the server takes in one request
    worst: float = 0.0
    at: str = ""  # the worst one, in words

    def add(self, answer: list[dict[str, Any]], expected: list[float]) -> None:
        for item, offline in zip(answer, expected, strict=True):
            difference = abs(item["score"] - offline)
            self.replayed += 1
            self.wrong += not difference <= self.tolerance  # NaN is wrong
            if not (difference <= self.worst or math.isnan(self.worst)):
                self.worst = difference
                self.at = f"{item['transaction_id']}, served {item['score']!r}, offline {offline!r}"


def run(inputs: Inputs) -> Outputs:
    """Wait, replay, compare, promote. Raises DataError if a score differs, RekindleError if nothing serves."""
    from rekindle import tracking
    from rekindle.workload import load

    endpoint = reached(inputs.endpoint or f"http://{inputs.name}:8080")
    service = Service(endpoint, inputs.model_sha256, time.monotonic() + inputs.wait_seconds)
    service.wait()
    found = Comparison(inputs.tolerance)
    replay = getattr(load(inputs.workload), "replay", None)
    if replay:
        seed = int(inputs.model_sha256[:15], 16)
        most = (inputs.max_batch, inputs.max_history)
        for request, expected in replay(inputs.dataset, inputs.report, inputs.sample, seed, *most):
            try:
                found.add(service.score(request), expected)
            except TooLarge:
                found.left_out += len(expected)
        judge(found, inputs, endpoint)
    else:
        sys.stderr.write(f"{inputs.workload} defines no replay: only the identity of the weights was checked\n")
    tracking.promote(inputs.name, inputs.version)
    if inputs.run_id:
        metrics = {"verify.max_difference": found.worst, "verify.replayed": found.replayed}
        tracking.log(inputs.run_id, metrics=metrics, tags={"rekindle.promoted": f"{inputs.name} {inputs.version}"})
    return Outputs(max_difference=found.worst, replayed=found.replayed, endpoint=endpoint)


def reached(endpoint: str) -> str:
    """Where a service is reached from here: $REKINDLE_ENDPOINT, or the variables that every pod has for a Service."""
    name = (urlsplit(endpoint).hostname or "").upper().replace("-", "_")
    host, port = os.environ.get(f"{name}_SERVICE_HOST"), os.environ.get(f"{name}_SERVICE_PORT")
    return (os.environ.get(ENDPOINT) or (f"http://{host}:{port}" if host and port else endpoint)).rstrip("/")


def judge(found: Comparison, inputs: Inputs, endpoint: str) -> None:
    """Raises DataError unless something was replayed and all of it agreed."""
    if not found.replayed:
        raise DataError(
            f"no test transaction could be replayed with at most {inputs.max_history:,} rows of history, and "
            f"{found.left_out} were too large for the server: raise serve.max_history or serve.max_bytes. Version "
            f"{inputs.version} is not promoted; what served before is put back."
        )
    if found.wrong:
        raise DataError(
            f"{found.wrong} of {found.replayed} replayed transactions score differently at {endpoint} than offline (by "
            f"more than {inputs.tolerance:g}); the worst is transaction {found.at}. Version {inputs.version} is not "
            "promoted; what served before is put back."
        )


class TooLarge(DataError):
    """The server does not take that much in one request."""


class Service:
    """The deployed model, as far as it is there: what is away is tried again until the deadline."""

    def __init__(self, endpoint: str, sha256: str, deadline: float) -> None:
        self.endpoint, self.sha256, self.deadline = endpoint, sha256, deadline

    def wait(self) -> None:
        """Until it is ready with the weights `sha256`."""
        while (answer := self.get("/health/ready")).get("model_sha256") != self.sha256 or answer["status"] != "ready":
            self.again(f"it answers {answer}")

    def score(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """The scores by the expected weights; while servers are replaced, others may answer."""
        while (answer := self.get("/v1/score", json.dumps(request).encode()))["model_sha256"] != self.sha256:
            self.again(f"a request was answered by the weights {answer['model_sha256'][:12]}")
        return answer["scores"]

    def get(self, path: str, body: bytes | None = None) -> dict[str, Any]:
        headers = {"content-type": "application/json"} if body else {}
        request = urllib.request.Request(self.endpoint + path, body, headers)
        while True:
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                text = error.read().decode(errors="replace")
                if error.code < 500:
                    raise (TooLarge if error.code == 413 else DataError)(
                        f"{self.endpoint}{path} answered {error.code}: {text[:1000]}"
                    ) from error
                self.again(f"it answers {error.code}: {text[:200]}")
            except (*AWAY, ValueError) as error:
                self.again(str(error))

    def again(self, reason: str) -> None:
        """Wait a moment. Raises RekindleError after the deadline."""
        if time.monotonic() > self.deadline:
            raise RekindleError(
                f"{self.endpoint} does not serve the model {self.sha256[:12]} in time ({reason}). Look at the servers' "
                f"log; set {ENDPOINT} if the service is reached elsewhere from here."
            )
        time.sleep(POLL)
