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
    """Fetch the model of the best trial, and log the result of the sweep. Raises ConfigError if all
    trials have failed."""
    from rekindle import Store, tracking
    from rekindle.content.weights import verify_weights
    from rekindle.errors import write_stderr
    from rekindle.training.sweep import sweep_report
    from rekindle.training.sweep.study import SweepStudy

    object_store = Store.from_env()
    sweep_study = SweepStudy(object_store, inputs.root, inputs.sweep)
    all_trials = sweep_study.read()
    last_rung = inputs.sweep.rungs - 1
    best_trial = sweep_study.find_winner()
    model_folder = inputs.workdir / "model"
    trained_model_prefix = sweep_study.make_output_prefix(best_trial.number, last_rung)
    object_store.download(f"{trained_model_prefix}/", model_folder)
    verify_weights(model_folder, object_store.uri(trained_model_prefix))

    for report_line in [
        *sweep_report.format_table(sweep_study),
        *sweep_report.describe_untried_trials(sweep_study),
    ]:
        write_stderr(report_line)

    best_value = best_trial.values[last_rung]
    total_steps = sum(sweep_trial.steps for sweep_trial in all_trials)
    assert best_value is not None
    worker_hours = sweep_study.read_hours()
    untried_parts = sweep_report.describe_untried_trials(sweep_study)

    if inputs.run_id:
        plot_path = inputs.workdir / "search.png"
        sweep_report.plot_results(sweep_study, plot_path)
        tracking.log_artifact(inputs.run_id, "search/search.png", plot_path.read_bytes())

        sweep_metrics = {
            "best_trial": best_trial.number,
            "best_objective": best_value,
            "trials": len(all_trials),
            "trial_steps": total_steps,
            "trial_hours": worker_hours,
            "trials_not_started": inputs.sweep.trial_count - len(all_trials),
        }

        sweep_tags = {"sweep.untried": "\n".join(untried_parts)} if untried_parts else {}
        tracking.log_to_run(
            inputs.run_id,
            run_metrics=sweep_metrics,
            run_params={"best": best_trial.settings},
            run_tags=sweep_tags,
        )

    return Outputs(
        model=model_folder,
        trial=best_trial.number,
        value=best_value,
        settings=best_trial.settings,
        steps=total_steps,
        hours=worker_hours,
        untried=untried_parts,
    )
