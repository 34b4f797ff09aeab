"""Why a step failed: the message of its process, which messages about attempts and children hide.

The node of a retried step says only why no further attempt started ("No more retries left").
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from argolocal.common import exit_codes

ATTEMPT = re.compile(r"\((\d+)\)$")  # end of the name of an attempt
# parts of Argo's messages about a stopped workflow
STOPPED = re.compile(r"(stopped|shutdown|terminated) with strategy", re.IGNORECASE)
# Argo's messages about a node's attempts or children. Source: Argo's operator.go
# processNodeRetries, steps.go
SECONDARY = re.compile(
    r"retryStrategy\.expression evaluated to false|No more retries left|Max duration limit exceeded"
    r"|Backoff would exceed max duration limit|retry exceeded workflow deadline|Backoff for"
    r" .*|child '.*' failed"
)
# Argo's message about a job or another object that failed; this runner adds the cause that the
# object reports
OBJECT_FAILED = re.compile(
    rf"(?:main: )?(?:Error \(exit code {exit_codes.EXECUTOR_ERROR}\): )?"
    r"failure condition '[^']*' evaluated true(?:: (?P<cause>.+))?",
    re.DOTALL,
)

UNREPORTED = "its job or Deployment has failed: the logs of the pods show why"


def plain(message: str) -> str:
    """Return the message without the condition that a job or Deployment met: with the cause that
    the object reports."""
    match = OBJECT_FAILED.fullmatch(message)
    if not match:
        return message
    return match["cause"] or UNREPORTED


def is_secondary(message: str) -> bool:
    """Return True for an empty message, and for a message that only refers to attempts or
    children."""
    return not message or SECONDARY.fullmatch(message) is not None


def root_message(message: str, attempts: Sequence[str]) -> str:
    """Return why a step failed: its own message, else the message of its last attempt that has
    one."""
    if not is_secondary(message):
        return message
    return next((text for text in reversed(attempts) if not is_secondary(text)), message)


def attempt_number(name: str) -> int:
    """Return the number of an attempt by its name; -1 for a node that is not an attempt."""
    match = ATTEMPT.search(name)
    if match:
        return int(match[1])
    return -1


def failed_steps(nodes: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return name and root message of each failed step, from the nodes in {{workflow.failures}}.

    A failed attempt of a step that succeeded later is left out, unless it is the only failure.
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
        message = root_message(messages[0], messages)
        is_step = items[0].get("displayName", "?") == name or STOPPED.search(message)
        (steps if is_step else attempts).append(
            (name, plain(message) or str(items[0].get("phase", "failed")))
        )

    phases = {str(item.get("phase")) for items in groups.values() for item in items} | {"failed"}
    roots = [
        [row for row in rows if row[1] not in phases and not is_secondary(row[1])]
        for rows in (steps, attempts)
    ]
    return roots[0] or roots[1] or steps + attempts
