"""Runs weeks of the past, several at a time. Every state is in the runs themselves: again after `kill -9` goes on.

A run of the past is judged and recorded, and never released: its parameter `backfill` tells the step that judges.
"""

import json
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from argolocal.common import homes
from argolocal.common.files import write_atomically
from argolocal.common.processes import python
from argolocal.manifest.kinds import COMPLETED, FAILED
from argolocal.state.journal import RunFiles
from rekindle.blocks.manifest.render import manifest_sha256
from rekindle.cluster import workflows
from rekindle.cluster.api import Cluster
from rekindle.errors import ConfigError
from rekindle.view.history.weeks import Week

POLL, CLUSTER_POLL = 0.5, 5.0  # seconds
FOLDER = "backfill"  # below the home: manifests, and what the runs print


def backfill(
    weeks: Iterable[Week], run: Callable[[Week], dict[str, Any]], parallel: int, note: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The row of each week, in order; `parallel` of them run at a time. One that fails does not stop the others."""

    def ran(week: Week) -> dict[str, Any]:
        note(f"{week.name} is the run of {week.time:%Y-%m-%d %H:%M} UTC")
        row = week.row(run(week))
        note(f"{week.name} {row['phase']} {row['gate'] or ''}".rstrip())
        return row

    with ThreadPoolExecutor(parallel) as pool:
        futures = [pool.submit(ran, week) for week in weeks]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def here(home: Path, manifest: dict[str, Any], week: Week) -> dict[str, Any]:
    """Runs a week on this machine, or goes on with it; gives its status. Raises ConfigError if it cannot begin."""
    files = RunFiles(home, week.name)
    homes.make(home)
    (home / FOLDER).mkdir(exist_ok=True)
    while files.runner():  # of a backfill that was killed
        time.sleep(POLL)
    log = home / FOLDER / f"{week.name}.log"
    if not (files.root / "manifest.yaml").exists():
        named = manifest | {"metadata": {k: v for k, v in manifest["metadata"].items() if k != "generateName"}}
        named["metadata"]["name"] = week.name
        write_atomically(file := home / FOLDER / f"{week.name}.json", json.dumps(named))
        pairs = [f"{name}={value}" for name, value in week.parameters.items()]
        _rekindle(log, "run", "--manifest", str(file), *(flag for pair in pairs for flag in ("-p", pair)))
    elif _hash(files.workflow()) != _hash(manifest):  # the name has three characters of it
        raise ConfigError(f"{week.name} is the run of another config: `rekindle prune` removes it, or change the name.")
    elif files.load()[0].get("phase") != "Succeeded":
        _rekindle(log, "resume", week.name)
    if not (files.root / "manifest.yaml").exists():
        raise ConfigError(f"{week.name} did not begin. {log.read_text().splitlines()[-1].removeprefix('error: ')}")
    return files.load()[0]


def _hash(workflow: dict[str, Any]) -> str:
    parameters = workflow["spec"]["arguments"]["parameters"]
    return next(str(parameter.get("value")) for parameter in parameters if parameter["name"] == "manifest_hash")


def _rekindle(log: Path, *arguments: str) -> None:
    command = python("-m", "rekindle", *arguments, "--yes", "-o", "json")
    with log.open("ab") as out:
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False)


def on_cluster(cluster: Cluster, schedule: str, week: Week) -> dict[str, Any]:
    """Submits a week from the schedule's template, or follows it; gives its status. Raises ConfigError, ApiError."""
    if not cluster.find(workflows.WORKFLOWS, week.name):
        workflow = workflows.run_now(cluster, schedule, week.parameters)
        workflow["metadata"]["name"] = week.name
        workflows.submit(cluster, workflow)
    elif (workflows.read(cluster, week.name).get("status") or {}).get("phase") in FAILED:
        workflows.resume(cluster, week.name)
    while (status := workflows.read(cluster, week.name).get("status") or {}).get("phase") not in COMPLETED:
        time.sleep(CLUSTER_POLL)
    return status


def runner(home: Path, manifest: dict[str, Any], schedule: str, cluster: Cluster | None) -> Any:
    """What runs a week: this machine, or the schedule on the cluster. Raises ConfigError if that is another one."""
    if not cluster:
        return partial(here, home, manifest)
    known = workflows.run_now(cluster, schedule)["metadata"]["annotations"].get(workflows.SHA256)
    if known != manifest_sha256(manifest):
        raise ConfigError(
            f"the schedule {schedule} on the cluster was made of another config than this one: `rekindle schedule "
            "CONFIG` first, or give the config that it was made of."
        )
    return partial(on_cluster, cluster, schedule)
