"""Show runs, deployments and services on this machine: the tables of `rekindle status`."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.state.journal import RunFiles
from argolocal.view import runs
from argolocal.view.summary import Status, steps
from rekindle.blocks.manifest import workflow_origin
from rekindle.local.cluster import LocalCluster
from rekindle.operations import results
from rekindle.view import outcome
from rekindle.view.plumbing import InternalSteps


def everything(home: Path, as_json: bool) -> str:
    """Return the tables of runs, deployments and services."""
    return runs.show_all(LocalCluster(home), as_json, run_row)


def run(home: Path, name: str, as_json: bool, show_all: bool = False) -> str:
    """Return the steps of a run, without internal steps unless `show_all`, and its live
    processes."""
    status = runs.load_status(home, name)
    manifest = RunFiles(home, name).workflow()
    if as_json:
        return to_json(as_object(home, name, manifest, status), indent=2)

    processes = runs.processes(home, name)
    return steps_table(name, status, manifest, show_all) + runs.processes_table(processes)


def as_object(home: Path, name: str, manifest: Mapping[str, Any], status: Status) -> dict[str, Any]:
    """Return the JSON object that `rekindle status NAME -o json` prints."""
    result = outcome.as_json(name, status, **facts(home, manifest, status))
    return result | {"processes": runs.processes(home, name)}


def steps_table(
    name: str, status: Status, manifest: Mapping[str, Any], show_all: bool = False
) -> str:
    """Return a table of the steps of a run, without internal steps unless `show_all`."""
    internal_steps = InternalSteps(manifest, status)
    rows = [internal_steps.make_readable(row) for row in steps(name, status)]
    if show_all:
        return runs.steps_table(name, status, rows)

    shown_rows = [row for row in rows if not internal_steps.is_internal(row)]
    table = runs.steps_table(name, status, shown_rows)
    hidden_count = len(rows) - len(shown_rows)
    if hidden_count:
        table += f"\n\n{hidden_count} internal steps are not shown: `--all` shows them"

    return table


def facts(home: Path, manifest: Mapping[str, Any], status: Status) -> dict[str, Any]:
    """Return further fields for `-o json`: the hash of a run's manifest, the endpoint of its model,
    and its cost."""
    # imported here to keep `rekindle status` fast
    from rekindle.blocks.manifest.render import manifest_sha256

    sha256 = workflow_origin.read_parameter(manifest, "manifest_hash") or manifest_sha256(manifest)
    cost = results.costs(status, manifest)
    return {"manifest_sha256": sha256, "endpoint": endpoint(home, manifest)} | (
        {"cost": cost} if cost else {}
    )


def endpoint(home: Path, manifest: Mapping[str, Any]) -> str | None:
    """Return the URL of the pipeline's Service, if its deployment is running."""
    name = workflow_origin.pipeline_label(manifest)
    cluster = LocalCluster(home)
    service = cluster.find("Service", name) if name else None
    if not service:
        return None

    address = f"http://127.0.0.1:{service['spec']['ports'][0]['port']}"
    if any(row.get("address") == address and row["running"] for row in cluster.overview()):
        return address
    return None


def token_header(home: Path, manifest: Mapping[str, Any]) -> str:
    """Return the curl option that sends this machine's access token, or "" if the run's model
    servers need none."""
    if not results.needs_token(manifest):
        return ""

    services = LocalCluster(home).services
    services.serving_token()
    return f" -H {shlex.quote(f'@{services.authorization_file}')}"


def run_row(name: str, status: Status, phase: str, created: str | None) -> dict[str, str]:
    verdict = {"verdict": results.parameters(status).get("verdict", "")}
    return {"run": name, "phase": phase} | verdict | runs.run_row(name, status, phase, created)
