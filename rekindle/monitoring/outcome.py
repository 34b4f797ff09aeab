"""How a workflow ended, in words: of what Argo and the tags of its MLflow run say."""

import json
import re
from collections.abc import Mapping
from typing import Any

STATUS = {"Succeeded": "FINISHED", "Failed": "FAILED", "Error": "FAILED"}
STOPPED = ("stopped with strategy", "shutdown with strategy", "terminated with strategy")  # Argo's words for `stop`
VERDICT = re.compile(r"([\w-]+/)?verdict")  # tags of one or several evaluations


def status(workflow: str, reasons: list[str]) -> str:
    """Argo's phase of a workflow → MLflow's status of a run; one that was stopped is `Failed`, its reasons say so."""
    if workflow != "Succeeded" and any(word in reason.lower() for reason in reasons for word in STOPPED):
        return "KILLED"
    return STATUS.get(workflow, "FAILED")


def reasons(failures: str) -> list[str]:
    """A line for each failed node of {{workflow.failures}}: a JSON list, quoted once more (strconv.Quote)."""
    value: Any = failures
    while isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except ValueError:
            return [f"workflow: {value}"]
    nodes = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []  # `null` for none
    nodes = [node for node in nodes if node.get("message")] or nodes  # a DAG only says that it failed
    return [f"{node.get('displayName', '?')}: {node.get('message') or node.get('phase', 'failed')}" for node in nodes]


def verdicts(tags: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(what its tags begin with, verdict, reason) of each evaluation of a run."""
    parts = [name.removesuffix("verdict") for name in tags if VERDICT.fullmatch(name)]
    return [(part, tags[f"{part}verdict"], tags.get(f"{part}reason", "")) for part in parts]
