"""Send requests to MLflow's REST API at $MLFLOW_TRACKING_URI. Errors contain MLflow's answer and a
remedy.

Each answer of MLflow is parsed into a type, which contains only the fields that Rekindle reads;
other fields are ignored. As in the JSON of proto3, an optional field may be missing or null.

Source: the types are defined by MLflow 3.17 (service.proto and model_registry.proto).
"""

import math
import os
import re
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, ValidationError

from argolocal.common.environment import read_integer, require_header_text
from argolocal.common.wording import escape_control_chars
from rekindle.documents import Document, describe_first_error, name_field
from rekindle.errors import (
    ConfigError,
    TrackingError,
    describe_cause,
    find_innermost_cause,
    format_address,
    without_secrets,
)
from rekindle.kubernetes_names import (
    MLFLOW_TRACKING_PASSWORD,
    MLFLOW_TRACKING_TOKEN,
    MLFLOW_TRACKING_URI,
    MLFLOW_TRACKING_USERNAME,
)
from rekindle.names import ObjectId, Version, format_untrusted

if TYPE_CHECKING:
    import requests

    from rekindle.content.http_answers import HttpAnswer

# environment variable of MLflow's client; the pauses before five retries are 0, 2, 4, 8 and 16 s
RETRIES_VARIABLE = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
DEFAULT_RETRIES = 5
# largest number of retries that MLflow's client accepts
MAX_RETRIES = 10
TIMEOUT_S = 30
# for comparison, 1,000 runs with 100 parameters take 10 MB
MAX_ANSWER_BYTES = 64 << 20
# sent by proxies without a server
UNAVAILABLE_STATUSES = (502, 503, 504)
# maximum number of characters of MLflow's answer in an error message
MAX_SHOWN_LENGTH = 300
SERVER_REMEDY = "Check that MLFLOW_TRACKING_URI is the address of an MLflow server."
# matches HTML tags, and scripts and styles with their content. An unclosed tag ends at the next <,
# and an unclosed script at the end of the page: otherwise, a search could take quadratic time
HTML_TAGS = re.compile(r"<(script|style)\b.*?(?:</\1>|\Z)|<[^<>]*>", re.DOTALL | re.IGNORECASE)
# numbers that proto3's JSON format represents as texts
NOT_FINITE_TEXTS = ("NaN", "Infinity", "-Infinity")
MAX_INT64 = (1 << 63) - 1
T = TypeVar("T")


def _replace_null(make_default: Callable[[], Any]) -> BeforeValidator:
    """Return the validator of an optional field, which replaces null by the default."""
    return BeforeValidator(
        lambda field_value: make_default() if field_value is None else field_value
    )


def _parse_integer(json_value: Any) -> Any:
    """Convert a 64-bit integer, which may be a text in proto3's JSON format."""
    if json_value is None:
        return 0
    if (
        isinstance(json_value, str)
        and json_value.removeprefix("-").isdecimal()
        and len(json_value) <= 20
    ):
        return int(json_value)
    return json_value


def _parse_tags(json_value: Any) -> dict[str, str]:
    """Convert a list of tags or parameters to a dictionary. Raises ValueError."""
    tags_by_name = {}
    for tag_name, tag_item in _list_named_items(json_value):
        tag_text = tag_item.get("value")
        if tag_text is None:
            tag_text = ""
        if not isinstance(tag_text, str):
            raise ValueError(f"the value of {format_untrusted(tag_name)} must be a text")
        tags_by_name[tag_name] = tag_text
    return tags_by_name


def _parse_metrics(json_value: Any) -> dict[str, float]:
    """Convert a list of metrics to a dictionary, and omit values that are not finite. Raises
    ValueError."""
    metrics_by_name = {}
    for metric_name, metric_item in _list_named_items(json_value):
        metric_value = metric_item.get("value", 0.0)
        is_number = isinstance(metric_value, int | float) and not isinstance(metric_value, bool)
        if not is_number and metric_value not in NOT_FINITE_TEXTS:
            raise ValueError(f"the value of {format_untrusted(metric_name)} must be a number")

        # convert the text, because `float` of a long integer raises OverflowError
        metric_value = float(str(metric_value))
        if math.isfinite(metric_value):
            metrics_by_name[metric_name] = metric_value
    return metrics_by_name


