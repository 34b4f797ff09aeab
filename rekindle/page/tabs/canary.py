"""The tab `canary`: the candidate's share of the traffic over time, the requests to both models,
and the outcome."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from argolocal.common import causes
from argolocal.page.sources import Run
from argolocal.view.summary import list_outputs, parse_timestamp
from rekindle.errors import RekindleError
from rekindle.page.tabs.charts import LineChart, Point, Series, format_number
from rekindle.page.tabs.curve_points import CurveReader
from rekindle.page.tabs.records import Records
from rekindle.release.serve_config import CHAMPION_CHANGED_RESULT, PASSED_RESULT

FIGURES = ("requests", "errors", "median_ms")


@dataclass(frozen=True)
class Figures:
    """Requests, errors and median response time of one model in a step of the canary. A figure that
    was not recorded is None."""

    requests: float | None
    errors: float | None
    median_ms: float | None

    @property
    def texts(self) -> list[str]:
        values = (self.requests, self.errors, self.median_ms)
        return ["–" if value is None else format_number(round(value, 3)) for value in values]


@dataclass(frozen=True)
class CanaryStep:
    """A step of a canary: the candidate got `percent` of the traffic.

    `score_shift`: largest Kolmogorov-Smirnov distance between the predictions of both models.
    """

    percent: int
    state: str
    started: str
    second: float
    seconds: float | None
    outcome: str
    candidate: Figures
    champion: Figures
    score_shift: float | None

    @property
    def shift_text(self) -> str:
        return "–" if self.score_shift is None else f"{self.score_shift:.3f}"


@dataclass(frozen=True)
class Rollout:
    """A canary: its planned shares in percent, its steps, and its outcome."""

    words: str
    planned: list[int]
    steps: list[CanaryStep]
    candidate: str
    champion: str
    limits: Mapping[str, str]
    chart: LineChart | None
    problem: str = ""


class CanaryTab:
    """The tab `canary`."""

    name = "canary"
    title = "Canary"
    content = Rollout

    def __init__(self, records: Records, curves: CurveReader) -> None:
        self.records = records
        self.curves = curves

    def is_shown(self, run: Run) -> bool:
        return bool(self._config(run)) or bool(list_watch_nodes(run))

    def _config(self, run: Run) -> Mapping[str, Any]:
        serve = self.records.facts(run).config.get("serve")
        canary = serve.get("canary") if isinstance(serve, Mapping) else None
        return canary if isinstance(canary, Mapping) else {}

    def build(self, run: Run, query: Mapping[str, str]) -> Rollout:
        problem = ""
        metrics: Mapping[str, list[Point]] = {}
        try:
            pipeline = self.records.facts(run).pipeline or run.name
            metrics = self.curves.read(run.name, pipeline)
        except RekindleError as error:
            problem = f"The requests of the models are not known: {error}"

        config = self._config(run)
        nodes = list_watch_nodes(run)
        start = min((parse_timestamp(node["startedAt"]) for node in nodes), default=0.0)
        steps = [_make_step(node, metrics, start) for node in nodes]
        inputs = list_outputs({"outputs": nodes[-1].get("inputs")}) if nodes else {}
        planned = [share for share in config.get("steps") or [] if isinstance(share, int)]
        limits = {
            "minimum of requests": str(config.get("requests", "")),
            "largest response time, relative": str(config.get("slower", "")),
            "largest shift of the predictions": str(config.get("score_shift", "")),
        }
        return Rollout(
            describe_outcome(steps, inputs, bool(nodes)),
            planned,
            [step for step in steps if step.percent],
            inputs.get("version", ""),
            inputs.get("champion", ""),
            {name: value for name, value in limits.items() if value},
            _make_chart(steps, 0.0 if run.is_finished else time.time() - start),
            problem,
        )


def list_watch_nodes(run: Run) -> list[Mapping[str, Any]]:
    """Return the nodes of the steps that compare the models, in the order of their start."""
    nodes: list[Mapping[str, Any]] = []
    for node in list((run.status.get("nodes") or {}).values()):
        if node.get("type") != "Pod" or not node.get("startedAt"):
            continue
        inputs = list_outputs({"outputs": node.get("inputs")})
        if {"percent", "rule", "former"} <= inputs.keys():
            nodes.append(node)
    return sorted(nodes, key=lambda node: node["startedAt"])


def _make_step(
    node: Mapping[str, Any], metrics: Mapping[str, list[Point]], start: float
) -> CanaryStep:
    inputs = list_outputs({"outputs": node.get("inputs")})
    text = inputs.get("percent", "0")
    percent = int(text) if text.isdecimal() and len(text) < 4 else 0
    began = parse_timestamp(node["startedAt"])
    end = node.get("finishedAt")

    def figure(name: str) -> float | None:
        points = metrics.get(f"canary.{percent}.{name}")
        return points[-1][1] if points else None

    candidate, champion = (
        Figures(*(figure(f"{model}.{name}") for name in FIGURES))
        for model in ("candidate", "champion")
    )
    return CanaryStep(
        percent,
        (node.get("phase") or "Pending").lower(),
        node["startedAt"],
        round(began - start, 3),
        round(parse_timestamp(end) - began, 3) if end else None,
        list_outputs(node).get("canary", ""),
        candidate,
        champion,
        figure("score_shift"),
    )


def describe_outcome(steps: list[CanaryStep], inputs: Mapping[str, str], has_started: bool) -> str:
    """Return a sentence about the outcome of a canary."""
    watched = [step for step in steps if step.percent]
    version = f"version {inputs['version']}" if inputs.get("version") else "the candidate"
    if not has_started:
        return "The canary has not started."
    if not watched and inputs.get("champion"):
        return f"The canary of {version} starts."
    if not watched:
        return f"{version.capitalize()} was released at once: no model served earlier."

    last_step = watched[-1]
    if not last_step.outcome:
        if last_step.state in ("running", "pending"):
            return f"{version.capitalize()} gets {last_step.percent} % of the requests now."
        return f"The comparison at {last_step.percent} % of the requests has {last_step.state}."
    if last_step.outcome == PASSED_RESULT:
        share = f"{last_step.percent} % of the requests"
        return f"{version.capitalize()} passed at all shares, at last {share}."
    if last_step.outcome == CHAMPION_CHANGED_RESULT:
        return f"The canary of {version} ended, because another version became the champion."
    reason = causes.extract_cause(last_step.outcome.partition(": ")[2])
    return f"{version.capitalize()} was rolled back: {reason}."


def _make_chart(steps: list[CanaryStep], now: float) -> LineChart | None:
    """Return a chart of the candidate's share of the requests over time. `now`: seconds since the
    start of a canary that is running, else 0."""
    points: list[Point] = []
    for step in steps:
        share = float(step.percent)
        if points:
            # the share of the previous step holds until this step
            points.append((step.second, points[-1][1]))
        end = step.second + step.seconds if step.seconds else max(now, step.second)
        points += [(step.second, share), (round(end, 3), share)]
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        return None
    return LineChart(
        "Share of the requests of the candidate, in percent", "s", [Series("share", points)]
    )
