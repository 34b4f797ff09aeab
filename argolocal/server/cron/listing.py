"""List the schedules of a home (a directory of runs) as rows of a table, with their last, next and
missed times.

rows = list_rows(home, now)
"""

from dataclasses import dataclass
from pathlib import Path

from argolocal.errors import ConfigError
from argolocal.language.gofmt import format_timestamp
from argolocal.manifest.types import Object
from argolocal.server.cron.controller import KIND, read_progress
from argolocal.server.cron.progress import Missed, find_next, list_schedules
from argolocal.state.stored_objects import StoredObjects


@dataclass(frozen=True)
class ScheduleRow:
    """A schedule. `at`: schedules of the CronWorkflow in crontab format. `last`, `next`: the last
    and the next scheduled time. `missed`: number of recorded missed times. `missed_time`: the
    newest missed time. `reason`: problem of the schedule, or the reason for the newest missed time,
    or "". The times of a row are in the format of RFC 3339, or None."""

    schedule: str
    at: str
    timezone: str
    suspended: bool
    last: str | None
    next: str | None
    missed: int
    missed_time: str | None
    reason: str


def list_rows(home: Path, now: float) -> list[ScheduleRow]:
    """Return the schedules of a home (a directory of runs), sorted by name. `now`: unix time."""
    return [make_row(home, cron, now) for cron in StoredObjects(home).list(KIND)]


def make_row(home: Path, cron: Object, now: float) -> ScheduleRow:
    """Return the row of a CronWorkflow."""
    spec = cron["spec"]
    status = cron.get("status") or {}
    is_suspended = bool(spec.get("suspend")) or status.get("phase") == "Stopped"
    conditions = status.get("conditions") or []
    problem = " ".join(str(condition.get("message")) for condition in conditions)
    next_time = None
    if not is_suspended:
        try:
            next_time = find_next(cron, now)
        except (ConfigError, ValueError) as error:
            problem = problem or str(error)

    missed_runs = read_missed(home, cron["metadata"]["name"])
    return ScheduleRow(
        schedule=cron["metadata"]["name"],
        at=" | ".join(list_schedules(cron)),
        timezone=spec.get("timezone") or "UTC",
        suspended=is_suspended,
        last=status.get("lastScheduledTime"),
        next=format_timestamp(next_time) if next_time else None,
        missed=len(missed_runs),
        missed_time=format_timestamp(missed_runs[0].time) if missed_runs else None,
        reason=problem or (missed_runs[0].reason if missed_runs else ""),
    )


def read_missed(home: Path, name: str) -> list[Missed]:
    """Return the missed times of a schedule, newest first. Return [] if the progress file of the
    schedule is missing or unreadable."""
    try:
        progress = read_progress(home, name).get(name)
    except (ConfigError, KeyError, TypeError):
        return []
    return list(reversed(progress.missed)) if progress else []
