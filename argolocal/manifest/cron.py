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
# A schedule without a time in these years, such as February 30, is considered to have ended.
MAX_YEARS_AHEAD = 5
SMALL_NUMBER = re.compile(r"\+?[0-9]{1,9}")


def find_schedule_error(schedule: str) -> str:
    """Return the reason why Argo rejects a schedule; "" if the schedule is valid."""
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
    """Return the reason why the name of a time zone is invalid; "" if it is valid, or if this
    machine does not have a time zone database."""
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
    """Yield the UTC times of several schedules after `start` and up to `end`, in order. A time that
    is in two of the schedules is yielded once."""
    seconds = start.timestamp()
    while True:
        next_times = [schedule.next_time(seconds) for schedule in schedules]
        run_times = [next_time for next_time in next_times if next_time is not None]
        if not run_times or min(run_times) > end.timestamp():
            return
        seconds = min(run_times)
        yield datetime.fromtimestamp(seconds, UTC)


def parse_schedule(text: str, timezone: str = "", anchor: int = 0) -> "Schedule":
    """Parse a schedule for which `find_schedule_error` returns "". `timezone` is the IANA name of
    the schedule's time zone; "" stands for UTC, the time zone of Argo's containers. `anchor`: unix
    time from which the intervals of @every are counted."""
    zone_text, _, expression = text.partition(" ")
    if zone_text.startswith(("TZ=", "CRON_TZ=")):
        timezone = zone_text.partition("=")[2]
        text = expression.strip()

    if text.startswith(EVERY):
        return IntervalSchedule(max(int(parse_duration(text.removeprefix(EVERY))), 1), anchor)

    field_texts = SCHEDULE_DESCRIPTORS.get(text, text).split()
    minutes, hours, days, months, weekdays = (
        frozenset(_parse_field(field_text, *field_rule) or set())
        for field_text, field_rule in zip(field_texts, CRON_FIELDS, strict=True)
    )
    has_any_day = _has_wildcard(field_texts[2]) or _has_wildcard(field_texts[4])
    zone = ZoneInfo(timezone or "UTC")
    return FieldSchedule(minutes, hours, days, months, weekdays, has_any_day, zone)


class Schedule(Protocol):
    """The interface of a parsed schedule."""

    def next_time(self, after: float) -> int | None:
        """Return the first time of the schedule after the unix time `after`, in unix seconds; None
        if the schedule has ended."""
        ...


