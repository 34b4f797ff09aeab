"""A sweep: trials train in parallel, the better trials continue from their checkpoints, and the
best trial becomes the candidate.

    rekindle sweep configs/sweep.yaml

prepare → trials → best → evaluate → (the gate) → release → deploy → verify. See docs/sweep.md.
"""

from typing import Any, Self

from hera.workflows import models as m
from pydantic import model_validator

import rekindle
from rekindle import blocks, project
from rekindle.blocks.container import RETRY_CONDITION, add_variables, retries
from rekindle.blocks.jobs.members import SHARED_MEMORY, SHARED_MOUNT
from rekindle.blocks.pod_settings import pod_spec, resource_requirements, secret_variables
from rekindle.blocks.settings import PodConfig
from rekindle.errors import ConfigError
from rekindle.program.trials.search_space import check_program_sweep
from rekindle.training.cost import pod_requests
from rekindle.training.cost.prices import HOUR_S, PRICES_FILE, Prices
from rekindle.training.sweep.sweep_config import (
    Sweep,
    SweepBudget,
    find_integer_settings,
    select_default_settings,
    select_sweep_family,
)


class Config(rekindle.Config):
    sweep: Sweep

    @model_validator(mode="after")
    def _check_sweep(self) -> Self:
        if self.program:
            sweep = check_program_sweep(self.sweep, self.program, self.train, self.model)
            return self.model_copy(update={"sweep": sweep})

        select_sweep_family(self.sweep, self.workload, self.families)
        self.sweep.check(self.train, self.model)
        return self


def budget_in_hours(budget: SweepBudget, pod: PodConfig) -> SweepBudget:
    """Convert a budget in money to hours of a pod that trains trials. Raises ConfigError if the
    price of the pod is unknown."""
    if not budget.money:
        return budget

    prices = Prices.load(project.current_root())
    spec = pod_spec(pod, "", [{"resources": resource_requirements(pod)}])

    price = prices.compute_pod_cost(pod_requests.read_pod(spec), HOUR_S) if prices else 0.0
    if not price:
        if prices:
            reason = f"the price of {pod_requests.read_pod(spec)} is 0"
        else:
            reason = f"{PRICES_FILE} is missing in the project"

        raise ConfigError(
            f"sweep.budget.money is {budget.money:g}, but {reason}. Add the prices of nodes, or set"
            " sweep.budget.hours."
        )

    hours = budget.money / price
    return budget.model_copy(update={"hours": min(hours, budget.hours or hours)})


def add_shared_memory(template: Any) -> None:
    """Give the pods of a template the same shared memory volume as the pods of a training job."""
    template.volumes.append(m.Volume.model_validate(SHARED_MEMORY))
    template.volume_mounts.append(m.VolumeMount.model_validate(SHARED_MOUNT))


def build(config: Config) -> Any:
    sweep = config.sweep.add_integer_steps(config.train, config.model).model_copy(
        update={"budget": budget_in_hours(config.sweep.budget, config.cluster.pod("train"))}
    )
    study: dict[str, Any] = {
        "sweep": sweep.model_dump(mode="json"),
        "root": "{{workflow.name}}/search",
    }
    sections: dict[str, Any] = {
        name: getattr(config, name).model_dump(mode="json") for name in ("train", "model")
    }
    if config.program:
        sections["program"] = config.program.model_dump(mode="json")
    else:
        sections["family"] = select_sweep_family(sweep, config.workload, config.families)

    first: dict[str, Any] = {
        "default": select_default_settings(sweep, config.train, config.model),
        "whole": find_integer_settings(sweep, config.train, config.model),
    }
    # high limit of retries: a pod trains several trials, each on up to `rungs` rungs, and each
    # training may be interrupted several times
    limit = (config.cluster.retries + 1) * sweep.rungs * -(-sweep.trial_count // sweep.pod_count)

    with blocks.pipeline(config) as workflow:
        data = blocks.prepare()
        trials = blocks.step(
            "steps.search.trial",
            task="trials",
            pod="train",
            **study,
            **sections,
            **first,
            part="{{item}}",
            workload=config.workload,
            dataset=data.outputs.dataset.key,
            digest=data.outputs.digest,
            experiment=config.name,
            run="{{workflow.name}}",
            with_items=list(range(sweep.pod_count)),
        )

        trials.template.retry_strategy = retries(limit, RETRY_CONDITION, factor=1)  # type: ignore[union-attr]
        if config.program:
            # because the processes of a DataLoader pass batches through shared memory
            add_shared_memory(trials.template)
            add_variables(trials.template, secret_variables(config.program.secrets))
        best = blocks.step("steps.search.best", after=[trials], **study, run_id=data.outputs.run_id)
        blocks.decide(best, dataset=data.outputs.dataset, run_id=data.outputs.run_id)

    return workflow
