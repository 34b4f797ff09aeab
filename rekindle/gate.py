"""The gate: decides from an evaluation whether to release a candidate, and explains the verdict.

Pipelines import `Gate` from this module, so this module must be cheap to import, and does not
import NumPy.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pydantic import Field

from argolocal.common.json_text import replace_nan
from rekindle.errors import ConfigError, suggest_similar
from rekindle.sections import Section

Verdict = Literal["release", "keep", "same"]
# (version of the champion, sha256 of its weights)
Champion = tuple[str, str]


@dataclass(frozen=True)
class Metric:
    """A metric of a model; the first metric in a workload's `metrics` decides the comparison of the
    candidate with the champion.

    `function(predictions, truths)` gets the results of the workload's `predict` and the truths of
    its `examples`, as NumPy arrays if they are numbers, else as lists. `weighted(predictions,
    truths, group, draws)` is optional. `weighted` computes the metric for many bootstrap draws at
    once, to speed up the confidence interval of the first metric. Bootstrap draw d contains each
    row of group g `draws[g, d]` times. `description` explains the metric on the page of a run.
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
        """Format a value of this metric with its name and unit, for example `rmse 0.1234 kWh`."""
        return f"{self.name} {value:.{self.digits}f}{self.unit and ' ' + self.unit}"

    def gain(self, change: float) -> float:
        """Return a change of this metric with the sign chosen so that positive means better."""
        if self.better == "higher":
            return change
        return -change


