"""Computes the cost of a run from the times of its nodes and the requests of their templates."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, RootModel

from argolocal.view.summary import outputs, timestamp
from rekindle.documents import parse
from rekindle.training.cost import jobs, pod_requests
from rekindle.training.cost.bill import format_amount, format_money
from rekindle.training.cost.prices import Prices

# output of the step `report` with the costs of trainings
TRAINING_COSTS = "training_costs"
MAX_STEPS = 4  # maximum number of steps that the text names


# an amount of money; the sum of all amounts is finite
Amount = Annotated[float, Field(ge=0, lt=1e15)]


class TrainingCosts(RootModel[dict[str, Amount]]):
    """The output TRAINING_COSTS: task → cost of the training, from its ledger."""

    model_config = ConfigDict(strict=True)


def compute_step_costs(
    status: Mapping[str, Any], manifest: pod_requests.Manifest, prices: Prices
) -> dict[str, float]:
    """Return the cost of each task with a pod or a job. The cost of an elastic training is included
    only if the step `report` has recorded it.

    The time of a pod includes the time that it waits for a node of the cluster. The pods of a
    Deployment are left out, because they run longer than the run.
    """
    templates = jobs.collect_templates(status, manifest)
    costs: dict[str, float] = {}

    for job in jobs.list_job_runs(status, manifest):
        costs[job.task] = costs.get(job.task, 0.0) + job.cost(prices)

    for node in list((status.get("nodes") or {}).values()):
        template = jobs.find_template(node, templates)
        if node.get("type") != "Pod" or not template or not node.get("startedAt"):
            continue

        pod = pod_requests.read_template_pod(template)
        if pod:
            task = jobs.parse_task_path(node)
            seconds = max(0.0, jobs.find_end_time(node, status) - timestamp(node["startedAt"]))
            costs[task] = costs.get(task, 0.0) + prices.pod_cost(pod, seconds)

        recorded_costs = outputs(node).get(TRAINING_COSTS) or "{}"
        source = f"the output {TRAINING_COSTS} of {node.get('name')}"
        costs.update(parse(TrainingCosts, recorded_costs, source, "Run the workflow again.").root)

    return costs


def compute_run_costs(
    status: Mapping[str, Any],
    manifest: pod_requests.Manifest,
    prices: Prices | None,
    trainings: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the cost of a run as `words` (text), `currency`, `total`, and `steps` (cost by task);
    {} without prices.

    `training_costs`: costs of elastic trainings by task, from their ledgers (default: the costs
    that the step `report` has recorded).
    """
    if not prices:
        return {}

    costs = compute_step_costs(status, manifest, prices) | dict(trainings or {})
    total = sum(costs.values())
    ranked = sorted(costs.items(), key=lambda item: -item[1])
    parts = [f"{task} {format_amount(cost)}" for task, cost in ranked[:MAX_STEPS]]

    other_costs = [cost for _, cost in ranked[MAX_STEPS:]]
    if other_costs:
        count = f"{len(other_costs)} other step{'s' * (len(other_costs) > 1)}"
        parts.append(f"{count} {format_amount(sum(other_costs))}")

    if parts:
        words = f"{format_money(total, prices.currency)} ({', '.join(parts)})"
    else:
        words = format_money(total, prices.currency)

    return {"words": words, "currency": prices.currency, "total": total, "steps": costs}
