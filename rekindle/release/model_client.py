"""A client of a deployed model, which retries while its servers are replaced."""

import http.client
import os
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from argolocal.common.environment import require_header_text
from argolocal.common.json_text import MAX_BYTES, loads, to_json
from rekindle.errors import ConfigError, DataError, RekindleError, format_address, in_one_line
from rekindle.kubernetes_names import REKINDLE_TOKEN

ENDPOINT = "REKINDLE_ENDPOINT"  # environment variable: URL of the service as seen from this process
# response headers: sha256 of the weights, and model version
SHA256 = "model-sha256"
VERSION = "model-version"
# request header of `verify`: the server does not count the instances, since they are test rows
REPLAY = "rekindle-replay"
DATA_UNTIL = "model-data-until"  # response header: the data cut-off, if the dataset has one
RETRY_PAUSE_S = 0.1
MAX_ERROR_BYTES = 1000  # maximum number of bytes to read from the body of an error
UNAVAILABLE = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)


def resolve(endpoint: str) -> str:
    """Return the URL of a service: $REKINDLE_ENDPOINT, else the address in the variables
    NAME_SERVICE_HOST and NAME_SERVICE_PORT of pods, else `endpoint`. Raises ConfigError if it
    contains a password."""
    name = (urlsplit(endpoint).hostname or "").upper().replace("-", "_")
    host = os.environ.get(f"{name}_SERVICE_HOST")
    port = os.environ.get(f"{name}_SERVICE_PORT")
    service = f"http://{host}:{port}" if host and port else endpoint
    url = (os.environ.get(ENDPOINT) or service).rstrip("/")
    reject_secrets(url)
    return url


def reject_secrets(url: str) -> None:
    """Raise ConfigError if the URL of a model's servers contains more than a host, a port and a
    path."""
    if format_address(url) != url:
        raise ConfigError(
            f"the address of the model's servers, {format_address(url)}, contains a user, a"
            f" password or a query: set {ENDPOINT} to http(s)://HOST[:PORT], and"
            f" {REKINDLE_TOKEN} to a token of the servers."
        )


class RequestTooLarge(DataError):
    """The server rejects a request because of its size."""


class ModelClient:
    """Client of the model `name` at `endpoint`. Its instances do not count in the server's
    statistics of user requests.

    Accepts only answers from servers whose weights have the hash `sha256`. Retries until `deadline`
    (monotonic clock).
    """

    def __init__(self, endpoint: str, name: str, sha256: str, deadline: float) -> None:
        reject_secrets(endpoint)
        self.endpoint = endpoint
        self.path = f"/v1/models/{name}"
        self.sha256 = sha256
        self.deadline = deadline

    def wait(self) -> dict[str, Any]:
        """Wait until a server with the expected weights is ready, and return its status. Raises
        RekindleError."""
        status = self._send(self.path)
        while not status.get("ready"):
            self._retry(f"it answers {in_one_line(status)}")
            status = self._send(self.path)
        return status

    def example(self) -> dict[str, Any]:
        """Return the server's example request. Raises the errors of `predict`."""
        return self._send(f"{self.path}/example")

    def predict(self, request: dict[str, Any]) -> list[Any]:
        """Return the predictions, one per instance. Raises RequestTooLarge or another DataError if
        the server rejects the request or answers without predictions, and RekindleError after the
        deadline."""
        answer = self._send(f"{self.path}:predict", to_json(request).encode())
        predictions = answer.get("predictions")
        if not isinstance(predictions, list):
            raise DataError(
                f"{self.endpoint} answered {in_one_line(answer)}: it must have a list of"
                f" predictions. Set {ENDPOINT} to a server of the model."
            )
        return predictions

    def _send(self, path: str, body: bytes | None = None) -> dict[str, Any]:
        headers = {REPLAY: "1"} | ({"content-type": "application/json"} if body else {})
        tokens = os.environ.get(REKINDLE_TOKEN, "").split()
        if tokens:
            headers["authorization"] = f"Bearer {require_header_text(tokens[0], REKINDLE_TOKEN)}"

        request = urllib.request.Request(self.endpoint + path, body, headers)
        while True:
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:  # nosec B310  # an address in the pipeline
                    sha256 = answer.headers[SHA256]
                    if sha256 == self.sha256:
                        return _parse_answer(answer.read(MAX_BYTES + 1))

                    self._retry(f"it answers with the weights {str(sha256)[:12]}")
            except urllib.error.HTTPError as error:
                text = error.read(MAX_ERROR_BYTES).decode(errors="replace")
                # a server that is being replaced may answer 404
                if error.code < 500 and error.code != 404:
                    raise (RequestTooLarge if error.code == 413 else DataError)(
                        f"{self.endpoint}{path} answered {error.code}: {text}"
                    ) from error

                self._retry(f"it answers {error.code}: {text[:200]}")
            except (*UNAVAILABLE, ValueError) as error:
                self._retry(str(error))

    def _retry(self, reason: str) -> None:
        """Pause before the next attempt. Raises RekindleError after the deadline."""
        if time.monotonic() > self.deadline:
            raise RekindleError(
                f"{self.endpoint} does not serve the model {self.sha256[:12]} in time ({reason})."
                f" See the servers' log; set {ENDPOINT} if the service has another address for this"
                " process."
            )
        time.sleep(RETRY_PAUSE_S)


def _parse_answer(data: bytes) -> dict[str, Any]:
    """Return the JSON object in an answer. Raises ValueError."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"its answer has more than {MAX_BYTES:,} bytes")
    value = loads(data)
    if not isinstance(value, dict):
        raise ValueError(f"its answer is {in_one_line(value)}, and must be a JSON object")
    return value
