"""Parse schedules of CronWorkflows as Argo does.

Source: robfig/cron v3 parser.go, ParseStandard, which Argo 4.1 calls (workflow/validate,
workflow/cron).
"""

import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from argolocal.errors import did_you_mean
from argolocal.language.gofmt import parse_seconds

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
DESCRIPTORS = ("@yearly", "@annually", "@monthly", "@weekly", "@daily", "@midnight", "@hourly")
NUMBER = re.compile(r"\+?[0-9]{1,9}")


def schedule_error(schedule: str) -> str:
    """Return the reason why Argo rejects a schedule, or ""."""
    zone, _, expression = schedule.partition(" ")
    if zone.startswith(("TZ=", "CRON_TZ=")):
        reason = timezone_error(zone.partition("=")[2])
        if reason:
            return f'the time zone "{zone.partition("=")[2]}": {reason}'

        schedule = expression.strip()

    if schedule.startswith("@every "):
        if _is_duration(schedule.removeprefix("@every ")):
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
    """Return the reason why a time zone is invalid, or "". If this machine has no time zone
    database, all names count as valid."""
    try:
        ZoneInfo(name or "UTC")
    except (ZoneInfoNotFoundError, ValueError, OSError):
        names = available_timezones()
        if names and name != "Local":
            return f"it must be an IANA time zone, such as Europe/Paris.{did_you_mean(name, names)}"
    return ""


def run_times(schedule: str, timezone: str, first_day: date, last_day: date) -> Iterator[datetime]:
    """Yield the UTC times at which a schedule with five fields starts runs, from `first_day` to
    `last_day` in `timezone`."""
    number_sets = [
        _parse_field(value, *field) or set()
        for value, field in zip(schedule.split(), FIELDS, strict=True)
    ]
    minutes, hours, days, months, weekdays = number_sets
    are_wildcards = [
        value.startswith(("*", "?")) for value in (schedule.split()[2], schedule.split()[4])
    ]

    day = first_day
    while day <= last_day:
        matches = (day.day in days, day.isoweekday() % 7 in weekdays)
        # cron's rule: a date matches if its day of the month or its day of the week matches; if one
        # field is *, both must match
        if day.month in months and (all(matches) if any(are_wildcards) else any(matches)):
            for hour in sorted(hours):
                for minute in sorted(minutes):
                    yield datetime.combine(day, time(hour, minute), ZoneInfo(timezone)).astimezone(
                        UTC
                    )

        day += timedelta(days=1)


def _parse_field(field: str, name: str, low: int, high: int) -> set[int] | None:
    """Return the numbers that a field of a schedule matches. The field is a list of numbers, ranges
    and *, with optional steps. Return None for an invalid field."""
    numbers: set[int] = set()

    for term in filter(None, field.split(",")):
        span, slash, step = term.partition("/")
        first, dash, last = span.partition("-")
        start: int | None = low
        end: int | None = high

        if first not in ("*", "?"):
            # as in Argo, a range that starts with * or ? matches all numbers
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
