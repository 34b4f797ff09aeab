"""A schedule is valid here if and only if it is valid in Argo."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argolocal.manifest.cron import find_schedule_error

VALID_SCHEDULES = [
    "0 3 * * 1",
    "*/15 0-6,22 1,15 * MON-FRI",
    "59 23 31 12 6",
    "0 0 * JAN *",
    "5/10 * ? * ?",
    "@daily",
    "@every 1h30m",
    "TZ=Europe/Paris 0 3 * * *",
    "CRON_TZ=UTC @hourly",
    "  0   3 * * 1 ",
    "+5 3 * * 1",
    "*/2,30-40/5 * * * *",
]
INVALID_SCHEDULES = {
    "every day": "five fields",
    "0 3 * *": "five fields",
    "0 3 * * 1 2026": "five fields",
    "": "five fields",
    "0 24 * * *": "hour",
    "60 * * * *": "minute",
    "* * 0 * *": "day of the month",
    "* * * 13 *": "month",
    "* * * * 7": "day of the week",
    "*/0 * * * *": "minute",
    "10-5 * * * *": "minute",
    "1-2-3 * * * *": "minute",
    "*/5/5 * * * *": "minute",
    "-1 * * * *": "minute",
    "MON * * * *": "minute",
    "@sometimes": "@daily",
    "@every day": "1h30m",
    "@every 60": "1h30m",
    "TZ=Mars/Base 0 3 * * *": "Mars/Base",
    "TZ=UTC": "five fields",
    "5L * * * *": "minute",
    "0 3 * * 1#2": "day of the week",
    "* * * * " + "9" * 5000: "day of the week",
}


@pytest.mark.parametrize("schedule", VALID_SCHEDULES)
def test_a_schedule_that_argo_accepts_is_accepted(schedule: str) -> None:
    assert find_schedule_error(schedule) == ""


@pytest.mark.parametrize("schedule", INVALID_SCHEDULES, ids=lambda text: text[:20])
def test_a_schedule_that_argo_rejects_is_rejected_with_the_reason(schedule: str) -> None:
    assert INVALID_SCHEDULES[schedule] in find_schedule_error(schedule)


@given(st.text(max_size=30) | st.text("0123456789*/-,? @TZ=", max_size=20))
def test_an_invalid_schedule_does_not_crash_the_parser(text: str) -> None:
    assert isinstance(find_schedule_error(text), str)
