"""People are told what happened: one message to a webhook, tried again while its server is away.

The `notify:` section of a config says which events. Whatever comes of a message, nothing else fails.
The address is a secret (who has it can write to the channel): no message and no log shows more of it than its host.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from argolocal.common.wording import visible
from rekindle.errors import innermost, say, without_user
from rekindle.sections import Section

Event = Literal["failure", "refusal", "release", "rollback", "drift"]
SECRET = "rekindle-notify"  # on a cluster: the Secret with the address
URL = "NOTIFY_URL"  # its key, and the variable of the environment
TIMEOUT = 10  # seconds for the server to connect, and to answer
AGAIN = (408, 429, 500, 502, 503, 504)  # answers of a server that may take it later
LONGEST = 3000  # characters of a reason
SLACK = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})  # source: Slack, "Formatting text for app surfaces"
STATUS = {"Succeeded": "FINISHED", "Failed": "FAILED", "Error": "FAILED"}
STOPPED = ("stopped with strategy", "shutdown with strategy", "terminated with strategy")  # Argo's words for `stop`
VERDICT = re.compile(r"([\w-]+/)?verdict")  # tags of one or several evaluations


class NotifyConfig(Section):
    """Who is told what happened. The address is no part of a config: it is a secret, the value of NOTIFY_URL."""

    format: Literal["off", "slack", "json"] = Field(
        default="off",
        description="of the message: slack (also Mattermost's), or json, whose fields docs/after-release.md lists",
    )
    events: list[Event] = Field(default=list(get_args(Event)), description="those of which people are told")
    mlflow_url: str = Field(
        default="",
        pattern=r"^(https?://[^@\s]+)?$",
        description="where people reach MLflow, for links (empty: where steps do)",
    )

    @field_validator("mlflow_url")
    @classmethod
    def _without_slash(cls, url: str) -> str:
        return url.rstrip("/")


@dataclass(frozen=True)
class Message:
    """What happened, to whom, why, and where to look."""

    event: Event
    name: str  # of the pipeline or of the model
    text: str  # a sentence
    reason: str = ""
    workflow: str = ""
    link: str = ""  # to the MLflow run

    def body(self, form: str) -> dict[str, Any]:
        """The JSON of the request."""
        reason, link = without_user(visible(self.reason))[:LONGEST], without_user(self.link)
        if form == "json":
            return asdict(self) | {"reason": reason, "link": link}
        lines = [f"*{self.name}*: {self.text}", reason]
        lines = [line.translate(SLACK) for line in lines if line]
        return {"text": "\n".join([*lines, *([f"<{link}|MLflow run>"] if link else [])])}


def tell(message: Message, config: NotifyConfig, attempts: int = 6, environ: Mapping[str, str] = os.environ) -> bool:
    """Send `message` if `config` wants it, and give whether it was taken; stderr says why if it was not.

    Pauses of 0, 2, 4, 8 and 16 s lie between the attempts.
    """
    if config.format == "off" or message.event not in config.events:
        return False
    if not (url := environ.get(URL, "").strip()):
        say(f"nobody is told: {URL} is not set. Set it to the webhook's address, on a cluster in the Secret {SECRET}.")
        return False
    problem = _post(url, message.body(config.format), attempts)
    if problem:
        say(f"nobody is told: the webhook at {_host(url)} {problem}")
    return not problem


def _post(url: str, body: dict[str, Any], attempts: int) -> str:
    """Why it was not taken; empty if it was."""
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    retry = Retry(
        attempts - 1,
        backoff_factor=1,
        status_forcelist=AGAIN,
        allowed_methods=None,
        raise_on_status=False,
        respect_retry_after_header=False,  # it may ask for hours
    )
    try:
        with requests.Session() as session:
            for scheme in ("http://", "https://"):
                session.mount(scheme, HTTPAdapter(max_retries=retry))
            # a redirected POST would become a GET
            with session.post(url, json=body, timeout=TIMEOUT, allow_redirects=False, stream=True) as answer:
                if 200 <= answer.status_code < 300:
                    return ""
                said = next(answer.iter_content(200), b"").decode(errors="replace")
                return f"answered {answer.status_code} ({visible(said)}). Correct {URL} if that does not pass."
    except (requests.RequestException, ValueError) as error:
        path = "/" + url.partition("://")[2].partition("/")[2]
        why = str(innermost(error)).replace(url, "its address").replace(path, "/...")
        return f"cannot be reached ({why}). Correct {URL}, or let pipelines out to it."


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or "no address"
    except ValueError:
        return "no address"


def status(workflow: str, reasons: list[str]) -> str:
    """Argo's phase of a workflow → MLflow's status of a run; one that was stopped is `Failed`, its reasons say so."""
    if workflow != "Succeeded" and any(word in reason.lower() for reason in reasons for word in STOPPED):
        return "KILLED"
    return STATUS.get(workflow, "FAILED")


def reasons(failures: str) -> list[str]:
    """A line for each failed node of {{workflow.failures}}: a JSON list, quoted once more (strconv.Quote)."""
    value: Any = failures
    while isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except ValueError:
            return [f"workflow: {value}"]
    nodes = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []  # `null` for none
    nodes = [node for node in nodes if node.get("message")] or nodes  # a DAG only says that it failed
    return [f"{node.get('displayName', '?')}: {node.get('message') or node.get('phase', 'failed')}" for node in nodes]


def verdicts(tags: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(what its tags begin with, verdict, reason) of each evaluation of a run."""
    parts = [name.removesuffix("verdict") for name in tags if VERDICT.fullmatch(name)]
    return [(part, tags[f"{part}verdict"], tags.get(f"{part}reason", "")) for part in parts]
