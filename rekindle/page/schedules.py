"""The section `schedules`: the schedules of the project or of a cluster, with their next times and
the times that were missed."""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from argolocal.common.files import read_regular_file
from argolocal.language.yaml_text import parse
from argolocal.manifest import cron
from argolocal.manifest.cron import EVERY
from argolocal.manifest.types import Object
from argolocal.page.run_list import RunRow
from rekindle.cluster.kubernetes_api import CRON_WORKFLOWS, Cluster
from rekindle.errors import ConfigError, RekindleError
from rekindle.page.cron_words import describe_schedule
from rekindle.page.rows import SCHEDULED

NEXT_TIMES = 3
MAX_DAYS_AHEAD = 400
MAX_DAYS_BACK = 31
MAX_CONFIG_BYTES = 1 << 20
MAX_CONFIGS = 200
# a scheduled time counts as missed if its run has not started within this time
LATE_AFTER = timedelta(minutes=2)


@dataclass(frozen=True)
class Schedule:
    """One schedule. A schedule, with its times in the format of RFC 3339. `words`: the schedule in
    words, or "". `missed`: times without a run, newest first; `problem`: a sentence about an
    invalid schedule; `command`: the command that runs the missed times; `reasons`: missed time →
    why its run was not started. `is_scheduled` is False for a config that is not scheduled
    anywhere, so that its runs do not start by themselves."""

    name: str
    source: str
    cron: str
    timezone: str
    is_suspended: bool
    next_times: list[str] = field(default_factory=list)
    last_run: str = ""
    last_time: str | None = None
    missed: list[str] = field(default_factory=list)
    command: str = ""
    problem: str = ""
    words: str = ""
    reasons: dict[str, str] = field(default_factory=dict)
    is_scheduled: bool = True


@dataclass(frozen=True)
class Schedules:
    """All known schedules. `notes`: sentences to show next to the schedules."""

    schedules: list[Schedule]
    notes: list[str]


class ProjectSchedules:
    """The schedules in the configs of the project. A time is missed if it is after the oldest known
    run of the pipeline, and no run has this scheduled time.

    `list_rows`: function that returns the rows of all runs, newest first.
    """

    def __init__(self, project: Path, list_rows: Callable[[], Sequence[RunRow]]) -> None:
        self.project = project
        self.list_rows = list_rows

    def read(self, query: Mapping[str, str]) -> Schedules:
        """Return the schedules of all configs that have the section `schedule`."""
        rows = self.list_rows()
        now = datetime.now(UTC)
        schedules = []
        for path in sorted((self.project / "configs").glob("*.yaml"))[:MAX_CONFIGS]:
            config = _read_config(path)
            section = config.get("schedule")
            if isinstance(section, dict):
                name = str(config.get("name") or path.stem)
                schedules.append(self._make_schedule(name, path, section, rows, now))

        notes = []
        if not schedules:
            notes.append(f"No config in {self.project / 'configs'} has the section `schedule`.")
        return Schedules(schedules, notes)

    def _make_schedule(
        self,
        pipeline_name: str,
        path: Path,
        section: Mapping[str, Any],
        rows: Iterable[RunRow],
        now: datetime,
    ) -> Schedule:
        config = f"configs/{path.name}"
        cron_line = str(section.get("cron") or "0 3 * * 1")
        timezone = str(section.get("timezone") or "UTC")
        is_suspended = section.get("suspend") is True
        problem = find_problem([cron_line], timezone)
        if problem:
            return Schedule(
                pipeline_name, config, cron_line, timezone, is_suspended, problem=problem
            )

        runs = [row for row in rows if row.pipeline == pipeline_name and row.started]
        last_run = runs[0] if runs else None
        covered = {parse_time_or_none(row.facts.get(SCHEDULED, "")) for row in runs}
        missed_times: list[datetime] = []
        if last_run and last_run.started:
            oldest = parse_time(runs[-1].started or last_run.started)
            start = max(oldest, now - timedelta(days=MAX_DAYS_BACK))
            missed_times = [
                time
                for time in list_times([cron_line], timezone, start, now)
                if time not in covered
            ]

        return Schedule(
            pipeline_name,
            config,
            cron_line,
            timezone,
            is_suspended,
            list_next_times([cron_line], timezone, now),
            last_run.name if last_run else "",
            last_run.started if last_run else None,
            [format_time(time) for time in reversed(missed_times)],
            _make_backfill_command(config, missed_times, timezone),
            words=describe_schedule(cron_line),
            is_scheduled=False,
        )


