"""The choice of the scheduled time of a CronWorkflow that is due. This module reads no clock and
does no I/O.

    decision = decide(cron, progress, now, is_continuous=True)
    decision.due        # unix time of the run to start, or None
    decision.progress   # to store once the run has started

A time is decided once: it is started, skipped by the CronWorkflow, or missed. After a pause of the
server or of the machine, the newest time is started, unless startingDeadlineSeconds is over. A time
that was decided is not decided again if the clock is set back.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from argolocal.engine.nodes import parse_time
from argolocal.manifest import cron as crontab
from argolocal.manifest.types import Object

# times that are listed after a pause
MAX_MISSED = 20
# pauses of the server or changes of the clock that are remembered
MAX_INTERVALS = 200
# lengths in seconds of the periods before now in which the newest time is searched
SEARCHED_PERIODS_S = (3600.0, 86400.0, 32 * 86400.0, 400 * 86400.0, 6 * 366 * 86400.0)
CHANGED = "the schedule was changed while no server ran, so it started no run for earlier times"
NOT_RUNNING = "the server did not run at this time"
TOO_LATE = "the server did not run until startingDeadlineSeconds ({}) was over"


@dataclass(frozen=True)
class Missed:
    """A time without a run, in unix seconds, and the reason."""

    time: int
    reason: str


@dataclass(frozen=True)
class Progress:
    """The decisions about the times of a CronWorkflow.

    `uid`: of the CronWorkflow. `schedule`: its schedules and time zone. `position`: unix time until
    which all times are decided. `decided`: intervals of unix times whose times were decided when
    the clock showed them; a clock that was set back shows them again. `missed`: newest last.
    """

    uid: str
    schedule: str
    position: float
    decided: tuple[tuple[float, float], ...] = ()
    missed: tuple[Missed, ...] = ()

    def is_decided(self, time: int) -> bool:
        return any(start <= time <= end for start, end in self.decided)

    def add_decided(self, start: float, end: float) -> "Progress":
        """Return the progress with another interval of decided times."""
        others = []
        for first, last in self.decided:
            if first <= end and start <= last:
                start = min(start, first)
                end = max(end, last)
            else:
                others.append((first, last))
        return replace(self, decided=(*others, (start, end))[-MAX_INTERVALS:])

    def add_missed(self, times: Iterable[int], reason: str) -> "Progress":
        """Return the progress with further times without a run."""
        missed = (*self.missed, *(Missed(time, reason) for time in times))
        return replace(self, missed=missed[-MAX_MISSED:])


@dataclass(frozen=True)
class Decision:
    """The progress at a time. `due`: the scheduled time that starts a run now, or None. `missed`:
    times that are decided now and have no run, unless a server died just after it started one;
    `reason`: why they have none."""

    progress: Progress
    due: int | None = None
    missed: list[int] = field(default_factory=list)
    reason: str = NOT_RUNNING

    @property
    def is_new(self) -> bool:
        """True if something was decided that must be stored."""
        return self.due is not None or bool(self.missed)


def decide(cron: Object, progress: Progress | None, now: float, is_continuous: bool) -> Decision:
    """Return what to do at the time `now`. `is_continuous`: the server has looked at this
    CronWorkflow a moment ago, so no time was missed."""
    uid = cron["metadata"]["uid"]
    schedule = describe_schedule(cron)
    if progress is None or progress.uid != uid:
        progress = Progress(uid, schedule, parse_time(cron["metadata"]["creationTimestamp"]))
    elif progress.schedule != schedule:
        # as in Argo, times of the new schedule that are over do not start a run
        start = progress.position
        progress = replace(progress, schedule=schedule, position=now)
        if not is_continuous:
            return Decision(progress, missed=find_times(cron, start, now), reason=CHANGED)

    if now <= progress.position:
        # the clock was set back, so times that were not decided may come again
        return Decision(replace(progress, position=now))

    times = [
        time for time in find_times(cron, progress.position, now) if not progress.is_decided(time)
    ]
    if is_continuous:
        progress = progress.add_decided(progress.position, now)
    else:
        if times:
            progress = progress.add_decided(times[-1], times[-1])
        progress = progress.add_decided(now, now)
    progress = replace(progress, position=now)

    deadline = cron["spec"].get("startingDeadlineSeconds")
    if not times:
        return Decision(progress)
    if not is_continuous and deadline is not None and now - times[-1] >= int(deadline):
        return Decision(progress, missed=times, reason=TOO_LATE.format(deadline))
    return Decision(progress, due=times[-1], missed=times[:-1])


def describe_schedule(cron: Object) -> str:
    """Return the schedules with their time zone, as in Argo's annotation last-used-schedule."""
    timezone = cron["spec"].get("timezone")
    prefix = f"CRON_TZ={timezone} " if timezone else ""
    return ",".join(prefix + line for line in list_schedules(cron))


def list_schedules(cron: Object) -> list[str]:
    """Return the schedules of a CronWorkflow. `schedule` is the form before Argo 4."""
    spec = cron["spec"]
    if spec.get("schedules"):
        return list(spec["schedules"])
    return [spec["schedule"]] if spec.get("schedule") else []


def parse_schedules(cron: Object) -> list[crontab.Schedule]:
    """Return the schedules of a valid CronWorkflow. The intervals of @every start when it is
    created."""
    anchor = int(parse_time(cron["metadata"]["creationTimestamp"]))
    timezone = cron["spec"].get("timezone") or ""
    return [crontab.parse_schedule(line, timezone, anchor) for line in list_schedules(cron)]


def find_next(cron: Object, after: float) -> int | None:
    """Return the first scheduled time after a time, both in unix seconds, or None."""
    times = [schedule.next_time(after) for schedule in parse_schedules(cron)]
    return min((time for time in times if time is not None), default=None)


def find_times(cron: Object, start: float, end: float) -> list[int]:
    """Return the newest scheduled times after `start` until `end`, oldest first."""
    schedules = parse_schedules(cron)
    for period in SEARCHED_PERIODS_S:
        first = max(start, end - period)
        times: set[int] = set()
        for schedule in schedules:
            time = schedule.next_time(first)
            while time is not None and time <= end:
                times.add(time)
                time = schedule.next_time(time)
        if times or first == start:
            return sorted(times)[-MAX_MISSED:]
    return []
