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

from argolocal.errors import suggest_similar
from argolocal.language.gofmt import parse_duration, parse_seconds

CRON_FIELDS = (
    ("minute", 0, 59),
    ("hour", 0, 23),
    ("day of the month", 1, 31),
    ("month", 1, 12),
    ("day of the week", 0, 6),
)
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
NUMBERS_BY_NAME = {
    "month": dict(zip(MONTHS, range(1, 13), strict=True)),
    "day of the week": dict(zip(DAYS, range(7), strict=True)),
}
SCHEDULE_DESCRIPTORS = {
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
SMALL_NUMBER = re.compile(r"\+?[0-9]{1,9}")


def find_schedule_error(schedule: str) -> str:
    """Return the reason why Argo rejects a schedule, or ""."""
    zone_text, _, expression = schedule.partition(" ")
    if zone_text.startswith(("TZ=", "CRON_TZ=")):
        reason = find_timezone_error(zone_text.partition("=")[2])
        if reason:
            return f'the time zone "{zone_text.partition("=")[2]}": {reason}'

        schedule = expression.strip()

    if schedule.startswith(EVERY):
        if _is_duration(schedule.removeprefix(EVERY)):
            return ""
        return f'"{schedule}" must be like @every 1h30m'

    if schedule.startswith("@"):
        choices = (*SCHEDULE_DESCRIPTORS, "@every 1h30m")
        if schedule in SCHEDULE_DESCRIPTORS:
            return ""
        return f'"{schedule}" must be one of {", ".join(choices)}'

    field_texts = schedule.split()
    if len(field_texts) != len(CRON_FIELDS):
        field_names = ", ".join(field_name for field_name, _, _ in CRON_FIELDS)
        return f"it must have five fields ({field_names}), as in 0 3 * * 1, not {len(field_texts)}"

    for field_text, (field_name, min_value, max_value) in zip(
        field_texts, CRON_FIELDS, strict=True
    ):
        if _parse_field(field_text, field_name, min_value, max_value) is None:
            return (
                f'the {field_name} is "{field_text}": it must be * or {min_value}-{max_value},'
                " with lists, ranges and /steps"
            )

    return ""


def find_timezone_error(timezone_name: str) -> str:
    """Return the reason why a time zone is invalid, or "". Without a time zone database, all names
    are valid."""
    try:
        ZoneInfo(timezone_name or "UTC")
    except (ZoneInfoNotFoundError, ValueError, OSError):
        timezone_names = available_timezones()
        if timezone_names and timezone_name != "Local":
            return (
                "it must be an IANA time zone, such as"
                f" Europe/Paris.{suggest_similar(timezone_name, timezone_names)}"
            )
    return ""


def list_run_times(
    schedule: str, timezone: str, first_day: date, last_day: date
) -> Iterator[datetime]:
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

    fields = SCHEDULE_DESCRIPTORS.get(text, text).split()
    minutes, hours, days, months, weekdays = (
        frozenset(_parse_field(value, *field) or set())
        for value, field in zip(fields, CRON_FIELDS, strict=True)
    )
    is_wildcard = _has_wildcard(fields[2]) or _has_wildcard(fields[4])
    zone = ZoneInfo(timezone or "UTC")
    return FieldSchedule(minutes, hours, days, months, weekdays, is_wildcard, zone)


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
        wall_time = self.wall.replace(minute=0, second=0)
        if field in ("month", "day"):
            wall_time = wall_time.replace(hour=0)
        if field == "month":
            wall_time = wall_time.replace(day=1)
        self._set_wall_time(wall_time)

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


def _parse_field(
    field_text: str, field_name: str, min_value: int, max_value: int
) -> set[int] | None:
    """Return the numbers in a field: a list of numbers, ranges and *, with optional steps. Return
    None for an invalid field."""
    numbers: set[int] = set()

    for term in filter(None, field_text.split(",")):
        range_text, separator, step_text = term.partition("/")
        first_text, range_separator, last_text = range_text.partition("-")
        first_number: int | None = min_value
        last_number: int | None = max_value

        if first_text not in ("*", "?"):  # as in Argo, a range that starts with * or ? means *
            first_number = _parse_number(first_text, field_name)
            if range_separator:
                last_number = _parse_number(last_text, field_name)
            else:
                last_number = max_value if separator else first_number

        if separator and (not SMALL_NUMBER.fullmatch(step_text) or int(step_text) == 0):
            return None
        if (
            first_number is None
            or last_number is None
            or not min_value <= first_number <= last_number <= max_value
        ):
            return None

        numbers.update(range(first_number, last_number + 1, int(step_text or 1)))

    return numbers


def _is_duration(text: str) -> bool:
    try:
        parse_seconds(text)
    except ValueError:
        return False
    # the duration after @every needs a unit, which parse_seconds does not require
    return text == "0" or (text[-1:].isalpha() and text == text.strip())


def _parse_number(text: str, field_name: str) -> int | None:
    number = NUMBERS_BY_NAME.get(field_name, {}).get(text.lower())
    if number is None and SMALL_NUMBER.fullmatch(text):
        return int(text)
    return number
