"""List the trials of a running or completed sweep, best first (`rekindle sweep --of RUN`).

For a run on a cluster, a pod runs the following command, which prints the trials as JSON:

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
    TrainingTariff,
    build_trial_tariff,
    read_prices,
    read_recorded_manifest,
)
from rekindle.training.sweep import sweep_report
from rekindle.training.sweep.costs import compute_trial_bills, sum_amounts
from rekindle.training.sweep.study import SEARCH_FOLDER, SweepStudy
from rekindle.training.sweep.sweep_config import Sweep

Trials = dict[str, Any]


class PodTrials(Document):
    """The JSON object that a pod prints: rows of the trials, used hours, sentences about trials and
    rungs that did not run because of the budget, and lines of the table."""

    trials: list[dict[str, JsonValue]]
    hours: float
    untried: list[str]
    table: list[str]


def list_local_trials(home_folder: Path, run_name: str) -> Trials:
    """Return the trials of a run on this machine, as rows and as lines of a table, and the used
    budget.

    Raises ConfigError if the run is not a sweep.
    """
    workflow = RunFiles(home_folder, run_name).workflow()
    sweep_section = _read_sweep_section(run_name, workflow["spec"])
    return _read_trials(
        LocalCluster(home_folder).store(), run_name, sweep_section, _read_tariff(workflow)
    )


def list_cluster_trials(cluster: Cluster, run_name: str) -> Trials:
    """Return the trials of a run on a cluster, which a pod reads. Raises ConfigError, ApiError,
    RekindleError."""
    from rekindle.cluster import remote, workflows

    workflow = workflows.read_run(cluster, run_name)
    workflow_spec = workflows.get_effective_spec(workflow)
    price_list = _read_tariff({"spec": workflow_spec})
    pod_arguments = [
        to_json(_read_sweep_section(run_name, workflow_spec)),
        price_list.model_dump_json() if price_list else "null",
    ]
    module_name = "rekindle.operations.sweep_trials"
    return remote.run_for_result(
        cluster, workflow, PodTrials, module_name, run_name, *pod_arguments
    ).model_dump()


def _read_tariff(workflow: Mapping[str, Any]) -> TrainingTariff | None:
    """Return the prices for the pods of the trials; None if no prices are set."""
    recorded_manifest = read_recorded_manifest(workflow)
    return build_trial_tariff(
        recorded_manifest, read_prices(recorded_manifest) or Prices.load(project.current_root())
    )


def _read_sweep_section(run_name: str, workflow_spec: dict[str, Any]) -> Any:
    sweep_section = workflow_origin.read_config(
        {"metadata": {"name": run_name}, "spec": workflow_spec}
    ).get("sweep")
    if not sweep_section:
        raise ConfigError(
            f"{run_name} is not a sweep: `rekindle sweep CONFIG` starts a sweep, `rekindle status`"
            " lists runs."
        )
    return sweep_section


def _read_trials(
    object_store: Store, run_name: str, sweep_section: object, price_list: TrainingTariff | None
) -> Trials:
    sweep_study = SweepStudy(
        object_store, f"{run_name}/{SEARCH_FOLDER}", Sweep.model_validate(sweep_section)
    )
    sweep_study.read()
    trial_rows = sweep_report.build_rows(sweep_study)
    untried_sentences = sweep_report.describe_untried_trials(sweep_study)
    trials_result = {
        "trials": trial_rows,
        "hours": sweep_study.read_hours(),
        "untried": untried_sentences,
    }

    if not price_list:
        return trials_result | {
            "table": [*sweep_report.format_table(sweep_study), *untried_sentences]
        }

    bills_by_trial = compute_trial_bills(sweep_study, price_list)
    costs_by_trial = {
        trial_number: trial_bill.total for trial_number, trial_bill in bills_by_trial.items()
    }
    cost_sentence = (
        "All trials, without the start of their pods, cost"
        f" {format_money(sum(costs_by_trial.values()), price_list.prices.currency)}"
    )

    lost_cost = sum_amounts(bills_by_trial.values()).get("losses")
    if lost_cost:
        cost_sentence += f", {format_amount(lost_cost)} of it for losses"

    costed_rows = [
        trial_row | {"cost": bills_by_trial[trial_row["trial"]].as_json()}
        for trial_row in trial_rows
    ]

    return trials_result | {
        "trials": costed_rows,
        "table": [
            *sweep_report.format_table(sweep_study, costs_by_trial),
            *untried_sentences,
            "",
            f"{cost_sentence}.",
        ],
    }


if __name__ == "__main__":
    given_tariff = json.loads(sys.argv[3])
    given_tariff = given_tariff and TrainingTariff.model_validate(given_tariff)
    print(
        to_json(_read_trials(Store.from_env(), sys.argv[1], json.loads(sys.argv[2]), given_tariff))
    )
