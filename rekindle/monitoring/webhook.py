"""One message to a webhook, tried again while its server is away. Whatever comes of it, nothing else fails.

The address is a secret (who has it can write to the channel): no message and no log shows more of it than its host.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from argolocal.common.wording import visible
from rekindle.errors import innermost, say, without_user
from rekindle.monitoring.config import SECRET, URL, Event, NotifyConfig

TIMEOUT = 10  # seconds for the server to connect, and to answer
AGAIN = (408, 429, 500, 502, 503, 504)  # answers of a server that may take it later
LONGEST = 3000  # characters of a reason
SLACK = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})  # source: Slack, "Formatting text for app surfaces"


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
        why = str(innermost(error)).replace(url, "its address").replace(_path(url), "/...")
        return f"cannot be reached ({why}). Correct {URL}, or let pipelines out to it."


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or "no address"
    except ValueError:
        return "no address"


def _path(url: str) -> str:
    """What follows the host."""
    return "/" + url.partition("://")[2].partition("/")[2]
