"""Send requests to MLflow's REST API at $MLFLOW_TRACKING_URI. Errors contain MLflow's answer and a
remedy.

Each answer is parsed into a type, which contains only the fields that Rekindle reads; other fields
are ignored. As in the JSON of proto3, an optional field may be missing or null.

Source: MLflow 3.17, service.proto and model_registry.proto.
"""

import math
import os
import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, ValidationError

from argolocal.common.environment import read_integer, require_header_text
from argolocal.common.wording import visible
from rekindle.documents import Document, describe_first_error, name_field
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
from rekindle.names import ObjectId, Version, show

if TYPE_CHECKING:
    import requests

    from rekindle.content.http_answers import HttpAnswer

# environment variable of MLflow's client; the pauses before five retries are 0, 2, 4, 8 and 16 s
RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
DEFAULT_RETRIES = 5
MAX_RETRIES = 10  # the maximum that MLflow's client accepts
TIMEOUT_S = 30
MAX_ANSWER_BYTES = 64 << 20  # for comparison, 1,000 runs with 100 parameters take 10 MB
UNAVAILABLE_STATUSES = (502, 503, 504)  # sent by proxies without a server
MAX_SHOWN_LENGTH = 300  # limit for the text of other answers
SERVER_REMEDY = "Check that MLFLOW_TRACKING_URI is the address of an MLflow server."
# an unclosed tag ends at the next <, an unclosed script at the end of the page, so that a search
# takes linear time
HTML_TAGS = re.compile(r"<(script|style)\b.*?(?:</\1>|\Z)|<[^<>]*>", re.DOTALL | re.IGNORECASE)
# these numbers are texts in proto3's JSON format
NOT_FINITE = ("NaN", "Infinity", "-Infinity")
MAX_INT64 = (1 << 63) - 1
T = TypeVar("T")


def _replace_null(default: Callable[[], Any]) -> BeforeValidator:
    """Return the validator of an optional field, which replaces null by the default."""
    return BeforeValidator(lambda value: default() if value is None else value)


def _parse_integer(value: Any) -> Any:
    """Convert a 64-bit integer, which may be a text in proto3's JSON format."""
    if value is None:
        return 0
    if isinstance(value, str) and value.removeprefix("-").isdecimal() and len(value) <= 20:
        return int(value)
    return value


def _parse_tags(value: Any) -> dict[str, str]:
    """Convert a list of tags or parameters to a dictionary. Raises ValueError."""
    tags = {}
    for name, item in _items(value):
        text = item.get("value")
        if text is None:
            text = ""
        if not isinstance(text, str):
            raise ValueError(f"the value of {show(name)} must be a text")
        tags[name] = text
    return tags


def _parse_metrics(value: Any) -> dict[str, float]:
    """Convert a list of metrics to a dictionary, and omit values that are not finite. Raises
    ValueError."""
    metrics = {}
    for name, item in _items(value):
        number = item.get("value", 0.0)
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number and number not in NOT_FINITE:
            raise ValueError(f"the value of {show(name)} must be a number")

        # not the type `float`, because it raises OverflowError for a long integer
        number = float(str(number))
        if math.isfinite(number):
            metrics[name] = number
    return metrics


