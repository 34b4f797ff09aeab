"""Make a workflow of one task, its nodes and its status for tests of the view."""

from datetime import UTC, datetime
from typing import Any

WORKFLOW = "demo-4k2xp"


def time_at(seconds: float) -> str:
    return datetime.fromtimestamp(1_700_000_000 + seconds, UTC).isoformat()


def make_node(
    name: str,
    kind: str = "Pod",
    phase: str = "Succeeded",
    start: float = 0,
    end: float | None = 1,
    **more: Any,
):
    times = {"startedAt": time_at(start), "finishedAt": None if end is None else time_at(end)}
    return {"name": WORKFLOW + name, "type": kind, "phase": phase, **times, **more}


def make_status(*nodes: dict, phase: str = "Running", outputs: dict | None = None) -> dict:
    parameters = [{"name": k, "value": v} for k, v in (outputs or {}).items()]
    return {
        "phase": phase,
        "nodes": {n["name"]: n for n in nodes},
        "outputs": {"parameters": parameters},
    }


ROOT = make_node("", "DAG", "Running", end=None)
