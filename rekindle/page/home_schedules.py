"""The schedules whose runs the server of this machine starts, with the reason for each missed
time."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from argolocal.engine.nodes import parse_time as parse_seconds
from argolocal.manifest.types import Object
from argolocal.server.cron.controller import KIND
from argolocal.server.cron.listing import read_missed
from argolocal.server.cron.progress import find_next, list_schedules
from argolocal.server.server_lock import find_server
from argolocal.state.stored_objects import StoredObjects
from rekindle.page.cron_words import describe_schedule
from rekindle.page.schedules import (
    NEXT_TIMES,
    ProjectSchedules,
    Schedule,
    Schedules,
    find_problem,
    format_time,
)

HOME_SOURCE = "this machine"
NO_SERVER = (
    "No server runs on this machine, so it does not start runs by itself: `rekindle server` starts"
    " one."
)
STORE_NOTE = (
    "`rekindle schedule CONFIG --local` schedules a config on this machine, and `rekindle schedule"
    " CONFIG` on a cluster. `rekindle backfill CONFIG` runs missed times here."
)


class HomeSchedules:
    """The CronWorkflows in REKINDLE_HOME, and the schedules of the project's configs that are not
    stored.

    `project`: the schedules of the project's configs, or None to leave these schedules out.
    """

    def __init__(self, home: Path, project: ProjectSchedules | None = None) -> None:
        self.home = home.resolve()
        self.project = project

    def read(self, query: Mapping[str, str]) -> Schedules:
        """Return the schedules, with a note if no server runs that would start the scheduled
        runs."""
        now = datetime.now(UTC)
        crons = StoredObjects(self.home).list(KIND)
        stored = [make_home_schedule(self.home, cron, now) for cron in crons]
        notes = [] if find_server(self.home) else [NO_SERVER]
        if self.project is None:
            return Schedules(stored, notes)

        names = {schedule.name for schedule in stored}
        configs = self.project.read(query)
        config_schedules = [
            schedule for schedule in configs.schedules if schedule.name not in names
        ]
        return Schedules([*stored, *config_schedules], [*notes, STORE_NOTE, *configs.notes])


def make_home_schedule(home: Path, cron: Object, now: datetime) -> Schedule:
    """Return the schedule of a CronWorkflow that is stored in REKINDLE_HOME."""
    schedule_name = cron["metadata"]["name"]
    spec = cron["spec"]
    status = cron.get("status") or {}
    lines = list_schedules(cron)
    timezone = spec.get("timezone") or "UTC"
    has_stopped = status.get("phase") == "Stopped"
    is_suspended = bool(spec.get("suspend")) or has_stopped
    problem = find_problem(lines, timezone)
    active = status.get("active") or []
    last_time = status.get("lastScheduledTime")
    last_run = f"{schedule_name}-{int(parse_seconds(last_time))}" if last_time else ""
    missed_times = read_missed(home, schedule_name)
    words = [] if problem else [describe_schedule(line) for line in lines]

    return Schedule(
        schedule_name,
        HOME_SOURCE,
        " | ".join(lines),
        timezone,
        is_suspended,
        [] if problem or is_suspended else _list_next_times(cron, now),
        active[-1]["name"] if active else last_run,
        last_time,
        [_format_seconds(missed_time.time) for missed_time in missed_times],
        problem=problem or _describe_conditions(status),
        words="; ".join(words) if all(words) else "",
        reasons={
            _format_seconds(missed_time.time): missed_time.reason for missed_time in missed_times
        },
    )


def _list_next_times(cron: Object, now: datetime) -> list[str]:
    times: list[str] = []
    time = find_next(cron, now.timestamp())
    while time is not None and len(times) < NEXT_TIMES:
        times.append(_format_seconds(time))
        time = find_next(cron, time)
    return times


def _describe_conditions(status: Object) -> str:
    return " ".join(str(condition.get("message")) for condition in status.get("conditions") or [])


def _format_seconds(seconds: int) -> str:
    return format_time(datetime.fromtimestamp(seconds, UTC))
