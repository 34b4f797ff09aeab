"""Evaluate a candidate: compute the metrics of candidate and champion on the same test rows, and
let the gate decide.

    rekindle step steps.evaluate --name=demo --dataset=dataset/ --model=model/ --output report=out/

The verdict is release (the candidate is better, not significantly worse, or the first model), keep
(the champion stays) or same (the candidate has the weights of the champion). The report of the step
contains verdict.json, predictions and plots. Without the input `name`, the candidate is not
compared with a champion; without the input `run_id`, nothing is logged to MLflow.
"""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from argolocal.common.json_text import to_json
from rekindle import Artifact, Evaluation, Gate, StepInputs, StepOutputs, gate
from rekindle.release.serve_config import DEFAULT_MAX_BATCH
from rekindle.step import SHA256_OR_EMPTY, SHA256_PATTERN

if TYPE_CHECKING:
    from rekindle.tracking import Release

# logged fields of the difference in a metric between two models
DIFFERENCE_FIELDS = ("mean", "low", "high")


class Inputs(StepInputs, Gate):
    workload: str = Field(description="module of the workload")
    dataset: Artifact = Field(description="output of prepare")
    digest: str = Field(
        default="", pattern=SHA256_OR_EMPTY, description="digest of the dataset; empty: any"
    )
    model: Artifact = Field(description="output of train: model.safetensors and model.json")
    name: str = Field(
        default="", description="registered model whose champion is compared with the candidate"
    )
    run_id: str = Field(
        default="", description="MLflow run for metrics, verdict and plots; empty: log nothing"
    )
    servers: str = Field(
        default="", description="digest of the serving configuration, to detect changes"
    )
    backfill: str = Field(
        default="",
        description="if not empty, this is the run of a backfill, whose model is never released",
    )
    part: str = Field(
        default="",
        description="prefix of the names of tags and metrics, if the run has several evaluations",
    )
    max_batch: int = Field(
        default=DEFAULT_MAX_BATCH,
        ge=1,
        description="number of consecutive test rows that are predicted together (serve.max_batch)",
    )
    threads: int = Field(
        default=1,
        ge=1,
        description=(
            "number of CPU threads; more threads than free cores make the step many times slower"
        ),
    )


class Outputs(StepOutputs):
    verdict: gate.Verdict = Field(description="release, keep or same; never release in a backfill")
    judged: gate.Verdict = Field(description="verdict of the gate, even in a backfill")
    reason: str = Field(description="reason of the verdict, with figures")
    metrics: dict[str, float] = Field(description="metrics of the candidate by name")
    model_sha256: str = Field(
        pattern=SHA256_PATTERN, description="sha256 of the candidate's weights"
    )
    champion: str = Field(description="version of the champion; empty if none exists")
    report: Artifact = Field(description="verdict.json, predictions and plots")


def run(inputs: Inputs) -> Outputs:
    """Evaluate the candidate, decide, and record the verdict. Raises DataError if the candidate
    cannot be evaluated."""
    # set the variables now, because libraries read them when they are loaded
    for variable_name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable_name] = str(inputs.threads)

    from rekindle import tracking, workload
    from rekindle.content.verified_release import VERDICT
    from rekindle.content.weights import read_description
    from rekindle.release.evaluation import evaluate

    workload_module: Any = workload.load(inputs.workload)
    candidate_sha256 = read_description(inputs.model).sha256
    champion_release = tracking.champion(inputs.name) if inputs.name else None
    has_champion_weights = bool(champion_release and champion_release.sha256 == candidate_sha256)

    # a champion with the candidate's weights needs no evaluation of its own
    champion_folder = None
    if champion_release and not has_champion_weights:
        champion_folder = _download_champion(inputs, champion_release)

    report_folder = inputs.workdir / "report"
    evaluation = evaluate(
        workload_module,
        inputs.model,
        champion_folder,
        inputs.dataset,
        report_folder,
        inputs,
        inputs.max_batch,
    )

    gate_decision = gate.Decision(
        inputs, workload_module.metrics, evaluation, candidate_sha256, champion=None
    )
    if champion_release:
        gate_decision = _add_champion(
            gate_decision, champion_release, champion_folder, workload_module, inputs.servers
        )

    verdict, verdict_reason = gate_decision.decide()
    verdict_record = gate_decision.record(verdict, verdict_reason) | {"max_batch": inputs.max_batch}
    (report_folder / VERDICT).write_text(to_json(verdict_record, indent=1) + "\n")

    if inputs.run_id:
        _log_evaluation(inputs, evaluation, verdict, verdict_reason, report_folder)

    step_outputs = {
        "judged": verdict,
        "reason": verdict_reason,
        "metrics": evaluation.metrics["candidate"],
        "champion": champion_release.version if champion_release else "",
    }

    # "keep" prevents a release, because `steps.release` accepts only the verdict "release"
    if inputs.backfill and verdict == "release":
        verdict = "keep"
        step_outputs["reason"] = f"a past week is not released: {verdict_reason}"

    step_outputs["verdict"] = verdict
    return Outputs(**step_outputs, model_sha256=candidate_sha256, report=report_folder)


