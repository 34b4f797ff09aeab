"""Execute Retry nodes: start attempts, and decide after each failed attempt whether and when to
retry.

The conditions are checked in Argo's order: shutdown and deadline, maxDuration, backoff, policy,
limit, expression. Therefore the node waits for one backoff even after a failure that the policy
does not retry, and never waits if the strategy has no limit. Source: Argo's operator.go
executeTemplate, processNodeRetries, mergedTemplateDefaultsInto.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from argolocal.engine import admission
from argolocal.engine.context import Context
from argolocal.engine.nodes import LimitReached, NodeError, Options, parse_time, record_inputs
from argolocal.language import gofmt
from argolocal.language.expr import evaluate_bool
from argolocal.language.functions import ExprError
from argolocal.language.substitute import nest_scope
from argolocal.manifest.allowed_values import FAILED, FULFILLED, RETRIED_PHASES, TEMPLATE_TYPES
from argolocal.manifest.patch import merge_over
from argolocal.manifest.types import Node, Task, Template

TRANSIENT_MESSAGES = (
    "i/o timeout",
    "connection refused",
    "connection reset",
    "TLS handshake timeout",
    "EOF",
    "transient",
)


@dataclass(frozen=True)
class Decision:
    """Either the final `phase` of the node, or the times of the next attempt in unix seconds: its
    start `start_at` and its `deadline`."""

    phase: str = ""
    message: str = ""
    start_at: float | None = None
    deadline: float | None = None


def execute(
    context: Context,
    name: str,
    caller: Task,
    template: Template,
    strategy: dict[str, Any],
    options: Options,
) -> Node:
    """Advance a Retry node. Raises LimitReached, NodeError."""
    table = context.table

    parent = table.get(name)
    if not parent:
        parent = table.create(name, "Retry", "Running", caller, options)
        record_inputs(parent, template)

    options = replace(options, flag={**options.flag, "retried": True})
    attempt_node = None

    # two iterations: if an attempt ends at once, the second iteration starts the next attempt
    for _ in range(2):
        attempts = table.attempts(parent)
        if attempt_node:
            try:
                admission.check_parallelism(context, template, parent, options.boundary)
            except LimitReached:
                table.mark(attempt_node["name"], "Error", "Max parallelism reached")
                raise

        if attempts and attempts[-1]["phase"] in FULFILLED:
            deadline = _next_attempt(context, parent, attempts, strategy)
            if deadline is None:
                return parent

            options = replace(options, deadline=deadline or options.deadline)
            number = len(attempts)
        else:
            number = max(len(attempts) - 1, 0)

        if number < len(attempts):
            attempt = attempts[number]["name"]
        else:
            attempt = f"{name}({number})"

        if not context.template_of(attempt):
            local_values = {
                "retries": str(number),
                "pod.name": table.pod_name(attempt, template["name"]),
            }
            local_values.update(last_retry_variables(attempts[number - 1] if number else None))

            try:
                context.expansion(attempt).template = context.inputs.substitute_params(
                    template, local_values
                )
            except NodeError as error:
                table.mark_error(attempt, caller, options, str(error))
                table.link_child(name, attempt)
                raise

        attempt_node = _execute_attempt(context, parent, attempt, caller, policy(strategy), options)
        if not attempt_node or attempt_node["phase"] not in FULFILLED:
            return parent

    return parent


def _next_attempt(
    context: Context, parent: Node, attempts: list[Node], strategy: dict[str, Any]
) -> float | None:
    """Return the deadline of the next attempt (0: unlimited), or None if no attempt may start now.

    Raises NodeError.
    """
    try:
        decision = decide(context, parent, attempts, strategy)
    except (ExprError, ValueError) as error:
        context.table.mark(parent["name"], "Error", str(error))
        raise NodeError(str(error)) from None

    if decision.phase:
        if attempts[-1].get("outputs") is not None:
            parent["outputs"] = attempts[-1]["outputs"]

        context.table.mark(parent["name"], decision.phase, decision.message or None)
        return None

    context.table.mark(parent["name"], parent["phase"], decision.message)
    if decision.start_at:
        context.wake_at(decision.start_at)
        return None

    return decision.deadline or 0.0


def _execute_attempt(
    context: Context, parent: Node, attempt: str, caller: Task, retry_policy: str, options: Options
) -> Node | None:
    """Execute one attempt, a child of the Retry node `parent`. Raises LimitReached, NodeError."""
    table = context.table

    try:
        child = context.execute(attempt, caller, {}, options, is_attempt=True)
    except NodeError:
        if retry_policy == "OnFailure":
            # with this policy, the caller of this function handles the error
            table.link_child(parent["name"], attempt)
            raise

        child = table.get(attempt)

    if child:
        table.link_child(parent["name"], attempt)

    if child and child.get("daemoned") and not parent.get("daemoned"):
        parent["daemoned"] = True
        table.needs_requeue = True
        context.daemons[parent["id"]] = None
        table.changed_nodes[parent["id"]] = None

    return child


def decide(
    context: Context, parent: Node, attempts: list[Node], strategy: dict[str, Any]
) -> Decision:
    """Decide how the Retry node continues after its last attempt: with another attempt or its final
    phase. Raises ExprError and ValueError for an invalid strategy."""
    last_attempt = attempts[-1]
    now = context.table.now

    if last_attempt["phase"] not in FAILED:
        return Decision("Succeeded")
    if context.shutdown:
        return Decision(last_attempt["phase"], f"Stopped with strategy '{context.shutdown}'")
    if context.deadline and now >= context.deadline:
        return Decision(last_attempt["phase"], "retry exceeded workflow deadline")

    if strategy.get("limit") is not None:
        limit = parse_int(strategy["limit"])
    else:
        limit = None

    backoff = strategy.get("backoff") or {}
    deadline = None

    if backoff:
        if backoff.get("maxDuration"):
            deadline = parse_time(attempts[0]["startedAt"]) + gofmt.parse_seconds(
                str(backoff["maxDuration"])
            )
            if now > deadline:
                return Decision(last_attempt["phase"], "Max duration limit exceeded")

        wait = backoff_duration(backoff, len(attempts))
        backoff_end = parse_time(last_attempt["finishedAt"]) + wait
        if deadline and backoff_end > deadline:
            return Decision(last_attempt["phase"], "Backoff would exceed max duration limit")
        if now < backoff_end and limit is not None and len(attempts) <= limit:
            return Decision(message=f"Backoff for {gofmt.humanize(wait)}", start_at=backoff_end)

    retry_policy = policy(strategy)
    if retry_policy == "OnTransientError":
        is_retryable = any(word in last_attempt.get("message", "") for word in TRANSIENT_MESSAGES)
    else:
        is_retryable = last_attempt["phase"] in RETRIED_PHASES[retry_policy]

    if not is_retryable:
        return Decision(last_attempt["phase"], last_attempt.get("message", ""))
    if limit is not None and len(attempts) > limit:
        return Decision(last_attempt["phase"], "No more retries left")

    if strategy.get("expression"):
        scope = last_retry_variables(last_attempt, default_exit_code="-1") | {
            "retries": str(len(attempts) - 1)
        }
        if not evaluate_bool(strategy["expression"], nest_scope(scope)):
            return Decision(last_attempt["phase"], "retryStrategy.expression evaluated to false")

    return Decision(deadline=deadline)


def policy(strategy: dict[str, Any]) -> str:
    """Return the retry policy of a strategy, or Argo's default policy."""
    return strategy.get("retryPolicy") or ("Always" if strategy.get("expression") else "OnFailure")


