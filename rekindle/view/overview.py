"""Runs, deployments and services on this machine: the tables of `rekindle status`."""

import json
from pathlib import Path

from argolocal.view import runs
from argolocal.view.summary import Status
from rekindle.local.cluster import LocalCluster
from rekindle.view import outcome


def everything(home: Path, as_json: bool) -> str:
    """Return the tables of runs, deployments and services."""
    return runs.everything(LocalCluster(home), as_json, run_row)


def run(home: Path, name: str, as_json: bool) -> str:
    status = runs.state(home, name)
    return json.dumps(outcome.as_json(name, status), indent=2) if as_json else runs.steps_table(name, status)


def run_row(name: str, status: Status, phase: str, created: str | None) -> dict[str, str]:
    verdict = {"verdict": outcome.parameters(status).get("verdict", "")}
    return {"run": name, "phase": phase} | verdict | runs.run_row(name, status, phase, created)
