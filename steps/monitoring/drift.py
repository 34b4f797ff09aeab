"""Compare the requests that a served model has received since the last check with the model's test
rows.

    rekindle step steps.monitoring.drift --model=demo --workflow=try-1 --experiment=drift

The verdict is `drift`, `steady` (no drift), or `few` (too few instances to judge; the next check
includes them).
"""

from pydantic import Field

from rekindle.release.serve_config import DriftConfig
from rekindle.step import StepInputs, StepOutputs


class Inputs(StepInputs, DriftConfig):
    workflow: str = Field(
        description=(
            "name of the workflow; its MLflow run has this name, and is created if it does not"
            " exist"
        )
    )
    experiment: str = Field(default="drift", description="MLflow experiment of the run")


class Outputs(StepOutputs):
    verdict: str = Field(description="drift, steady or few")
    reason: str = Field(description="reason of the verdict, with figures")
    again: bool = Field(description="true if the model should be trained again")
    run_id: str = Field(description="MLflow run of this workflow")


def run(inputs: Inputs) -> Outputs:
    """Compare the requests with the test rows, and record the verdict.

    Raises DataError if the champion or the record of its test rows does not exist, RekindleError if
    a server does not answer.
    """
    from rekindle import tracking
    from rekindle.release.watch import drift
    from rekindle.storage import Store

    store = Store.from_env()
    run_id = tracking.start_run(inputs.experiment, inputs.workflow, {tracking.MODEL: inputs.model})
    rows, shifts = drift.compare(store, inputs, inputs.workflow)
    above = drift.select_drifted(shifts, inputs.threshold)
    again = False
    seen = f"{rows:,} instances of {inputs.model} since the last check"

    if not shifts:
        verdict = "few"
        reason = f"{seen}: drift.minimum is {inputs.minimum:,}."
    elif not above:
        name, largest = max(shifts.items(), key=lambda item: item[1].psi)
        verdict = "steady"
        reason = f"{seen} resemble its test rows: the largest PSI is {largest.psi:.3f} ({name})."
    else:
        figures = ", ".join(f"{name} (PSI {shift.psi:.3f})" for name, shift in above.items())
        verdict = "drift"
        reason = (
            f"{seen} differ from its test rows: {figures}; drift.threshold is {inputs.threshold:g}."
        )

        if inputs.retrain:
            days = drift.claim_retraining(store, inputs, inputs.workflow)
            again = not days
            wait = f"drift.min_days_between allows a training in {days:.1f} days."
            reason += " A training starts." if again else f" {wait}"

    psi = {f"psi/{name.replace(' ', '/')}": shift.psi for name, shift in shifts.items()}
    tracking.log(
        run_id,
        metrics={"instances": float(rows)} | psi,
        tags={"verdict": verdict, "reason": reason},
    )
    if shifts:
        drift.draw(shifts, inputs.threshold, inputs.workdir / "drift/psi.png")
        tracking.log_dir(run_id, inputs.workdir / "drift", "evaluation")

    return Outputs(verdict=verdict, reason=reason, again=again, run_id=run_id)
