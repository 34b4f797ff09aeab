"""Report on the trainings of a run: `rekindle explain`. The report uses the ledger of a training
or, for a job of another framework, the time and outcome of its step.

    # in a pod: prints {TASK: {"words": [...], ...}}
    python -m rekindle.view.explain WORKFLOW '{TASK: TARIFF, ...}'
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, RootModel

from argolocal.common.json_text import to_json
from argolocal.common.wording import format_duration, visible
from argolocal.state.journal import RunFiles
from argolocal.view import runs
from rekindle import project
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.documents import Document
from rekindle.errors import ConfigError
from rekindle.keys import LEDGER, key
from rekindle.local.cluster import LocalCluster

if TYPE_CHECKING:
    from rekindle.storage import Store
    from rekindle.training.cost.jobs import JobRun
    from rekindle.training.cost.prices import Prices
    from rekindle.training.cost.tariff import Tariff

NO_LEDGER = (
    "Time that was trained, waited or lost is known only for trainings of blocks.train and of"
    " programs, which keep a ledger."
)
LEDGERS = re.compile(re.escape(key("TASK", LEDGER)).replace("TASK", r"([\w-]+)"))


class TrainingCost(Document):
    """The field of a training's cost that the cost of its run is computed from."""

    model_config = ConfigDict(extra="allow")
    total: float


class TrainingReport(Document):
    """The report that a pod prints about a training. Only the fields that this machine uses are
    declared."""

    model_config = ConfigDict(extra="allow")
    words: list[str]
    cost: TrainingCost | None = None


class TrainingReports(RootModel[dict[str, TrainingReport]]):
    """The reports by task."""

    model_config = ConfigDict(strict=True)


def explain(home: Path, name: str | None, as_json: bool) -> str:
    """Return the report on the trainings of a run (default: the newest run), which may still be
    active.

    Raises ConfigError if the run does not exist or trains nothing, StorageError if the object store
    is unavailable.
    """
    name = name or runs.find_newest(home)
    status = runs.load_status(home, name)
    workflow = RunFiles(home, name).workflow()

    costs = Costs(name, workflow, status)
    trainings = {}
    if costs.tariffs:
        trainings = reports(LocalCluster(home).store(), name, costs.tariffs)

    return _report(name, status["phase"], trainings, costs, status, as_json)


def explain_on_cluster(cluster: Cluster, name: str | None, as_json: bool) -> str:
    """Return the report on a cluster's run. A pod in the cluster reads the ledgers, because the
    object store may be unreachable from this machine.

    Raises ConfigError, ApiError, RekindleError if the pod fails.
    """
    from rekindle.cluster import remote, workflows

    name = name or workflows.newest_run(cluster)
    workflow = workflows.read_run(cluster, name)
    status = workflow.get("status") or {}
    costs = Costs(name, {"spec": workflows.spec_of(workflow)}, status)

    tariffs = {task: tariff and tariff.model_dump() for task, tariff in costs.tariffs.items()}
    answer: dict[str, dict[str, Any]] = {}
    if tariffs:
        module = "rekindle.view.explain"
        reports = remote.run_for_result(
            cluster, workflow, TrainingReports, module, name, to_json(tariffs)
        )
        answer = reports.model_dump(exclude_unset=True)

    return _report(name, status.get("phase") or "Pending", answer, costs, status, as_json)


def reports(
    store: "Store", name: str, tariffs: Mapping[str, "Tariff | None"]
) -> dict[str, dict[str, Any]]:
    """Summarize the ledger of each training, in lines of text and in figures. Raises
    StorageError."""
    from rekindle.training.cost.bill import build_report
    from rekindle.training.ledger.accounting import summarize
    from rekindle.training.ledger.events import read_events

    return {
        task: build_report(summarize(read_events(store, key(task, LEDGER, name))), tariff)
        for task, tariff in tariffs.items()
    }


