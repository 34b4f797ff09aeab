"""Send requests to MLflow's REST API at MLFLOW_TRACKING_URI; errors contain MLflow's response and a
remedy."""

import os
import re
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from argolocal.common.environment import read_integer, require_header_text
from argolocal.common.wording import visible
from rekindle.errors import (
    ConfigError,
    TrackingError,
    describe_cause,
    format_address,
    innermost,
    without_secrets,
)
from rekindle.kubernetes_names import (
    MLFLOW_TRACKING_PASSWORD,
    MLFLOW_TRACKING_TOKEN,
    MLFLOW_TRACKING_URI,
    MLFLOW_TRACKING_USERNAME,
)

if TYPE_CHECKING:
    import requests

# environment variable of MLflow's client; the pauses before five retries are 0, 2, 4, 8 and 16 s
RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
DEFAULT_RETRIES = 5
MAX_RETRIES = 10  # the maximum that MLflow's client accepts
TIMEOUT_S = 30
UNAVAILABLE_STATUSES = (502, 503, 504)  # status codes of a proxy whose server does not answer
MAX_ANSWER_LENGTH = 300  # characters to show of an answer that is not MLflow's JSON
HTML_TAGS = re.compile(r"<(script|style)\b.*?</\1>|<[^>]*>", re.DOTALL | re.IGNORECASE)


class RequestRefused(TrackingError):
    """MLflow answered with an error; `code` is MLflow's error code."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def address() -> str:
    """Return the address of the MLflow server. Raises TrackingError if MLFLOW_TRACKING_URI is not
    set."""
    uri = os.environ.get(MLFLOW_TRACKING_URI, "").rstrip("/")
    if not uri.startswith(("http://", "https://")):
        raise TrackingError(
            f"MLFLOW_TRACKING_URI is {format_address(uri) or 'not set'}: MLflow records runs and"
            " models. Set it to the http(s):// address of an MLflow server, in a cluster through"
            ' the ConfigMap "rekindle".'
        )
    return uri


def request(method: str, path: str, **content: Any) -> dict[str, Any]:
    """Return MLflow's answer to a request.

    Raises RequestRefused, or TrackingError if the answer does not come from MLflow.
    """
    import requests

    uri = address()

    try:
        session = _configured_session()
        answer = session.request(method, f"{uri}/api/2.0/{path}", timeout=TIMEOUT_S, **content)
    except requests.RequestException as error:
        cause = describe_cause(innermost(error), uri)
        server = format_address(uri)
        raise TrackingError(
            f"MLflow at {server} does not answer ({cause}). Check MLFLOW_TRACKING_URI and that"
            f" `curl {server}/health` says OK, then run this step again: nothing is recorded twice."
        ) from error

    try:
        body = answer.json() if answer.content else {}
    except ValueError:
        body = None

    if not isinstance(body, dict) or not (answer.ok or body.get("error_code")):
        _reject(answer)
    if answer.ok:
        return body

    code = body["error_code"]
    message = body.get("message") or answer.reason
    message = without_secrets(f"{code}: {message}".splitlines()[0])
    raise RequestRefused(f"MLflow at {format_address(address())} refused: {message}", code)


def condition(field: str, value: str) -> str:
    """Return the filter of an MLflow search for objects whose `field` has `value`.

    MLflow's filters have no escape characters, so the value is put in the kind of quotes that it
    does not contain. If it contains both kinds, or ends with a backslash, these characters are
    replaced by wildcards, and the filter may match other values, too.
    """
    if not value.endswith("\\"):
        for quote in ("'", '"'):
            if quote not in value:
                return f"{field} = {quote}{value}{quote}"

    pattern = re.sub(r"['\"\\%]", "_", value)
    return f"{field} LIKE '{pattern}'"


def _reject(answer: "requests.Response") -> NoReturn:
    """Raise TrackingError with the text of an answer that is not MLflow's JSON."""
    server = format_address(address())
    host = urlsplit(address()).netloc.rpartition("@")[2]

    answer_text = (
        " ".join(visible(HTML_TAGS.sub(" ", answer.text)).split())[:MAX_ANSWER_LENGTH] or "nothing"
    )
    if "Host header" in answer_text:
        remedy = (
            f"Start MLflow with {host} in --allowed-hosts (MLFLOW_SERVER_ALLOWED_HOSTS), or use an"
            " address that it contains."
        )
    elif answer.status_code in (401, 403):
        remedy = (
            "Set MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD,"
            " of a permitted user."
        )
    else:
        remedy = "Check MLFLOW_TRACKING_URI: an MLflow server answers in JSON."

    raise TrackingError(
        f"MLflow at {server} answered {answer.status_code} {answer.reason}: {answer_text!r}."
        f" {remedy}"
    )


def _configured_session() -> "requests.Session":
    """Return a session with the retries and the token that the environment sets. Raises
    TrackingError."""
    try:
        retries = read_integer(RETRIES, DEFAULT_RETRIES, 0, MAX_RETRIES)
        token = require_header_text(
            os.environ.get(MLFLOW_TRACKING_TOKEN, "").strip(), MLFLOW_TRACKING_TOKEN
        )
    except ConfigError as error:
        raise TrackingError(*error.args) from None
    return _session(retries, token)


def _add_token(token: str, request: "requests.PreparedRequest") -> "requests.PreparedRequest":
    request.headers["Authorization"] = f"Bearer {token}"
    return request


@cache
def _session(attempts: int, token: str) -> "requests.Session":
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    class Session(requests.Session):
        def rebuild_auth(self, prepared_request: Any, response: Any) -> None:
            """Remove the login from a request that a redirect sends to another server.

            The method of `requests` replaces the login by one of ~/.netrc.
            """
            if self.should_strip_auth(response.request.url, prepared_request.url):
                prepared_request.headers.pop("Authorization", None)

    session = Session()
    retried_statuses = (408, 429, 500, *UNAVAILABLE_STATUSES)

    retry = Retry(
        attempts,
        backoff_factor=1,
        status_forcelist=retried_statuses,
        allowed_methods=None,
        raise_on_status=False,
    )

    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(max_retries=retry))

    if token:
        # not a header of the session, which a login in ~/.netrc would replace
        session.auth = partial(_add_token, token)
    elif user := os.environ.get(MLFLOW_TRACKING_USERNAME):
        password = os.environ.get(MLFLOW_TRACKING_PASSWORD, "")
        # encoded here, because `requests` would use Latin-1, but servers expect UTF-8 (RFC 7617)
        login = [text.encode().decode("latin-1") for text in (user, password)]
        session.auth = (login[0], login[1])

    return session