@dataclass(frozen=True)
class IntervalSchedule:
    """The schedule `@every`. The intervals are counted from `anchor`, a unix time, so that a
    restart does not move them; Argo counts them from the start of its controller."""

    seconds: int
    anchor: int

    def next_time(self, after: float) -> int:
        return self.anchor + int((after - self.anchor) // self.seconds + 1) * self.seconds


@dataclass(frozen=True)
class FieldSchedule:
    """A schedule with five fields. `has_any_day`: the day of the month or the day of the week is *.
    If `has_any_day` is True, a day must match both fields; otherwise, a day must match one of them.

    If a change of clocks skips a local time, the schedule has no run at this time. If a local time
    occurs twice, the schedule has a run at both times. The algorithm is the same as in robfig/cron,
    so that the results are equal at all changes of clocks. Source: robfig/cron v3 spec.go,
    SpecSchedule.Next.
    """

    minutes: Set[int]
    hours: Set[int]
    days: Set[int]
    months: Set[int]
    weekdays: Set[int]
    has_any_day: bool
    zone: ZoneInfo

    def next_time(self, after: float) -> int | None:
        moment = _Moment(int(after // 1) + 1, self.zone)
        last_year = moment.wall_time.year + MAX_YEARS_AHEAD
        while moment.wall_time.year <= last_year:
            if self._advance(moment):
                return moment.seconds
        return None

    def _advance(self, moment: "_Moment") -> bool:
        """Advance a moment until it matches, or until a field wraps around. Return True if the
        moment matches, and False if a larger field has changed and must be checked again."""
        while moment.wall_time.month not in self.months:
            moment.reset("month")
            moment.add_month()
            if moment.wall_time.month == 1:
                return False

        while not self._is_on_day(moment.wall_time):
            moment.reset("day")
            moment.add_day()
            if moment.wall_time.day == 1:
                return False

        while moment.wall_time.hour not in self.hours:
            moment.reset("hour")
            moment.add_seconds(HOUR_S)
            if moment.wall_time.hour == 0:
                return False

        while moment.wall_time.minute not in self.minutes:
            moment.reset("minute")
            moment.add_seconds(MINUTE_S)
            if moment.wall_time.minute == 0:
                return False

        if moment.wall_time.second:
            moment.add_seconds(MINUTE_S - moment.wall_time.second)
            return False
        return True

    def _is_on_day(self, wall_time: datetime) -> bool:
        is_day = wall_time.day in self.days
        is_weekday = wall_time.isoweekday() % 7 in self.weekdays
        if self.has_any_day:
            return is_day and is_weekday
        return is_day or is_weekday


class _Moment:
    """A time that the search for the next match moves forward. `seconds`: unix time. `wall_time`:
    the local time in the schedule's time zone."""

    def __init__(self, seconds: int, zone: ZoneInfo) -> None:
        self.zone = zone
        self.is_reset = False
        self.seconds = seconds
        self.wall_time = self._read_wall_time()

    def reset(self, field: str) -> None:
        """On the first call, set the fields that are smaller than `field` to their minimum. Later
        calls for the same moment do nothing."""
        if self.is_reset:
            return
        self.is_reset = True
        if field == "minute":
            self.add_seconds(-(self.seconds % MINUTE_S))
            return
        wall_time = self.wall_time.replace(minute=0, second=0)
        if field in ("month", "day"):
            wall_time = wall_time.replace(hour=0)
        if field == "month":
            wall_time = wall_time.replace(day=1)
        self._set_wall_time(wall_time)

    def add_month(self) -> None:
        first_day = self.wall_time.replace(day=1)
        next_month = (first_day + timedelta(days=31)).replace(day=1)
        self._set_wall_time(next_month + timedelta(days=self.wall_time.day - 1))

    def add_day(self) -> None:
        previous_seconds = self.seconds
        self._set_wall_time(self.wall_time + timedelta(days=1))
        hour = self.wall_time.hour
        # If a change of clocks skips midnight, robfig/cron skips the whole day in time zones east
        # of Greenwich.
        if hour > 12:
            self.add_seconds((24 - hour) * HOUR_S)
        elif hour:
            self.add_seconds(-hour * HOUR_S)

        # When a zone moves to the other side of the date line, it skips a day, on which robfig/cron
        # would loop forever.
        while self.seconds <= previous_seconds:
            self.add_seconds(HOUR_S)

    def add_seconds(self, seconds: int) -> None:
        self.seconds += seconds
        self.wall_time = self._read_wall_time()

    def _set_wall_time(self, wall_time: datetime) -> None:
        """Move the moment to a local time. If this local time occurs twice or never, move to the
        time that Go's time.Date returns."""
        wall_seconds = int(wall_time.replace(tzinfo=UTC).timestamp())
        offset = self._offset(wall_seconds)
        actual_offset = self._offset(wall_seconds - offset)
        self.seconds = wall_seconds - actual_offset
        self.wall_time = self._read_wall_time()

    def _read_wall_time(self) -> datetime:
        return datetime.fromtimestamp(self.seconds, self.zone).replace(tzinfo=None, fold=0)

    def _offset(self, seconds: int) -> int:
        """Return the offset from UTC in seconds at a time."""
        offset = datetime.fromtimestamp(seconds, self.zone).utcoffset()
        return int(offset.total_seconds()) if offset else 0


def _has_wildcard(field: str) -> bool:
    """Return True if a term of the field stands for all values, such as * and */1, but not */2."""
    terms = (term.partition("/") for term in field.split(","))
    return any(
        span.partition("-")[0] in ("*", "?") and (not slash or int(step) == 1)
        for span, slash, step in terms
    )


def _parse_field(
    field_text: str, field_name: str, min_value: int, max_value: int
) -> set[int] | None:
    """Return the numbers that a field allows; None for an invalid field. A field is a list of
    numbers, ranges and *, with optional steps."""
    numbers: set[int] = set()

    for term in filter(None, field_text.split(",")):
        range_text, separator, step_text = term.partition("/")
        first_text, range_separator, last_text = range_text.partition("-")
        first_number: int | None = min_value
        last_number: int | None = max_value

        # as in Argo, a range that starts with * or ? stands for all values
        if first_text not in ("*", "?"):
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
