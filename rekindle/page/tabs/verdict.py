"""The tab `verdict`: compares the candidate with the champion, the baseline and the limits of the
gate, and shows the rule that decided."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from argolocal.page.sources import Run
from argolocal.view.summary import list_outputs
from rekindle.content.verified_release import VERDICT
from rekindle.documents import Document, InvalidDocument, parse
from rekindle.errors import RekindleError
from rekindle.operations import results
from rekindle.page.tabs.charts import Axis, Tick, format_number
from rekindle.page.tabs.records import Records

MODELS = ("candidate", "champion", "baseline")
PASSED_GATE = "Passed the gate"
HEADLINES = {
    "release": "Released",
    "keep": "Not released, the current model stays",
    "same": "Nothing to release",
    "taken back": "Rolled back by the canary",
}


class MetricRecord(Document):
    """The record of a metric in verdict.json."""

    name: str
    better: str = "higher"
    unit: str = ""
    digits: int = Field(default=4, ge=0, le=17)
    description: str = ""


class DifferenceRecord(Document):
    """The record of a difference between two models in verdict.json. `low` and `high` are None if
    no confidence interval was computed."""

    metric: str
    mean: float | None = None
    low: float | None = None
    high: float | None = None


class GateRecord(Document):
    """The record of the gate's settings in verdict.json."""

    minimum: dict[str, float] = Field(default_factory=dict)
    maximum: dict[str, float] = Field(default_factory=dict)
    tolerance: float = 0.0
    beats_baseline: float = 0.0
    confidence: float = 0.95


class ChoiceRecord(Document):
    """The record of the choice between families of models in verdict.json."""

    family: str
    by: str
    better: str = "lower"
    validation: dict[str, dict[str, float | None]] = Field(default_factory=dict)


class VerdictRecord(Document):
    """The parts of verdict.json that the tab shows."""

    metrics: list[MetricRecord] = Field(default_factory=list)
    rows: int = 0
    candidate: dict[str, Any] = Field(default_factory=dict)
    champion: dict[str, Any] | None = None
    baseline: dict[str, Any] | None = None
    difference: DifferenceRecord | None = None
    baseline_difference: DifferenceRecord | None = None
    chosen: ChoiceRecord | None = None
    parts: list[dict[str, Any]] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)
    gate: GateRecord = Field(default_factory=GateRecord)


@dataclass(frozen=True)
class Value:
    """A model's value of a metric. `model`: candidate, champion, baseline, minimum or maximum."""

    model: str
    value: float
    text: str


@dataclass(frozen=True)
class MetricRow:
    """A metric with the values of all models, and its minimum and maximum in the gate."""

    name: str
    better: str
    unit: str
    values: list[Value]
    bounds: list[Value]
    digits: int = 4
    description: str = ""

    def format(self, metric_value: float | None) -> str:
        """Return a value with the digits of the metric; a dash for a missing value."""
        return "–" if metric_value is None else f"{metric_value:.{self.digits}f}"

    @property
    def axis(self) -> Axis:
        numbers = [shown_value.value for shown_value in (*self.values, *self.bounds)]
        return make_axis(numbers)

    @property
    def ticks(self) -> list[Tick]:
        return make_ticks(self.axis)

    def x(self, metric_value: float) -> float:
        """Convert a value to a horizontal position in percent."""
        return round(100 * self.axis.share(metric_value), 2)


@dataclass(frozen=True)
class Interval:
    """The candidate's difference from another model, with its confidence interval. A positive
    `gain` means that the candidate is better. `limit`: minimum gain that the gate requires, or
    None."""

    model: str
    metric: str
    gain: float
    low: float | None
    high: float | None
    limit: float | None
    limit_name: str
    amount: str
    range: str

    @property
    def text(self) -> str:
        return f"{'better' if self.gain >= 0 else 'worse'} by {self.amount}{self.range}"

    @property
    def axis(self) -> Axis:
        numbers = [0.0, self.gain, self.low, self.high, self.limit]
        return make_axis([number for number in numbers if number is not None])

    @property
    def ticks(self) -> list[Tick]:
        return make_ticks(self.axis)

    def x(self, difference: float) -> float:
        """Convert a gain to a horizontal position in percent."""
        return round(100 * self.axis.share(difference), 2)


