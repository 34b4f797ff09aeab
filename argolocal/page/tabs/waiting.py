"""Describe in words why a run is currently waiting."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from argolocal.common import program
from argolocal.common.wording import join_first_names
from argolocal.engine.suspend import list_suspended_nodes, make_resume_hint
from argolocal.page.failure import GROUP_TYPES, step_name
from argolocal.page.sources import Run

MAX_SENTENCES = 6
MAX_NAMES = 5


def describe_waiting(run: Run, find_duration: Callable[[str], str]) -> list[str]:
    """Return sentences about the running and the waiting steps of a run.

    `find_duration`: function that returns the duration of a suspend step, or "" if the step waits
    for a user; argument: name of the node.
    """
    if run.is_finished:
        return []
    if run.phase == "Interrupted":
        return [
            "The process that ran this run has ended."
            f" `{program.name} resume {run.command_target}` continues the run."
        ]

    sentences = list(_waiting_sentences(run, find_duration))
    hidden_count = len(sentences) - MAX_SENTENCES
    if hidden_count > 0:
        sentences = [*sentences[:MAX_SENTENCES], f"{hidden_count} more steps wait."]

    running_steps = [
        step_name(run.name, node["name"])
        for node in list((run.status.get("nodes") or {}).values())
        if node["phase"] == "Running" and node["type"] not in (*GROUP_TYPES, "Suspend")
    ]
    if running_steps:
        names = join_first_names(list(dict.fromkeys(running_steps)), MAX_NAMES)
        sentences.append(f"Running: {names}.")

    return sentences


def _waiting_sentences(run: Run, find_duration: Callable[[str], str]) -> Iterator[str]:
    if run.spec.get("suspend"):
        yield f"The run is suspended: `{program.name} resume {run.command_target}` continues it."

    message = str(run.status.get("message") or "")
    if message:
        yield f"The run: {message}."

    for node in list_suspended_nodes(run.status):
        duration = find_duration(node["name"])
        if duration:
            yield f"{step_name(run.name, node['name'])} waits for {duration}, then continues."
        else:
            hint = make_resume_hint(run.command_target, node)
            yield f"{hint.replace(' in another terminal', '')}."

    for node in list((run.status.get("nodes") or {}).values()):
        sentence = _waiting_sentence(node, step_name(run.name, node["name"]))
        if sentence:
            yield sentence


def _waiting_sentence(node: Mapping[str, Any], name: str) -> str:
    """Return a sentence with the reason why the step `name` waits, or "" if it does not wait."""
    message = str(node.get("message") or "")
    lock = (node.get("synchronizationStatus") or {}).get("waiting")
    if lock:
        return f"{name} waits for the lock {lock}: {message or 'another step holds it'}."
    if node["type"] == "Retry" and node["phase"] == "Running" and message.startswith("Backoff"):
        attempt = len(node.get("children") or []) + 1
        return f"{name} waits before attempt {attempt}: {message}."
    if node["type"] in ("Pod", "HTTP", "Container") and node["phase"] == "Pending":
        reason = f": {message}" if message else ""
        return f"{name} waits for its pod{reason}."
    return ""
