"""Decide whether a scheduled time of a CronWorkflow is due, so that its run must start now. This
module does not read the clock and does no I/O.

    decision = decide(cron, progress, now, is_continuous=True)
    decision.due        # scheduled time of the run to start, in unix seconds, or None
    decision.progress   # to be stored once the run has started

Each scheduled time is decided once: a run starts, the CronWorkflow skips the time, or the time is
missed. After a pause of the server or of the machine, only the run of the newest time is started,
unless this time is more than startingDeadlineSeconds ago. If the clock is set back, a decided time
is not decided again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from argolocal.engine.nodes import parse_time
from argolocal.manifest import cron as crontab
from argolocal.manifest.types import Object

# maximum number of missed times to keep
MAX_MISSED = 20
# maximum number of intervals of decided times to keep; each pause of the server and each change of
# the clock starts another interval
MAX_INTERVALS = 200
# lengths of the periods in which the newest scheduled times are searched, one after the other
SEARCHED_PERIODS_S = (3600.0, 86400.0, 32 * 86400.0, 400 * 86400.0, 6 * 366 * 86400.0)
CHANGED = "the schedule was changed while no server ran, so it started no run for earlier times"
NOT_RUNNING = "the server did not run at this time"
TOO_LATE = "the server did not run until startingDeadlineSeconds ({}) was over"


@dataclass(frozen=True)
class Missed:
    """A scheduled time without a run, in unix seconds, and the reason."""

    time: int
    reason: str


@dataclass(frozen=True)
class Progress:
    """The decisions about the scheduled times of a CronWorkflow.

    `uid`: uid of the CronWorkflow. `schedule`: the schedules and the time zone of the CronWorkflow.
    `position`: unix time until which all scheduled times are decided. `decided`: (start, end) of
    the intervals in which all scheduled times are decided, in unix seconds; the intervals are
    needed if the clock is set back. `missed`: the missed times, newest last.
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
        separate_intervals = []
        for other_start, other_end in self.decided:
            if other_start <= end and start <= other_end:
                start = min(start, other_start)
                end = max(end, other_end)
            else:
                separate_intervals.append((other_start, other_end))

        return replace(self, decided=(*separate_intervals, (start, end))[-MAX_INTERVALS:])

    def add_missed(self, times: Iterable[int], reason: str) -> "Progress":
        """Return the progress with additional missed times."""
        missed_runs = (*self.missed, *(Missed(time, reason) for time in times))
        return replace(self, missed=missed_runs[-MAX_MISSED:])


@dataclass(frozen=True)
class Decision:
    """The result of `decide`. `due`: the scheduled time whose run must start now, or None.
    `missed`: other scheduled times that are decided now; a time whose run exists is not a missed
    time, since a server may have been killed just after it had started this run. `reason`: why the
    times in `missed` have no run."""

    progress: Progress
    due: int | None = None
    missed: list[int] = field(default_factory=list)
    reason: str = NOT_RUNNING

    @property
    def is_new(self) -> bool:
        """True if a scheduled time was decided, so that the progress must be stored."""
        return self.due is not None or bool(self.missed)


def decide(cron: Object, progress: Progress | None, now: float, is_continuous: bool) -> Decision:
    """Return the decision about a CronWorkflow at the unix time `now`. `progress`: the decisions so
    far, or None for a new CronWorkflow. `is_continuous` is True if the server has checked the
    CronWorkflow a moment ago, so that no time was missed."""
    uid = cron["metadata"]["uid"]
    schedule = describe_schedule(cron)
    if progress is None or progress.uid != uid:
        progress = Progress(uid, schedule, _find_first_position(cron))
    elif progress.schedule != schedule:
        # as in Argo, times of a new schedule that are before now do not start a run
        start = progress.position
        progress = replace(progress, schedule=schedule, position=now)
        if not is_continuous:
            return Decision(progress, missed=find_times(cron, start, now), reason=CHANGED)

    if now <= progress.position:
        # the clock was set back; the times that are not decided may come again, so keep them
        # undecided
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


def _find_first_position(cron: Object) -> float:
    """Return the unix time from which the schedule is evaluated if its progress file is missing."""
    times = [cron["metadata"]["creationTimestamp"]]
    last_time = (cron.get("status") or {}).get("lastScheduledTime")
    if last_time:
        times.append(last_time)
    return max(parse_time(time) for time in times)


def describe_schedule(cron: Object) -> str:
    """Return the schedules with their time zone, as in Argo's annotation last-used-schedule."""
    timezone = cron["spec"].get("timezone")
    prefix = f"CRON_TZ={timezone} " if timezone else ""
    return ",".join(prefix + line for line in list_schedules(cron))


def list_schedules(cron: Object) -> list[str]:
    """Return the schedules of a CronWorkflow: the field `schedules`, or the field `schedule` of
    Argo before version 4."""
    spec = cron["spec"]
    if spec.get("schedules"):
        return list(spec["schedules"])
    return [spec["schedule"]] if spec.get("schedule") else []


def parse_schedules(cron: Object) -> list[crontab.Schedule]:
    """Return the parsed schedules of a valid CronWorkflow. The intervals of the schedule @every are
    counted from the creation of the CronWorkflow."""
    anchor = int(parse_time(cron["metadata"]["creationTimestamp"]))
    timezone = cron["spec"].get("timezone") or ""
    return [crontab.parse_schedule(line, timezone, anchor) for line in list_schedules(cron)]


def find_next(cron: Object, after: float) -> int | None:
    """Return the first scheduled time after the time `after`, both in unix seconds. Return None if
    no scheduled time follows."""
    times = [schedule.next_time(after) for schedule in parse_schedules(cron)]
    return min((time for time in times if time is not None), default=None)


def find_times(cron: Object, start: float, end: float) -> list[int]:
    """Return the last scheduled times after `start` and not after `end`, at most MAX_MISSED, oldest
    first."""
    schedules = parse_schedules(cron)
    for period in SEARCHED_PERIODS_S:
        first_time = max(start, end - period)
        times: set[int] = set()
        for schedule in schedules:
            time = schedule.next_time(first_time)
            while time is not None and time <= end:
                times.add(time)
                time = schedule.next_time(time)
        if times or first_time == start:
            return sorted(times)[-MAX_MISSED:]
    return []
