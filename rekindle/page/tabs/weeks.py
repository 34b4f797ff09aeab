"""The tab `weeks`: the runs of the backfill that a run belongs to, and their results."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from argolocal.page.sources import Run, RunSource
from argolocal.view.summary import parse_timestamp
from rekindle.blocks.manifest.provenance import BACKFILL, SCHEDULED_TIME
from rekindle.errors import ConfigError
from rekindle.operations.missed_runs import HASH_LENGTH, MissedRun
from rekindle.page.tabs.charts import LineChart, Series
from rekindle.page.tabs.records import Records

MAX_WEEKS = 500
DAY_S = 86400.0


@dataclass(frozen=True)
class Week:
    """One run of a backfill. `is_this` is True for the run whose page is shown. `gate`: release or
    keep; "" if the run was not evaluated."""

    scheduled: str
    run: str
    is_this: bool
    phase: str
    gate: str
    reason: str
    metrics: Mapping[str, float | None]
    seconds: float | None
    model_sha256: str

    @property
    def metric_texts(self) -> dict[str, str]:
        return {
            name: "–" if value is None else f"{value:.4g}" for name, value in self.metrics.items()
        }


@dataclass(frozen=True)
class Weeks:
    """The runs of a backfill, oldest first."""

    words: str
    weeks: list[Week]
    metrics: list[str]
    charts: list[LineChart]


class WeeksTab:
    """The tab `weeks`."""

    name = "weeks"
    title = "Backfill"
    content = Weeks

    def __init__(self, source: RunSource, records: Records) -> None:
        self.source = source
        self.records = records
        # name of a run → its version and its row
        self._cached_rows: dict[str, tuple[str, Week | None]] = {}

    def is_shown(self, run: Run) -> bool:
        return bool(self.records.facts(run).parameters.get(BACKFILL))

    def version(self, run: Run) -> str:
        """Return a text that changes when a run of the backfill changes."""
        if not self.is_shown(run):
            return ""
        versions = [
            f"{name}={self.source.version(name)}" for name in self._list_candidate_names(run)
        ]
        return hashlib.sha256("/".join(versions).encode()).hexdigest()[:16]

    def build(self, run: Run, query: Mapping[str, str]) -> Weeks:
        rows = (
            [self._read_row(run, name) for name in self._list_candidate_names(run)]
            if self.is_shown(run)
            else []
        )
        weeks = sorted((row for row in rows if row), key=lambda week: week.scheduled)
        metrics = list(dict.fromkeys(name for week in weeks for name in week.metrics))
        charts = [chart for chart in (_make_chart(name, weeks) for name in metrics) if chart]
        return Weeks(describe_results(weeks), weeks, metrics, charts)

    def _list_candidate_names(self, run: Run) -> list[str]:
        """Return the names of runs that, judging by the name, may belong to the same backfill."""
        facts = self.records.facts(run)
        suffix = f"-{facts.parameters.get('manifest_hash', '')[:HASH_LENGTH]}"
        names = [
            name
            for name in self.source.names()
            if name == run.name or (name.startswith(f"{facts.pipeline}-") and name.endswith(suffix))
        ]
        return names[:MAX_WEEKS]

    def _read_row(self, run: Run, run_name: str) -> Week | None:
        """Return the row of a run; None if the run does not belong to the backfill."""
        version = self.source.version(run_name)
        cached_version, row = self._cached_rows.get(run_name, ("", None))
        if cached_version != version:
            try:
                row = self._make_row(run, self.source.read(run_name))
            except ConfigError:
                row = None
            self._cached_rows[run_name] = version, row

        if row is None:
            return None
        # a cached row may have been made for the page of another run
        return replace(row, is_this=run_name == run.name)

    def _make_row(self, run: Run, other: Run) -> Week | None:
        parameters = self.records.facts(other).parameters
        is_same = parameters.get("manifest_hash") == self.records.facts(run).parameters.get(
            "manifest_hash"
        )
        try:
            time = datetime.fromisoformat(parameters.get(SCHEDULED_TIME, ""))
        except ValueError:
            return None
        if not is_same or not parameters.get(BACKFILL):
            return None

        row = MissedRun(time, other.name).row(other.status)
        start = other.status.get("startedAt")
        end = other.status.get("finishedAt")
        seconds = parse_timestamp(end) - parse_timestamp(start) if start and end else None
        return Week(
            row["scheduled"],
            other.name,
            other.name == run.name,
            row["phase"],
            row["gate"] or "",
            row["reason"] or "",
            row["metrics"],
            seconds,
            row["model_sha256"] or "",
        )


def describe_results(weeks: list[Week]) -> str:
    """Return sentences about the results of the runs of a backfill."""
    finished = [week for week in weeks if week.phase == "Succeeded"]
    failed = sum(week.phase in ("Failed", "Error") for week in weeks)
    released = sum(week.gate == "release" for week in finished)
    kept_count = sum(week.gate == "keep" for week in finished)
    text = (
        f"{len(finished)} of {len(weeks)} runs that have started were successful: the gate would"
        f" have released {released} of their models, and kept the champion {kept_count} times."
    )
    if failed:
        text += f" {failed} runs failed."
    return f"{text} A backfill releases nothing."


def _make_chart(metric_name: str, weeks: list[Week]) -> LineChart | None:
    """Plot a metric against the days since the first run; return None with fewer than two
    values."""
    times = {week.run: datetime.fromisoformat(week.scheduled).timestamp() for week in weeks}
    first_time = min(times.values())
    values_by_run = {week.run: week.metrics.get(metric_name) for week in weeks}
    points = [
        (round((times[run_name] - first_time) / DAY_S, 3), value)
        for run_name, value in values_by_run.items()
        if value is not None
    ]
    if len(points) < 2:
        return None
    title = f"{metric_name} of the candidates, by days since the first run"
    return LineChart(title, "day", [Series(metric_name, points)], has_marks=True)
