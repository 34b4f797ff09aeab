"""Schedules have the same times as in Argo's library, robfig/cron 3.0.1, also when clocks change.

`robfig_cron_times.json` contains 200 schedules, 10 zones and, for each zone, times shortly before
both changes of its clocks in 2026. A digest is the start of the sha256 of the 25 times that follow
each of these times, as numbers separated by spaces. The following program in Go has written the
digests:

    schedule, err := cron.ParseStandard("CRON_TZ=" + zone + " " + line)
    for t := time.Unix(start, 0); count < 25; count++ { t = schedule.Next(t); print(t.Unix()) }
"""

import hashlib
import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from argolocal.manifest.cron import Schedule, list_run_times, parse_schedule, times_between

RECORDED_TIMES = json.loads((Path(__file__).parent / "robfig_cron_times.json").read_text())
TIMES_PER_SCHEDULE = 25


def list_next_times(schedule: Schedule, start: int) -> list[int]:
    times: list[int] = []
    next_time = schedule.next_time(start)
    while (
        next_time is not None
        and next_time <= start + 400 * 86400
        and len(times) < TIMES_PER_SCHEDULE
    ):
        times.append(next_time)
        next_time = schedule.next_time(next_time)
    return times


def hash_times(times: list[int]) -> str:
    return hashlib.sha256(" ".join(map(str, times)).encode()).hexdigest()[:8]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("zone", RECORDED_TIMES["zones"])
def test_all_schedules_have_the_times_of_argo_around_both_changes_of_clocks(zone: str) -> None:
    recorded = RECORDED_TIMES["zones"][zone]
    for line, expected in zip(
        RECORDED_TIMES["schedules"], recorded["digests"].split(), strict=True
    ):
        schedule = parse_schedule(line, zone)
        times = [time for start in recorded["starts"] for time in list_next_times(schedule, start)]
        assert hash_times(times) == expected, f"{line} in {zone}"


def test_a_time_that_clocks_skip_does_not_exist_and_a_repeated_one_exists_twice() -> None:
    spring = list_run_times("30 2 * * *", "Europe/Berlin", date(2026, 3, 28), date(2026, 3, 30))
    assert [f"{time:%dT%H:%M}" for time in spring] == ["28T01:30", "30T00:30"]
    autumn = list_run_times("30 2 * * *", "Europe/Berlin", date(2026, 10, 24), date(2026, 10, 26))
    assert [f"{time:%dT%H:%M}" for time in autumn] == [
        "24T00:30",
        "25T00:30",
        "25T01:30",
        "26T01:30",
    ]


def test_a_step_of_days_is_not_a_wildcard() -> None:
    times = list_run_times("0 0 */10 * 1", "UTC", date(2026, 6, 1), date(2026, 6, 12))
    assert [time.day for time in times] == [1, 8, 11]


def test_the_date_that_a_zone_skipped_has_no_times() -> None:
    zone = ZoneInfo("Pacific/Apia")
    times = list_run_times("0 12 * * 4-6", "Pacific/Apia", date(2011, 12, 29), date(2011, 12, 31))
    assert [time.astimezone(zone).day for time in times] == [29, 31]


def test_several_schedules_start_one_run_for_each_time() -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    schedules = [
        parse_schedule("@daily"),
        parse_schedule("0 */12 * * *"),
        parse_schedule("@every 20h"),
    ]
    times = times_between(schedules, start, start + timedelta(days=1))
    assert [f"{time:%dT%H}" for time in times] == ["01T04", "01T12", "02T00"]


def test_intervals_do_not_depend_on_the_last_run() -> None:
    schedule = parse_schedule("@every 1h30m", anchor=1000)
    assert schedule.next_time(1000) == schedule.next_time(6399.5) == 6400
    assert schedule.next_time(6400) == 11800


def test_a_date_that_never_comes_has_no_times() -> None:
    assert parse_schedule("0 0 30 2 *", "Europe/Berlin").next_time(0) is None
