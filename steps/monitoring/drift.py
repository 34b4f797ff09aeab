"""Compare what the servers of a model saw since the last look with its test rows.

    rekindle step steps.monitoring.drift --model=demo --workflow=try-1 --experiment=drift

The verdict is drift, steady, or few: not enough instances to judge, which the next look counts as well.
"""

from pydantic import Field

from rekindle.release.config import DriftConfig
from rekindle.step import StepInputs, StepOutputs


class Inputs(StepInputs, DriftConfig):
    workflow: str = Field(description="name of the workflow: its MLflow run is found by it, or made")
    experiment: str = Field(default="drift", description="MLflow experiment of the run")


class Outputs(StepOutputs):
    verdict: str = Field(description="drift, steady or few")
    reason: str = Field(description="why, with the figures")
    again: bool = Field(description="whether the model is to be trained again")
    run_id: str = Field(description="the MLflow run of this workflow")


def run(inputs: Inputs) -> Outputs:
    """Look, compare, record, decide. Raises DataError without a reference, RekindleError if no server answers."""
    from rekindle import tracking
    from rekindle.release.watch import drift
    from rekindle.storage import Store

    store = Store.from_env()
    run_id = tracking.start_run(inputs.experiment, inputs.workflow, {"rekindle.model": inputs.model})
    rows, found = drift.compare(store, inputs, inputs.workflow)
    above, again = drift.select_drifted(found, inputs.threshold), False
    seen = f"{rows:,} instances of {inputs.model} since the last look"
    if not found:
        verdict, reason = "few", f"{seen}: drift.minimum is {inputs.minimum:,}."
    elif not above:
        name, largest = max(found.items(), key=lambda item: item[1].psi)
        verdict, reason = "steady", f"{seen} are like its test rows: the largest PSI is {largest.psi:.3f} ({name})."
    else:
        figures = ", ".join(f"{name} (PSI {shift.psi:.3f})" for name, shift in above.items())
        verdict = "drift"
        reason = f"{seen} are not like its test rows: {figures}; drift.threshold is {inputs.threshold:g}."
        if inputs.retrain:
            days = drift.days_until_retraining(store, inputs, inputs.workflow)
            again = not days
            reason += " It is trained again." if again else f" drift.min_days_between lets it train in {days:.1f} days."
    metrics = {"instances": float(rows)} | {f"psi/{name.replace(' ', '/')}": shift.psi for name, shift in found.items()}
    tracking.log(run_id, metrics=metrics, tags={"verdict": verdict, "reason": reason})
    if found:
        drift.draw(found, inputs.threshold, inputs.workdir / "drift/psi.png")
        tracking.log_dir(run_id, inputs.workdir / "drift", "evaluation")
    return Outputs(verdict=verdict, reason=reason, again=again, run_id=run_id)
