"""Reports on the trainings of a run, from their ledgers: `rekindle explain`.

`python -m rekindle.view.explain WORKFLOW TASK...` prints in a pod: {TASK: {"words": [...], ...}}
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from argolocal.common.wording import visible
from argolocal.state.journal import RunFiles
from argolocal.view import runs
from rekindle.cluster.api import Cluster
from rekindle.errors import ConfigError
from rekindle.keys import LEDGER, key
from rekindle.local.cluster import LocalCluster

if TYPE_CHECKING:
    from rekindle.storage import Store

LEDGERS = re.compile(re.escape(key("TASK", LEDGER)).replace("TASK", r"([\w-]+)"))


def explain(home: Path, name: str | None, as_json: bool) -> str:
    """Return the report on the trainings of a run (default: the newest run); the run may be active.

    Raises ConfigError if the run does not exist or trains nothing, StorageError if the object store is unavailable.
    """
    name = name or runs.newest(home)
    phase = runs.state(home, name)["phase"]
    tasks = _tasks(name, RunFiles(home, name).workflow())
    return _report(name, phase, reports(LocalCluster(home).store(), name, tasks), as_json)


def explain_on_cluster(cluster: Cluster, name: str | None, as_json: bool) -> str:
    """Return the report on a cluster's run. A pod reads the object store, which may be unreachable from this machine.

    Raises ConfigError, ApiError, RekindleError if the pod fails.
    """
    from rekindle.cluster import remote, workflows

    name = name or workflows.newest(cluster)
    workflow = workflows.read(cluster, name)
    tasks = _tasks(name, workflows.spec_of(workflow))
    *_, answer = remote.run_module(cluster, workflow, "rekindle.view.explain", name, *tasks)
    return _report(name, (workflow.get("status") or {}).get("phase") or "Pending", answer, as_json)


def reports(store: "Store", name: str, tasks: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the summary of each training's ledger, as lines of text and numbers. Raises StorageError."""
    from rekindle.training.ledger.accounting import summarize
    from rekindle.training.ledger.events import read
    from rekindle.training.ledger.text import describe

    summaries = {task: summarize(read(store, key(task, LEDGER, name))) for task in tasks}
    return {task: {"words": describe(summary)} | summary.as_json() for task, summary in summaries.items()}


def _tasks(name: str, manifest: Any) -> list[str]:
    tasks = sorted(set(LEDGERS.findall(json.dumps(manifest))))
    if not tasks:
        raise ConfigError(f"{name} does not train with Rekindle: `rekindle status {name}` shows its steps.")
    return tasks


def _report(name: str, phase: str, trainings: Mapping[str, dict[str, Any]], as_json: bool) -> str:
    if as_json:
        content = next(iter(trainings.values())) if len(trainings) == 1 else {"trainings": trainings}
        return json.dumps({"workflow": name, "phase": phase} | content, indent=2)
    titles = {task: [] if len(trainings) == 1 else [f"{task}:"] for task in trainings}
    lines = [line for task, report in trainings.items() for line in ("", *titles[task], *report["words"])]
    return visible("\n".join([f"{name}: {phase}", *lines]))


if __name__ == "__main__":
    from rekindle.storage import Store

    print(json.dumps(reports(Store.from_env(), sys.argv[1], sys.argv[2:])))
