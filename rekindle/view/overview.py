"""Show runs, deployments and services on this machine: the tables of `rekindle status`."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.state.journal import RunFiles
from argolocal.view import runs
from argolocal.view.summary import Status, list_steps
from rekindle.blocks.manifest import workflow_origin
from rekindle.local.cluster import LocalCluster
from rekindle.operations import results
from rekindle.view import outcome
from rekindle.view.plumbing import InternalSteps


def format_overview(home: Path, as_json: bool) -> str:
    """Return the tables of runs, deployments and services."""
    return runs.show_all(LocalCluster(home), as_json, build_run_row)


def format_run(home: Path, run_name: str, as_json: bool, shows_all: bool = False) -> str:
    """Return the steps of a run, without internal steps unless `shows_all`, and its live
    processes."""
    run_status = runs.load_status(home, run_name)
    manifest = RunFiles(home, run_name).workflow()
    if as_json:
        return to_json(build_run_object(home, run_name, manifest, run_status), indent=2)

    live_processes = runs.list_processes(home, run_name)
    return format_steps_table(
        run_name, run_status, manifest, shows_all
    ) + runs.format_processes_table(live_processes)


def build_run_object(
    home: Path, run_name: str, manifest: Mapping[str, Any], run_status: Status
) -> dict[str, Any]:
    """Return the JSON object that `rekindle status NAME -o json` prints."""
    outcome_fields = outcome.build_outcome(
        run_name, run_status, **collect_run_facts(home, manifest, run_status)
    )
    return outcome_fields | {"processes": runs.list_processes(home, run_name)}


def format_steps_table(
    run_name: str, run_status: Status, manifest: Mapping[str, Any], shows_all: bool = False
) -> str:
    """Return a table of the steps of a run, without internal steps unless `shows_all`."""
    internal_steps = InternalSteps(manifest, run_status)
    step_rows = [
        internal_steps.make_readable(step_row) for step_row in list_steps(run_name, run_status)
    ]
    if shows_all:
        return runs.format_steps_table(run_name, run_status, step_rows)

    shown_rows = [step_row for step_row in step_rows if not internal_steps.is_internal(step_row)]
    table_text = runs.format_steps_table(run_name, run_status, shown_rows)
    hidden_count = len(step_rows) - len(shown_rows)
    if hidden_count:
        table_text += f"\n\n{hidden_count} internal steps are not shown: `--all` shows them"

    return table_text


def collect_run_facts(
    home: Path, manifest: Mapping[str, Any], run_status: Status
) -> dict[str, Any]:
    """Return further fields for `-o json`: the hash of a run's manifest, the endpoint of its model,
    and its cost."""
    # imported here to keep `rekindle status` fast
    from rekindle.blocks.manifest.render import manifest_sha256

    sha256 = workflow_origin.read_parameter(manifest, "manifest_hash") or manifest_sha256(manifest)
    run_costs = results.compute_costs(run_status, manifest)
    return {"manifest_sha256": sha256, "endpoint": find_endpoint(home, manifest)} | (
        {"cost": run_costs} if run_costs else {}
    )


def find_endpoint(home: Path, manifest: Mapping[str, Any]) -> str | None:
    """Return the URL of the pipeline's Service, if its deployment is running."""
    name = workflow_origin.pipeline_label(manifest)
    cluster = LocalCluster(home)
    service_object = cluster.find("Service", name) if name else None
    if not service_object:
        return None

    service_address = f"http://127.0.0.1:{service_object['spec']['ports'][0]['port']}"
    if any(
        deployment_row.get("address") == service_address and deployment_row["running"]
        for deployment_row in cluster.overview()
    ):
        return service_address
    return None


def format_token_header(home: Path, manifest: Mapping[str, Any]) -> str:
    """Return the curl option that sends this machine's access token, or "" if the run's model
    servers need none."""
    if not results.needs_token(manifest):
        return ""

    local_services = LocalCluster(home).services
    local_services.serving_token()
    return f" -H {shlex.quote(f'@{local_services.authorization_file}')}"


def build_run_row(
    run_name: str, run_status: Status, run_phase: str, creation_time: str | None
) -> dict[str, str]:
    verdict_field = {"verdict": results.read_parameters(run_status).get("verdict", "")}
    return (
        {"run": run_name, "phase": run_phase}
        | verdict_field
        | runs.make_run_row(run_name, run_status, run_phase, creation_time)
    )
