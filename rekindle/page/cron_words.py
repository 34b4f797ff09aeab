"""Describes schedules in words, such as `every Monday at 03:00` for `0 3 * * 1`."""

import re

from argolocal.common.wording import format_duration
from argolocal.language.gofmt import parse_duration
from argolocal.manifest.cron import DAYS, EVERY, MONTHS, SCHEDULE_DESCRIPTORS

DAY_NAMES = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
MONTH_NAMES = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
# forms of a field of a schedule that can be described in words
NUMBERS = re.compile(r"\d{1,2}(,\d{1,2})*")
STEP = re.compile(r"\*/(\d{1,2})")
RANGE = re.compile(r"(\d{1,2})-(\d{1,2})")


def describe_schedule(cron_line: str) -> str:
    """Describe a valid schedule in words; return "" if the description would be long."""
    if cron_line.startswith(EVERY):
        return f"every {format_duration(parse_duration(cron_line.removeprefix(EVERY)))}"

    fields = SCHEDULE_DESCRIPTORS.get(cron_line, cron_line).split()
    if len(fields) != 5:
        return ""

    minute, hour, day, month, weekday = (field.lower().replace("?", "*") for field in fields)
    months = _describe_months(month)
    days = _describe_days(day, weekday)
    times = _describe_times(minute, hour)
    if months is None or days is None or not times:
        return ""

    if times.startswith("every "):
        # the schedule runs every hour of each described day
        days = "" if days == "every day" else f"{days}, "
        return f"{days}{times}{months}"
    return f"{days} {times}{months}"


def _describe_times(minute: str, hour: str) -> str:
    """Describe the times of a day, such as `at 03:00` or `every 15 minutes`; return "" for times
    that cannot be described."""
    if hour == "*" and minute == "*":
        return "every minute"

    minute_step = STEP.fullmatch(minute)
    if hour == "*" and minute_step:
        return f"every {int(minute_step[1])} minutes"
    if not NUMBERS.fullmatch(minute):
        return ""

    minutes = [int(number) for number in minute.split(",")]
    if NUMBERS.fullmatch(hour):
        hours = [int(number) for number in hour.split(",")]
        times = [f"{hour:02}:{minute:02}" for hour in hours for minute in minutes]
        return f"at {_join_words(times)}"

    if minutes == [0]:
        at_minute = ""
    else:
        at_minute = f" at {_join_words([f'minute {number}' for number in minutes])}"
    if hour == "*":
        return f"every hour{at_minute}"

    hour_step = STEP.fullmatch(hour)
    if hour_step:
        return f"every {int(hour_step[1])} hours{at_minute}"

    hour_range = RANGE.fullmatch(hour)
    if hour_range:
        return f"every hour from {int(hour_range[1])} to {int(hour_range[2])}{at_minute}"
    return ""


def _describe_days(day: str, weekday: str) -> str | None:
    """Describe the days of a schedule, such as `every Monday`; return None for days that cannot be
    described."""
    weekday = _replace_names(weekday, DAYS, 0)
    if day == "*" and weekday == "*":
        return "every day"
    if day == "*" and NUMBERS.fullmatch(weekday):
        return f"every {_join_words([DAY_NAMES[int(number)] for number in weekday.split(',')])}"

    weekday_range = RANGE.fullmatch(weekday)
    if day == "*" and weekday_range:
        return f"from {DAY_NAMES[int(weekday_range[1])]} to {DAY_NAMES[int(weekday_range[2])]}"
    if weekday == "*" and NUMBERS.fullmatch(day):
        return f"on day {_join_words(day.split(','))} of the month"
    return None


def _describe_months(month: str) -> str | None:
    """Describe the months, such as ` in January`; return "" for all months, and None for months
    that cannot be described."""
    month = _replace_names(month, MONTHS, 1)
    if month == "*":
        return ""
    if NUMBERS.fullmatch(month):
        return f" in {_join_words([MONTH_NAMES[int(number) - 1] for number in month.split(',')])}"
    return None


def _replace_names(field: str, names: tuple[str, ...], first_number: int) -> str:
    """Return a field of a schedule with numbers in place of the names of days or months.
    `first_number`: number of the first day or month."""
    for value_number, value_name in enumerate(names, first_number):
        field = field.replace(value_name, str(value_number))
    return field


def _join_words(words: list[str]) -> str:
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} and {words[-1]}"
