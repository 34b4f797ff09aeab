"""Run the missed runs of a schedule, several at a time. A backfill stores no state except its runs,
so an interrupted backfill can be repeated.

The models of the missed runs are evaluated and recorded, but the gate never releases them, because
of the workflow parameter `backfill`.
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
from argolocal.common.processes import make_python_command
from argolocal.manifest.allowed_values import COMPLETED_PHASES, FAILED_PHASES
from argolocal.state.journal import MANIFEST_FILE, RunFiles
from rekindle.blocks.manifest.render import manifest_sha256
from rekindle.cluster import workflows
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.errors import ConfigError
from rekindle.operations.missed_runs import MissedRun

POLL_INTERVAL_S = 0.5
CLUSTER_POLL_INTERVAL_S = 5.0
# folder in REKINDLE_HOME with the manifests and the output of the missed runs
BACKFILL_FOLDER = "backfill"


def backfill(
    missed_runs: Iterable[MissedRun],
    execute_run: Callable[[MissedRun], dict[str, Any]],
    max_parallel_runs: int,
    log_message: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Execute the missed runs, `max_parallel_runs` at a time, and return a row for each run, in the
    order of the runs. A failed run does not stop the other runs."""

    def execute_and_log(missed_run: MissedRun) -> dict[str, Any]:
        log_message(f"{missed_run.name} is the run of {missed_run.time:%Y-%m-%d %H:%M} UTC")
        result_row = missed_run.row(execute_run(missed_run))
        log_message(f"{missed_run.name} {result_row['phase']} {result_row['gate'] or ''}".rstrip())
        return result_row

    with ThreadPoolExecutor(max_parallel_runs) as thread_pool:
        row_futures = [
            thread_pool.submit(execute_and_log, missed_run) for missed_run in missed_runs
        ]
        try:
            return [row_future.result() for row_future in row_futures]
        except BaseException:
            thread_pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_on_this_machine(
    home_folder: Path, manifest: dict[str, Any], missed_run: MissedRun
) -> dict[str, Any]:
    """Start or resume a missed run on this machine, and return its final status. Raises ConfigError
    if the run cannot start."""
    run_files = RunFiles(home_folder, missed_run.name)
    homes.create_home(home_folder)
    (home_folder / BACKFILL_FOLDER).mkdir(exist_ok=True)
    log_path = home_folder / BACKFILL_FOLDER / f"{missed_run.name}.log"
    was_tried = False

    while True:
        # another backfill executes this run, or a killed backfill has left the run running
        if run_files.runner():
            time.sleep(POLL_INTERVAL_S)
            continue

        is_created = (run_files.root / MANIFEST_FILE).exists()
        # the run's name contains only the first characters of the manifest hash, so compare the
        # whole hash
        if is_created and _hash_manifest(run_files.workflow()) != _hash_manifest(manifest):
            raise ConfigError(
                f"{missed_run.name} belongs to another config: remove the run (`rekindle prune`),"
                " or change the name."
            )

        run_status = run_files.load()[0]
        if is_created and (was_tried or run_status.get("phase") == "Succeeded"):
            return run_status

        if was_tried:
            raise ConfigError(
                f"{missed_run.name} did not start."
                f" {log_path.read_text().splitlines()[-1].removeprefix('error: ')}"
            )

        if is_created:
            command_arguments = ["resume", missed_run.name]
        else:
            command_arguments = _prepare_first_run(home_folder, manifest, missed_run)
        _run_rekindle(log_path, *command_arguments)

        # if a runner exists, another backfill has started the run at the same time
        was_tried = not run_files.runner()


def _prepare_first_run(
    home_folder: Path, manifest: dict[str, Any], missed_run: MissedRun
) -> list[str]:
    """Write the manifest of a missed run, and return the arguments of `rekindle` that run it."""
    workflow_metadata = {
        key: value for key, value in manifest["metadata"].items() if key != "generateName"
    }
    manifest_file = home_folder / BACKFILL_FOLDER / f"{missed_run.name}.json"
    write_atomically(
        manifest_file,
        to_json(manifest | {"metadata": workflow_metadata | {"name": missed_run.name}}),
    )

    parameter_pairs = [f"{name}={value}" for name, value in missed_run.parameters.items()]
    return [
        "run",
        "--manifest",
        str(manifest_file),
        *(
            command_argument
            for parameter_pair in parameter_pairs
            for command_argument in ("-p", parameter_pair)
        ),
    ]


def _hash_manifest(workflow: dict[str, Any]) -> str:
    workflow_parameters = workflow["spec"]["arguments"]["parameters"]
    return next(
        str(workflow_parameter.get("value"))
        for workflow_parameter in workflow_parameters
        if workflow_parameter["name"] == "manifest_hash"
    )


def _run_rekindle(log_path: Path, *arguments: str) -> None:
    command = make_python_command("-m", "rekindle", *arguments, "--yes", "-o", "json")
    with log_path.open("ab") as log_file:
        subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file, check=False
        )


def run_on_cluster(cluster: Cluster, schedule_name: str, missed_run: MissedRun) -> dict[str, Any]:
    """Submit or resume a missed run, wait for its end, and return its status. Raises ConfigError,
    ApiError."""
    try:
        existing_workflow = cluster.find(workflows.WORKFLOWS, missed_run.name)
        if not existing_workflow:
            workflow = workflows.build_scheduled_workflow(
                cluster, schedule_name, missed_run.parameters
            )
            workflow["metadata"]["name"] = missed_run.name
            workflows.submit(cluster, workflow)
        elif (existing_workflow.get("status") or {}).get("phase") in FAILED_PHASES:
            workflows.resume_run(cluster, missed_run.name)
    except (ApiError, ConfigError):
        # another backfill may have submitted or resumed the run at the same time
        existing_workflow = cluster.find(workflows.WORKFLOWS, missed_run.name)
        if (
            not existing_workflow
            or (existing_workflow.get("status") or {}).get("phase") in FAILED_PHASES
        ):
            raise

    while True:
        run_status = workflows.read_run(cluster, missed_run.name).get("status") or {}
        if run_status.get("phase") in COMPLETED_PHASES:
            return run_status
        time.sleep(CLUSTER_POLL_INTERVAL_S)


def select_executor(
    home_folder: Path, manifest: dict[str, Any], schedule_name: str, cluster: Cluster | None
) -> Any:
    """Return the function that starts or resumes a missed run, and returns its final status.

    Raises ConfigError if the schedule on the cluster was created from another manifest than
    `manifest`.
    """
    if not cluster:
        return partial(run_on_this_machine, home_folder, manifest)

    workflow_annotations = workflows.build_scheduled_workflow(cluster, schedule_name)["metadata"][
        "annotations"
    ]
    if workflow_annotations.get(workflows.SHA256_ANNOTATION) != manifest_sha256(manifest):
        raise ConfigError(
            f"the schedule {schedule_name} on the cluster has another config: apply the given"
            " config with `rekindle schedule CONFIG` first, or give the config of the schedule."
        )

    return partial(run_on_cluster, cluster, schedule_name)
