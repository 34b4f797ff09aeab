"""Find the reason why a step failed.

The message of a node may only refer to its attempts or children: the message of a retried step is
"No more retries left". In this case, the message of an attempt states the reason.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from argolocal.common import exit_codes

ATTEMPT = re.compile(r"\((\d+)\)$")  # matches the number of an attempt at the end of its name
# matches a part of Argo's messages about stopped workflows
STOPPED = re.compile(r"(stopped|shutdown|terminated) with strategy", re.IGNORECASE)
# Argo's messages that only refer to a node's attempts or children. Source: Argo's operator.go
# (processNodeRetries) and steps.go
SECONDARY = re.compile(
    r"retryStrategy\.expression evaluated to false|No more retries left|Max duration limit exceeded"
    r"|Backoff would exceed max duration limit|retry exceeded workflow deadline|Backoff for"
    r" .*|child '.*' failed"
)
# matches Argo's message about a failed Kubernetes object, such as a job; our runner appends the
# `cause` that the object's status reports
OBJECT_FAILED = re.compile(
    rf"(?:main: )?(?:Error \(exit code {exit_codes.EXECUTOR_ERROR}\): )?"
    r"failure condition '[^']*' evaluated true(?:: (?P<cause>.+))?",
    re.DOTALL,
)

UNREPORTED = "its job or Deployment has failed: the logs of the pods show why"


def extract_cause(message: str) -> str:
    """Return the cause that a message about a failed Kubernetes object states. Return any other
    message unchanged."""
    match = OBJECT_FAILED.fullmatch(message)
    if not match:
        return message
    return match["cause"] or UNREPORTED


def is_secondary(message: str) -> bool:
    """Return True if a message is empty or only refers to attempts or children."""
    return not message or SECONDARY.fullmatch(message) is not None


def find_root_message(message: str, attempts: Sequence[str]) -> str:
    """Return the reason why a step failed: the step's `message`, or the last message of its
    `attempts` if the step's message is secondary."""
    if not is_secondary(message):
        return message
    return next((text for text in reversed(attempts) if not is_secondary(text)), message)


def attempt_number(name: str) -> int:
    """Return the attempt number that ends a node's name, or -1 if the node is not an attempt."""
    match = ATTEMPT.search(name)
    if match:
        return int(match[1])
    return -1


def failed_steps(nodes: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return name and root message of each failed step in the nodes of {{workflow.failures}}.

    Failed attempts are returned only if no step has failed.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for node in nodes:
        name = str(node.get("displayName") or "?")
        groups.setdefault((ATTEMPT.sub("", name), str(node.get("templateName"))), []).append(node)

    steps: list[tuple[str, str]] = []
    attempts: list[tuple[str, str]] = []

    for (name, _), items in groups.items():
        items.sort(key=lambda item: attempt_number(str(item.get("displayName"))))
        messages = [str(item.get("message") or "") for item in items]
        message = find_root_message(messages[0], messages)
        is_step = items[0].get("displayName", "?") == name or STOPPED.search(message)
        (steps if is_step else attempts).append(
            (name, extract_cause(message) or str(items[0].get("phase", "failed")))
        )

    phases = {str(item.get("phase")) for items in groups.values() for item in items} | {"failed"}
    steps_with_cause, attempts_with_cause = (
        [
            (name, message)
            for name, message in failures
            if message not in phases and not is_secondary(message)
        ]
        for failures in (steps, attempts)
    )
    return steps_with_cause or attempts_with_cause or steps + attempts