def _list_named_items(json_value: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the items of a list of key-value pairs by their key. Raises ValueError."""
    if json_value is None:
        return []
    if not isinstance(json_value, list):
        raise ValueError("it must be a list")

    named_items = []
    for item_number, json_item in enumerate(json_value):
        if not isinstance(json_item, dict) or not isinstance(json_item.get("key"), str):
            raise ValueError(f"the item {item_number} must be an object with the text `key`")
        named_items.append((json_item["key"], json_item))
    return named_items


Text = Annotated[str, _replace_null(str)]
Integer = Annotated[int, BeforeValidator(_parse_integer), Field(ge=-MAX_INT64 - 1, le=MAX_INT64)]
Tags = Annotated[dict[str, str], BeforeValidator(_parse_tags)]
Metrics = Annotated[dict[str, float], BeforeValidator(_parse_metrics)]
Items = Annotated[list[T], _replace_null(list)]
Id = Annotated[str, name_field(ObjectId)]
VersionNumber = Annotated[str, name_field(Version)]


class Answer(Document):
    """The base class of MLflow's answers. The class Answer is also the type of answers whose fields
    Rekindle does not read."""


class ArtifactChanged(Answer):
    """The answer to a request that writes or deletes an artifact. MLflow's FastAPI server sends an
    empty body."""


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
    """The metrics, parameters and tags of a run. Metrics with the values NaN and infinity are left
    out."""

    metrics: Metrics = Field(default_factory=dict)
    params: Tags = Field(default_factory=dict)
    tags: Tags = Field(default_factory=dict)


class Run(Answer):
    info: RunInfo
    data: RunContent


class RunAnswer(Answer):
    run: Run


class Page(Answer):
    """One page of a list that MLflow returns; `next_page_token` is "" on the last page."""

    next_page_token: Text = ""

    def is_empty(self) -> bool:
        """Return True if the page has no objects."""
        return not any(value for name, value in self if name != "next_page_token")


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


def get_server_address() -> str:
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


def send_request(method: str, path: str, answer_type: type[A], **request_options: Any) -> A:
    """Return MLflow's answer to a request as a document of the type `answer_type`.

    Raises RequestRefused if MLflow answers with an error, and TrackingError if MLflow does not
    answer, or if the answer is malformed or does not come from MLflow.
    """
    import requests

    from rekindle.content.http_answers import UnreadableAnswer, send

    server_uri = get_server_address()
    url = f"{server_uri}/api/2.0/{path}"

    try:
        session = _configured_session()
        http_answer = send(
            session, method, url, max_bytes=MAX_ANSWER_BYTES, timeout_s=TIMEOUT_S, **request_options
        )
    except UnreadableAnswer as error:
        raise TrackingError(
            f"MLflow at {format_address(server_uri)} does not answer {method} {path} as MLflow"
            f" does: {error}. {SERVER_REMEDY}"
        ) from None
    except requests.RequestException as error:
        error_cause = describe_cause(find_innermost_cause(error), server_uri)
        server_name = format_address(server_uri)
        raise TrackingError(
            f"MLflow at {server_name} does not answer ({error_cause}). Check MLFLOW_TRACKING_URI"
            f" and that `curl {server_name}/health` says OK, then run this step again: nothing is"
            " recorded twice."
        ) from error

    if not http_answer.ok:
        _raise_refusal(http_answer)

    if answer_type is ArtifactChanged and not http_answer.content:
        return answer_type()

    try:
        return answer_type.model_validate_json(http_answer.content)
    except ValidationError as error:
        is_object = bool(error.errors(include_url=False, include_input=False)[0]["loc"])
        if not is_object:
            _raise_foreign_answer(http_answer)

        raise TrackingError(
            f"MLflow at {format_address(server_uri)} answered {method} {path} with a malformed"
            f" document: {describe_first_error(error)}. {SERVER_REMEDY}"
        ) from None


def format_condition(field_name: str, field_value: str) -> str:
    """Return the filter of an MLflow search for objects whose `field_name` has `field_value`.

    MLflow's filters have no escape characters, so the value is put in single or in double quotes,
    depending on which of them it does not contain. If the value contains single and double quotes,
    or ends with a backslash, these characters are replaced by wildcards, and the filter may also
    match other values.
    """
    if not field_value.endswith("\\"):
        for quote_sign in ("'", '"'):
            if quote_sign not in field_value:
                return f"{field_name} = {quote_sign}{field_value}{quote_sign}"

    like_pattern = re.sub(r"['\"\\%]", "_", field_value)
    return f"{field_name} LIKE '{like_pattern}'"


def now_ms() -> int:
    """Return the current time as MLflow's requests contain it: in milliseconds since 1970."""
    return int(time.time() * 1000)


def make_pairs(values_by_name: Mapping[str, Any]) -> list[dict[str, str]]:
    """Convert tags or parameters to a list of key-value pairs, as MLflow's requests contain
    them."""
    return [{"key": name, "value": str(value)} for name, value in values_by_name.items()]


def encode_number(metric_value: float) -> float | str:
    """Return a number as it is written in MLflow's requests: infinity and NaN as text."""
    float_value = float(metric_value)
    return {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}.get(str(float_value), float_value)


def _raise_refusal(http_answer: "HttpAnswer") -> NoReturn:
    """Raise RequestRefused with MLflow's error, or TrackingError if the answer does not come from
    MLflow."""
    try:
        error_answer = ErrorAnswer.model_validate_json(http_answer.content)
    except ValidationError:
        _raise_foreign_answer(http_answer)

    error_code = error_answer.error_code
    text = f"{error_code}: {error_answer.message or http_answer.reason}".strip().splitlines()[0]
    message = escape_control_chars(without_secrets(text))
    raise RequestRefused(
        f"MLflow at {format_address(get_server_address())} refused: {message}", error_code
    )


def _raise_foreign_answer(http_answer: "HttpAnswer") -> NoReturn:
    """Raise TrackingError with the text of an answer that is not MLflow's JSON."""
    server_name = format_address(get_server_address())
    host_name = urlsplit(get_server_address()).netloc.rpartition("@")[2]

    answer_text = (
        " ".join(escape_control_chars(HTML_TAGS.sub(" ", http_answer.text)).split())[
            :MAX_SHOWN_LENGTH
        ]
        or "nothing"
    )
    if "Host header" in answer_text:
        remedy = (
            f"Start MLflow with {host_name} in --allowed-hosts (MLFLOW_SERVER_ALLOWED_HOSTS), or"
            " use an address that it contains."
        )
    elif http_answer.status_code in (401, 403):
        remedy = (
            "Set MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD,"
            " of a permitted user."
        )
    else:
        remedy = "Check MLFLOW_TRACKING_URI: an MLflow server answers in JSON."

    raise TrackingError(
        f"MLflow at {server_name} answered {http_answer.status_code} {http_answer.reason}:"
        f" {answer_text!r}. {remedy}"
    )


def _configured_session() -> "requests.Session":
    """Return a session with the retries and the token that the environment sets. Raises
    TrackingError."""
    try:
        retry_count = read_integer(RETRIES_VARIABLE, DEFAULT_RETRIES, 0, MAX_RETRIES)
        token = require_header_text(
            os.environ.get(MLFLOW_TRACKING_TOKEN, "").strip(), MLFLOW_TRACKING_TOKEN
        )
    except ConfigError as error:
        raise TrackingError(*error.args) from None
    return _create_session(retry_count, token)


@cache
def _create_session(max_retries: int, token: str) -> "requests.Session":
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    from rekindle.content.http_answers import Session

    session = Session()
    retried_statuses = (408, 429, 500, *UNAVAILABLE_STATUSES)

    retry_policy = Retry(
        max_retries,
        backoff_factor=1,
        status_forcelist=retried_statuses,
        allowed_methods=None,
        raise_on_status=False,
    )

    for url_scheme in ("http://", "https://"):
        session.mount(url_scheme, HTTPAdapter(max_retries=retry_policy))

    if token:
        session.set_token(f"Bearer {token}")
    elif user_name := os.environ.get(MLFLOW_TRACKING_USERNAME):
        password = os.environ.get(MLFLOW_TRACKING_PASSWORD, "")
        # encode the login as UTF-8, which servers expect (RFC 7617), because `requests` would use
        # Latin-1
        login_parts = [text.encode().decode("latin-1") for text in (user_name, password)]
        session.auth = (login_parts[0], login_parts[1])

    return session


# a forked process must not use the connections of its parent
os.register_at_fork(after_in_child=_create_session.cache_clear)