@dataclass(frozen=True)
class Rule:
    """A rule of the gate. `is_met` is True if the candidate meets the rule. `margin`: by how much
    the candidate meets or misses the rule, in words."""

    text: str
    is_met: bool
    margin: str


@dataclass(frozen=True)
class Family:
    """A family of models, and its validation metrics, by which the best family was chosen."""

    name: str
    is_chosen: bool
    values: dict[str, float | None]


@dataclass(frozen=True)
class Part:
    """A part of the test rows, such as a week, with the values of the models by metric."""

    name: str
    rows: int | None
    values: dict[str, dict[str, float | None]]


@dataclass(frozen=True)
class Evaluation:
    """The verdict of one evaluation, with its evidence.

    `problem`: sentence that says why the evidence is missing, or "".
    """

    task: str
    verdict: str
    headline: str
    reason: str
    version: str | None
    champion: str
    rows: int = 0
    confidence: float = 0.0
    intervals: list[Interval] = field(default_factory=list)
    metrics: list[MetricRow] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    families: list[Family] = field(default_factory=list)
    families_by: str = ""
    parts: list[Part] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problem: str = ""


@dataclass(frozen=True)
class Verdicts:
    """The evaluations of a run. `overruled`: reason why a canary, or a lack of new data, overruled
    the verdict."""

    evaluations: list[Evaluation]
    overruled: str = ""


def choose_headline(verdict: str, run: Run) -> str:
    """Return a verdict in words. A model that has passed the gate is released by later steps of its
    run."""
    if verdict != "release":
        return HEADLINES.get(verdict, f"Verdict: {verdict}")
    if not run.is_finished:
        return f"{PASSED_GATE}, the release is in progress"
    if run.phase != "Succeeded":
        return f"{PASSED_GATE}, but the run did not complete the release"
    return HEADLINES[verdict]


class VerdictTab:
    """The tab `verdict`."""

    name = "verdict"
    title = "Verdict"
    content = Verdicts

    def __init__(self, records: Records) -> None:
        self.records = records

    def is_shown(self, run: Run) -> bool:
        return bool(results.list_verdicts(run.status))

    def build(self, run: Run, query: Mapping[str, str]) -> Verdicts:
        report_keys = find_reports(run)
        evaluations = [
            self._evaluation(run, row, report_keys.get(row["task"], ""))
            for row in results.list_verdicts(run.status)
        ]
        run_outputs = results.read_parameters(run.status)
        overruled = ""
        reason = run_outputs.get("reason", "")
        is_overruled = run_outputs.get("verdict") in ("taken back", "same")
        if is_overruled and reason not in [item.reason for item in evaluations]:
            overruled = f"{HEADLINES[run_outputs['verdict']]}: {reason}"
        return Verdicts(evaluations, overruled)

    def _evaluation(self, run: Run, row: Mapping[str, Any], report: str) -> Evaluation:
        record = VerdictRecord()
        problem = ""
        try:
            content = self.records.read(f"{report}/{VERDICT}") if report else None
            if content:
                record = parse(VerdictRecord, content, f"{report}/{VERDICT}")
            else:
                problem = "The report of the evaluation is not in the object store any longer."
        except (InvalidDocument, RekindleError) as error:
            problem = f"The report of the evaluation cannot be read: {error}"

        headline = choose_headline(row["verdict"], run)
        return describe_evaluation(row, record, headline, problem)


def find_reports(run: Run) -> dict[str, str]:
    """Return the key of the report of each evaluation, by task; of a repeated evaluation, the key
    of the last report."""
    keys: dict[str, str] = {}
    nodes = list((run.status.get("nodes") or {}).values())
    for node in sorted(nodes, key=lambda node: node.get("finishedAt") or ""):
        if "verdict" not in list_outputs(node):
            continue
        for artifact in (node.get("outputs") or {}).get("artifacts") or []:
            object_key = (artifact.get("s3") or {}).get("key", "")
            if artifact.get("name") == "report" and object_key.count("/") == 2:
                keys[object_key.split("/")[1]] = object_key
    return keys


