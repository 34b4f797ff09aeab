"""Compare the requests that a served model has received since the last check with the model's test
rows.

    rekindle step steps.monitoring.drift --model=demo --workflow=try-1 --experiment=drift

The verdict is `drift`, `steady` (no drift), or `few` (too few instances for a decision; the next
check includes these instances).
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

    object_store = Store.from_env()
    run_id = tracking.start_run(inputs.experiment, inputs.workflow, {tracking.MODEL: inputs.model})
    row_count, shift_by_feature = drift.compute_request_shifts(
        object_store, inputs, inputs.workflow
    )
    drifted_shifts = drift.select_drifted_shifts(shift_by_feature, inputs.threshold)
    should_retrain = False
    instances_text = f"{row_count:,} instances of {inputs.model} since the last check"

    if not shift_by_feature:
        verdict = "few"
        reason = f"{instances_text}: drift.minimum is {inputs.minimum:,}."
    elif not drifted_shifts:
        feature_name, largest_shift = max(
            shift_by_feature.items(), key=lambda feature_and_shift: feature_and_shift[1].psi
        )
        verdict = "steady"
        reason = (
            f"{instances_text} resemble its test rows: the largest PSI is"
            f" {largest_shift.psi:.3f} ({feature_name})."
        )
    else:
        shift_texts = ", ".join(
            f"{feature_name} (PSI {feature_shift.psi:.3f})"
            for feature_name, feature_shift in drifted_shifts.items()
        )
        verdict = "drift"
        reason = (
            f"{instances_text} differ from its test rows: {shift_texts}; drift.threshold is"
            f" {inputs.threshold:g}."
        )

        if inputs.retrain:
            days_until_retraining = drift.claim_retraining(object_store, inputs, inputs.workflow)
            should_retrain = not days_until_retraining
            waiting_sentence = (
                f"drift.min_days_between allows a training in {days_until_retraining:.1f} days."
            )
            reason += " A training starts." if should_retrain else f" {waiting_sentence}"

    psi_metrics = {
        f"psi/{feature_name.replace(' ', '/')}": feature_shift.psi
        for feature_name, feature_shift in shift_by_feature.items()
    }
    tracking.log_to_run(
        run_id,
        run_metrics={"instances": float(row_count)} | psi_metrics,
        run_tags={"verdict": verdict, "reason": reason},
    )
    if shift_by_feature:
        drift.draw_shifts(shift_by_feature, inputs.threshold, inputs.workdir / "drift/psi.png")
        tracking.log_folder(run_id, inputs.workdir / "drift", "evaluation")

    return Outputs(verdict=verdict, reason=reason, again=should_retrain, run_id=run_id)
