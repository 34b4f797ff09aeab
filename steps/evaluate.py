"""Judge a candidate: its metrics on the test rows, beside the champion's on the very same rows, and a verdict.

    rekindle step steps.evaluate --name=fraud --dataset=dataset/ --model=model/ --output report=out/

The verdict is release (better, or as good as chance allows, or the first), keep (the champion stays) or same (the
candidate is the champion). The report holds verdict.json, scores.parquet and pictures. Without a `name` there is no
champion to compare with, without a `run_id` nothing goes to MLflow.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import Field

from rekindle.errors import DataError
from rekindle.gate import Decision, Evaluation, Gate, decide
from rekindle.step import Artifact, StepInputs, StepOutputs


class Inputs(StepInputs, Gate):
    workload: str = Field(default="steps.fraud", description="module that scores the data")
    dataset: Artifact = Field(description="what prepare made")
    model: Artifact = Field(description="what train made: model.safetensors and model.json")
    name: str = Field(default="", description="registered model whose champion the candidate must meet")
    run_id: str = Field(default="", description="MLflow run for metrics, verdict and pictures")


class Outputs(StepOutputs):
    verdict: Decision = Field(description="release, keep or same")
    reason: str = Field(description="why, with the figures")
    metrics: dict[str, float] = Field(description="of the candidate, means over the test weeks")
    ap: float = Field(description="average precision, if the workload has it")
    auc: float = Field(description="area under the ROC curve, if the workload has it")
    cp100: float = Field(description="card precision among the top 100 a day, if the workload has it")
    model_sha256: str = Field(description="identity of the candidate's weights")
    report: Artifact = Field(description="verdict.json, scores.parquet and pictures")


def run(inputs: Inputs) -> Outputs:
    """Score, compare, decide, record. Raises DataError if the candidate cannot be judged."""
    from rekindle import tracking, workload

    sha256 = _sha256(inputs.model)
    release = tracking.champion(inputs.name) if inputs.name else None
    known = release and (release.version, release.sha256)
    rival = _download(release.uri, inputs.workdir / "champion") if release and release.sha256 != sha256 else None
    report = inputs.workdir / "report"
    found = workload.load(inputs.workload).evaluate(inputs.model, rival, inputs.dataset, report, inputs)
    decision, reason = decide(inputs, found, sha256, known)
    record = verdict(inputs, found, decision, reason, sha256, known)
    report.mkdir(exist_ok=True)
    (report / "verdict.json").write_text(json.dumps(record, indent=1) + "\n")
    ours = found.metrics["candidate"]
    if inputs.run_id:
        _log(inputs.run_id, found, record, report)
    three = {name: ours.get(name, float("nan")) for name in ("ap", "auc", "cp100")}
    return Outputs(verdict=decision, reason=reason, metrics=ours, **three, model_sha256=sha256, report=report)


def verdict(
    gate: Gate, found: Evaluation, decision: Decision, reason: str, sha256: str, champion: tuple[str, str] | None
) -> dict[str, Any]:
    """The verdict with its evidence, as plain data."""
    rule = {name: getattr(gate, name) for name in Gate.model_fields}
    rival = {"version": champion[0], "sha256": champion[1], **found.metrics.get("champion", {})} if champion else None
    return {
        "verdict": decision,
        "reason": reason,
        "candidate": {"sha256": sha256, **found.metrics["candidate"]},
        "champion": rival,
        "difference": asdict(found.difference) if found.difference else None,
        "weeks": found.parts,
        "warnings": found.warnings,
        "gate": rule,
    }


def _sha256(model: Path) -> str:
    try:
        return json.loads((model / "model.json").read_text())["sha256"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{model} holds no trained model ({error}): model.json with sha256 must be there.") from error


def _download(prefix: str, folder: Path) -> Path:
    """The champion's weights and their description. Raises NotFound if its release is gone from the store."""
    from rekindle.storage import NotFound, Store

    store = Store.from_env()
    try:
        for file in ("model.json", "model.safetensors"):
            store.download(f"{prefix.rstrip('/')}/{file}", folder / file)
    except NotFound as error:
        raise NotFound(
            f"the champion cannot be compared with: {error} Put its release back, or take the alias `champion` from "
            "that version in MLflow so that the candidate is judged alone."
        ) from error
    return folder


def _log(run_id: str, found: Evaluation, record: dict[str, Any], report: Path) -> None:
    from rekindle import tracking

    ours, gap = found.metrics["candidate"], found.difference
    theirs = {f"champion_{name}": value for name, value in found.metrics.get("champion", {}).items()}
    compared = {f"{gap.metric}_difference_{end}": getattr(gap, end) for end in ("mean", "low", "high")} if gap else {}
    tags = {name: record[name] for name in ("verdict", "reason")}
    tracking.log(run_id, metrics={**ours, **theirs, **compared}, tags=tags)
    points = [(f"week_{name}", part["candidate"][name], n) for n, part in enumerate(found.parts) for name in ours]
    tracking.log_metrics(run_id, points)
    tracking.log_dir(run_id, report, "evaluation")