def describe_evaluation(
    row: Mapping[str, Any], record: VerdictRecord, verdict: str, problem: str = ""
) -> Evaluation:
    """Return an evaluation from the outputs of its step (`row`) and its verdict.json. `verdict`:
    the verdict in words."""
    metrics = record.metrics or [MetricRecord(name=name) for name in row["metrics"]]
    candidate = record.candidate or row["metrics"]
    record = record.model_copy(update={"candidate": candidate})
    by_name = {metric.name: metric for metric in metrics}

    intervals = [
        make_interval(model, difference, by_name[difference.metric], record)
        for model, difference in (
            ("champion", record.difference),
            ("baseline", record.baseline_difference),
        )
        if difference and difference.mean is not None and difference.metric in by_name
    ]
    rows = [make_row(metric, record) for metric in metrics]
    champion = str((record.champion or {}).get("version") or "")
    chosen = record.chosen

    return Evaluation(
        task=row["task"],
        verdict=row["verdict"],
        headline=make_headline(row["verdict"], verdict, intervals, champion, record),
        reason=row["reason"],
        version=row["version"],
        champion=champion,
        rows=record.rows,
        confidence=record.gate.confidence,
        intervals=intervals,
        metrics=[metric for metric in rows if metric.values],
        rules=list_rules(metrics, intervals, record),
        families=list_families(chosen) if chosen else [],
        families_by=chosen.by if chosen else "",
        parts=[make_part(part_record, metrics) for part_record in record.parts],
        warnings=[*record.warnings],
        problem=problem,
    )


def find_number(json_record: Mapping[str, Any] | None, key: str) -> float | None:
    """Return the number `key` of a record; None if the number is missing or not finite."""
    found_value = (json_record or {}).get(key)
    if (
        isinstance(found_value, int | float)
        and not isinstance(found_value, bool)
        and math.isfinite(found_value)
    ):
        return float(found_value)
    return None


def make_headline(
    verdict: str, start: str, intervals: list[Interval], champion: str, record: VerdictRecord
) -> str:
    """Return a sentence that starts with `start`, the verdict in words, and says how much better or
    worse the new model is."""
    if verdict == "same":
        return f"{start}: the new model is the champion itself."
    if not intervals:
        return f"{start}: the new model was compared with no other model."

    first_interval = intervals[0]
    other = f"the {first_interval.model}"
    if first_interval.model == "champion" and champion:
        other += f" (version {champion})"

    chance = ""
    if (
        first_interval.low is not None
        and first_interval.high is not None
        and first_interval.low <= 0 <= first_interval.high
    ):
        chance = ", which may be chance"

    direction = "better" if first_interval.gain >= 0 else "worse"
    difference = f"{first_interval.amount}{chance}{first_interval.range}"
    text = f"the new model is {direction} than {other} by {difference}."
    if first_interval.model == "baseline" and not record.champion:
        text += " No champion exists yet."
    return f"{start}: {text}"


def make_interval(
    model: str, difference: DifferenceRecord, metric: MetricRecord, record: VerdictRecord
) -> Interval:
    """Convert the candidate's difference from a model to a gain, which is positive if the candidate
    is better."""
    assert difference.mean is not None
    sign = 1 if metric.better == "higher" else -1
    gain = sign * difference.mean
    low = high = None
    if difference.low is not None and difference.high is not None:
        low, high = sorted((sign * difference.low, sign * difference.high))

    if model == "champion":
        limit: float | None = -record.gate.tolerance
        limit_name = "gate.tolerance"
    else:
        limit = record.gate.beats_baseline or None
        limit_name = "gate.beats_baseline"

    unit = f" {metric.unit}" if metric.unit else ""
    amount = f"{abs(gain):.{metric.digits}f}{unit} {metric.name}"
    interval_text = ""
    if low is not None:
        interval_text = (
            f" ({record.gate.confidence:.0%} interval {low:+.{metric.digits}f} to"
            f" {high:+.{metric.digits}f})"
        )
    return Interval(model, metric.name, gain, low, high, limit, limit_name, amount, interval_text)


