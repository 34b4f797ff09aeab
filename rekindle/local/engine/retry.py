"""What becomes of a node after a failed attempt, and the defaults of templates.

Order as in Argo: shutdown and deadline, maxDuration, backoff, policy, limit, expression; so a failure that is not to be
retried still waits out one backoff, and without a limit there is no backoff at all.
Source: Argo's operator.go processNodeRetries, mergedTemplateDefaultsInto.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rekindle.argo.kinds import RETRIED_PHASES, TEMPLATE_TYPES
from rekindle.argo.language import gofmt
from rekindle.argo.language.expr import truth
from rekindle.argo.language.substitute import expanded
from rekindle.argo.manifest.patch import merged
from rekindle.local.engine.nodes import Node, moment

if TYPE_CHECKING:
    from rekindle.local.engine.scheduler import Scheduler
TRANSIENT = ("i/o timeout", "connection refused", "connection reset", "TLS handshake timeout", "EOF", "transient")


@dataclass(frozen=True)
class Step:
    """Over in `phase`, or another attempt: after `wait` (unix seconds), to end by `deadline`."""

    phase: str = ""
    message: str = ""
    wait: float | None = None
    deadline: float | None = None


def decide(scheduler: "Scheduler", parent: Node, attempts: list[Node], strategy: dict[str, Any]) -> Step:
    """What follows the end of the last attempt. Raises ExprError, ValueError (the node is in error then)."""
    last, now = attempts[-1], scheduler.now
    if last["phase"] not in ("Failed", "Error"):
        return Step("Succeeded")
    if scheduler.shutdown:
        return Step(last["phase"], f"Stopped with strategy '{scheduler.shutdown}'")
    if scheduler.deadline and now >= scheduler.deadline:
        return Step(last["phase"], "retry exceeded workflow deadline")
    limit = whole(strategy["limit"]) if strategy.get("limit") is not None else None
    backoff, end = strategy.get("backoff") or {}, None
    if backoff:
        if backoff.get("maxDuration"):
            end = moment(attempts[0]["startedAt"]) + gofmt.seconds(str(backoff["maxDuration"]))
            if now > end:
                return Step(last["phase"], "Max duration limit exceeded")
        wait = pause(backoff, len(attempts))
        until = moment(last["finishedAt"]) + wait
        if end and until > end:
            return Step(last["phase"], "Backoff would exceed max duration limit")
        if now < until and limit is not None and len(attempts) <= limit:
            return Step(message=f"Backoff for {gofmt.humane(wait)}", wait=until)
    if (kind := policy(strategy)) == "OnTransientError":
        again = any(word in last.get("message", "") for word in TRANSIENT)
    else:
        again = last["phase"] in RETRIED_PHASES[kind]
    if not again:
        return Step(last["phase"], last.get("message", ""))
    if limit is not None and len(attempts) > limit:
        return Step(last["phase"], "No more retries left")
    if strategy.get("expression"):
        scope = variables(last, missing="-1") | {"retries": str(len(attempts) - 1)}
        if not truth(strategy["expression"], expanded(scope)):
            return Step(last["phase"], "retryStrategy.expression evaluated to false")
    return Step(deadline=end)


def policy(strategy: dict[str, Any]) -> str:
    """Which ends of attempts another one may follow."""
    return strategy.get("retryPolicy") or ("Always" if strategy.get("expression") else "OnFailure")


def pause(backoff: dict[str, Any], attempts: int) -> float:
    """duration × factor^(attempts-1), at most cap; in seconds."""
    if not backoff.get("duration"):
        raise ValueError("no base duration specified for retryStrategy")
    wait = gofmt.seconds(str(backoff["duration"]))
    factor = whole(backoff.get("factor") or 0)
    if factor > 0:
        wait = min(wait * float(factor) ** (attempts - 1), 2**63 / 1e9)
    return min(wait, gofmt.seconds(str(backoff["cap"]))) if backoff.get("cap") else wait


def whole(value: Any) -> int:
    """Raises ValueError in Argo's words."""
    if not re.fullmatch(r"[+-]?[0-9]+", str(value)):
        raise ValueError(f"value '{value}' cannot be resolved to an int")
    return int(value)


def variables(last: Node | None, missing: str = "0") -> dict[str, str]:
    """lastRetry.* for the next attempt; all text, and of a first attempt zero or empty."""
    if last is None:
        return {"lastRetry.exitCode": "0", "lastRetry.duration": "0", "lastRetry.status": "", "lastRetry.message": ""}
    ends = [moment(last[key][:19] + "Z") for key in ("startedAt", "finishedAt") if last.get(key)]  # Argo has seconds
    return {
        "lastRetry.exitCode": (last.get("outputs") or {}).get("exitCode", missing),
        "lastRetry.duration": gofmt.general(ends[-1] - ends[0]),
        "lastRetry.status": last["phase"],
        "lastRetry.message": last.get("message", ""),
    }


def with_defaults(template: dict[str, Any], defaults: dict[str, Any] | None) -> dict[str, Any]:
    """The template over `templateDefaults`, but for what these say of other kinds of template."""
    if not defaults:
        return template
    kinds = {kind for kind in TEMPLATE_TYPES if kind in template}
    fitting = {key: value for key, value in defaults.items() if key not in TEMPLATE_TYPES or key in kinds}
    return merged(fitting, template)
