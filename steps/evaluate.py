"""Evaluate a candidate: its metrics and the champion's on the same test rows, and the verdict of the gate.

    rekindle step steps.evaluate --name=demo --dataset=dataset/ --model=model/ --output report=out/

The verdict is release (better, or as good as chance allows, or the first), keep (the champion stays) or same (the
candidate is the champion). The report holds verdict.json, predictions and pictures. Without a `name` there is no
champion to compare with, without a `run_id` nothing goes to MLflow.
"""

import json
import os
from typing import Any

from pydantic import Field

from rekindle import Artifact, Evaluation, Gate, StepInputs, StepOutputs, gate

ENDS = ("mean", "low", "high")  # of the interval of the difference


class Inputs(StepInputs, Gate):
    workload: str = Field(description="module that scores the data")
    dataset: Artifact = Field(description="what prepare made")
    model: Artifact = Field(description="what train made: model.safetensors and model.json")
    name: str = Field(default="", description="registered model whose champion the candidate must meet")
    run_id: str = Field(default="", description="MLflow run for metrics, verdict and pictures")
    servers: str = Field(default="", description="digest of what makes its servers, to tell whether that changed")
    backfill: str = Field(
        default="", description="not empty: a past week, which is judged and recorded, never released"
    )
    part: str = Field(default="", description="what names on the run begin with, if it has several evaluations")
    threads: int = Field(default=1, ge=1, description="CPU threads; more than the free cores make it many times slower")


class Outputs(StepOutputs):
    verdict: gate.Verdict = Field(description="release, keep or same; of a past week never release")
    judged: gate.Verdict = Field(description="what the gate says, also of a past week")
    reason: str = Field(description="why, with the figures")
    metrics: dict[str, float] = Field(description="of the candidate, by name")
    model_sha256: str = Field(description="identity of the candidate's weights")
    champion: str = Field(description="version of the champion that it was compared with; empty: there is none")
    report: Artifact = Field(description="verdict.json, predictions and pictures")


def run(inputs: Inputs) -> Outputs:
    """Score, compare, decide, record. Raises DataError if the candidate cannot be judged."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # read when the libraries are loaded
        os.environ[name] = str(inputs.threads)
    from rekindle import tracking, workload
    from rekindle.release.files import describe_changes, download_champion, model_description
    from rekindle.release.judge import evaluate
    from rekindle.storage import Store

    sha256 = model_description(inputs.model)["sha256"]
    release = tracking.champion(inputs.name) if inputs.name else None
    champion = None
    if release and release.sha256 != sha256:
        champion = download_champion(Store.from_env(), release.uri, inputs.workdir / "champion")
    report = inputs.workdir / "report"
    judged: Any = workload.load(inputs.workload)
    evaluation = evaluate(judged, inputs.model, champion, inputs.dataset, report, inputs)
    beside = (release.version, release.sha256) if release else None
    rows = json.loads((champion / "verdict.json").read_text()).get("rows", 0) if champion else 0
    same = release if release and release.sha256 == sha256 else None
    changed = describe_changes(Store.from_env(), same, judged, inputs.servers) if same else ""
    decision = gate.Decision(inputs, judged.metrics, evaluation, sha256, beside, rows, changed)
    verdict, reason = decision.decide()
    (report / "verdict.json").write_text(json.dumps(decision.record(verdict, reason), indent=1) + "\n")
    if inputs.run_id:
        part = f"{inputs.part}/" if inputs.part else ""
        tags = {f"{part}verdict": verdict, f"{part}reason": reason}
        tracking.log(inputs.run_id, metrics=logged(evaluation, part), tags=tags)
        tracking.log_metrics(inputs.run_id, curves(evaluation, part))
        tracking.log_dir(inputs.run_id, report, f"{part}evaluation")
    metrics = evaluation.metrics["candidate"]
    version = release.version if release else ""
    outputs = {"judged": verdict, "reason": reason, "metrics": metrics, "champion": version}
    if inputs.backfill and verdict == "release":  # `steps.release` refuses any other
        verdict, outputs["reason"] = "keep", f"a past week is not released: {reason}"
    outputs["verdict"] = verdict
    return Outputs(**outputs, model_sha256=sha256, report=report)


def logged(evaluation: Evaluation, part: str) -> dict[str, float]:
    """The metrics of the MLflow run: of the candidate, the champion and the baseline, and the difference."""
    difference, metrics = evaluation.difference, evaluation.metrics
    others = {f"{model}_{name}": v for model in metrics if model != "candidate" for name, v in metrics[model].items()}
    interval = {f"{difference.metric}_difference_{end}": getattr(difference, end) for end in ENDS} if difference else {}
    return {f"{part}{name}": value for name, value in (metrics["candidate"] | others | interval).items()}


def curves(evaluation: Evaluation, part: str) -> list[tuple[str, float, int]]:
    """The candidate's metrics in each part of the test data, as points of a curve."""
    names, parts = evaluation.metrics["candidate"], enumerate(evaluation.parts)
    return [(f"{part}part/{name}", row["candidate"][name], number) for number, row in parts for name in names]
