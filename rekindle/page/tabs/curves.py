"""The tab `curves`: charts of loss, learning rate, measures, validation and speed of a run's
trainings; other runs of the pipeline can be overlaid."""

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import Any

from argolocal.common.json_text import loads
from argolocal.page.sources import Run
from rekindle.errors import ConfigError, RekindleError, TrackingError
from rekindle.keys import CURVE, MODEL, key
from rekindle.page.tabs.charts import (
    COLOURS,
    LineChart,
    Point,
    Series,
    downsample,
    select_finite_points,
)
from rekindle.page.tabs.curve_points import CurveReader, Curves
from rekindle.page.tabs.records import Records
from rekindle.page.tabs.siblings import Siblings

CURVE_NAME = re.compile(r"(?:(?P<task>.+)/)?(?P<kind>train|validation)/(?P<metric>[^/]+)")
SPEED = "steps per second"
# names of the first charts, in their order; the other charts follow, sorted by name
ORDER = ("loss", "validation", "learning_rate", SPEED, "samples_per_s", "gradient_norm")
TITLES = {"samples_per_s": "samples per second"}
SCALES = ("linear", "log")
MAX_CACHED_RUNS = 12
MAX_CURVES_OF_RUN = 60


@dataclass(frozen=True)
class OtherRun:
    """Another run of the pipeline, whose curves can be overlaid."""

    name: str
    is_shown: bool


@dataclass(frozen=True)
class CurveCharts:
    """The charts of a run. `problem`: sentence that says why curves are missing, or ""."""

    charts: list[LineChart]
    scale: str
    others: list[OtherRun]
    problem: str = ""


class CurvesTab:
    """The tab `curves`."""

    name = "curves"
    title = "Curves"
    content = CurveCharts

    def __init__(self, records: Records, curves: CurveReader, siblings: Siblings) -> None:
        self.records = records
        self.reader = curves
        self.siblings = siblings
        self._curves: OrderedDict[tuple[str, str], Curves] = OrderedDict()
        self._lock = Lock()

    def is_shown(self, run: Run) -> bool:
        return bool(self.records.facts(run).trainings)

    def version(self, run: Run) -> str:
        """Return a text that changes when the curves of an active run change; "" for a run that has
        ended."""
        if run.is_finished:
            return ""
        try:
            return f"{self.reader.version(run.name)}/{self.records.ledger_version(run)}"
        except RekindleError:
            return ""

    def build(self, run: Run, query: Mapping[str, str]) -> CurveCharts:
        scale = query.get("scale", "linear")
        if scale not in SCALES:
            raise ConfigError(
                f"the scale is {scale[:100]!r}: it must be one of {', '.join(SCALES)}."
            )

        chosen = list(dict.fromkeys(_list_query_values(query, "with")))
        if len(chosen) >= COLOURS:
            raise ConfigError(f"{len(chosen)} runs are chosen: at most {COLOURS - 1} can be shown.")

        runs = [run, *(self.siblings.read(run, name) for name in chosen if name != run.name)]
        problem = ""
        curves: dict[str, Curves] = {}
        for shown_run in runs:
            try:
                curves[shown_run.name] = self._read(shown_run)
            except RekindleError as error:
                problem = str(error)

        other_names = list(dict.fromkeys([*chosen, *self.siblings.names(run)]))
        return CurveCharts(
            make_charts(curves, scale == "log"),
            scale,
            [OtherRun(name, name in chosen) for name in other_names if name != run.name],
            problem,
        )

    def _read(self, run: Run) -> Curves:
        """Return the curves of a run, from the cache if the curves have not changed."""
        cache_key = run.name, f"{run.version}:{self.version(run)}"
        with self._lock:
            if cache_key in self._curves:
                self._curves.move_to_end(cache_key)
                return self._curves[cache_key]

        curves = self._load(run)
        with self._lock:
            self._curves[cache_key] = curves
            while len(self._curves) > MAX_CACHED_RUNS:
                self._curves.popitem(last=False)
        return curves

    def _load(self, run: Run) -> Curves:
        facts = self.records.facts(run)
        curves = dict(self.reader.read(run.name, facts.pipeline or run.name))
        tasks = facts.trainings
        for task in tasks:
            prefix = f"{task}/" if len(tasks) > 1 else ""
            # without curves in MLflow, use the losses that are stored with the model
            if not any(CURVE_NAME.fullmatch(name) for name in curves):
                curves[f"{prefix}train/loss"] = self._read_losses(run.name, task)
            curves[f"{prefix}train/{SPEED}"] = self._measure_speed(run.name, task)
        return {name: points for name, points in curves.items() if points}

    def _read_losses(self, run_name: str, task: str) -> list[Point]:
        ledger_content = self.records.read(f"{key(task, MODEL, run_name)}/{CURVE}")
        try:
            rows = loads(ledger_content) if ledger_content else []
            points = [(float(step), float(loss)) for step, loss in rows if loss is not None]
        except (ValueError, TypeError) as error:
            raise TrackingError(f"the file {CURVE} of {run_name} is malformed: {error}.") from None
        return downsample(select_finite_points(points))

    def _measure_speed(self, run_name: str, task: str) -> list[Point]:
        points = self.records.summary(run_name, task).points
        speeds = [
            (float(last), (last - first) / (end - start))
            for (start, first), (end, last) in pairwise(points)
            if last > first and end - start > 0.05
        ]
        return downsample(sorted(dict(speeds).items()))


def make_charts(curves: Mapping[str, Curves], is_logarithmic: bool) -> list[LineChart]:
    """Return a chart for each metric. A chart has one line for the training and one line for the
    validation of each run."""
    charts: dict[str, list[Series]] = {}
    is_single = len(curves) == 1
    for number, (run, metrics) in enumerate(curves.items()):
        for name, points in sorted(metrics.items())[:MAX_CURVES_OF_RUN]:
            match = CURVE_NAME.fullmatch(name)
            if not match or (len(points) == 1 and points[0][0] == 0):
                continue

            is_validation = match["kind"] == "validation"
            colour = int(is_validation) if is_single else number
            label = match["kind"] if is_single else f"{run} {match['kind']}"
            title = f"{match['task']}: {match['metric']}" if match["task"] else match["metric"]
            charts.setdefault(title, []).append(Series(label, points, colour, is_validation))

    return [
        LineChart(
            TITLES.get(title, title.replace("_", " ")),
            "step",
            charts[title],
            is_logarithmic and any(y > 0 for series in charts[title] for _, y in series.points),
        )
        for title in sorted(charts, key=_get_chart_order)
    ]


def _get_chart_order(title: str) -> tuple[int, str]:
    metric = title.rpartition(": ")[2]
    return (ORDER.index(metric) if metric in ORDER else 1), title


def _list_query_values(query: Mapping[str, str], parameter_name: str) -> list[str]:
    """Return all values of a query parameter of a URL."""
    getlist: Any = getattr(query, "getlist", None)
    query_values = (
        getlist(parameter_name)
        if getlist
        else [query[parameter_name]]
        if parameter_name in query
        else []
    )
    return [value for value in query_values if value]
