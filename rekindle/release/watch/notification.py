"""Sends notifications to a webhook, with retries while its server is unavailable.

The `notify:` section of a config selects the events. A failed notification does not stop its
caller. The address of the webhook is a secret, since it permits writing to the channel: messages
and logs show only its host.
"""

import html
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args
from urllib.parse import quote, unquote, urlsplit

from pydantic import Field, field_validator

from argolocal.common import causes
from argolocal.common.wording import visible
from rekindle.errors import innermost, say, without_secrets
from rekindle.kubernetes_names import NOTIFY_SECRET, NOTIFY_URL
from rekindle.release.watch.time_limit import call_within
from rekindle.sections import Section

Event = Literal["failure", "refusal", "release", "rollback", "drift"]
TIMEOUT_S = 10  # limit to connect, and limit to answer
TOTAL_TIMEOUT_S = 150  # limit for all attempts and pauses
RETRIED_STATUSES = (408, 429, 500, 502, 503, 504)
MAX_ANSWER_BYTES = 4096  # maximum number of bytes to read from the answer if the server refuses
MAX_SHOWN_CHARACTERS = 200
SEPARATOR = re.compile("[/?&=#:@]")  # separators between the parts of an address
MIN_SECRET_LENGTH = 6  # a shorter part of an address does not count as a secret
MAX_REASON_LENGTH = 3000  # maximum number of characters of a reason
# source: Slack, "Formatting text for app surfaces", which lists the characters to escape
SLACK_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
RUN_STATUSES = {"Succeeded": "FINISHED", "Failed": "FAILED", "Error": "FAILED"}
# matches the tag `verdict`, or `TASK/verdict` if a run has several evaluations
VERDICT_TAG = re.compile(r"([\w-]+/)?verdict")


class NotifyConfig(Section):
    """Notifications about runs. The webhook's address is a secret, so NOTIFY_URL sets it, not a
    config key."""

    format: Literal["off", "slack", "json"] = Field(
        default="off",
        description=(
            "message format: slack (also for Mattermost), or json (fields: docs/after-release.md)"
        ),
    )
    events: list[Event] = Field(
        default=list(get_args(Event)), description="events that send a notification"
    )
    mlflow_url: str = Field(
        default="",
        pattern=r"^(https?://[^@\s]+)?$",
        description="MLflow's address for links in messages (empty: MLFLOW_TRACKING_URI)",
    )

    @field_validator("mlflow_url")
    @classmethod
    def _without_slash(cls, url: str) -> str:
        return url.rstrip("/")


@dataclass(frozen=True)
class Message:
    """The content of a notification."""

    event: Event
    name: str  # name of the pipeline or the model
    text: str  # one sentence
    reason: str = ""
    workflow: str = ""
    link: str = ""  # address of the MLflow run

    def body(self, message_format: str) -> dict[str, Any]:
        """Return the JSON of the request."""
        reason = without_secrets(visible(self.reason))[:MAX_REASON_LENGTH]
        link = without_secrets(self.link)
        if message_format == "json":
            return asdict(self) | {"reason": reason, "link": link}
        lines = [f"*{self.name}*: {self.text}", reason]
        lines = [line.translate(SLACK_ESCAPES) for line in lines if line]
        return {"text": "\n".join([*lines, *([f"<{link}|MLflow run>"] if link else [])])}


def send(
    message: Message,
    config: NotifyConfig,
    attempts: int = 6,
    environ: Mapping[str, str] = os.environ,
) -> bool:
    """Send `message` (see `deliver`) and log a failure. Return True if the message was sent."""
    delivery = deliver(message, config, attempts, environ)
    if delivery.problem:
        say(delivery.problem)
    return delivery.sent


@dataclass(frozen=True)
class Delivery:
    """The result of sending a notification. If the config does not select the event, nothing is
    sent and `problem` is ""."""

    sent: bool
    problem: str = ""


