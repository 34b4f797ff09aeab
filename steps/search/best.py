"""Select the best trial of a sweep; its model becomes the candidate without another training.

rekindle step steps.search.best --sweep='{...}' --root=runs/a/search --output model=model/
"""

from typing import Any

from pydantic import Field

from rekindle import Artifact, StepInputs, StepOutputs
from rekindle.training.sweep.sweep_config import Sweep


class Inputs(StepInputs):
    sweep: Sweep = Field(description="the `sweep` section of the config")
    root: str = Field(description="key prefix of the sweep in the object store")
    run_id: str = Field("", description="MLflow run for the result and the plot (empty: none)")


class Outputs(StepOutputs):
    model: Artifact = Field(description="model of the best trial, as a training stores it")
    trial: int = Field(description="number of the best trial")
    value: float = Field(description="validation metric of the best trial")
    settings: dict[str, Any] = Field(description="settings of the best trial")
    steps: int = Field(description="total number of training steps of all trials")
    hours: float = Field(description="total worker-hours of all trials")
    untried: list[str] = Field(
        description=(
            "parts of the search space that were not tried because of the budget (empty: everything"
            " was tried)"
        )
    )


def run(inputs: Inputs) -> Outputs:
    """Fetch the best trial, and log the result. Raises ConfigError if all trials have failed."""
    from rekindle import Store, tracking
    from rekindle.content.weights import verify_weights
    from rekindle.errors import say
    from rekindle.training.sweep import sweep_report
    from rekindle.training.sweep.study import Study

    store = Store.from_env()
    study = Study(store, inputs.root, inputs.sweep)
    trials = study.read()
    last = inputs.sweep.rungs - 1
    trial = study.find_winner()
    model = inputs.workdir / "model"
    trained_model = study.output_prefix(trial.number, last)
    store.download(f"{trained_model}/", model)
    verify_weights(model, store.uri(trained_model))

    for line in [*sweep_report.format_table(study), *sweep_report.describe_untried(study)]:
        say(line)

    value = trial.values[last]
    steps = sum(other.steps for other in trials)
    assert value is not None
    hours = study.read_hours()
    untried = sweep_report.describe_untried(study)

    if inputs.run_id:
        picture = inputs.workdir / "search.png"
        sweep_report.plot_results(study, picture)
        tracking.log_artifact(inputs.run_id, "search/search.png", picture.read_bytes())

        metrics = {
            "best_trial": trial.number,
            "best_objective": value,
            "trials": len(trials),
            "trial_steps": steps,
            "trial_hours": hours,
            "trials_not_started": inputs.sweep.trial_count - len(trials),
        }

        tags = {"sweep.untried": "\n".join(untried)} if untried else {}
        tracking.log(inputs.run_id, metrics=metrics, params={"best": trial.settings}, tags=tags)

    return Outputs(
        model=model,
        trial=trial.number,
        value=value,
        settings=trial.settings,
        steps=steps,
        hours=hours,
        untried=untried,
    )
