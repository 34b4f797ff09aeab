"""Execute Retry nodes: start attempts, and decide after each failed attempt whether and when to
retry.

The conditions are checked in Argo's order: shutdown and deadline, maxDuration, backoff, policy,
limit, expression. The backoff is checked before the policy, so the node waits for its backoff even
after a failure that the policy does not retry. If the strategy lacks a limit, the node never waits.
The behaviour follows Argo's operator.go (executeTemplate, processNodeRetries,
mergedTemplateDefaultsInto).
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from argolocal.engine import admission
from argolocal.engine.context import Context
from argolocal.engine.nodes import (
    ExecutionOptions,
    LimitReached,
    NodeError,
    parse_time,
    record_inputs,
)
from argolocal.language import gofmt
from argolocal.language.expr import evaluate_bool
from argolocal.language.functions import ExprError
from argolocal.language.substitute import nest_scope
from argolocal.manifest.allowed_values import (
    FAILED_PHASES,
    FULFILLED_PHASES,
    RETRIED_PHASES,
    TEMPLATE_TYPES,
)
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
class RetryDecision:
    """A decision about a Retry node. `phase`: the node's final phase, or "" if another attempt
    follows. `start_at`: unix time when the next attempt may start; None: now. `deadline`: unix time
    when the next attempt is killed."""

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
    options: ExecutionOptions,
) -> Node:
    """Create or advance a Retry node, and return it. Raises LimitReached if a limit prevents an
    attempt from starting, and NodeError if the node fails."""
    node_table = context.table

    retry_node = node_table.get(name)
    if not retry_node:
        retry_node = node_table.create(name, "Retry", "Running", caller, options)
        record_inputs(retry_node, template)

    options = replace(options, node_flag={**options.node_flag, "retried": True})
    attempt_node = None

    # The first iteration may start an attempt that ends at once, for example because its template
    # is invalid. If so, the second iteration starts the next attempt.
    for _ in range(2):
        attempts = node_table.attempts(retry_node)
        if attempt_node:
            try:
                admission.check_parallelism(context, template, retry_node, options.boundary_id)
            except LimitReached:
                node_table.mark(attempt_node["name"], "Error", "Max parallelism reached")
                raise

        if attempts and attempts[-1]["phase"] in FULFILLED_PHASES:
            deadline = _plan_next_attempt(context, retry_node, attempts, strategy)
            if deadline is None:
                return retry_node

            options = replace(options, deadline=deadline or options.deadline)
            attempt_number = len(attempts)
        else:
            attempt_number = max(len(attempts) - 1, 0)

        if attempt_number < len(attempts):
            attempt_name = attempts[attempt_number]["name"]
        else:
            attempt_name = f"{name}({attempt_number})"

        if not context.template_of(attempt_name):
            local_values = {
                "retries": str(attempt_number),
                "pod.name": node_table.compute_pod_name(attempt_name, template["name"]),
            }
            local_values.update(
                make_last_retry_variables(attempts[attempt_number - 1] if attempt_number else None)
            )

            try:
                context.expansion(attempt_name).template = context.inputs.substitute_params(
                    template, local_values
                )
            except NodeError as error:
                node_table.mark_error(attempt_name, caller, options, str(error))
                node_table.link_child(name, attempt_name)
                raise

        attempt_node = _execute_attempt(
            context, retry_node, attempt_name, caller, parse_retry_policy(strategy), options
        )
        if not attempt_node or attempt_node["phase"] not in FULFILLED_PHASES:
            return retry_node

    return retry_node


def _plan_next_attempt(
    context: Context, retry_node: Node, attempt_nodes: list[Node], strategy: dict[str, Any]
) -> float | None:
    """Decide how the node continues after its last attempt. Return the deadline of the next attempt
    (0: unlimited), or None if no attempt may start now, because the node has ended or waits for its
    backoff. Raises NodeError."""
    try:
        decision = decide_retry(context, retry_node, attempt_nodes, strategy)
    except (ExprError, ValueError) as error:
        context.table.mark(retry_node["name"], "Error", str(error))
        raise NodeError(str(error)) from None

    if decision.phase:
        if attempt_nodes[-1].get("outputs") is not None:
            retry_node["outputs"] = attempt_nodes[-1]["outputs"]

        context.table.mark(retry_node["name"], decision.phase, decision.message or None)
        return None

    context.table.mark(retry_node["name"], retry_node["phase"], decision.message)
    if decision.start_at:
        context.wake_at(decision.start_at)
        return None

    return decision.deadline or 0.0


def _execute_attempt(
    context: Context,
    retry_node: Node,
    attempt_name: str,
    caller: Task,
    retry_policy: str,
    options: ExecutionOptions,
) -> Node | None:
    """Start or advance one attempt, a child of `retry_node`. Return the attempt's node, or None if
    the node could not be created. Raises LimitReached if a limit prevents the attempt from
    starting, and NodeError if it fails."""
    node_table = context.table

    try:
        attempt_node = context.execute(attempt_name, caller, {}, options, is_attempt=True)
    except NodeError:
        if retry_policy == "OnFailure":
            # with this policy, Argo does not retry errors
            node_table.link_child(retry_node["name"], attempt_name)
            raise

        attempt_node = node_table.get(attempt_name)

    if attempt_node:
        node_table.link_child(retry_node["name"], attempt_name)

    if attempt_node and attempt_node.get("daemoned") and not retry_node.get("daemoned"):
        retry_node["daemoned"] = True
        node_table.needs_requeue = True
        context.daemons[retry_node["id"]] = None
        node_table.changed_nodes[retry_node["id"]] = None

    return attempt_node


def decide_retry(
    context: Context, retry_node: Node, attempt_nodes: list[Node], strategy: dict[str, Any]
) -> RetryDecision:
    """Decide whether another attempt follows the last attempt of a Retry node. Raises ExprError and
    ValueError for an invalid strategy."""
    last_attempt = attempt_nodes[-1]
    now = context.table.now

    if last_attempt["phase"] not in FAILED_PHASES:
        return RetryDecision("Succeeded")
    if context.shutdown:
        return RetryDecision(last_attempt["phase"], f"Stopped with strategy '{context.shutdown}'")
    if context.deadline and now >= context.deadline:
        return RetryDecision(last_attempt["phase"], "retry exceeded workflow deadline")

    if strategy.get("limit") is not None:
        max_retries = parse_int(strategy["limit"])
    else:
        max_retries = None

    backoff = strategy.get("backoff") or {}
    deadline = None

    if backoff:
        if backoff.get("maxDuration"):
            deadline = parse_time(attempt_nodes[0]["startedAt"]) + gofmt.parse_seconds(
                str(backoff["maxDuration"])
            )
            if now > deadline:
                return RetryDecision(last_attempt["phase"], "Max duration limit exceeded")

        wait_seconds = compute_backoff_seconds(backoff, len(attempt_nodes))
        backoff_end = parse_time(last_attempt["finishedAt"]) + wait_seconds
        if deadline and backoff_end > deadline:
            return RetryDecision(last_attempt["phase"], "Backoff would exceed max duration limit")
        if now < backoff_end and max_retries is not None and len(attempt_nodes) <= max_retries:
            return RetryDecision(
                message=f"Backoff for {gofmt.humanize(wait_seconds)}", start_at=backoff_end
            )

    retry_policy = parse_retry_policy(strategy)
    if retry_policy == "OnTransientError":
        is_retryable = any(
            transient_message in last_attempt.get("message", "")
            for transient_message in TRANSIENT_MESSAGES
        )
    else:
        is_retryable = last_attempt["phase"] in RETRIED_PHASES[retry_policy]

    if not is_retryable:
        return RetryDecision(last_attempt["phase"], last_attempt.get("message", ""))
    if max_retries is not None and len(attempt_nodes) > max_retries:
        return RetryDecision(last_attempt["phase"], "No more retries left")

    if strategy.get("expression"):
        expression_scope = make_last_retry_variables(last_attempt, default_exit_code="-1") | {
            "retries": str(len(attempt_nodes) - 1)
        }
        if not evaluate_bool(strategy["expression"], nest_scope(expression_scope)):
            return RetryDecision(
                last_attempt["phase"], "retryStrategy.expression evaluated to false"
            )

    return RetryDecision(deadline=deadline)


def parse_retry_policy(strategy: dict[str, Any]) -> str:
    """Return the retry policy of a strategy, or Argo's default policy."""
    return strategy.get("retryPolicy") or ("Always" if strategy.get("expression") else "OnFailure")


