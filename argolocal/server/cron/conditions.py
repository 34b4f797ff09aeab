"""Evaluate the conditions of a CronWorkflow, which are `when` before each run, and
`stopStrategy.expression` after each run.

The behaviour follows Argo's workflow/cron/operator.go (evalWhen, checkStopingCondition).
"""

from collections.abc import Mapping
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.engine.nodes import parse_time
from argolocal.language import govaluate, substitute
from argolocal.language.expr import evaluate_bool
from argolocal.language.go_time import GoTime
from argolocal.language.sprig import ARGO_FUNCTIONS
from argolocal.manifest.types import Object

# suffix of the names of variables that contain a map as JSON text
JSON_SUFFIX = ".json"


def may_run(cron: Object, now: float) -> bool:
    """Return True if the condition `when` of a CronWorkflow allows a run. Raises NodeError."""
    condition = cron["spec"].get("when")
    if not condition:
        return True

    values = {f"cronworkflow.{name}": value for name, value in _variables(cron).items()}
    scope: Mapping[str, Any] = {**values, "now": lambda: GoTime(now)}
    text = to_json(condition, ensure_ascii=False)[1:-1]
    return govaluate.should_execute(substitute.replace_tags(text, scope, substitute.EVERY_TAG))


def must_stop(cron: Object, now: float) -> bool:
    """Return True if `stopStrategy` of a CronWorkflow ends the schedule. Raises ExprError."""
    expression = (cron["spec"].get("stopStrategy") or {}).get("expression")
    if not expression:
        return False
    scope = {"cronworkflow": _variables(cron), "now": lambda: GoTime(now)}
    return evaluate_bool(expression, {**scope, **ARGO_FUNCTIONS})


def _variables(cron: Object) -> dict[str, Any]:
    """Return the variables of conditions, without the prefix `cronworkflow.`."""
    metadata = cron["metadata"]
    status = cron.get("status") or {}
    labels = metadata.get("labels") or {}
    annotations = metadata.get("annotations") or {}
    last_time = status.get("lastScheduledTime")
    return {
        "name": metadata["name"],
        "namespace": metadata.get("namespace") or "",
        "labels": labels,
        # as in Argo, this variable contains the labels instead of the annotations
        "annotations": labels,
        f"labels{JSON_SUFFIX}": to_json(labels),
        f"annotations{JSON_SUFFIX}": to_json(annotations),
        "failed": status.get("failed") or 0,
        "succeeded": status.get("succeeded") or 0,
        "lastScheduledTime": GoTime(parse_time(last_time)) if last_time else None,
    }
