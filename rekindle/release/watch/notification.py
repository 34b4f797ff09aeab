"""Sends notifications to a webhook, with retries while its server is unavailable.

The `notify:` section of a config selects the events. A notification that cannot be sent does not
stop the run. The address of the webhook is a secret, since everyone who knows the address can write
to the channel. Error messages and logs show only the host of the webhook, because its address is a
secret.
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
from argolocal.common.wording import escape_control_chars
from rekindle.errors import find_innermost_cause, without_secrets, write_stderr
from rekindle.kubernetes_names import NOTIFY_SECRET, NOTIFY_URL
from rekindle.release.watch.time_limit import call_with_time_limit
from rekindle.sections import Section

Event = Literal["failure", "refusal", "release", "rollback", "drift"]
# time limit to connect, and to wait for the answer
TIMEOUT_S = 10
# time limit for all attempts and pauses together
TOTAL_TIMEOUT_S = 150
RETRIED_STATUSES = (408, 429, 500, 502, 503, 504)
# maximum number of bytes to read from the answer if the server refuses
MAX_ANSWER_BYTES = 4096
MAX_SHOWN_CHARACTERS = 200
# matches the separators between the parts of an address
URL_SEPARATOR = re.compile("[/?&=#:@]")
# a shorter part of an address does not count as a secret
MIN_SECRET_LENGTH = 6
# maximum number of characters of a reason in a notification
MAX_REASON_LENGTH = 3000
# source: Slack, "Formatting text for app surfaces", which lists the characters to escape
SLACK_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
RUN_STATUSES = {"Succeeded": "FINISHED", "Failed": "FAILED", "Error": "FAILED"}
# matches the tag `verdict`, or `TASK/verdict` if a run has several evaluations
VERDICT_TAG = re.compile(r"([\w-]+/)?verdict")


class NotifyConfig(Section):
    """Notifications about runs. The webhook's address is a secret, so it is set by NOTIFY_URL, not
    by a config key."""

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
class NotificationMessage:
    """The content of a notification."""

    event: Event
    # name of the pipeline or the model
    name: str
    text: str  # reason for the event, as one sentence
    reason: str = ""
    workflow: str = ""
    # address of the MLflow run
    link: str = ""

    def body(self, message_format: str) -> dict[str, Any]:
        """Return the JSON body of the request to the webhook."""
        shown_reason = without_secrets(escape_control_chars(self.reason))[:MAX_REASON_LENGTH]
        shown_link = without_secrets(self.link)
        if message_format == "json":
            return asdict(self) | {"reason": shown_reason, "link": shown_link}
        message_lines = [f"*{self.name}*: {self.text}", shown_reason]
        message_lines = [
            message_line.translate(SLACK_ESCAPES) for message_line in message_lines if message_line
        ]
        return {
            "text": "\n".join(
                [*message_lines, *([f"<{shown_link}|MLflow run>"] if shown_link else [])]
            )
        }


def send_notification(
    message: NotificationMessage,
    notify_config: NotifyConfig,
    max_attempts: int = 6,
    environment: Mapping[str, str] = os.environ,
) -> bool:
    """Send the notification `message` (see `deliver_message`), and log a failure. Return True if
    the message was sent."""
    delivery = deliver_message(message, notify_config, max_attempts, environment)
    if delivery.problem:
        write_stderr(delivery.problem)
    return delivery.sent


@dataclass(frozen=True)
class Delivery:
    """The result of sending a notification. If the config does not select the event of the
    notification, nothing is sent and `problem` is ""."""

    sent: bool
    problem: str = ""


def deliver_message(
    message: NotificationMessage,
    notify_config: NotifyConfig,
    max_attempts: int = 6,
    environment: Mapping[str, str] = os.environ,
) -> Delivery:
    """Send `message` if `notify_config` selects its event. The pauses between attempts are 0, 2,
    4, 8 and 16 s."""
    if notify_config.format == "off" or message.event not in notify_config.events:
        return Delivery(sent=False)

    webhook_url = environment.get(NOTIFY_URL, "").strip()
    if not webhook_url:
        error_remedy = (
            f"Set it to the webhook's address, on a cluster in the Secret {NOTIFY_SECRET}."
        )
        return Delivery(
            sent=False, problem=f"notification not sent: {NOTIFY_URL} is not set. {error_remedy}"
        )

    request_body = message.body(notify_config.format)
    try:
        problem_text = call_with_time_limit(
            TOTAL_TIMEOUT_S, lambda: _post_with_retries(webhook_url, request_body, max_attempts)
        )
    except TimeoutError as error:
        problem_text = f"answers too slowly ({error}). Correct {NOTIFY_URL} if this persists."

    if problem_text:
        return Delivery(
            sent=False,
            problem=(
                f"notification not sent: the webhook at {_parse_host(webhook_url)} {problem_text}"
            ),
        )

    return Delivery(sent=True)


def _post_with_retries(webhook_url: str, request_body: dict[str, Any], max_attempts: int) -> str:
    """Post the notification to the webhook, with retries. Return "", or the reason for a failure,
    which continues the sentence "the webhook ..."."""
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    retry_policy = Retry(
        max_attempts - 1,
        backoff_factor=1,
        status_forcelist=RETRIED_STATUSES,
        allowed_methods=None,
        raise_on_status=False,
        # limit the pause, because a server may ask for hours
        respect_retry_after_header=False,
    )

    try:
        with requests.Session() as session:
            for url_scheme in ("http://", "https://"):
                session.mount(url_scheme, HTTPAdapter(max_retries=retry_policy))

            # redirects are not followed, because they would change the POST to a GET
            with session.post(
                webhook_url,
                json=request_body,
                timeout=TIMEOUT_S,
                allow_redirects=False,
                stream=True,
            ) as http_response:
                if 200 <= http_response.status_code < 300:
                    return ""

                answer_text = next(http_response.iter_content(MAX_ANSWER_BYTES), b"").decode(
                    errors="replace"
                )
                shown_answer = escape_control_chars(
                    _hide_address(answer_text, webhook_url)[:MAX_SHOWN_CHARACTERS]
                )
                error_remedy = f"Correct {NOTIFY_URL} if this persists."
                return f"answered {http_response.status_code} ({shown_answer}). {error_remedy}"
    except (requests.RequestException, ValueError) as error:
        error_cause = _hide_address(str(find_innermost_cause(error)), webhook_url)
        error_remedy = f"Correct {NOTIFY_URL}, or allow pipelines to connect to it."
        return f"cannot be reached ({error_cause}). {error_remedy}"


def _hide_address(error_text: str, webhook_url: str) -> str:
    """Remove the webhook's address and its parts, also in escaped form, from a text such as a
    server's answer, which may repeat the address."""
    url_path = "/" + webhook_url.partition("://")[2].partition("/")[2]
    path_segments = [
        path_segment
        for path_segment in URL_SEPARATOR.split(url_path)
        if len(path_segment) >= MIN_SECRET_LENGTH
    ]
    secret_parts = [url_path, *path_segments] if len(url_path) > 1 else path_segments

    for secret_part in [webhook_url, *secret_parts]:
        for secret_spelling in (
            secret_part,
            quote(secret_part),
            unquote(secret_part),
            html.escape(secret_part),
        ):
            error_text = error_text.replace(
                secret_spelling, "its address" if secret_part == webhook_url else "..."
            )
    return error_text