class Gate(Section):
    """The rules for releasing a candidate. The first model of a name cannot be compared with a
    champion, so it is released only if at least one bound (`minimum` or `maximum`) is set."""

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
    """The candidate's value of `metric` minus the value of another model, computed on the same
    rows, with a confidence interval."""

    metric: str
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation. `metrics`: metrics of the candidate and, if they were evaluated, of
    the champion and the baseline, by the names `candidate`, `champion` and `baseline`."""

    metrics: dict[str, dict[str, float]]
    # number of evaluated rows
    rows: int = 0
    # results for parts of the rows, such as weeks: {"name", "rows", "candidate": {...}, ...}
    parts: list[dict[str, Any]] = field(default_factory=list)
    # difference between the candidate and the champion
    difference: Difference | None = None
    # difference between the candidate and the baseline
    baseline_difference: Difference | None = None
    # the chosen family of the candidate, and the validation results of all families
    chosen: dict[str, Any] | None = None
    # reasons why the champion could not be evaluated on this data; empty if it could
    incomparable: str = ""
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Decision:
    """The evidence for the gate's decision about a candidate: its evaluation, and the champion that
    it would replace."""

    gate: Gate
    metrics: Sequence[Metric]
    evaluation: Evaluation
    # sha256 of the candidate's weights
    candidate: str
    champion: Champion | None
    # number of rows on which the champion was evaluated before its release; 0 if unknown
    champion_rows: int = 0
    # if the champion has the same weights as the candidate, the difference that remains, such as
    # `its code`; "" if nothing differs
    changed: str = ""

    def decide(self) -> tuple[Verdict, str]:
        """Return the verdict and its reason. Raises ConfigError if the gate names an unknown
        metric."""
        check_bounds(self.gate, self.metrics)
        verdict, reason = self._decide()
        row_count = self.evaluation.rows
        reason_notes = [*self._describe_baseline(), *self._describe_choice()]
        reason_notes += [f"Warning: {warning}" for warning in self.evaluation.warnings]

        if 2 * row_count < self.champion_rows:
            reason_notes.append(
                f"Warning: {row_count:,} rows were judged; the champion was released on"
                f" {self.champion_rows:,}."
            )

        return verdict, " ".join([reason, *reason_notes])

    def record(self, verdict: Verdict, reason: str) -> dict[str, Any]:
        """Return the content of verdict.json: the verdict with its evidence."""
        evaluation = self.evaluation
        champion = self.champion
        metric_values = evaluation.metrics

        if champion:
            champion_record = {
                "version": champion[0],
                "sha256": champion[1],
                **metric_values.get("champion", {}),
            }
        else:
            champion_record = None

        metric_definitions = [
            {
                "name": metric.name,
                "better": metric.better,
                "unit": metric.unit,
                "digits": metric.digits,
            }
            | ({"description": metric.description} if metric.description else {})
            for metric in self.metrics
        ]

        return {
            "verdict": verdict,
            "reason": reason,
            "metrics": metric_definitions,
            "rows": evaluation.rows,
            "candidate": {"sha256": self.candidate, **metric_values["candidate"]},
            "champion": champion_record,
            "baseline": metric_values.get("baseline"),
            "difference": _difference_as_json(evaluation.difference),
            "baseline_difference": _difference_as_json(evaluation.baseline_difference),
            "chosen": evaluation.chosen,
            "parts": evaluation.parts,
            "warnings": evaluation.warnings,
            "gate": {name: getattr(self.gate, name) for name in Gate.model_fields},
        }

    def _decide(self) -> tuple[Verdict, str]:
        champion = self.champion
        candidate_values = self.evaluation.metrics["candidate"]

        has_same_weights = champion and champion[1] == self.candidate
        if champion and has_same_weights and not self.changed:
            return (
                "same",
                (
                    f"The candidate is the champion (version {champion[0]}): its weights have the"
                    " same sha256."
                ),
            )

        broken_bounds, met_bounds = (
            bound_texts + margin_texts
            for bound_texts, margin_texts in zip(
                self._check_bounds(candidate_values), self._check_baseline_margin(), strict=True
            )
        )
        if broken_bounds:
            return "keep", f"The candidate does not meet the gate: {', '.join(broken_bounds)}."
        if champion and self.evaluation.difference:
            return self._compare_with_champion(self.evaluation.difference, champion[0])

        if champion and has_same_weights:
            reason = (
                f"The weights equal the champion's (version {champion[0]}), but {self.changed}"
                " changed."
            )
            met_bounds_text = f" ({', '.join(met_bounds)})" if met_bounds else ""
            return "release", f"{reason} The candidate meets the gate{met_bounds_text}."

        if champion:
            reason = (
                f"The champion (version {champion[0]}) cannot score this data:"
                f" {self.evaluation.incomparable}"
            )
            bounds_reason = "So only the bounds of the gate decide, and the candidate meets them"
        else:
            reason = "No champion exists yet."
            bounds_reason = "The candidate meets the gate"

        if met_bounds:
            return "release", f"{reason} {bounds_reason} ({', '.join(met_bounds)})."

        met_bounds_text = ", ".join(
            metric.text(candidate_values[metric.name])
            for metric in self.metrics
            if metric.name in candidate_values
        )

        return (
            "keep",
            f"{reason} So the gate needs bounds ({met_bounds_text}): set gate.minimum or"
            " gate.maximum.",
        )

    def _check_bounds(self, candidate_values: dict[str, float]) -> tuple[list[str], list[str]]:
        """Return two lists of texts: the first describes the bounds that the candidate breaks, the
        second the bounds that it meets."""
        broken_bounds = []
        met_bounds = []

        for metric in self.metrics:
            metric_value = candidate_values.get(metric.name, math.nan)
            for gate_bounds, met_sign, broken_sign in (
                (self.gate.minimum, ">=", "<"),
                (self.gate.maximum, "<=", ">"),
            ):
                bound = gate_bounds.get(metric.name)
                if bound is not None:
                    if met_sign == ">=":
                        is_met = metric_value >= bound
                    else:
                        is_met = metric_value <= bound

                    comparison_sign = met_sign if is_met else broken_sign
                    if math.isnan(metric_value):
                        comparison_sign = f"is not a number, must be {met_sign}"

                    (met_bounds if is_met else broken_bounds).append(
                        f"{metric.text(metric_value)} {comparison_sign} {bound:g}"
                    )

        return broken_bounds, met_bounds

    def _check_baseline_margin(self) -> tuple[list[str], list[str]]:
        """Return two lists as `_check_bounds` does, for the bound gate.beats_baseline. One of the
        two lists contains the text about gate.beats_baseline; both lists are empty if
        gate.beats_baseline is not set."""
        margin = self.gate.beats_baseline
        difference = self.evaluation.baseline_difference

        if not margin:
            return [], []
        if not difference:
            return ["gate.beats_baseline is set, but the test rows have no baseline"], []

        metric = self.metrics[0]
        lowest_gain = min(map(metric.gain, (difference.low, difference.high)))

        mean_gain = metric.gain(difference.mean)
        if mean_gain >= margin and lowest_gain > 0:
            return [], [
                f"better than the baseline by {mean_gain:.{metric.digits}f} {metric.name} >="
                f" {margin:g}"
            ]

        if mean_gain >= margin:
            shortfall_text = " may be chance:"
        else:
            shortfall_text = f" is less than gate.beats_baseline ({margin:g}):"

        return [
            f"its advantage over the baseline{shortfall_text} {self._format_interval(difference)}"
        ], []

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
        baseline_values = self.evaluation.metrics.get("baseline", {})
        metric = self.metrics[0]
        if metric.name not in baseline_values:
            return []
        difference = self.evaluation.baseline_difference
        if difference:
            interval_text = (
                f"; the candidate minus the baseline is {self._format_interval(difference)}"
            )
        else:
            interval_text = ""
        return [f"The baseline has {metric.text(baseline_values[metric.name])}{interval_text}."]

    def _describe_choice(self) -> list[str]:
        chosen_family = self.evaluation.chosen
        if not chosen_family:
            return []

        selection_metric = chosen_family["by"]
        validation_values = chosen_family["validation"]

        other_values = ", ".join(
            f"{name} {_format_value(validation_values[name][selection_metric])}"
            for name in validation_values
            if name != chosen_family["family"]
        )

        chosen_value = f"{validation_values[chosen_family['family']][selection_metric]:.5g}"

        return [
            f"Validation chose the family {chosen_family['family']} by {selection_metric}"
            f" {chosen_value} ({other_values})."
        ]

    def _compare_with_champion(
        self, difference: Difference, champion_version: str
    ) -> tuple[Verdict, str]:
        gate = self.gate
        metric_values = self.evaluation.metrics
        metric = next(metric for metric in self.metrics if metric.name == difference.metric)
        candidate_value = metric_values["candidate"][metric.name]
        champion_value = metric_values["champion"][metric.name]
        comparison_text = (
            f"{metric.text(candidate_value)} against {champion_value:.{metric.digits}f} of the"
            f" champion (version {champion_version}) on the same rows:"
            f" {self._format_interval(difference)}"
        )
        mean_gain = metric.gain(difference.mean)

        lowest_gain, highest_gain = sorted(map(metric.gain, (difference.low, difference.high)))
        if not all(map(math.isfinite, (mean_gain, lowest_gain, highest_gain))):
            return "keep", f"The candidate cannot be compared: {comparison_text}."
        if highest_gain < 0:
            return "keep", f"The candidate is worse, and not by chance: {comparison_text}."

        if mean_gain < -gate.tolerance:
            return (
                "keep",
                (
                    f"The candidate is worse by more than gate.tolerance ({gate.tolerance:g}):"
                    f" {comparison_text}."
                ),
            )

        if lowest_gain > 0:
            return "release", f"The candidate is better, and not by chance: {comparison_text}."

        return (
            "release",
            (
                f"The candidate is not worse by more than gate.tolerance ({gate.tolerance:g}):"
                f" {comparison_text}."
            ),
        )


def _difference_as_json(metric_difference: Difference | None) -> dict[str, Any] | None:
    """Return a difference as a JSON object, with null for unknown bounds of its interval."""
    if metric_difference:
        return replace_nan(asdict(metric_difference))
    return None


def check_bounds(gate: Gate, metrics: Sequence[Metric]) -> None:
    """Raise ConfigError for a bound of an unknown metric, for a minimum above the maximum, and for
    a metric whose only bound rejects good values, such as a maximum of the accuracy."""
    metric_names = [metric.name for metric in metrics]
    for key in ("minimum", "maximum"):
        for name in getattr(gate, key):
            if name not in metric_names:
                raise ConfigError(
                    f"gate.{key}.{name}: the workload does not define this"
                    f" metric.{suggest_similar(name, metric_names)} Metrics:"
                    f" {', '.join(metric_names)}."
                )

    for metric in metrics:
        minimum_bound = gate.minimum.get(metric.name)
        maximum_bound = gate.maximum.get(metric.name)
        if (
            minimum_bound is not None
            and maximum_bound is not None
            and minimum_bound > maximum_bound
        ):
            raise ConfigError(
                f"gate.minimum.{metric.name} is {minimum_bound:g} and gate.maximum.{metric.name}"
                f" is {maximum_bound:g}: no value meets both. Lower the minimum, or raise the"
                " maximum."
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


def _format_value(metric_value: float | None) -> str:
    """Format a value with five significant digits. None stands for NaN."""
    if metric_value is None:
        return "not a number"
    return format(metric_value, ".5g")
