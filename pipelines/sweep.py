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
            checked_sweep = check_program_sweep(self.sweep, self.program, self.train, self.model)
            return self.model_copy(update={"sweep": checked_sweep})

        select_sweep_family(self.sweep, self.workload, self.families)
        self.sweep.check(self.train, self.model)
        return self


def budget_in_hours(money_budget: SweepBudget, pod_config: PodConfig) -> SweepBudget:
    """Convert a budget in money to hours of a pod that trains trials. Raises ConfigError if the
    price of the pod is unknown."""
    if not money_budget.money:
        return money_budget

    price_list = Prices.load(project.current_root())
    pod_spec_document = pod_spec(pod_config, "", [{"resources": resource_requirements(pod_config)}])

    price_per_hour = (
        price_list.compute_pod_cost(pod_requests.read_pod(pod_spec_document), HOUR_S)
        if price_list
        else 0.0
    )
    if not price_per_hour:
        if price_list:
            error_reason = f"the price of {pod_requests.read_pod(pod_spec_document)} is 0"
        else:
            error_reason = f"{PRICES_FILE} is missing in the project"

        raise ConfigError(
            f"sweep.budget.money is {money_budget.money:g}, but {error_reason}. Add the prices of"
            " nodes, or set sweep.budget.hours."
        )

    affordable_hours = money_budget.money / price_per_hour
    return money_budget.model_copy(
        update={"hours": min(affordable_hours, money_budget.hours or affordable_hours)}
    )


def add_shared_memory(pod_template: Any) -> None:
    """Give the pods of a template the same shared memory volume as the pods of a training job."""
    pod_template.volumes.append(m.Volume.model_validate(SHARED_MEMORY))
    pod_template.volume_mounts.append(m.VolumeMount.model_validate(SHARED_MOUNT))


def build(config: Config) -> Any:
    integer_step_sweep = config.sweep.add_integer_steps(config.train, config.model).model_copy(
        update={"budget": budget_in_hours(config.sweep.budget, config.cluster.pod("train"))}
    )
    study_inputs: dict[str, Any] = {
        "sweep": integer_step_sweep.model_dump(mode="json"),
        "root": "{{workflow.name}}/search",
    }
    config_sections: dict[str, Any] = {
        section_name: getattr(config, section_name).model_dump(mode="json")
        for section_name in ("train", "model")
    }
    if config.program:
        config_sections["program"] = config.program.model_dump(mode="json")
    else:
        config_sections["family"] = select_sweep_family(
            integer_step_sweep, config.workload, config.families
        )

    default_trial_settings: dict[str, Any] = {
        "default": select_default_settings(integer_step_sweep, config.train, config.model),
        "whole": find_integer_settings(integer_step_sweep, config.train, config.model),
    }
    # high limit of retries: a pod trains several trials, each on up to `rungs` rungs, and each
    # training may be interrupted several times
    max_trial_pods = (
        (config.cluster.retries + 1)
        * integer_step_sweep.rungs
        * -(-integer_step_sweep.trial_count // integer_step_sweep.pod_count)
    )

    with blocks.pipeline(config) as workflow:
        prepare_step = blocks.prepare()
        trial_steps = blocks.step(
            "steps.search.trial",
            task="trials",
            pod="train",
            **study_inputs,
            **config_sections,
            **default_trial_settings,
            part="{{item}}",
            workload=config.workload,
            dataset=prepare_step.outputs.dataset.key,
            digest=prepare_step.outputs.digest,
            experiment=config.name,
            run="{{workflow.name}}",
            with_items=list(range(integer_step_sweep.pod_count)),
        )

        trial_steps.template.retry_strategy = retries(max_trial_pods, RETRY_CONDITION, factor=1)  # type: ignore[union-attr]
        if config.program:
            # because the processes of a DataLoader pass batches through shared memory
            add_shared_memory(trial_steps.template)
            add_variables(trial_steps.template, secret_variables(config.program.secrets))
        best_step = blocks.step(
            "steps.search.best",
            after=[trial_steps],
            **study_inputs,
            run_id=prepare_step.outputs.run_id,
        )
        blocks.decide(
            best_step, dataset=prepare_step.outputs.dataset, run_id=prepare_step.outputs.run_id
        )

    return workflow
