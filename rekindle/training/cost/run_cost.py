"""The cost of a run as a whole: the times of its nodes, and the requests of their templates."""

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, RootModel

from argolocal.view.summary import outputs, timestamp
from rekindle.documents import parse
from rekindle.training.cost import jobs, pod_requests
from rekindle.training.cost.bill import amount, money
from rekindle.training.cost.prices import Prices

# output of the step `report`: task → cost of the training, from its ledger
TRAINING_COSTS = "training_costs"
MAX_STEPS = 4  # number of steps that the text names


class TrainingCosts(RootModel[dict[str, float]]):
    """The output TRAINING_COSTS: task → cost."""

    model_config = ConfigDict(strict=True)


def step_costs(
    status: Mapping[str, Any], manifest: pod_requests.Manifest, prices: Prices
) -> dict[str, float]:
    """Return the cost of each task with pods, or with a job; of a training with a ledger only if
    `report` recorded it.

    The time of a node includes the time that its pod waits for a node of the cluster. Servers run
    on after the run, so the pods of a Deployment are left out.
    """
    templates = jobs.templates_of(status, manifest)
    costs: dict[str, float] = {}

    for job in jobs.job_runs(status, manifest):
        costs[job.task] = costs.get(job.task, 0.0) + job.cost(prices)

    for node in list((status.get("nodes") or {}).values()):
        template = jobs.template_of(node, templates)
        if node.get("type") != "Pod" or not template or not node.get("startedAt"):
            continue

        pod = pod_requests.of_template(template)
        if pod:
            task = jobs.task_of(node)
            seconds = max(0.0, jobs.end_of(node, status) - timestamp(node["startedAt"]))
            costs[task] = costs.get(task, 0.0) + prices.pod_cost(pod, seconds)

        recorded_costs = outputs(node).get(TRAINING_COSTS) or "{}"
        source = f"the output {TRAINING_COSTS} of {node.get('name')}"
        costs.update(parse(TrainingCosts, recorded_costs, source, "Run the workflow again.").root)

    return costs


def run_costs(
    status: Mapping[str, Any],
    manifest: pod_requests.Manifest,
    prices: Prices | None,
    trainings: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the cost of a run: `words`, `currency`, `total`, and `steps` by task; {} without
    prices.

    `trainings`: costs of trainings from their ledgers (default: as `report` has recorded them).
    """
    if not prices:
        return {}

    costs = step_costs(status, manifest, prices) | dict(trainings or {})
    total = sum(costs.values())
    ranked = sorted(costs.items(), key=lambda item: -item[1])
    parts = [f"{task} {amount(cost)}" for task, cost in ranked[:MAX_STEPS]]

    rest = ranked[MAX_STEPS:]
    if rest:
        parts.append(
            f"{len(rest)} other step{'s' * (len(rest) > 1)} {amount(sum(cost for _, cost in rest))}"
        )

    if parts:
        words = f"{money(total, prices.currency)} ({', '.join(parts)})"
    else:
        words = money(total, prices.currency)

    return {"words": words, "currency": prices.currency, "total": total, "steps": costs}
