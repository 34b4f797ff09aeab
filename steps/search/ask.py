"""Decide the trials of a round of a sweep.

    rekindle step steps.search.ask --sweep='{...}' --root=runs/a/search --round=0 --output pods=pods.json

Optuna chooses the settings of new trials; the results of the previous rounds decide which trials continue. The first
decision about a round is final, so this step may be killed and restarted at any time.
"""

from typing import Any

from pydantic import Field

from rekindle import StepInputs, StepOutputs
from rekindle.training.search.config import Sweep


class Inputs(StepInputs):
    sweep: Sweep = Field(description="the `sweep` section of the config")
    root: str = Field(description="key prefix of the sweep in the object store")
    round: int = Field(ge=0, description="number of the round")
    default: dict[str, Any] = Field(
        default_factory=dict, description="settings of the first trial (empty: Optuna chooses them)"
    )
    whole: dict[str, bool] = Field(
        default_factory=dict, description="for each setting, true if its values are integers"
    )


class Outputs(StepOutputs):
    pods: list[int] = Field(description="numbers of the pods; the number of a pod selects its trials")
    trials: int = Field(description="number of trials in this round")


def run(inputs: Inputs) -> Outputs:
    """Decide the trials of the round. Raises ConfigError if all trials have failed."""
    from rekindle import Store
    from rekindle.training.search.study import Study

    study = Study(Store.from_env(), inputs.root, inputs.sweep)
    count = len(study.decide(inputs.round, inputs.default, inputs.whole)["run"])
    return Outputs(pods=list(range(min(count, inputs.sweep.parallel))), trials=count)
