"""Find the reason why a step failed.

The message of a failed node may only refer to its attempts or children: for example, "No more
retries left" is the message of a retried step, and only the message of its last attempt states the
reason.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from argolocal.common import exit_codes

# matches the number of an attempt at the end of its name
ATTEMPT_NUMBER = re.compile(r"\((\d+)\)$")
# matches a part of Argo's messages about stopped workflows
STOPPED_MESSAGE = re.compile(r"(stopped|shutdown|terminated) with strategy", re.IGNORECASE)
# Argo's messages that only refer to a node's attempts or children. Taken from Argo's operator.go
# (processNodeRetries) and steps.go
SECONDARY_MESSAGE = re.compile(
    r"retryStrategy\.expression evaluated to false|No more retries left|Max duration limit exceeded"
    r"|Backoff would exceed max duration limit|retry exceeded workflow deadline|Backoff for"
    r" .*|child '.*' failed"
)
# matches Argo's message about a failed Kubernetes object, such as a job; our runner appends the
# `cause` that the object's status reports
OBJECT_FAILED_MESSAGE = re.compile(
    rf"(?:main: )?(?:Error \(exit code {exit_codes.EXECUTOR_ERROR}\): )?"
    r"failure condition '[^']*' evaluated true(?:: (?P<cause>.+))?",
    re.DOTALL,
)

UNREPORTED_CAUSE = "its job or Deployment has failed: the logs of the pods show why"


def extract_cause(message: str) -> str:
    """Return the cause that a message about a failed Kubernetes object states. Return a message of
    any other form unchanged."""
    match = OBJECT_FAILED_MESSAGE.fullmatch(message)
    if not match:
        return message
    return match["cause"] or UNREPORTED_CAUSE


def is_secondary_message(message: str) -> bool:
    """Return True if a message is empty or only refers to attempts or children."""
    return not message or SECONDARY_MESSAGE.fullmatch(message) is not None


def find_root_message(message: str, attempt_messages: Sequence[str]) -> str:
    """Return the reason why a step failed: the step's `message`, or the last message of its
    `attempt_messages` if the step's message is secondary."""
    if not is_secondary_message(message):
        return message
    return next(
        (
            attempt_message
            for attempt_message in reversed(attempt_messages)
            if not is_secondary_message(attempt_message)
        ),
        message,
    )


def parse_attempt_number(name: str) -> int:
    """Return the attempt number that ends a node's name, or -1 if the node is not an attempt."""
    match = ATTEMPT_NUMBER.search(name)
    if match:
        return int(match[1])
    return -1


def list_failed_steps(nodes: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return name and root message of each failed step in the nodes of {{workflow.failures}}.

    Failed attempts are returned only if no step has failed.
    """
    node_groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for node in nodes:
        name = str(node.get("displayName") or "?")
        node_groups.setdefault(
            (ATTEMPT_NUMBER.sub("", name), str(node.get("templateName"))), []
        ).append(node)

    step_causes: list[tuple[str, str]] = []
    attempt_causes: list[tuple[str, str]] = []

    for (name, _), node_group in node_groups.items():
        node_group.sort(
            key=lambda group_node: parse_attempt_number(str(group_node.get("displayName")))
        )
        messages = [str(group_node.get("message") or "") for group_node in node_group]
        message = find_root_message(messages[0], messages)
        is_step = node_group[0].get("displayName", "?") == name or STOPPED_MESSAGE.search(message)
        (step_causes if is_step else attempt_causes).append(
            (name, extract_cause(message) or str(node_group[0].get("phase", "failed")))
        )

    phases = {
        str(group_node.get("phase"))
        for node_group in node_groups.values()
        for group_node in node_group
    } | {"failed"}
    steps_with_cause, attempts_with_cause = (
        [
            (name, message)
            for name, message in named_causes
            if message not in phases and not is_secondary_message(message)
        ]
        for named_causes in (step_causes, attempt_causes)
    )
    return steps_with_cause or attempts_with_cause or step_causes + attempt_causes
