"""The gate: from an evaluation to a verdict, in words and figures that a person can check.

Light on purpose: the pipelines read `Gate` from here.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from rekindle.errors import ConfigError, did_you_mean
from rekindle.sections import Section

Decision = Literal["release", "keep", "same"]


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
    """What a workload's `evaluate` found. The keys of `metrics` are "candidate" and, if it was scored, "champion"."""

    metrics: dict[str, dict[str, float]]
    parts: list[dict[str, Any]] = field(default_factory=list)  # e.g. weeks: {"name", "rows", "candidate": {...}, ...}
    difference: Difference | None = None
    incomparable: str = ""  # why the champion cannot score this data
    warnings: list[str] = field(default_factory=list)


def decide(gate: Gate, found: Evaluation, candidate: str, champion: tuple[str, str] | None) -> tuple[Decision, str]:
    """The verdict and its reason. `candidate` is the sha256 of its weights, `champion` (version, sha256).

    Raises ConfigError if `gate.minimum` names an unknown metric.
    """
    decision, reason = _decide(gate, found, candidate, champion)
    return decision, " ".join([reason, *(f"Warning: {w}" for w in found.warnings)])


def _decide(gate: Gate, found: Evaluation, candidate: str, champion: tuple[str, str] | None) -> tuple[Decision, str]:
    metrics = found.metrics["candidate"]
    if unknown := sorted(set(gate.minimum) - set(metrics)):
        known = ", ".join(metrics)
        raise ConfigError(
            f"gate.minimum.{unknown[0]}: there is no such metric.{did_you_mean(unknown[0], set(metrics))} "
            f"Metrics: {known}."
        )
    if champion and champion[1] == candidate:
        return "same", f"The candidate is the champion (version {champion[0]}): its weights have the same sha256."
    low = [f"{k} {metrics[k]:.4f} < {v:g}" for k, v in gate.minimum.items() if not metrics[k] >= v]
    if low:
        return "keep", f"The candidate is below gate.minimum: {', '.join(low)}."
    passed = "".join(f", {k} {metrics[k]:.4f} >= {v:g}" for k, v in gate.minimum.items())
    if not champion:
        figures = passed[2:] or ", ".join(f"{k} {v:.4f}" for k, v in metrics.items())
        return "release", f"There is no champion yet and the candidate meets every minimum ({figures})."
    if found.difference is None:
        return _without_comparison(gate, found, champion[0], passed[2:])
    return _compare(gate, found, found.difference, champion[0])


def _without_comparison(gate: Gate, found: Evaluation, version: str, passed: str) -> tuple[Decision, str]:
    why = f"The champion (version {version}) cannot score this data: {found.incomparable}"
    if gate.minimum:
        return "release", f"{why} So gate.minimum alone decides, and the candidate meets it ({passed})."
    return "keep", f"{why} And without gate.minimum nothing says that the candidate is good enough: set it."


def _compare(gate: Gate, found: Evaluation, gap: Difference, version: str) -> tuple[Decision, str]:
    ours, theirs = found.metrics["candidate"][gap.metric], found.metrics["champion"][gap.metric]
    figures = (
        f"{gap.metric} {ours:.4f} against {theirs:.4f} of the champion (version {version}) on the same rows: "
        f"{gap.mean:+.4f}, {gate.confidence:.0%} interval {gap.low:+.4f} to {gap.high:+.4f}"
    )
    if gap.high < 0:
        return "keep", f"The candidate is worse, and not by chance: {figures}."
    if gap.mean < -gate.tolerance:
        return "keep", f"The candidate is worse by more than gate.tolerance ({gate.tolerance:g}): {figures}."
    if gap.low > 0:
        return "release", f"The candidate is better, and not by chance: {figures}."
    return "release", f"The candidate is not worse by more than gate.tolerance ({gate.tolerance:g}): {figures}."
