"""Evaluate a candidate: compute the metrics of candidate and champion on the same test rows, and
let the gate decide.

    rekindle step steps.evaluate --name=demo --dataset=dataset/ --model=model/ --output report=out/

The verdict is release (the candidate is better, not significantly worse, or the first), keep (the
champion stays) or same (the candidate has the weights of the champion). The report contains
verdict.json, predictions and plots. Without `name`, the candidate is not compared with a champion;
without `run_id`, nothing is logged to MLflow.
"""

import math
import os
from typing import Any

from pydantic import Field

from argolocal.common.json_text import to_json
from rekindle import Artifact, Evaluation, Gate, StepInputs, StepOutputs, gate
from rekindle.release.serve_config import MAX_BATCH
from rekindle.step import SHA256, SHA256_OR_EMPTY

# fields of a metric's difference between two models to log
INTERVAL = ("mean", "low", "high")


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
        default=MAX_BATCH,
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
    model_sha256: str = Field(pattern=SHA256, description="sha256 of the candidate's weights")
    champion: str = Field(description="version of the champion; empty if none exists")
    report: Artifact = Field(description="verdict.json, predictions and plots")


def run(inputs: Inputs) -> Outputs:
    """Evaluate the candidate, decide, and record the verdict. Raises DataError if the candidate
    cannot be evaluated."""
    # libraries read these variables when they are loaded
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(inputs.threads)

    from rekindle import tracking, workload
    from rekindle.content.verified_release import VERDICT
    from rekindle.content.weights import read_description
    from rekindle.release.evaluation import evaluate
    from rekindle.release.release_files import (
        describe_changes,
        download_champion,
        read_evaluated_rows,
    )
    from rekindle.storage import Store

    sha256 = read_description(inputs.model).sha256
    release = tracking.champion(inputs.name) if inputs.name else None
    champion = None

    if release and release.sha256 != sha256:
        champion = download_champion(Store.from_env(), release.uri, inputs.workdir / "champion")

    report = inputs.workdir / "report"
    module: Any = workload.load(inputs.workload)
    evaluation = evaluate(
        module, inputs.model, champion, inputs.dataset, report, inputs, inputs.max_batch
    )
    compared = (release.version, release.sha256) if release else None
    champion_rows = read_evaluated_rows(champion) if champion else 0

    same = release if release and release.sha256 == sha256 else None
    if same:
        changed = describe_changes(Store.from_env(), same, module, inputs.servers)
    else:
        changed = ""

    decision = gate.Decision(
        inputs, module.metrics, evaluation, sha256, compared, champion_rows, changed
    )
    verdict, reason = decision.decide()
    record = decision.record(verdict, reason) | {"max_batch": inputs.max_batch}
    (report / VERDICT).write_text(to_json(record, indent=1) + "\n")

    if inputs.run_id:
        prefix = f"{inputs.part}/" if inputs.part else ""
        tags = {f"{prefix}verdict": verdict, f"{prefix}reason": reason}
        tags.update({f"{prefix}family": evaluation.chosen["family"]} if evaluation.chosen else {})
        tracking.log(inputs.run_id, metrics=metrics_to_log(evaluation, prefix), tags=tags)
        tracking.log_metrics(inputs.run_id, curves(evaluation, prefix))
        tracking.log_dir(inputs.run_id, report, f"{prefix}evaluation")

    metrics = evaluation.metrics["candidate"]
    version = release.version if release else ""
    outputs = {"judged": verdict, "reason": reason, "metrics": metrics, "champion": version}

    # "keep" prevents a release, because `steps.release` accepts only the verdict "release"
    if inputs.backfill and verdict == "release":
        verdict = "keep"
        outputs["reason"] = f"a past week is not released: {reason}"

    outputs["verdict"] = verdict
    return Outputs(**outputs, model_sha256=sha256, report=report)


def metrics_to_log(evaluation: Evaluation, prefix: str) -> dict[str, float]:
    """Return the values to log to MLflow by name.

    These are the metrics of candidate, champion and baseline, the intervals of the candidate's
    differences from champion and baseline, and the validation values of all families. Numbers that
    are not finite are left out.
    """
    metrics = evaluation.metrics

    values = {
        f"{model}_{name}": v
        for model in metrics
        if model != "candidate"
        for name, v in metrics[model].items()
    }

    for other, difference in (
        ("", evaluation.difference),
        ("baseline_", evaluation.baseline_difference),
    ):
        if difference:
            values.update(
                {
                    f"{difference.metric}_{other}difference_{k}": getattr(difference, k)
                    for k in INTERVAL
                }
            )

    families = (evaluation.chosen or {"validation": {}})["validation"]
    values.update(
        {
            f"validation/{family}/{name}": v
            for family in families
            for name, v in families[family].items()
        }
    )

    values = metrics["candidate"] | values

    return {
        f"{prefix}{name}": value
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    }


def curves(evaluation: Evaluation, prefix: str) -> list[tuple[str, float, int]]:
    """Return (name, value, part number) for each metric of the candidate and each part of the test
    data, such as a week."""
    names = evaluation.metrics["candidate"]
    parts = enumerate(evaluation.parts)
    return [
        (f"{prefix}part/{name}", row["candidate"][name], number)
        for number, row in parts
        for name in names
    ]
