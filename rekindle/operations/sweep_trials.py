"""List the trials of a running or completed sweep, best first: `rekindle sweep --of RUN`.

For a run on a cluster, a pod runs this command, which prints the trials as JSON:

    python -m rekindle.operations.sweep_trials WORKFLOW SWEEP TARIFF
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from argolocal.common.json_text import to_json
from argolocal.state.journal import RunFiles
from rekindle import project
from rekindle.blocks.manifest import workflow_origin
from rekindle.cluster.kubernetes_api import Cluster
from rekindle.documents import Document
from rekindle.errors import ConfigError
from rekindle.local.cluster import LocalCluster
from rekindle.storage import Store
from rekindle.training.cost.bill import format_amount, format_money
from rekindle.training.cost.prices import Prices
from rekindle.training.cost.tariff import (
    Tariff,
    build_trial_tariff,
    read_prices,
    read_recorded_manifest,
)
from rekindle.training.sweep import sweep_report
from rekindle.training.sweep.costs import compute_trial_bills, sum_amounts
from rekindle.training.sweep.study import FOLDER, Study
from rekindle.training.sweep.sweep_config import Sweep

Trials = dict[str, Any]


class TrialsOfPod(Document):
    """The Trials that a pod prints: rows of the trials, used hours, sentences about trials and
    rungs that did not run because of the budget, and lines of the table."""

    trials: list[dict[str, JsonValue]]
    hours: float
    untried: list[str]
    table: list[str]


def trials_here(home: Path, name: str) -> Trials:
    """Return the trials of a run on this machine, as rows and as lines of a table, and the used
    budget.

    Raises ConfigError if the run is not a sweep.
    """
    workflow = RunFiles(home, name).workflow()
    section = _sweep_section(name, workflow["spec"])
    return _read(LocalCluster(home).store(), name, section, _tariff(workflow))


def trials_on_cluster(cluster: Cluster, name: str) -> Trials:
    """Return the trials of a run on a cluster, which a pod reads. Raises ConfigError, ApiError,
    RekindleError."""
    from rekindle.cluster import remote, workflows

    workflow = workflows.read_run(cluster, name)
    spec = workflows.spec_of(workflow)
    tariff = _tariff({"spec": spec})
    values = [to_json(_sweep_section(name, spec)), tariff.model_dump_json() if tariff else "null"]
    module = "rekindle.operations.sweep_trials"
    return remote.run_for_result(cluster, workflow, TrialsOfPod, module, name, *values).model_dump()


def _tariff(workflow: Mapping[str, Any]) -> Tariff | None:
    """Return the prices for the pods of the trials; None if no prices are set."""
    manifest = read_recorded_manifest(workflow)
    return build_trial_tariff(manifest, read_prices(manifest) or Prices.load(project.root()))


def _sweep_section(name: str, spec: dict[str, Any]) -> Any:
    section = workflow_origin.read_config({"metadata": {"name": name}, "spec": spec}).get("sweep")
    if not section:
        raise ConfigError(
            f"{name} is not a sweep: `rekindle sweep CONFIG` starts a sweep, `rekindle status`"
            " lists runs."
        )
    return section


def _read(store: Store, name: str, section: object, tariff: Tariff | None) -> Trials:
    study = Study(store, f"{name}/{FOLDER}", Sweep.model_validate(section))
    study.read()
    rows = sweep_report.build_rows(study)
    untried = sweep_report.describe_untried(study)
    result = {"trials": rows, "hours": study.read_hours(), "untried": untried}

    if not tariff:
        return result | {"table": [*sweep_report.format_table(study), *untried]}

    bills = compute_trial_bills(study, tariff)
    costs = {number: bill.total for number, bill in bills.items()}
    words = (
        "All trials, without the start of their pods, cost"
        f" {format_money(sum(costs.values()), tariff.prices.currency)}"
    )

    losses = sum_amounts(bills.values()).get("losses")
    if losses:
        words += f", {format_amount(losses)} of it for losses"

    trials = [row | {"cost": bills[row["trial"]].as_json()} for row in rows]

    return result | {
        "trials": trials,
        "table": [*sweep_report.format_table(study, costs), *untried, "", f"{words}."],
    }


if __name__ == "__main__":
    given_tariff = json.loads(sys.argv[3])
    given_tariff = given_tariff and Tariff.model_validate(given_tariff)
    print(to_json(_read(Store.from_env(), sys.argv[1], json.loads(sys.argv[2]), given_tariff)))
