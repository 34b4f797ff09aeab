"""Report on the trainings of a run (`rekindle explain`). The report uses the ledger of a training
or, for a job of another framework, the time and outcome of its step.

    # in a pod: prints {TASK: {"words": [...], ...}} for {TASK: TrainingTariff}
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
from argolocal.common.wording import escape_control_chars, format_duration
from argolocal.state.journal import RunFiles
from argolocal.view import runs
from rekindle import project
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.documents import Document
from rekindle.errors import ConfigError
from rekindle.keys import LEDGER_KEY, key
from rekindle.local.cluster import LocalCluster

if TYPE_CHECKING:
    from rekindle.storage import Store
    from rekindle.training.cost.jobs import AppliedJob
    from rekindle.training.cost.prices import Prices
    from rekindle.training.cost.tariff import TrainingTariff

NO_LEDGER_NOTE = (
    "Time that was trained, waited or lost is known only for trainings of blocks.train and of"
    " programs, which keep a ledger."
)
LEDGER_KEY_PATTERN = re.compile(re.escape(key("TASK", LEDGER_KEY)).replace("TASK", r"([\w-]+)"))


class TrainingCost(Document):
    """The field of a training's cost that the cost of its run is computed from."""

    model_config = ConfigDict(extra="allow")
    total: float


class TrainingReport(Document):
    """The report that a pod prints about a training. The class declares only the fields that this
    machine uses."""

    model_config = ConfigDict(extra="allow")
    words: list[str]
    cost: TrainingCost | None = None


class TrainingReports(RootModel[dict[str, TrainingReport]]):
    """The reports about the trainings of a run, by task."""

    model_config = ConfigDict(strict=True)


def explain_run(home: Path, run_name: str | None, as_json: bool) -> str:
    """Return the report on the trainings of a run (default: the newest run), which may still be
    active.

    Raises ConfigError if the run does not exist or trains nothing, StorageError if the object store
    is unavailable.
    """
    run_name = run_name or runs.find_newest(home)
    run_status = runs.load_status(home, run_name)
    workflow = RunFiles(home, run_name).workflow()

    run_costs = RunCosts(run_name, workflow, run_status)
    training_reports = {}
    if run_costs.tariffs:
        training_reports = read_training_reports(
            LocalCluster(home).store(), run_name, run_costs.tariffs
        )

    return _format_report(
        run_name, run_status["phase"], training_reports, run_costs, run_status, as_json
    )


def explain_on_cluster(cluster: Cluster, run_name: str | None, as_json: bool) -> str:
    """Return the report on a cluster's run. A pod in the cluster reads the ledgers, because the
    object store may be unreachable from this machine.

    Raises ConfigError, ApiError, RekindleError if the pod fails.
    """
    from rekindle.cluster import remote, workflows

    run_name = run_name or workflows.find_newest_run(cluster)
    workflow = workflows.read_run(cluster, run_name)
    workflow_status = workflow.get("status") or {}
    run_costs = RunCosts(
        run_name, {"spec": workflows.get_effective_spec(workflow)}, workflow_status
    )

    tariffs_by_task = {
        task_name: tariff and tariff.model_dump() for task_name, tariff in run_costs.tariffs.items()
    }
    reports_by_task: dict[str, dict[str, Any]] = {}
    if tariffs_by_task:
        module_name = "rekindle.view.explain"
        pod_reports = remote.run_for_result(
            cluster, workflow, TrainingReports, module_name, run_name, to_json(tariffs_by_task)
        )
        reports_by_task = pod_reports.model_dump(exclude_unset=True)

    return _format_report(
        run_name,
        workflow_status.get("phase") or "Pending",
        reports_by_task,
        run_costs,
        workflow_status,
        as_json,
    )


def read_training_reports(
    object_store: "Store", run_name: str, tariffs_by_task: Mapping[str, "TrainingTariff | None"]
) -> dict[str, dict[str, Any]]:
    """Summarize the ledger of each training, in lines of text and in figures. Raises
    StorageError."""
    from rekindle.training.cost.bill import build_report
    from rekindle.training.ledger.accounting import summarize_events
    from rekindle.training.ledger.events import read_events

    return {
        task_name: build_report(
            summarize_events(read_events(object_store, key(task_name, LEDGER_KEY, run_name))),
            tariff,
        )
        for task_name, tariff in tariffs_by_task.items()
    }


