"""Reports on the trainings of a run, from their ledgers: `rekindle explain`.

`python -m rekindle.view.explain WORKFLOW '{TASK: TARIFF, ...}'` prints in a pod: {TASK: {"words": [...], ...}}
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from argolocal.common.wording import visible
from argolocal.state.journal import RunFiles
from argolocal.view import runs
from rekindle import project
from rekindle.cluster.api import Cluster
from rekindle.errors import ConfigError
from rekindle.keys import LEDGER, key
from rekindle.local.cluster import LocalCluster

if TYPE_CHECKING:
    from rekindle.storage import Store
    from rekindle.training.cost.tariff import Tariff

LEDGERS = re.compile(re.escape(key("TASK", LEDGER)).replace("TASK", r"([\w-]+)"))


def explain(home: Path, name: str | None, as_json: bool) -> str:
    """Return the report on the trainings of a run (default: the newest run); the run may be active.

    Raises ConfigError if the run does not exist or trains nothing, StorageError if the object store is unavailable.
    """
    name = name or runs.newest(home)
    status, workflow = runs.state(home, name), RunFiles(home, name).workflow()
    costs = Costs(name, workflow)
    trainings = reports(LocalCluster(home).store(), name, costs.tariffs)
    return _report(name, status["phase"], trainings, costs.of_run(status, trainings), as_json)


def explain_on_cluster(cluster: Cluster, name: str | None, as_json: bool) -> str:
    """Return the report on a cluster's run. A pod reads the object store, which may be unreachable from this machine.

    Raises ConfigError, ApiError, RekindleError if the pod fails.
    """
    from rekindle.cluster import remote, workflows

    name = name or workflows.newest(cluster)
    workflow = workflows.read(cluster, name)
    status = workflow.get("status") or {}
    costs = Costs(name, {"spec": workflows.spec_of(workflow)})
    tariffs = {task: tariff and tariff.model_dump() for task, tariff in costs.tariffs.items()}
    *_, answer = remote.run_module(cluster, workflow, "rekindle.view.explain", name, json.dumps(tariffs))
    return _report(name, status.get("phase") or "Pending", answer, costs.of_run(status, answer), as_json)


def reports(store: "Store", name: str, tariffs: Mapping[str, "Tariff | None"]) -> dict[str, dict[str, Any]]:
    """Return the summary of each training's ledger, as lines of text and numbers. Raises StorageError."""
    from rekindle.training.cost.bill import report
    from rekindle.training.ledger.accounting import summarize
    from rekindle.training.ledger.events import read

    return {task: report(summarize(read(store, key(task, LEDGER, name))), tariff) for task, tariff in tariffs.items()}


class Costs:
    """The prices of a run, else the current prices of the project; `tariffs`: by training, None without prices."""

    def __init__(self, name: str, workflow: Mapping[str, Any]) -> None:
        from rekindle.training.cost import tariff
        from rekindle.training.cost.prices import Prices

        tasks, self.manifest = _tasks(name, workflow), tariff.recorded_manifest(workflow)
        self.prices = tariff.prices_of(self.manifest) or Prices.load(project.root())
        self.tariffs = dict.fromkeys(tasks) | tariff.tariffs(self.manifest, self.prices, tasks)

    def of_run(self, status: Mapping[str, Any], trainings: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """Return the cost of the whole run in words and by task; {} without prices."""
        from rekindle.training.cost.steps import run_costs

        totals = {task: report["cost"]["total"] for task, report in trainings.items() if "cost" in report}
        return run_costs(status, self.manifest, self.prices, totals)


def _tasks(name: str, manifest: Any) -> list[str]:
    tasks = sorted(set(LEDGERS.findall(json.dumps(manifest))))
    if not tasks:
        raise ConfigError(f"{name} does not train with Rekindle: `rekindle status {name}` shows its steps.")
    return tasks


def _report(
    name: str, phase: str, trainings: Mapping[str, dict[str, Any]], costs: dict[str, Any], as_json: bool
) -> str:
    words = costs.pop("words", "")
    if as_json:
        content = next(iter(trainings.values())) if len(trainings) == 1 else {"trainings": trainings}
        run_cost = {"run_cost": costs} if costs else {}
        return json.dumps({"workflow": name, "phase": phase} | content | run_cost, indent=2)
    titles = {task: [] if len(trainings) == 1 else [f"{task}:"] for task in trainings}
    lines = [line for task, report in trainings.items() for line in ("", *titles[task], *report["words"])]
    return visible("\n".join([f"{name}: {phase}", *lines, *(["", f"The whole run cost {words}."] if words else [])]))


if __name__ == "__main__":
    from rekindle.storage import Store
    from rekindle.training.cost.tariff import Tariff

    parsed = {task: value and Tariff.model_validate(value) for task, value in json.loads(sys.argv[2]).items()}
    print(json.dumps(reports(Store.from_env(), sys.argv[1], parsed)))
