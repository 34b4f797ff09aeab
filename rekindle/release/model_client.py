"""A client of a deployed model, which repeats requests while the servers are replaced."""

import http.client
import os
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from argolocal.common.environment import require_header_text
from argolocal.common.json_text import MAX_BYTES, loads, to_json
from rekindle.errors import (
    ConfigError,
    DataError,
    RekindleError,
    format_address,
    format_in_one_line,
)
from rekindle.kubernetes_names import REKINDLE_TOKEN

# environment variable with the URL of the service as seen from this process
ENDPOINT_VARIABLE = "REKINDLE_ENDPOINT"
# response headers: sha256 of the weights, and model version
SHA256_HEADER = "model-sha256"
VERSION_HEADER = "model-version"
# request header of `verify`, which tells the server not to count the instances, since they are test
# rows
REPLAY_HEADER = "rekindle-replay"
# response header with the data cut-off of the dataset, if the dataset has a cut-off
DATA_UNTIL_HEADER = "model-data-until"
RETRY_PAUSE_S = 0.1
# maximum number of bytes to read from the body of an error
MAX_ERROR_BYTES = 1000
UNAVAILABLE_ERRORS = (
    urllib.error.URLError,
    http.client.HTTPException,
    ConnectionError,
    TimeoutError,
)


def resolve_endpoint(endpoint: str) -> str:
    """Return the URL of a service: $REKINDLE_ENDPOINT, else the address in the variables
    NAME_SERVICE_HOST and NAME_SERVICE_PORT of pods, else `endpoint`. Raises ConfigError if the URL
    contains a password."""
    service_name = (urlsplit(endpoint).hostname or "").upper().replace("-", "_")
    service_host = os.environ.get(f"{service_name}_SERVICE_HOST")
    service_port = os.environ.get(f"{service_name}_SERVICE_PORT")
    service_url = (
        f"http://{service_host}:{service_port}" if service_host and service_port else endpoint
    )
    url = (os.environ.get(ENDPOINT_VARIABLE) or service_url).rstrip("/")
    reject_secrets(url)
    return url


def reject_secrets(url: str) -> None:
    """Raise ConfigError if the URL of a model's servers contains more than a host, a port and a
    path."""
    if format_address(url) != url:
        raise ConfigError(
            f"the address of the model's servers, {format_address(url)}, contains a user, a"
            f" password or a query: set {ENDPOINT_VARIABLE} to http(s)://HOST[:PORT], and"
            f" {REKINDLE_TOKEN} to a token of the servers."
        )


class RequestTooLarge(DataError):
    """The server rejects a request because of its size."""


class ModelClient:
    """Client of the model `model_name` at `endpoint`. In its statistics of user requests, the
    server does not count the instances that the client sends.

    The client accepts only answers from servers whose weights have the hash `sha256`. The client
    repeats failed requests until `deadline_seconds`, a time of the monotonic clock.
    """

    def __init__(
        self, endpoint: str, model_name: str, sha256: str, deadline_seconds: float
    ) -> None:
        reject_secrets(endpoint)
        self.endpoint = endpoint
        self.path = f"/v1/models/{model_name}"
        self.sha256 = sha256
        self.deadline = deadline_seconds

    def wait(self) -> dict[str, Any]:
        """Wait until a server with the expected weights is ready, and return its status. Raises
        RekindleError."""
        server_status = self._send(self.path)
        while not server_status.get("ready"):
            self._retry(f"it answers {format_in_one_line(server_status)}")
            server_status = self._send(self.path)
        return server_status

    def example(self) -> dict[str, Any]:
        """Return the server's example request. Raises the errors of `predict`."""
        return self._send(f"{self.path}/example")

    def predict(self, request: dict[str, Any]) -> list[Any]:
        """Return the predictions, one per instance. Raises RequestTooLarge or another DataError if
        the server rejects the request or answers without predictions, and RekindleError after the
        deadline."""
        server_answer = self._send(f"{self.path}:predict", to_json(request).encode())
        predictions = server_answer.get("predictions")
        if not isinstance(predictions, list):
            raise DataError(
                f"{self.endpoint} answered {format_in_one_line(server_answer)}: it must have a"
                f" list of predictions. Set {ENDPOINT_VARIABLE} to a server of the model."
            )
        return predictions

    def _send(self, url_path: str, request_body: bytes | None = None) -> dict[str, Any]:
        request_headers = {REPLAY_HEADER: "1"} | (
            {"content-type": "application/json"} if request_body else {}
        )
        access_tokens = os.environ.get(REKINDLE_TOKEN, "").split()
        if access_tokens:
            request_headers["authorization"] = (
                f"Bearer {require_header_text(access_tokens[0], REKINDLE_TOKEN)}"
            )

        http_request = urllib.request.Request(
            self.endpoint + url_path, request_body, request_headers
        )
        while True:
            try:
                with urllib.request.urlopen(http_request, timeout=30) as http_response:  # nosec B310  # an address in the pipeline
                    answered_sha256 = http_response.headers[SHA256_HEADER]
                    if answered_sha256 == self.sha256:
                        return _parse_answer(http_response.read(MAX_BYTES + 1))

                    self._retry(f"it answers with the weights {str(answered_sha256)[:12]}")
            except urllib.error.HTTPError as error:
                error_text = error.read(MAX_ERROR_BYTES).decode(errors="replace")
                # a server that is being replaced may answer 404
                if error.code < 500 and error.code != 404:
                    error_type = RequestTooLarge if error.code == 413 else DataError
                    raise error_type(
                        f"{self.endpoint}{url_path} answered {error.code}: {error_text}"
                    ) from error

                self._retry(f"it answers {error.code}: {error_text[:200]}")
            except (*UNAVAILABLE_ERRORS, ValueError) as error:
                self._retry(str(error))

    def _retry(self, reason: str) -> None:
        """Pause before the next attempt of a request. Raises RekindleError after the deadline."""
        if time.monotonic() > self.deadline:
            raise RekindleError(
                f"{self.endpoint} does not serve the model {self.sha256[:12]} in time ({reason})."
                f" See the servers' log; set {ENDPOINT_VARIABLE} if the service has another"
                " address for this process."
            )
        time.sleep(RETRY_PAUSE_S)


def _parse_answer(answer_bytes: bytes) -> dict[str, Any]:
    """Return the JSON object in an answer of the server. Raises ValueError."""
    if len(answer_bytes) > MAX_BYTES:
        raise ValueError(f"its answer has more than {MAX_BYTES:,} bytes")
    answer_object = loads(answer_bytes)
    if not isinstance(answer_object, dict):
        raise ValueError(
            f"its answer is {format_in_one_line(answer_object)}, and must be a JSON object"
        )
    return answer_object
