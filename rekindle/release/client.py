"""A client of a deployed model that waits for the expected weights, and retries while servers are replaced."""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from rekindle.errors import DataError, RekindleError

ENDPOINT = "REKINDLE_ENDPOINT"  # environment: URL of the service as seen from here, whatever its name
SHA256, VERSION = "model-sha256", "model-version"  # headers of every answer: which weights gave it
DATA_UNTIL = "model-data-until"  # and where the data that it knows ends, if its dataset says so
POLL = 0.1  # seconds between two attempts
UNAVAILABLE = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)


def resolve(endpoint: str) -> str:
    """The URL to reach a service at: $REKINDLE_ENDPOINT, else the variables that every pod has for a Service."""
    name = (urlsplit(endpoint).hostname or "").upper().replace("-", "_")
    host, port = os.environ.get(f"{name}_SERVICE_HOST"), os.environ.get(f"{name}_SERVICE_PORT")
    return (os.environ.get(ENDPOINT) or (f"http://{host}:{port}" if host and port else endpoint)).rstrip("/")


class RequestTooLarge(DataError):
    """The server refuses a request for its size."""


class ModelClient:
    """The model `name` at `endpoint`; only answers of the weights `sha256` count. Retries until `deadline`."""

    def __init__(self, endpoint: str, name: str, sha256: str, deadline: float) -> None:
        self.endpoint, self.path, self.sha256, self.deadline = endpoint, f"/v1/models/{name}", sha256, deadline

    def wait(self) -> None:
        """Until a server is ready with the expected weights. Raises RekindleError after the deadline."""
        while not (status := self._send(self.path))["ready"]:
            self._retry(f"it answers {status}")

    def example(self) -> dict[str, Any]:
        """A request that the server says it takes. Raises as `predict` does."""
        return self._send(f"{self.path}/example")

    def predict(self, request: dict[str, Any]) -> list[Any]:
        """The prediction for each instance. Raises RequestTooLarge, DataError, or RekindleError after the deadline."""
        return self._send(f"{self.path}:predict", json.dumps(request).encode())["predictions"]

    def _send(self, path: str, body: bytes | None = None) -> dict[str, Any]:
        headers = {"content-type": "application/json"} if body else {}
        request = urllib.request.Request(self.endpoint + path, body, headers)
        while True:
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:  # nosec B310  # the pipeline's
                    if (sha256 := answer.headers[SHA256]) == self.sha256:
                        return json.load(answer)
                    self._retry(f"it answers with the weights {str(sha256)[:12]}")
            except urllib.error.HTTPError as error:
                text = error.read().decode(errors="replace")
                if error.code < 500 and error.code != 404:  # what is being replaced may not know the name
                    raise (RequestTooLarge if error.code == 413 else DataError)(
                        f"{self.endpoint}{path} answered {error.code}: {text[:1000]}"
                    ) from error
                self._retry(f"it answers {error.code}: {text[:200]}")
            except (*UNAVAILABLE, ValueError) as error:
                self._retry(str(error))

    def _retry(self, reason: str) -> None:
        """Pause before the next attempt. Raises RekindleError after the deadline."""
        if time.monotonic() > self.deadline:
            raise RekindleError(
                f"{self.endpoint} does not serve the model {self.sha256[:12]} in time ({reason}). Look at the servers' "
                f"log; set {ENDPOINT} if the service is reached elsewhere from here."
            )
        time.sleep(POLL)
