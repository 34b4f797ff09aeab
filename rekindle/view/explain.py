"""Reports what happened during the training of a run, from its ledger: `rekindle explain`.

python -m rekindle.view.explain WORKFLOW TASK...    in a pod: {TASK: {"words": [...], ...}}
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
    """The report on the trainings of a run (default: the newest), which may still be running.

    Raises ConfigError if there is no such run or it trains nothing, StorageError if the object store is unavailable.
    """
    name = name or runs.newest(home)
    phase = runs.state(home, name)["phase"]
    tasks = _tasks(name, RunFiles(home, name).workflow())
    return _report(name, phase, reports(LocalCluster(home).store(), name, tasks), as_json)


def explain_on_cluster(cluster: Cluster, name: str | None, as_json: bool) -> str:
    """The same for a run on a cluster, whose object store a pod reads: it may be out of reach from here.

    Raises ConfigError, ApiError, RekindleError if the pod fails.
    """
    from rekindle.cluster import remote, workflows

    name = name or workflows.newest(cluster)
    workflow = workflows.read(cluster, name)
    tasks = _tasks(name, workflows.spec_of(workflow))
    *_, answer = remote.ask(cluster, workflow, "rekindle.view.explain", name, *tasks)
    return _report(name, (workflow.get("status") or {}).get("phase") or "Pending", answer, as_json)


def reports(store: "Store", name: str, tasks: Iterable[str]) -> dict[str, dict[str, Any]]:
    """By training: what its ledger adds up to, in words and numbers. Raises StorageError."""
    from rekindle.training.ledger.accounting import summarize
    from rekindle.training.ledger.events import read
    from rekindle.training.ledger.text import describe

    summaries = {task: summarize(read(store, key(task, LEDGER, name))) for task in tasks}
    return {task: {"words": describe(summary)} | summary.as_json() for task, summary in summaries.items()}


def _tasks(name: str, manifest: Any) -> list[str]:
    tasks = sorted(set(LEDGERS.findall(json.dumps(manifest))))
    if not tasks:
        raise ConfigError(f"{name} has no training of ours: `rekindle status {name}` shows its steps.")
    return tasks


def _report(name: str, phase: str, trainings: Mapping[str, dict[str, Any]], as_json: bool) -> str:
    if as_json:
        content = next(iter(trainings.values())) if len(trainings) == 1 else {"trainings": trainings}
        return json.dumps({"workflow": name, "phase": phase} | content, indent=2)
    titles = {task: [] if len(trainings) == 1 else [f"{task}:"] for task in trainings}
    parts = [line for task, report in trainings.items() for line in ("", *titles[task], *report["words"])]
    return visible("\n".join([f"{name}: {phase}", *parts]))


if __name__ == "__main__":
    from rekindle.storage import Store

    print(json.dumps(reports(Store.from_env(), sys.argv[1], sys.argv[2:])))
