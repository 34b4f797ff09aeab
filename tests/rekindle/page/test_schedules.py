"""Tests of the page's section of schedules: next times, missed times, and schedules that Argo would
reject."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from argolocal.page.run_list import RunRow
from argolocal.runner.cluster import LocalCluster
from argolocal.server.cron.controller import CronController
from argolocal.state.stored_objects import StoredObjects
from rekindle.page.home_schedules import HomeSchedules, make_home_schedule
from rekindle.page.rows import read_scheduled_time
from rekindle.page.schedules import (
    ProjectSchedules,
    Schedule,
    format_time,
    list_next_times,
    list_times,
    make_cluster_schedule,
)
from tests import builders
from tests.browser import start_page

NOW = datetime(2026, 3, 28, 12, 0, tzinfo=UTC)


def read_project(folder: Path, config: str, rows: Sequence[RunRow] = ()) -> Schedule:
    (folder / "configs").mkdir(exist_ok=True)
    (folder / "configs/nightly.yaml").write_text(config)
    (schedule,) = ProjectSchedules(folder, lambda: rows).read({}).schedules
    return schedule


def test_the_next_times_are_in_the_time_zone_of_the_schedule() -> None:
    # the clocks of Paris go forward on 29 March 2026
    assert list_next_times(["0 3 * * *"], "Europe/Paris", NOW) == [
        "2026-03-29T01:00+00:00",
        "2026-03-30T01:00+00:00",
        "2026-03-31T01:00+00:00",
    ]
    assert list_next_times(["0 0 29 2 *"], "UTC", NOW) == []


def test_several_lines_of_a_schedule_are_merged() -> None:
    times = list_next_times(["0 18 * * *", "@hourly"], "UTC", NOW)
    assert times == ["2026-03-28T13:00+00:00", "2026-03-28T14:00+00:00", "2026-03-28T15:00+00:00"]


def test_the_times_of_a_period_count_from_the_last_run() -> None:
    last_time = datetime(2026, 3, 28, 11, 20, tzinfo=UTC)
    assert list_next_times(["@every 45m"], "UTC", NOW, last_time) == [
        "2026-03-28T12:05+00:00",
        "2026-03-28T12:50+00:00",
        "2026-03-28T13:35+00:00",
    ]
    assert (
        list_next_times(["@every 45m"], "UTC", last_time, last_time)[0] == "2026-03-28T12:05+00:00"
    )
    assert list_next_times(["@every 45m"], "UTC", NOW) == []


def test_times_without_a_run_are_missed(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    times = list_times(["0 * * * *"], "UTC", now.replace(minute=0), now)
    assert not times

    started = "2020-01-01T00:00:00Z"
    rows = [RunRow("nightly-x7k2p", "nightly", "succeeded", started=started)]
    config = "name: nightly\nschedule: {cron: 0 0 * * *}\n"
    schedule = read_project(tmp_path, config, rows)
    assert len(schedule.missed) in (31, 32)
    assert schedule.last_run == "nightly-x7k2p"
    assert schedule.command.startswith("rekindle backfill configs/nightly.yaml --from ")

    facts = {"Scheduled": schedule.missed[0]}
    rows.insert(0, RunRow("nightly-1", "nightly", "succeeded", started=started, facts=facts))
    assert schedule.missed[0] not in read_project(tmp_path, config, rows).missed


def test_a_run_with_a_malformed_scheduled_time_does_not_hide_the_schedules(tmp_path: Path) -> None:
    facts = {"Scheduled": "{{workflow.scheduledTime}}"}
    rows = [RunRow("nightly-1", "nightly", "failed", started="2020-01-01T00:00:00Z", facts=facts)]
    config = "name: nightly\nschedule: {cron: 0 0 * * *}\n"
    assert read_project(tmp_path, config, rows).last_run == "nightly-1"


def test_the_scheduled_time_of_a_run_is_the_time_that_its_schedule_inserted() -> None:
    parameter = {"name": "scheduled-time", "value": "{{workflow.scheduledTime}}"}
    annotations = {"workflows.argoproj.io/scheduled-time": "2026-11-30T06:45:00Z"}
    manifest = {
        "metadata": {"name": "demo-1", "annotations": annotations},
        "spec": {"arguments": {"parameters": [parameter]}},
    }
    assert read_scheduled_time(manifest) == "2026-11-30T06:45:00Z"


def test_a_pipeline_that_never_ran_has_missed_nothing(tmp_path: Path) -> None:
    schedule = read_project(tmp_path, "name: nightly\nschedule: {cron: 0 0 * * *}\n")
    assert (schedule.missed, schedule.command, schedule.last_run) == ([], "", "")
    assert len(schedule.next_times) == 3


def test_an_invalid_schedule_is_explained(tmp_path: Path) -> None:
    schedule = read_project(tmp_path, "name: nightly\nschedule: {cron: every day}\n")
    assert "five fields" in schedule.problem
    schedule = read_project(tmp_path, "schedule: {timezone: Europe/Pariss}\n")
    assert "Europe/Paris" in schedule.problem


def test_a_broken_config_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/broken.yaml").write_text("a: [")
    (tmp_path / "configs/binary.yaml").write_bytes(b"\xff\xfe")
    assert read_project(tmp_path, "schedule: {cron: 0 5 * * *}\n").name == "nightly"


def cron_workflow(**spec: Any) -> dict[str, Any]:
    status = {"lastScheduledTime": "2026-03-28T08:00:00Z", "active": [{"name": "demo-1774684800"}]}
    return {"metadata": {"name": "demo"}, "spec": spec, "status": status}


def test_times_that_argo_has_missed_are_shown() -> None:
    schedule = make_cluster_schedule(cron_workflow(schedules=["0 * * * *"]), NOW)
    # at 12:00, the run that is scheduled for 12:00 is not late yet
    assert schedule.missed == [format_time(NOW.replace(hour=hour)) for hour in (11, 10, 9)]
    assert schedule.last_run == "demo-1774684800"


def test_a_suspended_schedule_has_no_next_and_no_missed_times() -> None:
    schedule = make_cluster_schedule(cron_workflow(schedule="0 * * * *", suspend=True), NOW)
    assert schedule.is_suspended
    assert (schedule.next_times, schedule.missed) == ([], [])


def test_the_page_says_that_no_server_runs_and_how_a_config_is_scheduled(tmp_path: Path) -> None:
    with start_page(tmp_path / "home", "rekindle") as server:
        notes = server.get("/schedules").json()["notes"]
        assert "does not start runs by itself" in notes[0]
        text = server.get("/schedules", "text/html").text
        assert "<code>rekindle schedule CONFIG --local</code>" in text


def test_a_schedule_of_this_machine_shows_its_next_times_and_why_a_time_was_missed(
    tmp_path: Path,
) -> None:
    spec = {
        "entrypoint": "main",
        "templates": [{"name": "main", "container": builders.make_shell_container("true")}],
    }
    cron = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "CronWorkflow",
        "metadata": {"name": "weekly"},
        "spec": {"schedules": ["0 3 * * 1"], "timezone": "Europe/Paris", "workflowSpec": spec},
    }
    home = tmp_path.resolve()
    cluster = LocalCluster(home)
    objects = StoredObjects(home, datetime(2026, 3, 20, tzinfo=UTC).timestamp)
    objects.create({**cron, "spec": {**cron["spec"], "startingDeadlineSeconds": 60}})
    CronController(cluster, objects, NOW.timestamp).reconcile()

    (schedule,) = HomeSchedules(home).read({}).schedules
    assert schedule.missed == ["2026-03-23T02:00+00:00"]
    assert "startingDeadlineSeconds (60)" in schedule.reasons[schedule.missed[0]]
    assert schedule.last_run == ""

    shown = make_home_schedule(home, objects.get("CronWorkflow", "weekly"), NOW)
    assert shown.next_times[0] == "2026-03-30T01:00+00:00"