class RunCosts:
    """Computes the costs of a run with the prices that the run recorded or, without recorded
    prices, the project's current prices.

    `tariffs`: name of a training → its tariff, or None without prices. `jobs`: jobs of other
    frameworks in the run.
    """

    def __init__(
        self, run_name: str, workflow: Mapping[str, Any], status: Mapping[str, Any]
    ) -> None:
        from rekindle.training.cost import jobs, tariff
        from rekindle.training.cost.prices import Prices

        task_names = sorted(set(LEDGER_KEY_PATTERN.findall(to_json(workflow))))
        self.manifest = tariff.read_recorded_manifest(workflow)

        self.jobs = [
            *jobs.list_job_runs(status, self.manifest),
            *jobs.list_planned_jobs(status, self.manifest),
        ]
        if not task_names and not self.jobs:
            raise ConfigError(
                f"{run_name} does not train: `rekindle status {run_name}` shows its steps."
            )

        self.prices = tariff.read_prices(self.manifest) or Prices.load(project.current_root())
        self.tariffs = dict.fromkeys(task_names) | tariff.build_tariffs(
            self.manifest, self.prices, task_names
        )

    def of_run(
        self, run_status: Mapping[str, Any], training_reports: Mapping[str, dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the total cost of the run in words and the cost by task, or {} without prices."""
        from rekindle.training.cost.run_cost import compute_run_costs

        total_by_task = {
            task_name: training_report["cost"]["total"]
            for task_name, training_report in training_reports.items()
            if training_report.get("cost")
        }
        return compute_run_costs(run_status, self.manifest, self.prices, total_by_task)


def build_job_report(job_run: "AppliedJob", project_prices: "Prices | None") -> dict[str, Any]:
    """Return a report on a job of another framework: a line of text, its pods, time, outcome and
    cost."""
    from rekindle.training.cost.bill import format_money

    pods_by_role: dict[str, int] = {}
    for replicas in job_run.replicas:
        role_name = replicas.role or "pods"
        pods_by_role[role_name] = pods_by_role.get(role_name, 0) + replicas.count

    if job_run.phase == "Waiting":
        outcome_text = "has not started"
    else:
        outcome_text = f"{job_run.phase.lower()} after {format_duration(job_run.seconds)}"

    pods_text = ", ".join(
        f"{role_name} {pod_count}" for role_name, pod_count in pods_by_role.items()
    )
    report_line = f"{job_run.task}: {job_run.kind} ({pods_text}) {outcome_text}."
    if job_run.message and job_run.phase != "Succeeded":
        report_line += f" Cause: {job_run.message.rstrip('.')}."

    job_facts: dict[str, Any] = {
        "task": job_run.task,
        "kind": job_run.kind,
        "pods": pods_by_role,
        "phase": job_run.phase,
        "seconds": job_run.seconds,
        "message": job_run.message,
    }
    if project_prices and job_run.phase != "Waiting":
        job_facts["cost"] = job_run.cost(project_prices)
        report_line += f" It cost {format_money(job_facts['cost'], project_prices.currency)}."

    return {"words": [report_line]} | job_facts


def _format_report(
    run_name: str,
    run_phase: str,
    training_reports: Mapping[str, dict[str, Any]],
    run_costs: RunCosts,
    run_status: Mapping[str, Any],
    as_json: bool,
) -> str:
    job_reports: Sequence[dict[str, Any]] = [
        build_job_report(job_run, run_costs.prices) for job_run in run_costs.jobs
    ]
    run_cost = run_costs.of_run(run_status, training_reports)
    cost_text = run_cost.pop("words", "")

    if as_json:
        if len(training_reports) == 1:
            report_content = next(iter(training_reports.values()))
        else:
            report_content = {"trainings": training_reports}

        if job_reports:
            report_content = report_content | {"jobs": job_reports}
        if run_cost:
            report_content = report_content | {"run_cost": run_cost}

        return to_json({"workflow": run_name, "phase": run_phase} | report_content, indent=2)

    title_lines = {
        task_name: [] if len(training_reports) == 1 and not job_reports else [f"{task_name}:"]
        for task_name in training_reports
    }
    report_lines = [
        line
        for task_name, training_report in training_reports.items()
        for line in ("", *title_lines[task_name], *training_report["words"])
    ]

    if job_reports:
        report_lines += [
            "",
            *(line for job_report in job_reports for line in job_report["words"]),
            NO_LEDGER_NOTE,
        ]
    if cost_text:
        report_lines += ["", f"The whole run cost {cost_text}."]

    return escape_control_chars("\n".join([f"{run_name}: {run_phase}", *report_lines]))


if __name__ == "__main__":
    from rekindle.storage import Store
    from rekindle.training.cost.tariff import TrainingTariff

    tariffs = {
        task: value and TrainingTariff.model_validate(value)
        for task, value in json.loads(sys.argv[2]).items()
    }
    print(to_json(read_training_reports(Store.from_env(), sys.argv[1], tariffs)))