def make_row(metric: MetricRecord, record: VerdictRecord) -> MetricRow:
    """Return the row of a metric: the values of all models, and the limits of the gate."""

    def text(metric_value: float) -> str:
        return f"{metric_value:.{metric.digits}f}{metric.unit and ' ' + metric.unit}"

    models = {model: find_number(getattr(record, model), metric.name) for model in MODELS}
    bounds = {
        "minimum": record.gate.minimum.get(metric.name),
        "maximum": record.gate.maximum.get(metric.name),
    }
    return MetricRow(
        metric.name,
        metric.better,
        metric.unit,
        [Value(model, value, text(value)) for model, value in models.items() if value is not None],
        [
            Value(bound, value, f"{value:g}{metric.unit and ' ' + metric.unit}")
            for bound, value in bounds.items()
            if value is not None
        ],
        metric.digits,
        metric.description,
    )


def list_rules(
    metrics: list[MetricRecord], intervals: list[Interval], record: VerdictRecord
) -> list[Rule]:
    """Return the rules of the gate in the order of evaluation, each with the candidate's margin."""
    rules: list[Rule] = []
    for metric in metrics:
        value = find_number(record.candidate, metric.name)
        for sign, bounds, name in (
            (1, record.gate.minimum, "minimum"),
            (-1, record.gate.maximum, "maximum"),
        ):
            bound = bounds.get(metric.name)
            if bound is None:
                continue
            if value is None:
                rules.append(Rule(f"{name} of {metric.name}: {bound:g}", False, "not a number"))
                continue
            margin = sign * (value - bound)
            rules.append(
                Rule(
                    f"{metric.name} {value:.{metric.digits}f}, {name} {bound:g}",
                    margin >= 0,
                    format_margin(margin, metric.digits),
                )
            )

    for interval in intervals:
        if interval.limit is not None:
            rules.append(_make_interval_rule(interval, metrics))
    return rules


def _make_interval_rule(interval: Interval, metrics: list[MetricRecord]) -> Rule:
    digits = next(metric.digits for metric in metrics if metric.name == interval.metric)
    limit = interval.limit or 0.0
    margin = format_margin(interval.gain - limit, digits)
    if interval.model == "champion":
        is_met = interval.gain >= limit and not (interval.high is not None and interval.high < 0)
        text = f"worse than the champion by at most {-limit:g} ({interval.limit_name})"
    else:
        is_met = interval.gain >= limit and interval.low is not None and interval.low > 0
        text = f"better than the baseline by at least {limit:g} ({interval.limit_name})"
        if interval.gain >= limit and not is_met:
            margin = "may be chance: the interval contains 0"
    return Rule(text, is_met, margin)


def format_margin(margin: float, digits: int) -> str:
    """Describe by how much a rule is met (a positive margin) or missed (a negative margin)."""
    if not round(margin, digits):
        return "exactly the limit"
    return f"{abs(margin):.{digits}f} {'better' if margin > 0 else 'worse'} than required"


def list_families(chosen: ChoiceRecord) -> list[Family]:
    """Return the families of models; the chosen family comes first."""
    families = [
        Family(name, name == chosen.family, values) for name, values in chosen.validation.items()
    ]
    return sorted(families, key=lambda family: (not family.is_chosen, family.name))


def make_part(part_record: Mapping[str, Any], metrics: list[MetricRecord]) -> Part:
    """Return a part of the test rows from its record in verdict.json."""
    rows = part_record.get("rows")
    values = {
        model: {metric.name: find_number(part_record[model], metric.name) for metric in metrics}
        for model in MODELS
        if isinstance(part_record.get(model), Mapping)
    }
    name = str(part_record.get("name") or "")
    return Part(name, rows if isinstance(rows, int) else None, values)


def make_axis(numbers: list[float]) -> Axis:
    """Return an axis that covers all given numbers, with some space at both ends."""
    low = min(numbers)
    high = max(numbers)
    margin = 0.15 * (high - low) or 0.1 * abs(high) or 0.1
    return Axis(low - margin, high + margin)


def make_ticks(axis: Axis) -> list[Tick]:
    """Return about four labelled ticks for an axis."""
    return [Tick(round(100 * axis.share(x), 2), format_number(x)) for x in axis.ticks(4)]
