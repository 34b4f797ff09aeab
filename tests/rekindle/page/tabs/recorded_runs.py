"""Runs as Rekindle's own writers record them: manifest, status, ledger, report and metrics."""

import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.state.journal import RunFiles
from rekindle.keys import LEDGER_KEY, key
from rekindle.kubernetes_names import NAME_LABEL, PART_OF_REKINDLE
from rekindle.local.services.services import DATABASE_FILE
from rekindle.storage import Store
from rekindle.tracking import WORKFLOW
from rekindle.training.ledger.events import Ledger

MARKUP = "<img src=x onerror=document.title='hacked'>"
START = "2026-03-01T00:00:00.000Z"
END = "2026-03-01T00:02:00.000Z"
CHAMPION_SHA256 = "c" * 64
VERDICT = {
    "verdict": "keep",
    "reason": "The candidate is worse, and not by chance: rmse 2.5000 kWh against 2.0000.",
    "metrics": [
        {"name": "rmse", "better": "lower", "unit": "kWh", "digits": 4},
        {"name": "share", "better": "higher", "unit": "", "digits": 3},
    ],
    "rows": 1200,
    "candidate": {"sha256": "a" * 64, "rmse": 2.5, "share": 0.8},
    "champion": {"version": "3", "sha256": CHAMPION_SHA256, "rmse": 2.0, "share": 0.9},
    "baseline": {"rmse": 4.0, "share": None},
    "difference": {"metric": "rmse", "mean": 0.5, "low": 0.3, "high": 0.7},
    "baseline_difference": {"metric": "rmse", "mean": -1.5, "low": -1.9, "high": -1.1},
    "chosen": {
        "family": "trees",
        "by": "loss",
        "better": "lower",
        "validation": {"trees": {"loss": 0.1}, "linear": {"loss": None}},
    },
    "parts": [{"name": "2026-02", "rows": 600, "candidate": {"rmse": 2.4}, "frauds": 3}],
    "warnings": [f"Half of the rows are new. {MARKUP}"],
    "gate": {"minimum": {"share": 0.7}, "maximum": {"rmse": 3.0}, "tolerance": 0.1},
}


def make_pod_node(name: str, task: str, **values: Any) -> dict[str, Any]:
    """Return the node of a pod that has succeeded."""
    parameters = [{"name": n, "value": v} for n, v in values.pop("outputs", {}).items()]
    inputs = [{"name": n, "value": v} for n, v in values.pop("inputs", {}).items()]
    artifacts = [{"name": n, "s3": {"key": k}} for n, k in values.pop("artifacts", {}).items()]
    return {
        "id": f"{name}-{task}",
        "name": f"{name}.{task}",
        "displayName": task,
        "type": "Pod",
        "phase": "Succeeded",
        "startedAt": START,
        "finishedAt": END,
        "inputs": {"parameters": inputs},
        "outputs": {"parameters": parameters, "artifacts": artifacts},
        **values,
    }


def make_evaluation_node(name: str, verdict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node of an evaluation, whose report is in the object store."""
    outputs = {
        "verdict": verdict["verdict"],
        "reason": verdict["reason"],
        "metrics": to_json({"rmse": verdict["candidate"]["rmse"]}),
        "champion": "3",
    }
    return make_pod_node(
        name, "evaluate", outputs=outputs, artifacts={"report": f"{name}/evaluate/report"}
    )


def record_run(
    home: Path,
    name: str,
    config: Mapping[str, Any],
    nodes: Iterable[Mapping[str, Any]] = (),
    *,
    phase: str = "Succeeded",
    trainings: Iterable[str] = (),
    **parameters: str,
) -> None:
    """Create a run with a config and nodes. `trainings`: tasks with a ledger."""
    values = {"config": to_json(config), **parameters}
    template = {
        "name": "main",
        "dag": {"tasks": []},
        "metadata": {"annotations": {task: key(task, LEDGER_KEY) for task in trainings}},
    }
    files = RunFiles(home, name)
    files.create(
        {
            "apiVersion": "argoproj.io/v1alpha1",
            "kind": "Workflow",
            "metadata": {
                "name": name,
                "uid": name,
                "labels": {NAME_LABEL: str(config.get("name")), **PART_OF_REKINDLE},
            },
            "spec": {
                "entrypoint": "main",
                "templates": [template],
                "arguments": {"parameters": [{"name": n, "value": v} for n, v in values.items()]},
            },
        }
    )
    status: dict[str, Any] = {"phase": phase, "startedAt": START}
    if phase != "Running":
        status["finishedAt"] = END
    files.snapshot({**status, "nodes": {node["id"]: dict(node) for node in nodes}})
    files.close()


def record_events(store: Store, name: str, task: str, events: Iterable[Mapping[str, Any]]) -> None:
    """Write events to the ledger of a training."""
    ledger = Ledger(lambda: store, key(task, LEDGER_KEY, name))
    for event in events:
        ledger.note(**event)
    ledger.close()


def record_metrics(
    home: Path, name: str, metrics: Mapping[str, Iterable[tuple[int, float]]]
) -> None:
    """Write curves to a database with the tables of MLflow that the page reads."""
    with closing(sqlite3.connect(home / DATABASE_FILE)) as database, database:
        database.executescript(
            """
            CREATE TABLE IF NOT EXISTS runs (run_uuid, lifecycle_stage, start_time);
            CREATE TABLE IF NOT EXISTS tags (key, value, run_uuid);
            CREATE TABLE IF NOT EXISTS metrics (key, value, timestamp, run_uuid, step, is_nan);
            """
        )
        database.execute("INSERT INTO runs VALUES (?, 'active', 1)", (name,))
        database.execute("INSERT INTO tags VALUES (?, ?, ?)", (WORKFLOW, name, name))
        rows = [
            (metric, float(value), step, name, step)
            for metric, points in metrics.items()
            for step, value in points
        ]
        database.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, 0)", rows)
