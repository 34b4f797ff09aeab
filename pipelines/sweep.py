"""A search: trials train side by side, the better ones go on from their checkpoints, and the best is the candidate.

    rekindle sweep configs/sweep.yaml

prepare → (ask → trials) for each round → best → evaluate → (the gate) → release → deploy → verify. See docs/sweep.md.
"""

from typing import Any, Self

from pydantic import model_validator

import rekindle
from rekindle import blocks
from rekindle.blocks.container import RETRYABLE, retries
from rekindle.training.search.config import Sweep, check_workload, default, whole_numbers
from rekindle.training.search.rounds import rounds


class Config(rekindle.Config):
    sweep: Sweep

    @model_validator(mode="after")
    def _checked(self) -> Self:
        check_workload(self.sweep, self.workload)
        self.sweep.check(self.train, self.model)
        return self


def build(config: Config) -> Any:
    """The pipeline of `config`."""
    sweep = config.sweep
    search: dict[str, Any] = {"sweep": sweep.model_dump(mode="json"), "root": "{{workflow.name}}/search"}
    sections: dict[str, Any] = {name: getattr(config, name).model_dump(mode="json") for name in ("train", "model")}
    first: dict[str, Any] = {"default": default(sweep, config.train, config.model)}
    first |= {"whole": whole_numbers(sweep, config.train, config.model)}
    again = (config.cluster.retries + 1) * -(-max(round.count for round in rounds(sweep)) // sweep.parallel)
    with blocks.pipeline(config) as workflow:
        data = blocks.prepare()
        trained: list[str] = [data.name]
        for number in range(len(rounds(sweep))):
            asked = blocks.step(
                "steps.search.ask", task=f"ask-{number + 1}", after=trained, **search, **first, round=number
            )
            trials = blocks.step(
                "steps.search.trial",
                task=f"trials-{number + 1}",
                pod="train",
                **search,
                **sections,
                round=number,
                part="{{item}}",
                workload=config.workload,
                dataset=data.outputs.dataset.key,
                digest=data.outputs.digest,
                experiment=config.name,
                run="{{workflow.name}}",
                with_param=asked.outputs.pods,
            )
            # a pod has several trials, and any of them may be lost several times
            trials.template.retry_strategy = retries(again, RETRYABLE, factor=1)  # type: ignore[union-attr]
            trained = [trials.name]
        best = blocks.step("steps.search.best", after=trained, **search, run_id=data.outputs.run_id)
        blocks.decide(best, dataset=data.outputs.dataset, run_id=data.outputs.run_id)
    return workflow