class ClusterSchedules:
    """The CronWorkflows in a namespace."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def read(self, query: Mapping[str, str]) -> Schedules:
        """Return the schedules, or a sentence if the user of the page may not see schedules."""
        try:
            objects = self.cluster.list_objects(CRON_WORKFLOWS)
        except RekindleError as error:
            return Schedules([], [f"The schedules cannot be read: {error}"])

        now = datetime.now(UTC)
        schedules = [make_cluster_schedule(cron_workflow, now) for cron_workflow in objects]
        notes = []
        if not schedules:
            notes.append(
                f"Namespace {self.cluster.namespace} does not contain a schedule: `rekindle"
                " schedule CONFIG` applies one."
            )
        return Schedules(sorted(schedules, key=lambda schedule: schedule.name), notes)


def make_cluster_schedule(cron_workflow: Object, now: datetime) -> Schedule:
    """Return the schedule of a CronWorkflow. A time is missed if it is after the last run that
    Argo started."""
    spec = cron_workflow["spec"]
    status = cron_workflow.get("status") or {}
    lines = spec.get("schedules") or [spec.get("schedule", "")]
    timezone = spec.get("timezone") or "UTC"
    is_suspended = bool(spec.get("suspend"))
    active = status.get("active") or []
    last = status.get("lastScheduledTime")
    problem = find_problem(lines, timezone)
    missed_times: list[datetime] = []
    upcoming: list[str] = []

    words: list[str] = []
    if not problem:
        words = [describe_schedule(line) for line in lines]
        last_time = parse_time(last) if last else None
        upcoming = [] if is_suspended else list_next_times(lines, timezone, now, last_time)
        if last and not is_suspended:
            start = max(parse_time(last), now - timedelta(days=MAX_DAYS_BACK))
            missed_times = list_times(lines, timezone, start, now - LATE_AFTER)

    return Schedule(
        cron_workflow["metadata"]["name"],
        "CronWorkflow",
        " | ".join(lines),
        timezone,
        is_suspended,
        upcoming,
        str(active[-1].get("name") or "") if active else "",
        last,
        [format_time(time) for time in reversed(missed_times)],
        problem=problem,
        words="; ".join(words) if all(words) else "",
    )


def find_problem(cron_lines: Iterable[str], timezone: str) -> str:
    """Return a sentence about an invalid schedule or time zone, or ""."""
    for cron_line in cron_lines:
        reason = cron.find_schedule_error(cron_line)
        if reason:
            return f"The schedule {cron_line!r} is invalid: {reason}."
    reason = cron.find_timezone_error(timezone)
    if reason:
        return f"The time zone {timezone!r} is invalid: {reason}"
    return ""


def list_next_times(
    lines: Sequence[str], timezone: str, now: datetime, last_time: datetime | None = None
) -> list[str]:
    """Return the next times of a schedule. `last_time`: time of the newest run that the schedule
    has started. The times of `@every` are counted from `last_time`; if `last_time` is None, these
    times are left out."""
    end = now + timedelta(days=MAX_DAYS_AHEAD)
    times = cron.times_between(_parse_lines(lines, timezone, last_time), now, end)
    return [format_time(time) for time in islice(times, NEXT_TIMES)]


def list_times(
    lines: Sequence[str], timezone: str, start: datetime, end: datetime
) -> list[datetime]:
    """Return the times of a schedule after `start` until `end`, oldest first."""
    return list(cron.times_between(_parse_lines(lines, timezone), start, end))


def _parse_lines(
    lines: Sequence[str], timezone: str, last_time: datetime | None = None
) -> list[cron.Schedule]:
    """Parse the lines of a schedule. `last_time`: time of the last run, from which Argo counts the
    intervals of `@every`. If `last_time` is None, lines with `@every` are left out."""
    anchor_seconds = int(last_time.timestamp()) if last_time else 0
    return [
        cron.parse_schedule(line, timezone, anchor_seconds)
        for line in lines
        if last_time or not line.startswith(EVERY)
    ]


def _make_backfill_command(config: str, missed_times: Sequence[datetime], timezone: str) -> str:
    if not missed_times:
        return ""
    zone = ZoneInfo(timezone)
    first_day = missed_times[0].astimezone(zone).date()
    last_day = missed_times[-1].astimezone(zone).date()
    arguments = ["backfill", config, "--from", str(first_day), "--to", str(last_day)]
    return shlex.join(["rekindle", *arguments])


def _read_config(path: Path) -> Mapping[str, Any]:
    """Return the content of a config; {} if the file is not a config."""
    try:
        documents = parse(read_regular_file(path, MAX_CONFIG_BYTES).decode())
    except (OSError, UnicodeDecodeError, ConfigError):
        return {}
    first_document = next(iter(documents), None)
    return first_document if isinstance(first_document, dict) else {}


def parse_time(time_text: str) -> datetime:
    """Parse a time in the format of RFC 3339; a time without a time zone is in UTC."""
    time = datetime.fromisoformat(time_text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def parse_time_or_none(time_text: str) -> datetime | None:
    """Parse a time in the format of RFC 3339; return None for another text, because users choose
    the parameters of a run."""
    try:
        return parse_time(time_text)
    except ValueError:
        return None


def format_time(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="minutes")
