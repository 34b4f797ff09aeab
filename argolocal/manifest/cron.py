"""Parse schedules of CronWorkflows as Argo does.

Source: robfig/cron v3 parser.go, ParseStandard, which Argo 4.1 calls (workflow/validate,
workflow/cron).
"""

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from argolocal.errors import did_you_mean
from argolocal.language.gofmt import parse_duration, parse_seconds

FIELDS = (
    ("minute", 0, 59),
    ("hour", 0, 23),
    ("day of the month", 1, 31),
    ("month", 1, 12),
    ("day of the week", 0, 6),
)
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
VALUE_NAMES = {
    "month": dict(zip(MONTHS, range(1, 13), strict=True)),
    "day of the week": dict(zip(DAYS, range(7), strict=True)),
}
DESCRIPTORS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
EVERY = "@every "
MINUTE_S = 60
HOUR_S = 3600
# a schedule whose next time is later, such as February 30, has no more times
MAX_YEARS_AHEAD = 5
NUMBER = re.compile(r"\+?[0-9]{1,9}")


def schedule_error(schedule: str) -> str:
    """Return the reason why Argo rejects a schedule, or ""."""
    zone, _, expression = schedule.partition(" ")
    if zone.startswith(("TZ=", "CRON_TZ=")):
        reason = timezone_error(zone.partition("=")[2])
        if reason:
            return f'the time zone "{zone.partition("=")[2]}": {reason}'

        schedule = expression.strip()

    if schedule.startswith(EVERY):
        if _is_duration(schedule.removeprefix(EVERY)):
            return ""
        return f'"{schedule}" must be like @every 1h30m'

    if schedule.startswith("@"):
        choices = (*DESCRIPTORS, "@every 1h30m")
        if schedule in DESCRIPTORS:
            return ""
        return f'"{schedule}" must be one of {", ".join(choices)}'

    fields = schedule.split()
    if len(fields) != len(FIELDS):
        names = ", ".join(name for name, _, _ in FIELDS)
        return f"it must have five fields ({names}), as in 0 3 * * 1, not {len(fields)}"

    for value, (name, low, high) in zip(fields, FIELDS, strict=True):
        if _parse_field(value, name, low, high) is None:
            return (
                f'the {name} is "{value}": it must be * or {low}-{high}, with lists, ranges and'
                " /steps"
            )

    return ""


def timezone_error(name: str) -> str:
    """Return the reason why a time zone is invalid, or "". Without a time zone database, all names
    are valid."""
    try:
        ZoneInfo(name or "UTC")
    except (ZoneInfoNotFoundError, ValueError, OSError):
        names = available_timezones()
        if names and name != "Local":
            return f"it must be an IANA time zone, such as Europe/Paris.{did_you_mean(name, names)}"
    return ""


def run_times(schedule: str, timezone: str, first_day: date, last_day: date) -> Iterator[datetime]:
    """Yield the UTC times of a schedule, from `first_day` to `last_day` in `timezone`."""
    zone = ZoneInfo(timezone)
    start = datetime.combine(first_day, time(), zone) - timedelta(seconds=1)
    end = datetime.combine(last_day + timedelta(days=1), time(), zone) - timedelta(seconds=1)
    return times_between([parse_schedule(schedule, timezone)], start, end)


def times_between(
    schedules: Sequence["Schedule"], start: datetime, end: datetime
) -> Iterator[datetime]:
    """Yield the UTC times of several schedules after `start` until `end`, each time once, oldest
    first."""
    seconds = start.timestamp()
    while True:
        following = [schedule.next_time(seconds) for schedule in schedules]
        times = [value for value in following if value is not None]
        if not times or min(times) > end.timestamp():
            return
        seconds = min(times)
        yield datetime.fromtimestamp(seconds, UTC)


def parse_schedule(text: str, timezone: str = "", anchor: int = 0) -> "Schedule":
    """Return a valid schedule of a CronWorkflow. `timezone`: its IANA time zone (default: UTC, the
    time zone of Argo's containers). `anchor`: unix time from which the intervals of @every are
    counted."""
    prefix, _, expression = text.partition(" ")
    if prefix.startswith(("TZ=", "CRON_TZ=")):
        timezone = prefix.partition("=")[2]
        text = expression.strip()

    if text.startswith(EVERY):
        return IntervalSchedule(max(int(parse_duration(text.removeprefix(EVERY))), 1), anchor)

    fields = DESCRIPTORS.get(text, text).split()
    number_sets = [
        frozenset(_parse_field(value, *field) or set())
        for value, field in zip(fields, FIELDS, strict=True)
    ]
    is_wildcard = _has_wildcard(fields[2]) or _has_wildcard(fields[4])
    return FieldSchedule(*number_sets, is_wildcard, ZoneInfo(timezone or "UTC"))


class Schedule(Protocol):
    """The times of one schedule."""

    def next_time(self, after: float) -> int | None:
        """Return the first time after a time, both in unix seconds; None if the schedule has no
        more times."""
        ...