def _download_champion(inputs: Inputs, champion_release: "Release") -> Path:
    """Download the release of the champion, and return its folder."""
    from rekindle.release.release_files import download_champion
    from rekindle.storage import Store

    return download_champion(Store.from_env(), champion_release.uri, inputs.workdir / "champion")


def _add_champion(
    gate_decision: gate.Decision,
    champion_release: "Release",
    champion_folder: Path | None,
    workload_module: Any,
    servers_digest: str,
) -> gate.Decision:
    """Return the decision of the gate, extended by the facts about the champion.

    `champion_folder`: downloaded release of the champion; None if the champion has the candidate's
    weights.
    """
    from rekindle.release.release_files import describe_changes, read_evaluated_rows
    from rekindle.storage import Store

    champion_rows = 0
    change_description = ""
    if champion_folder:
        champion_rows = read_evaluated_rows(champion_folder)
    else:
        change_description = describe_changes(
            Store.from_env(), champion_release, workload_module, servers_digest
        )

    return replace(
        gate_decision,
        champion=(champion_release.version, champion_release.sha256),
        champion_rows=champion_rows,
        changed=change_description,
    )


def _log_evaluation(
    inputs: Inputs,
    evaluation: Evaluation,
    verdict: gate.Verdict,
    verdict_reason: str,
    report_folder: Path,
) -> None:
    """Log verdict, metrics and report to the MLflow run `inputs.run_id`."""
    from rekindle import tracking

    name_prefix = f"{inputs.part}/" if inputs.part else ""
    run_tags = {f"{name_prefix}verdict": str(verdict), f"{name_prefix}reason": verdict_reason}
    if evaluation.chosen:
        run_tags[f"{name_prefix}family"] = evaluation.chosen["family"]

    run_metrics = metrics_to_log(evaluation, name_prefix)
    tracking.log_to_run(inputs.run_id, run_metrics=run_metrics, run_tags=run_tags)
    tracking.log_metrics(inputs.run_id, list_part_metrics(evaluation, name_prefix))
    tracking.log_folder(inputs.run_id, report_folder, f"{name_prefix}evaluation")


def metrics_to_log(evaluation: Evaluation, name_prefix: str) -> dict[str, float]:
    """Return the values to log to MLflow by name.

    The values are the metrics of candidate, champion and baseline, the intervals of the candidate's
    differences from champion and baseline, and the validation values of all families. Numbers that
    are not finite are left out.
    """
    metrics_by_model = evaluation.metrics

    logged_values = {
        f"{model_name}_{metric_name}": metric_value
        for model_name in metrics_by_model
        if model_name != "candidate"
        for metric_name, metric_value in metrics_by_model[model_name].items()
    }

    for difference_prefix, difference in (
        ("", evaluation.difference),
        ("baseline_", evaluation.baseline_difference),
    ):
        if difference:
            logged_values.update(
                {
                    f"{difference.metric}_{difference_prefix}difference_{interval_field}": getattr(
                        difference, interval_field
                    )
                    for interval_field in DIFFERENCE_FIELDS
                }
            )

    validation_by_family = (evaluation.chosen or {"validation": {}})["validation"]
    logged_values.update(
        {
            f"validation/{family_name}/{metric_name}": metric_value
            for family_name in validation_by_family
            for metric_name, metric_value in validation_by_family[family_name].items()
        }
    )

    logged_values = metrics_by_model["candidate"] | logged_values

    return {
        f"{name_prefix}{metric_name}": logged_value
        for metric_name, logged_value in logged_values.items()
        if logged_value is not None and math.isfinite(logged_value)
    }


def list_part_metrics(evaluation: Evaluation, name_prefix: str) -> list[tuple[str, float, int]]:
    """Return (name, value, part number) for each metric of the candidate and each part of the test
    data, such as a week."""
    metric_names = evaluation.metrics["candidate"]
    numbered_parts = enumerate(evaluation.parts)
    return [
        (f"{name_prefix}part/{metric_name}", part_metrics["candidate"][metric_name], part_number)
        for part_number, part_metrics in numbered_parts
        for metric_name in metric_names
    ]
