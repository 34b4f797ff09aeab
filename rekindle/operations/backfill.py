"""Run the missed runs of a schedule, several at a time. The only state of a backfill is its runs,
so an interrupted backfill can be repeated.

The models of these runs are evaluated and recorded, but the gate never releases them, because of
the workflow parameter `backfill`.
"""

import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from argolocal.common import homes
from argolocal.common.files import write_atomically
from argolocal.common.json_text import to_json
from argolocal.common.processes import python_command
from argolocal.manifest.allowed_values import COMPLETED, FAILED
from argolocal.state.journal import MANIFEST_FILE, RunFiles
from rekindle.blocks.manifest.render import manifest_sha256
from rekindle.cluster import workflows
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.errors import ConfigError
from rekindle.operations.missed_runs import MissedRun

POLL_INTERVAL_S = 0.5
CLUSTER_POLL_INTERVAL_S = 5.0
FOLDER = "backfill"  # folder in the home with the manifests and the output of the runs


def backfill(
    missed_runs: Iterable[MissedRun],
    execute: Callable[[MissedRun], dict[str, Any]],
    parallel: int,
    log: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Execute the runs, `parallel` at a time, and return a row per run, in order. A failed run does
    not stop the others."""

    def run_one(run: MissedRun) -> dict[str, Any]:
        log(f"{run.name} is the run of {run.time:%Y-%m-%d %H:%M} UTC")
        row = run.row(execute(run))
        log(f"{run.name} {row['phase']} {row['gate'] or ''}".rstrip())
        return row

    with ThreadPoolExecutor(parallel) as pool:
        futures = [pool.submit(run_one, run) for run in missed_runs]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_here(home: Path, manifest: dict[str, Any], run: MissedRun) -> dict[str, Any]:
    """Start or resume a missed run on this machine, and return its final status. Raises ConfigError
    if the run cannot start."""
    files = RunFiles(home, run.name)
    homes.make(home)
    (home / FOLDER).mkdir(exist_ok=True)
    log = home / FOLDER / f"{run.name}.log"
    is_tried = False

    while True:
        # another backfill executes this run, or a killed backfill has left it running
        if files.runner():
            time.sleep(POLL_INTERVAL_S)
            continue

        is_created = (files.root / MANIFEST_FILE).exists()
        # the run's name contains only the first characters of the manifest hash, so compare the
        # whole hash
        if is_created and _manifest_hash(files.workflow()) != _manifest_hash(manifest):
            raise ConfigError(
                f"{run.name} belongs to another config: remove the run (`rekindle prune`), or"
                " change the name."
            )

        status = files.load()[0]
        if is_created and (is_tried or status.get("phase") == "Succeeded"):
            return status

        if is_tried:
            raise ConfigError(
                f"{run.name} did not start."
                f" {log.read_text().splitlines()[-1].removeprefix('error: ')}"
            )

        if is_created:
            arguments = ["resume", run.name]
        else:
            arguments = _first_run_arguments(home, manifest, run)
        _run_rekindle(log, *arguments)

        # if a runner exists, another backfill has started the run at the same time
        is_tried = not files.runner()


def _first_run_arguments(home: Path, manifest: dict[str, Any], run: MissedRun) -> list[str]:
    """Write the manifest of a missed run, and return the arguments of `rekindle` that run it."""
    metadata = {key: value for key, value in manifest["metadata"].items() if key != "generateName"}
    file = home / FOLDER / f"{run.name}.json"
    write_atomically(file, to_json(manifest | {"metadata": metadata | {"name": run.name}}))

    pairs = [f"{name}={value}" for name, value in run.parameters.items()]
    return ["run", "--manifest", str(file), *(flag for pair in pairs for flag in ("-p", pair))]


def _manifest_hash(workflow: dict[str, Any]) -> str:
    parameters = workflow["spec"]["arguments"]["parameters"]
    return next(
        str(parameter.get("value"))
        for parameter in parameters
        if parameter["name"] == "manifest_hash"
    )


def _run_rekindle(log: Path, *arguments: str) -> None:
    command = python_command("-m", "rekindle", *arguments, "--yes", "-o", "json")
    with log.open("ab") as out:
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False)


def run_on_cluster(cluster: Cluster, schedule: str, run: MissedRun) -> dict[str, Any]:
    """Submit or resume a missed run, wait for its end, and return its status. Raises ConfigError,
    ApiError."""
    try:
        existing = cluster.find(workflows.WORKFLOWS, run.name)
        if not existing:
            workflow = workflows.scheduled_workflow(cluster, schedule, run.parameters)
            workflow["metadata"]["name"] = run.name
            workflows.submit(cluster, workflow)
        elif (existing.get("status") or {}).get("phase") in FAILED:
            workflows.resume_run(cluster, run.name)
    except (ApiError, ConfigError):
        # another backfill may have submitted or resumed the run at the same time
        existing = cluster.find(workflows.WORKFLOWS, run.name)
        if not existing or (existing.get("status") or {}).get("phase") in FAILED:
            raise

    while True:
        status = workflows.read_run(cluster, run.name).get("status") or {}
        if status.get("phase") in COMPLETED:
            return status
        time.sleep(CLUSTER_POLL_INTERVAL_S)


def select_executor(
    home: Path, manifest: dict[str, Any], schedule: str, cluster: Cluster | None
) -> Any:
    """Return the function that starts or resumes a missed run.

    Raises ConfigError if the schedule on the cluster was created from another manifest than
    `manifest`.
    """
    if not cluster:
        return partial(run_here, home, manifest)

    annotations = workflows.scheduled_workflow(cluster, schedule)["metadata"]["annotations"]
    if annotations.get(workflows.SHA256_ANNOTATION) != manifest_sha256(manifest):
        raise ConfigError(
            f"the schedule {schedule} on the cluster has another config: apply the given config"
            " with `rekindle schedule CONFIG` first, or give the config of the schedule."
        )

    return partial(run_on_cluster, cluster, schedule)