def _parse_host(url: str) -> str:
    try:
        return urlsplit(url).hostname or "no address"
    except ValueError:
        return "no address"


def convert_phase(workflow_phase: str, failure_reasons: list[str]) -> str:
    """Convert Argo's phase to MLflow's run status. A stopped workflow has the phase `Failed`, like
    other failed workflows, so `failure_reasons` show whether the workflow was stopped."""
    if workflow_phase != "Succeeded" and any(
        causes.STOPPED_MESSAGE.search(failure_reason) for failure_reason in failure_reasons
    ):
        return "KILLED"
    return RUN_STATUSES.get(workflow_phase, "FAILED")


def describe_failures(failures_json: str) -> list[str]:
    """Return a line for each failed step in `failures_json`, the value of {{workflow.failures}}: a
    JSON list that Argo has quoted (strconv.Quote).

    Each line contains the message of the step's process, without passwords in addresses.
    """
    parsed_failures: Any = failures_json
    while isinstance(parsed_failures, str) and parsed_failures:
        try:
            parsed_failures = json.loads(parsed_failures)
        except (ValueError, RecursionError):
            return [f"workflow: {without_secrets(parsed_failures)}"]

    # the value is `null` if no step has failed
    if isinstance(parsed_failures, list):
        failed_nodes = [
            failed_node for failed_node in parsed_failures if isinstance(failed_node, dict)
        ]
    else:
        failed_nodes = []

    return [
        f"{step_name}: {without_secrets(failure_message)}"
        for step_name, failure_message in causes.list_failed_steps(failed_nodes)
    ]


def parse_verdicts(tags: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return (tag prefix, verdict, reason) for each evaluation of a run."""
    tag_prefixes = [
        tag_name.removesuffix("verdict") for tag_name in tags if VERDICT_TAG.fullmatch(tag_name)
    ]
    return [
        (tag_prefix, tags[f"{tag_prefix}verdict"], tags.get(f"{tag_prefix}reason", ""))
        for tag_prefix in tag_prefixes
    ]
