"""A schedule is shown in words, or in crontab format if the words would be longer."""

import pytest

from argolocal.manifest.cron import find_schedule_error
from rekindle.page.cron_words import describe_schedule

WORDS = {
    "0 3 * * 1": "every Monday at 03:00",
    "30 6,18 * * *": "every day at 06:30 and 18:30",
    "15 4 * * MON-fri": "from Monday to Friday at 04:15",
    "0 0 1 1 ?": "on day 1 of the month at 00:00 in January",
    "0 0 1,15 * *": "on day 1 and 15 of the month at 00:00",
    "*/15 * * * *": "every 15 minutes",
    "* * * * *": "every minute",
    "0 * * * *": "every hour",
    "5 */6 * * sun,wed": "every Sunday and Wednesday, every 6 hours at minute 5",
    "0 9-17 * * 1-5": "from Monday to Friday, every hour from 9 to 17",
    "@weekly": "every Sunday at 00:00",
    "@hourly": "every hour",
    "@every 1h30m": "every 1 h 30 min",
    # this schedule has no short description in words
    "0 0 1 * 1": "",
    "0-30/7 3 * * *": "",
    "0 3 * 1-6 *": "",
    "0 3 2-9 * *": "",
    "TZ=Europe/Paris 0 3 * * *": "",
}


@pytest.mark.parametrize("schedule", WORDS)
def test_a_schedule_is_described_in_words(schedule: str) -> None:
    assert find_schedule_error(schedule) == ""
    assert describe_schedule(schedule) == WORDS[schedule]