@dataclass(frozen=True)
class IntervalSchedule:
    """The schedule `@every`. Argo counts the intervals from the start of its controller; here, they
    do not depend on restarts."""

    seconds: int
    anchor: int

    def next_time(self, after: float) -> int:
        return self.anchor + int((after - self.anchor) // self.seconds + 1) * self.seconds


@dataclass(frozen=True)
class FieldSchedule:
    """A schedule with five fields. `is_wildcard`: the day of the month or the day of the week is *,
    so both must match; otherwise, one of them must match.

    A local time that a clock change skips is not a time of the schedule. A local time that occurs
    twice is a time of the schedule twice. Source: robfig/cron v3 spec.go, SpecSchedule.Next, whose
    steps this class repeats to get the same results at all changes of clocks.
    """

    minutes: Set[int]
    hours: Set[int]
    days: Set[int]
    months: Set[int]
    weekdays: Set[int]
    is_wildcard: bool
    zone: ZoneInfo

    def next_time(self, after: float) -> int | None:
        moment = _Moment(int(after // 1) + 1, self.zone)
        last_year = moment.wall.year + MAX_YEARS_AHEAD
        while moment.wall.year <= last_year:
            if self._advance(moment):
                return moment.seconds
        return None

    def _advance(self, moment: "_Moment") -> bool:
        """Advance a moment to the next time that may match. Return True if it matches, and False if
        larger fields have changed and must be checked again."""
        while moment.wall.month not in self.months:
            moment.reset("month")
            moment.add_month()
            if moment.wall.month == 1:
                return False

        while not self._is_on_day(moment.wall):
            moment.reset("day")
            moment.add_day()
            if moment.wall.day == 1:
                return False

        while moment.wall.hour not in self.hours:
            moment.reset("hour")
            moment.add_seconds(HOUR_S)
            if moment.wall.hour == 0:
                return False

        while moment.wall.minute not in self.minutes:
            moment.reset("minute")
            moment.add_seconds(MINUTE_S)
            if moment.wall.minute == 0:
                return False

        if moment.wall.second:
            moment.add_seconds(MINUTE_S - moment.wall.second)
            return False
        return True

    def _is_on_day(self, wall: datetime) -> bool:
        is_day = wall.day in self.days
        is_weekday = wall.isoweekday() % 7 in self.weekdays
        if self.is_wildcard:
            return is_day and is_weekday
        return is_day or is_weekday


class _Moment:
    """A time that moves forward. `wall`: what clocks in its time zone show."""

    def __init__(self, seconds: int, zone: ZoneInfo) -> None:
        self.zone = zone
        self.is_reset = False
        self.seconds = seconds
        self.wall = self._wall_time()

    def reset(self, field: str) -> None:
        """Set the fields that are smaller than `field` to their minimum, once."""
        if self.is_reset:
            return
        self.is_reset = True
        if field == "minute":
            self.add_seconds(-(self.seconds % MINUTE_S))
            return
        smaller_fields = {"minute": 0, "second": 0}
        if field in ("month", "day"):
            smaller_fields["hour"] = 0
        if field == "month":
            smaller_fields["day"] = 1
        self._set_wall_time(self.wall.replace(**smaller_fields))

    def add_month(self) -> None:
        first_day = self.wall.replace(day=1)
        next_month = (first_day + timedelta(days=31)).replace(day=1)
        self._set_wall_time(next_month + timedelta(days=self.wall.day - 1))

    def add_day(self) -> None:
        previous = self.seconds
        self._set_wall_time(self.wall + timedelta(days=1))
        hour = self.wall.hour
        # midnight does not exist on this day. East of Greenwich, robfig/cron then skips the day.
        if hour > 12:
            self.add_seconds((24 - hour) * HOUR_S)
        elif hour:
            self.add_seconds(-hour * HOUR_S)

        # a zone that crosses the date line skips a day, at which robfig/cron would stay for ever
        while self.seconds <= previous:
            self.add_seconds(HOUR_S)

    def add_seconds(self, seconds: int) -> None:
        self.seconds += seconds
        self.wall = self._wall_time()

    def _set_wall_time(self, wall: datetime) -> None:
        """Find the time when clocks show `wall`; if it occurs twice or never, the time that Go's
        time.Date finds."""
        wall_seconds = int(wall.replace(tzinfo=UTC).timestamp())
        offset = self._offset(wall_seconds)
        actual_offset = self._offset(wall_seconds - offset)
        self.seconds = wall_seconds - actual_offset
        self.wall = self._wall_time()

    def _wall_time(self) -> datetime:
        return datetime.fromtimestamp(self.seconds, self.zone).replace(tzinfo=None, fold=0)

    def _offset(self, seconds: int) -> int:
        """Return the offset from UTC in seconds at a time."""
        offset = datetime.fromtimestamp(seconds, self.zone).utcoffset()
        return int(offset.total_seconds()) if offset else 0


def _has_wildcard(field: str) -> bool:
    """Return True if a term of the field stands for all values. As in Argo, */2 does not."""
    terms = (term.partition("/") for term in field.split(","))
    return any(
        span.partition("-")[0] in ("*", "?") and (not slash or int(step) == 1)
        for span, slash, step in terms
    )


def _parse_field(field: str, name: str, low: int, high: int) -> set[int] | None:
    """Return the numbers in a field: a list of numbers, ranges and *, with optional steps. Return
    None for an invalid field."""
    numbers: set[int] = set()

    for term in filter(None, field.split(",")):
        span, slash, step = term.partition("/")
        first, dash, last = span.partition("-")
        start: int | None = low
        end: int | None = high

        if first not in ("*", "?"):  # as in Argo, a range that starts with * or ? means *
            start = _parse_number(first, name)
            if dash:
                end = _parse_number(last, name)
            else:
                end = high if slash else start

        if slash and (not NUMBER.fullmatch(step) or int(step) == 0):
            return None
        if start is None or end is None or not low <= start <= end <= high:
            return None

        numbers.update(range(start, end + 1, int(step or 1)))

    return numbers


def _is_duration(text: str) -> bool:
    try:
        parse_seconds(text)
    except ValueError:
        return False
    # the duration after @every needs a unit, which parse_seconds does not require
    return text == "0" or (text[-1:].isalpha() and text == text.strip())


def _parse_number(text: str, name: str) -> int | None:
    number = VALUE_NAMES.get(name, {}).get(text.lower())
    if number is None and NUMBER.fullmatch(text):
        return int(text)
    return number