def backoff_duration(backoff: dict[str, Any], attempts: int) -> float:
    """Return the seconds to wait before the next attempt: duration × factor^(attempts-1), limited
    by `cap`."""
    if not backoff.get("duration"):
        raise ValueError("no base duration specified for retryStrategy")
    wait = gofmt.parse_seconds(str(backoff["duration"]))
    factor = parse_int(backoff.get("factor") or 0)
    if factor > 0:
        wait = min(wait * float(factor) ** (attempts - 1), 2**63 / 1e9)
    if backoff.get("cap"):
        return min(wait, gofmt.parse_seconds(str(backoff["cap"])))
    return wait


def parse_int(value: object) -> int:
    """Parse an integer of the manifest. Raises ValueError with Argo's message."""
    text = str(value)
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError(f"value '{text}' cannot be resolved to an int")
    return int(text)


def last_retry_variables(last_attempt: Node | None, default_exit_code: str = "0") -> dict[str, str]:
    """Return the values of the tags lastRetry.* for the next attempt: "0" or "" before the first
    attempt."""
    if last_attempt is None:
        return {
            "lastRetry.exitCode": "0",
            "lastRetry.duration": "0",
            "lastRetry.status": "",
            "lastRetry.message": "",
        }

    # Argo computes the duration from whole seconds
    times = [
        parse_time(last_attempt[key][:19] + "Z")
        for key in ("startedAt", "finishedAt")
        if last_attempt.get(key)
    ]

    return {
        "lastRetry.exitCode": (
            (last_attempt.get("outputs") or {}).get("exitCode", default_exit_code)
        ),
        "lastRetry.duration": gofmt.format_g(times[-1] - times[0]),
        "lastRetry.status": last_attempt["phase"],
        "lastRetry.message": last_attempt.get("message", ""),
    }


def merge_template_defaults(template: Any, defaults: dict[str, Any] | None) -> Any:
    """Return `templateDefaults` overridden by the template, without the defaults of other template
    types."""
    if not defaults:
        return template
    types = {kind for kind in TEMPLATE_TYPES if kind in template}
    applicable_defaults = {
        key: value for key, value in defaults.items() if key not in TEMPLATE_TYPES or key in types
    }
    return merge_over(applicable_defaults, template)
