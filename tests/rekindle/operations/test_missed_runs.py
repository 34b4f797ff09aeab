"""A backfill finds each scheduled week of the past exactly once."""

from datetime import UTC, date, datetime
from pathlib import Path

import pytest

from argolocal.manifest import cron
from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.provenance import uses_scheduled_time
from rekindle.blocks.manifest.render import manifest_sha256, render_manifest
from rekindle.errors import ConfigError
from rekindle.operations.missed_runs import list_missed_runs
from rekindle.view.backfill_table import format_backfill_table
from tests.commands import ROOT

NOW = datetime(2026, 6, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("schedule", "timezone", "expected"),
    [
        ("0 3 * * 1", "UTC", ["03-02T03:00", "03-09T03:00"]),
        ("0 3 * * mon", "Europe/Paris", ["03-02T02:00", "03-09T02:00"]),
        ("30 */12 5 * *", "UTC", ["03-05T00:30", "03-05T12:30"]),
        ("0 0 1 * 0", "UTC", ["03-01T00:00", "03-08T00:00"]),
        ("0 0 10 * 0", "UTC", ["03-01T00:00", "03-08T00:00", "03-10T00:00"]),
        ("0 22/1 4-5/1 mar *", "UTC", ["03-04T22:00", "03-04T23:00", "03-05T22:00", "03-05T23:00"]),
        ("0 3 * apr *", "UTC", []),
    ],
)
def test_a_schedule_runs_at_the_times_of_cron(
    schedule: str, timezone: str, expected: list[str]
) -> None:
    times = cron.list_run_times(schedule, timezone, date(2026, 3, 1), date(2026, 3, 11))
    assert [f"{time:%m-%dT%H:%M}" for time in times] == expected


def test_names_of_missed_runs_depend_only_on_config_and_time() -> None:
    config = load_config(ROOT / "configs/demo.yaml").config
    sha256 = manifest_sha256(render_manifest(config))
    march = list_missed_runs(config, sha256, date(2026, 3, 1), date(2026, 3, 31), NOW)
    assert len(march) == len({run.name for run in march}) == 5
    assert list_missed_runs(config, sha256, date(2026, 3, 20), date(2026, 3, 31), NOW) == march[3:]
    assert (
        list_missed_runs(config, "xyz" + sha256, date(2026, 3, 20), date(2026, 3, 31), NOW)
        != march[3:]
    )
    assert march[0].parameters == {"scheduled-time": "2026-03-02T03:00:00Z", "backfill": "true"}


@pytest.mark.parametrize(
    ("first_day", "last_day", "error"),
    [(3, 5, "does not start a run"), (9, 2, "2026-03-09, which is after --to, 2026-03-02")],
)
def test_a_backfill_of_days_without_a_scheduled_run_is_refused(
    first_day: int, last_day: int, error: str
) -> None:
    config = load_config(ROOT / "configs/demo.yaml").config
    with pytest.raises(ConfigError, match=error):
        list_missed_runs(config, "0" * 64, date(2026, 3, first_day), date(2026, 3, last_day), NOW)


def test_a_backfill_of_days_in_the_future_is_refused() -> None:
    with pytest.raises(ConfigError, match="in the future"):
        list_missed_runs(
            load_config(ROOT / "configs/demo.yaml").config,
            "0" * 64,
            date(2026, 5, 1),
            date(2026, 6, 30),
            NOW,
        )


def test_only_a_moving_window_uses_the_scheduled_time() -> None:
    assert not uses_scheduled_time(render_manifest(load_config(ROOT / "configs/demo.yaml").config))
    assert uses_scheduled_time(
        render_manifest(load_config(ROOT / "configs/demo.yaml", ["data.window=60d"]).config)
    )


def test_the_table_has_a_line_for_each_failed_run() -> None:
    rows = [
        {
            "scheduled": "2026-03-02T03:00:00Z",
            "phase": "Succeeded",
            "gate": "keep",
            "metrics": {"auc": 0.8},
            "model_sha256": "ab",
        },
        {
            "scheduled": "2026-03-09T03:00:00Z",
            "phase": "Failed",
            "gate": None,
            "metrics": {},
            "model_sha256": None,
        },
    ]

    assert [line.split() for line in format_backfill_table(rows).splitlines()] == [
        ["SCHEDULED", "PHASE", "GATE", "AUC", "WEIGHTS"],
        ["2026-03-02T03:00:00Z", "Succeeded", "keep", "0.8", "ab"],
        ["2026-03-09T03:00:00Z", "Failed"],
    ]


def test_the_scheduled_time_does_not_change_the_manifest_hash(tmp_path: Path) -> None:
    manifest = render_manifest(load_config(ROOT / "configs/demo.yaml").config)
    original = manifest_sha256(manifest)
    for parameter in manifest["spec"]["arguments"]["parameters"]:
        if parameter["name"] in ("scheduled-time", "backfill"):
            parameter["value"] = "2026-03-02T03:00:00Z"
    assert manifest_sha256(manifest) == original