def deliver(
    message: Message,
    config: NotifyConfig,
    attempts: int = 6,
    environ: Mapping[str, str] = os.environ,
) -> Delivery:
    """Send `message` if `config` selects its event. The pauses between attempts are 0, 2, 4, 8 and
    16 s."""
    if config.format == "off" or message.event not in config.events:
        return Delivery(sent=False)

    url = environ.get(NOTIFY_URL, "").strip()
    if not url:
        remedy = f"Set it to the webhook's address, on a cluster in the Secret {NOTIFY_SECRET}."
        return Delivery(
            sent=False, problem=f"notification not sent: {NOTIFY_URL} is not set. {remedy}"
        )

    body = message.body(config.format)
    try:
        problem = call_within(TOTAL_TIMEOUT_S, lambda: _post_with_retries(url, body, attempts))
    except TimeoutError as error:
        problem = f"answers too slowly ({error}). Correct {NOTIFY_URL} if this persists."

    if problem:
        return Delivery(
            sent=False,
            problem=f"notification not sent: the webhook at {_parse_host(url)} {problem}",
        )

    return Delivery(sent=True)


def _post_with_retries(url: str, body: dict[str, Any], attempts: int) -> str:
    """Post the notification and return the reason of a failure, or ""."""
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    retry = Retry(
        attempts - 1,
        backoff_factor=1,
        status_forcelist=RETRIED_STATUSES,
        allowed_methods=None,
        raise_on_status=False,
        respect_retry_after_header=False,  # limit the pause, because a server may ask for hours
    )

    try:
        with requests.Session() as session:
            for scheme in ("http://", "https://"):
                session.mount(scheme, HTTPAdapter(max_retries=retry))

            # redirects are not followed, because they would change the POST to a GET
            with session.post(
                url, json=body, timeout=TIMEOUT_S, allow_redirects=False, stream=True
            ) as answer:
                if 200 <= answer.status_code < 300:
                    return ""

                content = next(answer.iter_content(MAX_ANSWER_BYTES), b"").decode(errors="replace")
                shown = visible(_hide_address(content, url)[:MAX_SHOWN_CHARACTERS])
                remedy = f"Correct {NOTIFY_URL} if this persists."
                return f"answered {answer.status_code} ({shown}). {remedy}"
    except (requests.RequestException, ValueError) as error:
        cause = _hide_address(str(innermost(error)), url)
        remedy = f"Correct {NOTIFY_URL}, or allow pipelines to connect to it."
        return f"cannot be reached ({cause}). {remedy}"


def _hide_address(text: str, url: str) -> str:
    """Remove the webhook's address and its parts, also in escaped form, from a text, because a
    server's answer may repeat them."""
    path = "/" + url.partition("://")[2].partition("/")[2]
    segments = [segment for segment in SEPARATOR.split(path) if len(segment) >= MIN_SECRET_LENGTH]
    secrets = [path, *segments] if len(path) > 1 else segments

    for secret in [url, *secrets]:
        for spelling in (secret, quote(secret), unquote(secret), html.escape(secret)):
            text = text.replace(spelling, "its address" if secret == url else "...")
    return text


def _parse_host(url: str) -> str:
    try:
        return urlsplit(url).hostname or "no address"
    except ValueError:
        return "no address"


def convert_phase(phase: str, reasons: list[str]) -> str:
    """Convert Argo's phase to MLflow's run status. Argo's phase of a stopped workflow is `Failed`,
    so `reasons` decide whether it was stopped."""
    if phase != "Succeeded" and any(causes.STOPPED.search(reason) for reason in reasons):
        return "KILLED"
    return RUN_STATUSES.get(phase, "FAILED")


def describe_failures(failures: str) -> list[str]:
    """Return a line for each failed step in `failures`, the value of {{workflow.failures}}: a JSON
    list that Argo has quoted (strconv.Quote).

    Each line has the message of the step's process, without passwords in addresses.
    """
    value: Any = failures
    while isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return [f"workflow: {without_secrets(value)}"]

    # `null` if no step has failed
    if isinstance(value, list):
        nodes = [item for item in value if isinstance(item, dict)]
    else:
        nodes = []

    return [f"{name}: {without_secrets(message)}" for name, message in causes.failed_steps(nodes)]


def parse_verdicts(tags: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return (tag prefix, verdict, reason) for each evaluation of a run."""
    prefixes = [name.removesuffix("verdict") for name in tags if VERDICT_TAG.fullmatch(name)]
    return [
        (prefix, tags[f"{prefix}verdict"], tags.get(f"{prefix}reason", "")) for prefix in prefixes
    ]
