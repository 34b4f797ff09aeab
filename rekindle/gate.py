"""The gate: decides from an evaluation whether to release a candidate, and explains the verdict.

Pipelines import `Gate` from this module, so it imports no numeric library.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pydantic import Field

from argolocal.common.json_text import replace_nan
from rekindle.errors import ConfigError, did_you_mean
from rekindle.sections import Section

Verdict = Literal["release", "keep", "same"]
Champion = tuple[str, str]  # (version of the champion, sha256 of its weights)


@dataclass(frozen=True)
class Metric:
    """A metric of a model; the first metric in a workload's `metrics` decides the comparison of the
    candidate with the champion.

    `function(predictions, truths)` gets the results of the workload's `predict` and the truths of
    its `examples`, as NumPy arrays if they are numbers, else as lists. `weighted(predictions,
    truths, group, draws)` is optional: it computes the metric for many bootstrap draws at once, to
    speed up the interval of the first metric. Bootstrap draw d contains each row of group g
    `draws[g, d]` times. `description` explains the metric on the page of a run.
    """

    name: str
    function: Callable[[Any, Any], float] | None = None
    better: Literal["higher", "lower"] = "higher"
    unit: str = ""
    digits: int = 4
    weighted: Callable[[Any, Any, Any, Any], Any] | None = None
    description: str = ""

    def __post_init__(self) -> None:
        if self.better not in ("higher", "lower"):
            raise ConfigError(
                f'Metric("{self.name}"): better is {self.better!r}: it must be "higher" or "lower".'
            )

    def text(self, value: float) -> str:
        """Format a value: `rmse 0.1234 kWh`."""
        return f"{self.name} {value:.{self.digits}f}{self.unit and ' ' + self.unit}"

    def gain(self, change: float) -> float:
        """Return a change of this metric with the sign chosen so that positive means better."""
        if self.better == "higher":
            return change
        return -change


class Gate(Section):
    """The rule for replacing the champion. If no bound is set, the first model of a name is not
    released."""

    minimum: dict[str, float] = Field(
        default_factory=dict,
        description="minimum of each metric for a release, e.g. {accuracy: 0.9}",
    )
    maximum: dict[str, float] = Field(
        default_factory=dict, description="maximum of each metric for a release, e.g. {rmse: 2.5}"
    )
    tolerance: float = Field(
        default=0.01,
        ge=0,
        description=(
            "tolerated loss of the candidate in the workload's first metric, if chance can explain"
            " the loss"
        ),
    )
    beats_baseline: float = Field(
        default=0.0,
        ge=0,
        description=(
            "in the workload's first metric the candidate must be better than the baseline by at"
            " least this much, and not by chance (0: not required)"
        ),
    )
    confidence: float = Field(
        default=0.95, gt=0.5, lt=1, description="confidence level of the difference's interval"
    )
    resamples: int = Field(
        default=300, ge=50, le=10_000, description="draws of the paired bootstrap"
    )


@dataclass(frozen=True)
class Difference:
    """Candidate's value of `metric` minus another model's value, over the same rows, with a
    confidence interval."""

    metric: str
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation. `metrics`: metrics of the candidate and, if they were scored, of the
    champion and the baseline, by these names."""

    metrics: dict[str, dict[str, float]]
    rows: int = 0  # number of rows evaluated
    # results for parts of the rows, such as weeks: {"name", "rows", "candidate": {...}, ...}
    parts: list[dict[str, Any]] = field(default_factory=list)
    difference: Difference | None = None  # difference between the candidate and the champion
    # difference between the candidate and the baseline
    baseline_difference: Difference | None = None
    # the chosen family of the candidate, and the validation results of all families
    chosen: dict[str, Any] | None = None
    incomparable: str = ""  # reason why the champion cannot score this data; empty if it can
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Decision:
    """The evidence for the gate's decision about a candidate: its evaluation, and the champion that
    it would replace."""

    gate: Gate
    metrics: Sequence[Metric]
    evaluation: Evaluation
    candidate: str  # sha256 of the candidate's weights
    champion: Champion | None
    # number of rows on which the champion was evaluated before its release; 0 if unknown
    champion_rows: int = 0
    # difference from a champion with equal weights, such as `its code`; "" if they do not differ
    changed: str = ""

    def decide(self) -> tuple[Verdict, str]:
        """Return the verdict and its reason. Raises ConfigError if the gate names an unknown
        metric."""
        check_bounds(self.gate, self.metrics)
        decision, reason = self._decide()
        rows = self.evaluation.rows
        notes = [*self._describe_baseline(), *self._describe_choice()]
        notes += [f"Warning: {warning}" for warning in self.evaluation.warnings]

        if 2 * rows < self.champion_rows:
            notes.append(
                f"Warning: {rows:,} rows were judged; the champion was released on"
                f" {self.champion_rows:,}."
            )

        return decision, " ".join([reason, *notes])

    def record(self, verdict: Verdict, reason: str) -> dict[str, Any]:
        """Return the content of verdict.json: the verdict with its evidence."""
        evaluation = self.evaluation
        champion = self.champion
        values = evaluation.metrics

        if champion:
            champion_record = {
                "version": champion[0],
                "sha256": champion[1],
                **values.get("champion", {}),
            }
        else:
            champion_record = None

        metric_definitions = [
            {"name": m.name, "better": m.better, "unit": m.unit, "digits": m.digits}
            | ({"description": m.description} if m.description else {})
            for m in self.metrics
        ]

        return {
            "verdict": verdict,
            "reason": reason,
            "metrics": metric_definitions,
            "rows": evaluation.rows,
            "candidate": {"sha256": self.candidate, **values["candidate"]},
            "champion": champion_record,
            "baseline": values.get("baseline"),
            "difference": _difference_as_json(evaluation.difference),
            "baseline_difference": _difference_as_json(evaluation.baseline_difference),
            "chosen": evaluation.chosen,
            "parts": evaluation.parts,
            "warnings": evaluation.warnings,
            "gate": {name: getattr(self.gate, name) for name in Gate.model_fields},
        }

    def _decide(self) -> tuple[Verdict, str]:
        champion = self.champion
        values = self.evaluation.metrics["candidate"]

        same_weights = champion and champion[1] == self.candidate
        if champion and same_weights and not self.changed:
            return (
                "same",
                (
                    f"The candidate is the champion (version {champion[0]}): its weights have the"
                    " same sha256."
                ),
            )

        broken_bounds, met_bounds = (
            bounds + margin
            for bounds, margin in zip(
                self._check_bounds(values), self._check_baseline_margin(), strict=True
            )
        )
        if broken_bounds:
            return "keep", f"The candidate does not meet the gate: {', '.join(broken_bounds)}."
        if champion and self.evaluation.difference:
            return self._compare_with_champion(self.evaluation.difference, champion[0])

        if champion and same_weights:
            reason = (
                f"The weights equal the champion's (version {champion[0]}), but {self.changed}"
                " changed."
            )
            figures = f" ({', '.join(met_bounds)})" if met_bounds else ""
            return "release", f"{reason} The candidate meets the gate{figures}."

        if champion:
            reason = (
                f"The champion (version {champion[0]}) cannot score this data:"
                f" {self.evaluation.incomparable}"
            )
            result = "So only the bounds of the gate decide, and the candidate meets them"
        else:
            reason = "No champion exists yet."
            result = "The candidate meets the gate"

        if met_bounds:
            return "release", f"{reason} {result} ({', '.join(met_bounds)})."

        figures = ", ".join(
            metric.text(values[metric.name]) for metric in self.metrics if metric.name in values
        )

        return (
            "keep",
            f"{reason} So the gate needs bounds ({figures}): set gate.minimum or gate.maximum.",
        )

    def _check_bounds(self, values: dict[str, float]) -> tuple[list[str], list[str]]:
        """Return two lists of texts: the first describes the bounds that the candidate breaks, the
        second the bounds that it meets."""
        broken_bounds = []
        met_bounds = []

        for metric in self.metrics:
            value = values.get(metric.name, math.nan)
            for bounds, met_sign, broken_sign in (
                (self.gate.minimum, ">=", "<"),
                (self.gate.maximum, "<=", ">"),
            ):
                bound = bounds.get(metric.name)
                if bound is not None:
                    if met_sign == ">=":
                        is_met = value >= bound
                    else:
                        is_met = value <= bound

                    sign = met_sign if is_met else broken_sign
                    if math.isnan(value):
                        sign = f"is not a number, must be {met_sign}"

                    (met_bounds if is_met else broken_bounds).append(
                        f"{metric.text(value)} {sign} {bound:g}"
                    )

        return broken_bounds, met_bounds

    def _check_baseline_margin(self) -> tuple[list[str], list[str]]:
        """Return two lists as `_check_bounds` does. The text about gate.beats_baseline is in the
        first list if the candidate breaks this bound, and in the second list if the candidate meets
        it; both lists are empty if the bound is not set."""
        margin = self.gate.beats_baseline
        difference = self.evaluation.baseline_difference

        if not margin:
            return [], []
        if not difference:
            return ["gate.beats_baseline is set, but the test rows have no baseline"], []

        metric = self.metrics[0]
        low = min(map(metric.gain, (difference.low, difference.high)))

        gain = metric.gain(difference.mean)
        if gain >= margin and low > 0:
            return [], [
                f"better than the baseline by {gain:.{metric.digits}f} {metric.name} >= {margin:g}"
            ]

        if gain >= margin:
            chance = " may be chance:"
        else:
            chance = f" is less than gate.beats_baseline ({margin:g}):"

        return [f"its advantage over the baseline{chance} {self._format_interval(difference)}"], []

    def _format_interval(self, difference: Difference) -> str:
        if not all(map(math.isfinite, (difference.low, difference.high))):
            return (
                f"{difference.metric} is not a number in most draws of the bootstrap, so it has no"
                " interval"
            )
        digits = next(metric.digits for metric in self.metrics if metric.name == difference.metric)
        return (
            f"{difference.mean:+.{digits}f}, {self.gate.confidence:.0%} interval"
            f" {difference.low:+.{digits}f} to {difference.high:+.{digits}f}"
        )

    def _describe_baseline(self) -> list[str]:
        values = self.evaluation.metrics.get("baseline", {})
        metric = self.metrics[0]
        if metric.name not in values:
            return []
        difference = self.evaluation.baseline_difference
        if difference:
            interval = f"; the candidate minus the baseline is {self._format_interval(difference)}"
        else:
            interval = ""
        return [f"The baseline has {metric.text(values[metric.name])}{interval}."]

    def _describe_choice(self) -> list[str]:
        chosen = self.evaluation.chosen
        if not chosen:
            return []

        by = chosen["by"]
        values = chosen["validation"]

        other_values = ", ".join(
            f"{name}"
            f" {'not a number' if values[name][by] is None else format(values[name][by], '.5g')}"
            for name in values
            if name != chosen["family"]
        )

        value = f"{values[chosen['family']][by]:.5g}"

        return [f"Validation chose the family {chosen['family']} by {by} {value} ({other_values})."]

    def _compare_with_champion(self, difference: Difference, version: str) -> tuple[Verdict, str]:
        gate = self.gate
        values = self.evaluation.metrics
        metric = next(metric for metric in self.metrics if metric.name == difference.metric)
        candidate, champion = (values[model][metric.name] for model in ("candidate", "champion"))
        digits = metric.digits
        figures = (
            f"{metric.text(candidate)} against {champion:.{digits}f} of the champion (version"
            f" {version}) on the same rows: {self._format_interval(difference)}"
        )
        gain = metric.gain(difference.mean)

        low, high = sorted(map(metric.gain, (difference.low, difference.high)))
        if not all(map(math.isfinite, (gain, low, high))):
            return "keep", f"The candidate cannot be compared: {figures}."
        if high < 0:
            return "keep", f"The candidate is worse, and not by chance: {figures}."

        if gain < -gate.tolerance:
            return (
                "keep",
                (
                    f"The candidate is worse by more than gate.tolerance ({gate.tolerance:g}):"
                    f" {figures}."
                ),
            )

        if low > 0:
            return "release", f"The candidate is better, and not by chance: {figures}."

        return (
            "release",
            (
                f"The candidate is not worse by more than gate.tolerance ({gate.tolerance:g}):"
                f" {figures}."
            ),
        )


