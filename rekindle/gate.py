"""The gate: from an evaluation to a verdict, in words and figures that a person can check.

Imports no numeric library: a pipeline reads `Gate` from here.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pydantic import Field

from rekindle.errors import ConfigError, did_you_mean
from rekindle.sections import Section

Decision = Literal["release", "keep", "same"]
Champion = tuple[str, str]  # version of the registered model, sha256 of its weights


class Gate(Section):
    """When a candidate may replace the champion."""

    minimum: dict[str, float] = Field(
        default_factory=dict, description="a metric below its minimum is never released, e.g. {ap: 0.6, auc: 0.85}"
    )
    tolerance: float = Field(
        default=0.01, ge=0, description="the candidate may be this much worse if chance can explain it"
    )
    confidence: float = Field(default=0.95, gt=0.5, lt=1, description="of the interval of the difference")
    resamples: int = Field(default=300, ge=50, le=10_000, description="draws of the paired bootstrap")


@dataclass(frozen=True)
class Difference:
    """Candidate minus champion in `metric`, on the same rows, with a confidence interval."""

    metric: str
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Evaluation:
    """The result of a workload's `evaluate`; `metrics` has the keys "candidate" and, if it was scored, "champion"."""

    metrics: dict[str, dict[str, float]]
    parts: list[dict[str, Any]] = field(default_factory=list)  # e.g. weeks: {"name", "rows", "candidate": {...}, ...}
    difference: Difference | None = None
    incomparable: str = ""  # why the champion cannot score this data
    warnings: list[str] = field(default_factory=list)


def decide(gate: Gate, evaluation: Evaluation, candidate: str, champion: Champion | None) -> tuple[Decision, str]:
    """The verdict and its reason. `candidate` is the sha256 of its weights, `champion` (version, sha256).

    Raises ConfigError if `gate.minimum` names an unknown metric.
    """
    decision, reason = _decide(gate, evaluation, candidate, champion)
    return decision, " ".join([reason, *(f"Warning: {warning}" for warning in evaluation.warnings)])


def record(
    gate: Gate,
    evaluation: Evaluation,
    verdict: Decision,
    reason: str,
    candidate: str,
    champion: Champion | None,
) -> dict[str, Any]:
    """verdict.json: the verdict with its evidence. `candidate` and `champion` as in `decide`."""
    metrics = evaluation.metrics
    beside = {"version": champion[0], "sha256": champion[1], **metrics.get("champion", {})} if champion else None
    return {
        "verdict": verdict,
        "reason": reason,
        "candidate": {"sha256": candidate, **metrics["candidate"]},
        "champion": beside,
        "difference": asdict(evaluation.difference) if evaluation.difference else None,
        "weeks": evaluation.parts,
        "warnings": evaluation.warnings,
        "gate": {name: getattr(gate, name) for name in Gate.model_fields},
    }


def _decide(gate: Gate, evaluation: Evaluation, candidate: str, champion: Champion | None) -> tuple[Decision, str]:
    metrics = evaluation.metrics["candidate"]
    if unknown := sorted(set(gate.minimum) - set(metrics)):
        known = ", ".join(metrics)
        raise ConfigError(
            f"gate.minimum.{unknown[0]}: there is no such metric.{did_you_mean(unknown[0], set(metrics))} "
            f"Metrics: {known}."
        )
    if champion and champion[1] == candidate:
        return "same", f"The candidate is the champion (version {champion[0]}): its weights have the same sha256."
    minima = gate.minimum.items()
    failed = [f"{name} {metrics[name]:.4f} < {least:g}" for name, least in minima if not metrics[name] >= least]
    if failed:
        return "keep", f"The candidate is below gate.minimum: {', '.join(failed)}."
    passed = ", ".join(f"{name} {metrics[name]:.4f} >= {least:g}" for name, least in minima)
    if not champion:
        figures = passed or ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        return "release", f"There is no champion yet and the candidate meets every minimum ({figures})."
    if evaluation.difference is None:
        return _without_comparison(gate, evaluation, champion[0], passed)
    return _compare(gate, evaluation, evaluation.difference, champion[0])


def _without_comparison(gate: Gate, evaluation: Evaluation, version: str, passed: str) -> tuple[Decision, str]:
    why = f"The champion (version {version}) cannot score this data: {evaluation.incomparable}"
    if gate.minimum:
        return "release", f"{why} So gate.minimum alone decides, and the candidate meets it ({passed})."
    return "keep", f"{why} And without gate.minimum nothing says that the candidate is good enough: set it."


def _compare(gate: Gate, evaluation: Evaluation, difference: Difference, version: str) -> tuple[Decision, str]:
    name = difference.metric
    candidate, champion = (evaluation.metrics[model][name] for model in ("candidate", "champion"))
    figures = (
        f"{name} {candidate:.4f} against {champion:.4f} of the champion (version {version}) on the same rows: "
        f"{difference.mean:+.4f}, {gate.confidence:.0%} interval {difference.low:+.4f} to {difference.high:+.4f}"
    )
    if difference.high < 0:
        return "keep", f"The candidate is worse, and not by chance: {figures}."
    if difference.mean < -gate.tolerance:
        return "keep", f"The candidate is worse by more than gate.tolerance ({gate.tolerance:g}): {figures}."
    if difference.low > 0:
        return "release", f"The candidate is better, and not by chance: {figures}."
    return "release", f"The candidate is not worse by more than gate.tolerance ({gate.tolerance:g}): {figures}."
