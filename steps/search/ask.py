"""Decide which trials of a search train in a round, and how far.

    rekindle step steps.search.ask --sweep='{...}' --root=runs/a/search --round=0 --output pods=pods.json

The first decision holds: this step may be killed and started again at any time. Optuna chooses the settings of new
trials; which of the others go on is decided by the results of the rounds before.
"""

from typing import Any

from pydantic import Field

from rekindle import StepInputs, StepOutputs
from rekindle.training.search.config import Sweep


class Inputs(StepInputs):
    sweep: Sweep = Field(description="the `sweep` section of the config")
    root: str = Field(description="key prefix of the search in the object store")
    round: int = Field(ge=0, description="number of the round")
    default: dict[str, Any] = Field(default_factory=dict, description="settings of the first trial (empty: any)")
    whole: dict[str, bool] = Field(default_factory=dict, description="by setting, whether it is a whole number")


class Outputs(StepOutputs):
    pods: list[int] = Field(description="a number for each pod, by which it knows its trials")
    trials: int = Field(description="that train in this round")


def run(inputs: Inputs) -> Outputs:
    """Raises ConfigError if no trial can go on."""
    from rekindle import Store
    from rekindle.training.search.study import Study

    study = Study(Store.from_env(), inputs.root, inputs.sweep)
    count = len(study.decide(inputs.round, inputs.default, inputs.whole)["run"])
    return Outputs(pods=list(range(min(count, inputs.sweep.parallel))), trials=count)
