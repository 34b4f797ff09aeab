"""Each scheduled time is decided once, even if the machine pauses or its clock is changed."""

import random
from datetime import UTC, datetime
from typing import Any

import pytest

from argolocal.language.gofmt import format_timestamp
from argolocal.server.cron.progress import Progress, decide, find_next

START = int(datetime(2026, 3, 2, tzinfo=UTC).timestamp())
MINUTE = 60
HOUR = 3600


def make_cron_workflow(*schedules: str, **spec: Any) -> dict[str, Any]:
    metadata = {"name": "c", "uid": "u", "creationTimestamp": "2026-03-02T00:00:00Z"}
    return {"metadata": metadata, "spec": {"schedules": list(schedules or ["* * * * *"]), **spec}}


class Clock:
    """Looks at one CronWorkflow, and records the times that were due and missed, as seconds after
    START."""

    def __init__(self, **spec: Any) -> None:
        self.cron = make_cron_workflow(**spec)
        self.progress: Progress | None = None
        self.due: list[int] = []
        self.missed: list[int] = []

    def look(self, seconds: float, is_continuous: bool = True) -> None:
        decision = decide(self.cron, self.progress, START + seconds, is_continuous)
        self.progress = decision.progress
        if decision.due is not None:
            self.due.append(decision.due - START)
        self.missed += [time - START for time in decision.missed]


def test_each_time_is_due_once_however_often_the_server_looks() -> None:
    clock = Clock()
    for tenth in range(0, 1850):
        clock.look(tenth / 10)
    assert clock.due == [60, 120, 180]
    assert clock.missed == []


def test_a_machine_that_was_off_catches_up_once_with_the_newest_time() -> None:
    clock = Clock()
    clock.look(61)
    clock.look(61 + 2 * HOUR, is_continuous=False)
    assert clock.due == [60, 2 * HOUR + 60]
    assert clock.missed[-2:] == [2 * HOUR - 60, 2 * HOUR]
    clock.look(62 + 2 * HOUR)
    assert len(clock.due) == 2


@pytest.mark.parametrize(("deadline", "due"), [(0, []), (10, []), (11, [60]), (None, [60])])
def test_the_starting_deadline_limits_the_catch_up(deadline: int | None, due: list[int]) -> None:
    spec = {} if deadline is None else {"startingDeadlineSeconds": deadline}
    clock = Clock(**spec)
    clock.look(70, is_continuous=False)
    assert clock.due == due
    assert clock.missed == [] if due else [60]


def test_the_starting_deadline_does_not_matter_while_the_server_runs() -> None:
    clock = Clock(startingDeadlineSeconds=0)
    clock.look(59)
    clock.look(60.4)
    assert clock.due == [60]


def test_a_clock_that_is_set_back_starts_nothing_again() -> None:
    clock = Clock()
    for seconds in range(0, 10 * MINUTE + 1, 10):
        clock.look(seconds)
    earlier_due = list(clock.due)
    for seconds in range(3 * MINUTE + 5, 12 * MINUTE + 15, 10):
        clock.look(seconds)
    assert clock.due == [*earlier_due, 11 * MINUTE, 12 * MINUTE]


def test_a_clock_that_was_set_forward_by_mistake_does_not_stop_the_schedule() -> None:
    clock = Clock()
    clock.look(61)
    year = 365 * 24 * HOUR
    clock.look(year + 61, is_continuous=False)
    assert clock.due == [60, year + 60]
    # the clock shows the right time again
    for seconds in range(70, 200, 10):
        clock.look(seconds)
    assert clock.due[2:] == [120, 180]


def test_another_schedule_does_not_start_its_past_times() -> None:
    clock = Clock()
    clock.look(61)
    clock.cron["spec"]["schedules"] = ["*/30 * * * *", "5 * * * *"]
    clock.look(40 * MINUTE, is_continuous=False)
    assert clock.due == [60]
    # these times are listed as missed, because a user may expect a run
    assert clock.missed == [5 * MINUTE, 30 * MINUTE]
    clock.look(65 * MINUTE, is_continuous=False)
    assert clock.due == [60, 65 * MINUTE]
    assert clock.missed == [5 * MINUTE, 30 * MINUTE, 60 * MINUTE]


def test_a_new_object_with_the_name_of_a_deleted_one_begins_again() -> None:
    clock = Clock()
    clock.look(61)
    clock.cron["metadata"] = {
        "name": "c",
        "uid": "v",
        "creationTimestamp": "2026-03-02T01:00:00Z",
    }
    clock.look(HOUR + 59)
    clock.look(HOUR + 61)
    assert clock.due == [60, HOUR + 60]


def test_a_local_time_that_does_not_exist_is_not_caught_up() -> None:
    clock = Clock(schedules=["30 2 29 3 *"], timezone="Europe/Berlin")
    clock.look(40 * 24 * HOUR, is_continuous=False)
    assert clock.due == []


@pytest.mark.parametrize("seed", range(20))
def test_random_clocks_and_pauses_start_no_time_twice(seed: int) -> None:
    dice = random.Random(seed)
    clock = Clock(schedules=["* * * * *", "*/7 * * * *"])
    now = 1.0
    for _ in range(400):
        step = dice.choice([1, 5, 20, 20, 45, 45, 59, 59, HOUR, -90, -2 * HOUR, 5 * HOUR])
        now = max(1.0, now + step * dice.random())
        clock.look(now, is_continuous=0 <= step < MINUTE)
    assert len(clock.due) > 100
    assert len(set(clock.due)) == len(clock.due)


def test_the_next_time_is_the_first_of_all_schedules() -> None:
    assert find_next(make_cron_workflow("0 5 * * *", "0 3 * * *"), START) == START + 3 * HOUR
    assert find_next(make_cron_workflow("0 0 30 2 *"), START) is None


def test_a_time_that_has_started_is_not_due_again_if_the_decisions_are_lost() -> None:
    clock = Clock()
    clock.look(61)
    clock.cron["status"] = {"lastScheduledTime": format_timestamp(START + 60)}
    clock.progress = None
    clock.look(90, is_continuous=False)
    assert clock.due == [60]