def _items(value: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the items of a list of key-value pairs by their key. Raises ValueError."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError("it must be a list")

    items = []
    for number, item in enumerate(value):
        if not isinstance(item, dict) or not isinstance(item.get("key"), str):
            raise ValueError(f"the item {number} must be an object with the text `key`")
        items.append((item["key"], item))
    return items


Text = Annotated[str, _replace_null(str)]
Integer = Annotated[int, BeforeValidator(_parse_integer), Field(ge=-MAX_INT64 - 1, le=MAX_INT64)]
Tags = Annotated[dict[str, str], BeforeValidator(_parse_tags)]
Metrics = Annotated[dict[str, float], BeforeValidator(_parse_metrics)]
Items = Annotated[list[T], _replace_null(list)]
Id = Annotated[str, name_field(ObjectId)]
VersionNumber = Annotated[str, name_field(Version)]


class Answer(Document):
    """The base class of answers. It is also used for answers whose fields are not read."""


class ArtifactChanged(Answer):
    """The answer to a request that writes or deletes an artifact. MLflow's FastAPI server sends an
    empty one."""


class ErrorAnswer(Answer):
    error_code: str = Field(min_length=1)
    message: Text = ""


class RunInfo(Answer):
    """The metadata of a run. Times are in milliseconds since 1970; 0 means unknown."""

    run_id: Id
    experiment_id: Id
    status: Literal["RUNNING", "SCHEDULED", "FINISHED", "FAILED", "KILLED"]
    lifecycle_stage: Text = ""
    start_time: Integer = 0
    end_time: Integer = 0
    artifact_uri: Text = ""


class RunContent(Answer):
    """`metrics` contains only finite numbers."""

    metrics: Metrics = Field(default_factory=dict)
    params: Tags = Field(default_factory=dict)
    tags: Tags = Field(default_factory=dict)


class Run(Answer):
    info: RunInfo
    data: RunContent


class RunAnswer(Answer):
    run: Run


class Page(Answer):
    """One page of a list; `next_page_token` is "" on the last page."""

    next_page_token: Text = ""


class RunsPage(Page):
    runs: Items[Run] = Field(default_factory=list)


class Experiment(Answer):
    experiment_id: Id
    name: str
    lifecycle_stage: Text = ""
    tags: Tags = Field(default_factory=dict)


class ExperimentAnswer(Answer):
    experiment: Experiment


class ExperimentsPage(Page):
    experiments: Items[Experiment] = Field(default_factory=list)


class ModelAlias(Answer):
    alias: str
    version: VersionNumber


class RegisteredModel(Answer):
    name: str
    aliases: Items[ModelAlias] = Field(default_factory=list)


class ModelAnswer(Answer):
    registered_model: RegisteredModel


class ModelsPage(Page):
    registered_models: Items[RegisteredModel] = Field(default_factory=list)


class ModelVersion(Answer):
    """`creation_timestamp`: in milliseconds since 1970, 0 if it is unknown."""

    name: str
    version: VersionNumber
    source: Text = ""
    run_id: Text = ""
    creation_timestamp: Integer = 0
    tags: Tags = Field(default_factory=dict)


class VersionAnswer(Answer):
    model_version: ModelVersion


class VersionsPage(Page):
    model_versions: Items[ModelVersion] = Field(default_factory=list)


class DownloadAddress(Answer):
    artifact_uri: Text = ""


class ArtifactFile(Answer):
    path: str


class ArtifactsPage(Page):
    files: Items[ArtifactFile] = Field(default_factory=list)


A = TypeVar("A", bound=Answer)


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


def request(method: str, path: str, model: type[A], **content: Any) -> A:
    """Return MLflow's answer to a request as a document of the type `model`.

    Raises RequestRefused, or TrackingError if the answer is malformed or not from MLflow.
    """
    import requests

    from rekindle.content.http_answers import UnreadableAnswer, send

    uri = address()
    url = f"{uri}/api/2.0/{path}"

    try:
        session = _configured_session()
        answer = send(
            session, method, url, max_bytes=MAX_ANSWER_BYTES, timeout=TIMEOUT_S, **content
        )
    except UnreadableAnswer as error:
        raise TrackingError(
            f"MLflow at {format_address(uri)} does not answer {method} {path} as MLflow does:"
            f" {error}. {SERVER_REMEDY}"
        ) from None
    except requests.RequestException as error:
        cause = describe_cause(innermost(error), uri)
        server = format_address(uri)
        raise TrackingError(
            f"MLflow at {server} does not answer ({cause}). Check MLFLOW_TRACKING_URI and that"
            f" `curl {server}/health` says OK, then run this step again: nothing is recorded twice."
        ) from error

    if not answer.ok:
        _refuse(answer)

    if model is ArtifactChanged and not answer.content:
        return model()

    try:
        return model.model_validate_json(answer.content)
    except ValidationError as error:
        is_object = bool(error.errors(include_url=False, include_input=False)[0]["loc"])
        if not is_object:
            _reject(answer)

        raise TrackingError(
            f"MLflow at {format_address(uri)} answered {method} {path} with a malformed document:"
            f" {describe_first_error(error)}. {SERVER_REMEDY}"
        ) from None


def condition(field: str, value: str) -> str:
    """Return the filter of an MLflow search for objects whose `field` has `value`.

    MLflow's filters have no escape characters, so the value is put in whichever quotes, single or
    double, it does not contain. If it contains both kinds, or ends with a backslash, these
    characters are replaced by wildcards, and the filter may match other values, too.
    """
    if not value.endswith("\\"):
        for quote in ("'", '"'):
            if quote not in value:
                return f"{field} = {quote}{value}{quote}"

    pattern = re.sub(r"['\"\\%]", "_", value)
    return f"{field} LIKE '{pattern}'"


def _refuse(answer: "HttpAnswer") -> NoReturn:
    """Raise RequestRefused with MLflow's error, or TrackingError if the answer does not come from
    MLflow."""
    try:
        refusal = ErrorAnswer.model_validate_json(answer.content)
    except ValidationError:
        _reject(answer)

    code = refusal.error_code
    text = f"{code}: {refusal.message or answer.reason}".strip().splitlines()[0]
    message = visible(without_secrets(text))
    raise RequestRefused(f"MLflow at {format_address(address())} refused: {message}", code)


def _reject(answer: "HttpAnswer") -> NoReturn:
    """Raise TrackingError with the text of an answer that is not MLflow's JSON."""
    server = format_address(address())
    host = urlsplit(address()).netloc.rpartition("@")[2]

    answer_text = (
        " ".join(visible(HTML_TAGS.sub(" ", answer.text)).split())[:MAX_SHOWN_LENGTH] or "nothing"
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


@cache
def _session(attempts: int, token: str) -> "requests.Session":
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    from rekindle.content.http_answers import Session

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
        session.set_token(f"Bearer {token}")
    elif user := os.environ.get(MLFLOW_TRACKING_USERNAME):
        password = os.environ.get(MLFLOW_TRACKING_PASSWORD, "")
        # encode here, because servers expect UTF-8 (RFC 7617), but `requests` would use Latin-1
        login = [text.encode().decode("latin-1") for text in (user, password)]
        session.auth = (login[0], login[1])

    return session


# a forked process must not use the connections of its parent
os.register_at_fork(after_in_child=_session.cache_clear)
