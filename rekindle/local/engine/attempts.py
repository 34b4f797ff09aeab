"""Retry nodes: attempt after attempt below one node, until one ends as it should or retries.py says that it is enough.

    node = execute(scheduler, name, holder, template, strategy, options)

Source: Argo's operator.go (executeTemplate, processNodeRetries).
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rekindle.argo.kinds import FULFILLED
from rekindle.argo.language.functions import ExprError
from rekindle.local.engine import admission, retry
from rekindle.local.engine.nodes import Node, NodeError, Options, Parallel, keep_inputs

if TYPE_CHECKING:
    from rekindle.local.engine.scheduler import Scheduler


def execute(
    s: "Scheduler",
    name: str,
    holder: dict[str, Any],
    template: dict[str, Any],
    strategy: dict[str, Any],
    options: Options,
) -> Node | None:
    """Brings a Retry node as far as it can go. Raises Parallel, NodeError."""
    parent = s.get(name)
    if not parent:
        parent = s.create(name, "Retry", "Running", holder, options)
        keep_inputs(parent, template)
    options = replace(options, flag={**options.flag, "retried": True})
    child = None
    for _ in range(2):  # once more when an attempt ends at once
        attempts = s.attempts(parent)
        last = attempts[-1] if attempts else None
        if child:
            try:
                admission.limit(s, template, parent, options.boundary)
            except Parallel:
                s.mark(child["name"], "Error", "Max parallelism reached")
                raise
        if last and last["phase"] in FULFILLED:
            try:
                step = retry.decide(s, parent, attempts, strategy)
            except (ExprError, ValueError) as error:
                s.mark(name, "Error", str(error))
                raise NodeError(str(error)) from None
            if step.phase:
                if last.get("outputs") is not None:
                    parent["outputs"] = last["outputs"]
                return s.mark(name, step.phase, step.message or None)
            s.mark(name, parent["phase"], step.message)
            if step.wait:
                s.wake_at(step.wait)
                return parent
            options = replace(options, deadline=step.deadline or options.deadline)
            last = None
        number = len(attempts) - (1 if last else 0)
        attempt = last["name"] if last else f"{name}({number})"
        if attempt not in s.memory:
            local = {"retries": str(number), "pod.name": s.pod_name(attempt, template["name"])}
            local |= retry.variables(attempts[number - 1] if number else None)
            try:
                s.memory[attempt] = s.substituted(template, local)
            except NodeError as error:
                s.error(attempt, holder, options, str(error))
                s.child(name, attempt)
                raise
        try:
            child = s.execute(attempt, holder, {}, options, retried=True)
        except NodeError:
            if retry.policy(strategy) == "OnFailure":  # the error goes on to whoever called it
                s.child(name, attempt)
                raise
            child = s.get(attempt)
        if child:
            s.child(name, attempt)
        if child and child.get("daemoned") and not parent.get("daemoned"):
            parent["daemoned"] = s.again = True
            s.daemons[parent["id"]] = None
            s.changed[parent["id"]] = None
        if not child or child["phase"] not in FULFILLED:
            return parent
    return parent