class Costs:
    """Computes the costs of a run with the prices that it recorded or, without these, the project's
    current prices.

    `tariffs`: name of a training → its tariff, or None without prices. `jobs`: jobs of other
    frameworks.
    """

    def __init__(self, name: str, workflow: Mapping[str, Any], status: Mapping[str, Any]) -> None:
        from rekindle.training.cost import jobs, tariff
        from rekindle.training.cost.prices import Prices

        tasks = sorted(set(LEDGERS.findall(to_json(workflow))))
        self.manifest = tariff.read_recorded_manifest(workflow)

        self.jobs = [
            *jobs.list_job_runs(status, self.manifest),
            *jobs.list_planned_jobs(status, self.manifest),
        ]
        if not tasks and not self.jobs:
            raise ConfigError(f"{name} does not train: `rekindle status {name}` shows its steps.")

        self.prices = tariff.read_prices(self.manifest) or Prices.load(project.root())
        self.tariffs = dict.fromkeys(tasks) | tariff.build_tariffs(
            self.manifest, self.prices, tasks
        )

    def of_run(
        self, status: Mapping[str, Any], trainings: Mapping[str, dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the total cost of the run in words and the cost by task, or {} without prices."""
        from rekindle.training.cost.run_cost import compute_run_costs

        totals = {
            task: report["cost"]["total"]
            for task, report in trainings.items()
            if report.get("cost")
        }
        return compute_run_costs(status, self.manifest, self.prices, totals)


def job_report(job: "JobRun", prices: "Prices | None") -> dict[str, Any]:
    """Return a report on a job of another framework: a line of text, its pods, time, outcome and
    cost."""
    from rekindle.training.cost.bill import format_money

    counts: dict[str, int] = {}
    for replicas in job.replicas:
        role = replicas.role or "pods"
        counts[role] = counts.get(role, 0) + replicas.count

    if job.phase == "Waiting":
        outcome = "has not started"
    else:
        outcome = f"{job.phase.lower()} after {format_duration(job.seconds)}"

    pods = ", ".join(f"{role} {count}" for role, count in counts.items())
    words = f"{job.task}: {job.kind} ({pods}) {outcome}."
    if job.message and job.phase != "Succeeded":
        words += f" Cause: {job.message.rstrip('.')}."

    facts: dict[str, Any] = {
        "task": job.task,
        "kind": job.kind,
        "pods": counts,
        "phase": job.phase,
        "seconds": job.seconds,
        "message": job.message,
    }
    if prices and job.phase != "Waiting":
        facts["cost"] = job.cost(prices)
        words += f" It cost {format_money(facts['cost'], prices.currency)}."

    return {"words": [words]} | facts


def _report(
    name: str,
    phase: str,
    trainings: Mapping[str, dict[str, Any]],
    costs: Costs,
    status: Mapping[str, Any],
    as_json: bool,
) -> str:
    jobs: Sequence[dict[str, Any]] = [job_report(job, costs.prices) for job in costs.jobs]
    run_cost = costs.of_run(status, trainings)
    words = run_cost.pop("words", "")

    if as_json:
        if len(trainings) == 1:
            content = next(iter(trainings.values()))
        else:
            content = {"trainings": trainings}

        if jobs:
            content = content | {"jobs": jobs}
        if run_cost:
            content = content | {"run_cost": run_cost}

        return to_json({"workflow": name, "phase": phase} | content, indent=2)

    titles = {task: [] if len(trainings) == 1 and not jobs else [f"{task}:"] for task in trainings}
    lines = [
        line for task, report in trainings.items() for line in ("", *titles[task], *report["words"])
    ]

    if jobs:
        lines += ["", *(line for job in jobs for line in job["words"]), NO_LEDGER]
    if words:
        lines += ["", f"The whole run cost {words}."]

    return visible("\n".join([f"{name}: {phase}", *lines]))


if __name__ == "__main__":
    from rekindle.storage import Store
    from rekindle.training.cost.tariff import Tariff

    tariffs = {
        task: value and Tariff.model_validate(value)
        for task, value in json.loads(sys.argv[2]).items()
    }
    print(to_json(reports(Store.from_env(), sys.argv[1], tariffs)))