def compute_backoff_seconds(backoff: dict[str, Any], attempt_count: int) -> float:
    """Return the seconds to wait before the next attempt: duration × factor^(attempts-1), limited
    by `cap`."""
    if not backoff.get("duration"):
        raise ValueError("no base duration specified for retryStrategy")
    wait_seconds = gofmt.parse_seconds(str(backoff["duration"]))
    factor = parse_int(backoff.get("factor") or 0)
    if factor > 0:
        wait_seconds = min(wait_seconds * float(factor) ** (attempt_count - 1), 2**63 / 1e9)
    if backoff.get("cap"):
        return min(wait_seconds, gofmt.parse_seconds(str(backoff["cap"])))
    return wait_seconds


def parse_int(value: object) -> int:
    """Parse an integer of the manifest. Raises ValueError with Argo's message for any other
    text."""
    text = str(value)
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError(f"value '{text}' cannot be resolved to an int")
    return int(text)


def make_last_retry_variables(
    last_attempt: Node | None, default_exit_code: str = "0"
) -> dict[str, str]:
    """Return the values of the tags lastRetry.* for the next attempt; before the first attempt, all
    values are "0" or ""."""
    if last_attempt is None:
        return {
            "lastRetry.exitCode": "0",
            "lastRetry.duration": "0",
            "lastRetry.status": "",
            "lastRetry.message": "",
        }

    # Argo computes the duration from whole seconds
    attempt_times = [
        parse_time(last_attempt[time_field][:19] + "Z")
        for time_field in ("startedAt", "finishedAt")
        if last_attempt.get(time_field)
    ]

    return {
        "lastRetry.exitCode": (
            (last_attempt.get("outputs") or {}).get("exitCode", default_exit_code)
        ),
        "lastRetry.duration": gofmt.format_g(attempt_times[-1] - attempt_times[0]),
        "lastRetry.status": last_attempt["phase"],
        "lastRetry.message": last_attempt.get("message", ""),
    }


def merge_template_defaults(template: Any, defaults: dict[str, Any] | None) -> Any:
    """Return the template with the missing fields from the workflow's `templateDefaults`. Defaults
    for templates of another type are ignored."""
    if not defaults:
        return template
    template_types = {
        template_type for template_type in TEMPLATE_TYPES if template_type in template
    }
    applicable_defaults = {
        key: value
        for key, value in defaults.items()
        if key not in TEMPLATE_TYPES or key in template_types
    }
    return merge_over(applicable_defaults, template)
