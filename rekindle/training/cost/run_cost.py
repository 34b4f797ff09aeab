"""Computes the cost of a run from the times of its nodes and the requests of their templates."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, RootModel

from argolocal.view.summary import list_outputs, parse_timestamp
from rekindle.documents import parse
from rekindle.training.cost import jobs, pod_requests
from rekindle.training.cost.bill import format_amount, format_money
from rekindle.training.cost.prices import Prices

# output of the step `report` with the costs of trainings
TRAINING_COSTS_OUTPUT = "training_costs"
# maximum number of steps that the text names
MAX_LISTED_STEPS = 4


# an amount of money; the sum of all amounts is finite
Amount = Annotated[float, Field(ge=0, lt=1e15)]


class TrainingCosts(RootModel[dict[str, Amount]]):
    """The output TRAINING_COSTS_OUTPUT: task → cost of the training, from its ledger."""

    model_config = ConfigDict(strict=True)


def compute_step_costs(
    workflow_status: Mapping[str, Any], manifest: pod_requests.Manifest, prices: Prices
) -> dict[str, float]:
    """Return the cost of each task of a run that has a pod or a job. The cost of an elastic
    training is included only if the step `report` has recorded it.

    The time of a pod includes the time that it waits for a node of the cluster. The pods of a
    Deployment are left out, because they run longer than the run.
    """
    templates_by_name = jobs.collect_templates(workflow_status, manifest)
    costs_by_task: dict[str, float] = {}

    for job_run in jobs.list_job_runs(workflow_status, manifest):
        costs_by_task[job_run.task] = costs_by_task.get(job_run.task, 0.0) + job_run.cost(prices)

    for workflow_node in list((workflow_status.get("nodes") or {}).values()):
        template = jobs.find_template(workflow_node, templates_by_name)
        if workflow_node.get("type") != "Pod" or not template or not workflow_node.get("startedAt"):
            continue

        template_pod = pod_requests.read_template_pod(template)
        if template_pod:
            task_path = jobs.parse_task_path(workflow_node)
            duration_seconds = max(
                0.0,
                jobs.find_end_time(workflow_node, workflow_status)
                - parse_timestamp(workflow_node["startedAt"]),
            )
            costs_by_task[task_path] = costs_by_task.get(task_path, 0.0) + prices.compute_pod_cost(
                template_pod, duration_seconds
            )

        recorded_costs = list_outputs(workflow_node).get(TRAINING_COSTS_OUTPUT) or "{}"
        value_source = f"the output {TRAINING_COSTS_OUTPUT} of {workflow_node.get('name')}"
        costs_by_task.update(
            parse(TrainingCosts, recorded_costs, value_source, "Run the workflow again.").root
        )

    return costs_by_task


def compute_run_costs(
    workflow_status: Mapping[str, Any],
    manifest: pod_requests.Manifest,
    prices: Prices | None,
    training_costs: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the cost of a run as `words` (text), `currency`, `total`, and `steps` (cost by task);
    {} if the run's prices are unknown.

    `training_costs`: costs of elastic trainings by task, from their ledgers (default: the costs
    that the step `report` has recorded).
    """
    if not prices:
        return {}

    costs_by_task = compute_step_costs(workflow_status, manifest, prices) | dict(
        training_costs or {}
    )
    total_cost = sum(costs_by_task.values())
    ranked_costs = sorted(costs_by_task.items(), key=lambda task_cost: -task_cost[1])
    cost_parts = [
        f"{task_path} {format_amount(step_cost)}"
        for task_path, step_cost in ranked_costs[:MAX_LISTED_STEPS]
    ]

    other_costs = [step_cost for _, step_cost in ranked_costs[MAX_LISTED_STEPS:]]
    if other_costs:
        other_steps_text = f"{len(other_costs)} other step{'s' * (len(other_costs) > 1)}"
        cost_parts.append(f"{other_steps_text} {format_amount(sum(other_costs))}")

    if cost_parts:
        cost_text = f"{format_money(total_cost, prices.currency)} ({', '.join(cost_parts)})"
    else:
        cost_text = format_money(total_cost, prices.currency)

    return {
        "words": cost_text,
        "currency": prices.currency,
        "total": total_cost,
        "steps": costs_by_task,
    }