def _difference_as_json(difference: Difference | None) -> dict[str, Any] | None:
    """Return a difference as a JSON object, with null for unknown bounds of its interval."""
    if difference:
        return replace_nan(asdict(difference))
    return None


def check_bounds(gate: Gate, metrics: Sequence[Metric]) -> None:
    """Raise ConfigError for a bound of an unknown metric, and for bounds that a good model cannot
    meet."""
    names = [metric.name for metric in metrics]
    for key in ("minimum", "maximum"):
        for name in getattr(gate, key):
            if name not in names:
                raise ConfigError(
                    f"gate.{key}.{name}: the workload does not define this"
                    f" metric.{did_you_mean(name, names)} Metrics: {', '.join(names)}."
                )

    for metric in metrics:
        low = gate.minimum.get(metric.name)
        high = gate.maximum.get(metric.name)
        if low is not None and high is not None and low > high:
            raise ConfigError(
                f"gate.minimum.{metric.name} is {low:g} and gate.maximum.{metric.name} is {high:g}:"
                " no value meets both. Lower the minimum, or raise the maximum."
            )

        required_bound, other_bound = (
            ("minimum", "maximum") if metric.better == "higher" else ("maximum", "minimum")
        )
        if metric.name in getattr(gate, other_bound) and metric.name not in getattr(
            gate, required_bound
        ):
            raise ConfigError(
                f"gate.{other_bound}.{metric.name} without gate.{required_bound}.{metric.name}:"
                f" {metric.better} is better for {metric.name}, so this bound alone releases bad"
                f" models and refuses good ones. Set gate.{required_bound}."
            )
