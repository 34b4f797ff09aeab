"""Runs, deployments and services on this machine: the tables of `rekindle status`."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argolocal.state.journal import RunFiles
from argolocal.view import runs
from argolocal.view.summary import Status
from rekindle.local.cluster import LocalCluster
from rekindle.view import outcome


def everything(home: Path, as_json: bool) -> str:
    """Return the tables of runs, deployments and services."""
    return runs.everything(LocalCluster(home), as_json, run_row)


def run(home: Path, name: str, as_json: bool) -> str:
    status = runs.state(home, name)
    if not as_json:
        return runs.steps_table(name, status)
    return json.dumps(outcome.as_json(name, status, **facts(home, RunFiles(home, name).workflow(), status)), indent=2)


def facts(home: Path, manifest: Mapping[str, Any], status: Status) -> dict[str, Any]:
    """Return the hash of a run's manifest, the endpoint of its model, and its cost, for `-o json`."""
    # imported in this function, for a fast `rekindle status`
    from rekindle.blocks.manifest.render import manifest_sha256

    sha256 = parameter(manifest, "manifest_hash") or manifest_sha256(manifest)
    cost = outcome.costs(status, manifest)
    return {"manifest_sha256": sha256, "endpoint": endpoint(home, manifest)} | ({"cost": cost} if cost else {})


def endpoint(home: Path, manifest: Mapping[str, Any]) -> str | None:
    """Return the URL of the pipeline's Service, if its deployment is running."""
    name = label(manifest, "name")
    cluster = LocalCluster(home)
    if not name or not (service := cluster.find("Service", name)):
        return None
    address = f"http://127.0.0.1:{service['spec']['ports'][0]['port']}"
    return address if any(row.get("address") == address and row["running"] for row in cluster.overview()) else None


def token_header(home: Path, manifest: Mapping[str, Any]) -> str:
    """Return the flag of curl that sends the token of this machine; "" if the model servers of a run need no token."""
    if not outcome.needs_token(manifest):
        return ""
    services = LocalCluster(home).services
    services.serving_token()
    return f" -H {shlex.quote(f'@{services.authorization_file}')}"


def label(manifest: Mapping[str, Any], name: str) -> str | None:
    """Return a label that Rekindle sets on its manifests, such as the name of the pipeline."""
    return ((manifest.get("metadata") or {}).get("labels") or {}).get(f"app.kubernetes.io/{name}")


def parameter(manifest: Mapping[str, Any], name: str) -> str:
    """Return the value of a workflow parameter; "" if it is missing or empty."""
    parameters = (manifest["spec"].get("arguments") or {}).get("parameters") or []
    return next((str(item.get("value") or "") for item in parameters if item["name"] == name), "")


def run_row(name: str, status: Status, phase: str, created: str | None) -> dict[str, str]:
    verdict = {"verdict": outcome.parameters(status).get("verdict", "")}
    return {"run": name, "phase": phase} | verdict | runs.run_row(name, status, phase, created)
