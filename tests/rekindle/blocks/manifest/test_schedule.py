"""Tests of the schedule of a pipeline; an invalid schedule is rejected when the config is read."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rekindle.blocks.manifest.config import ScheduleConfig, load_config
from rekindle.blocks.manifest.render import render_manifest

GOLDEN = Path(__file__).parents[3] / "golden"


def make_schedule(**values: Any) -> ScheduleConfig:
    return ScheduleConfig.model_validate(values)


def test_the_schedule_refers_to_the_template_and_passes_only_the_time() -> None:
    config = load_config(GOLDEN / "config.yaml", environment={}).config
    template = render_manifest(config, "template")
    cron = render_manifest(config, "cron")
    assert cron["spec"]["workflowMetadata"] == {
        "labels": cron["metadata"]["labels"]
    }  # commands find the runs of a schedule by these labels
    time = {"name": "scheduled-time", "value": "{{workflow.scheduledTime}}"}
    reference = {"workflowTemplateRef": {"name": template["metadata"]["name"]}}
    assert cron["spec"]["workflowSpec"] == reference | {"arguments": {"parameters": [time]}}
    assert template["metadata"]["namespace"] == cron["metadata"]["namespace"] == "models"


def test_scheduled_runs_do_not_overlap_and_missed_runs_are_started_late() -> None:
    spec = render_manifest(load_config(GOLDEN / "config.yaml", environment={}).config, "cron")[
        "spec"
    ]
    assert spec["concurrencyPolicy"] == "Forbid"
    assert spec["startingDeadlineSeconds"] == 3600
    assert spec["successfulJobsHistoryLimit"] == 3
    assert spec["failedJobsHistoryLimit"] == 3
    assert spec["schedules"] == ["30 2 * * 0"]
    assert spec["timezone"] == "Europe/Paris"
    # Argo 4 supports only the list `schedules`
    assert "schedule" not in spec


@pytest.mark.parametrize(
    "cron", ["0 3 * * 1", "*/15 0-6,22 1,15 * MON-FRI", "59 23 31 12 6", "0 0 * JAN *"]
)
def test_schedules_that_argo_supports_are_accepted(cron: str) -> None:
    assert make_schedule(cron=cron).cron == cron


@pytest.mark.parametrize(
    "cron, names",
    [
        ("0 25 * * 1", "hour"),
        ("60 3 * * 1", "minute"),
        ("0 3 0 * *", "day of the month"),
        ("0 3 * 13 *", "month"),
        ("0 3 * * 7", "day of the week"),
        ("0 3 * *", "five fields"),
        ("weekly", "five"),
        ("0 3 * * 1 2026", "five"),
    ],
)
def test_an_error_in_a_schedule_names_the_field(cron: str, names: str) -> None:
    with pytest.raises(ValidationError, match=names):
        make_schedule(cron=cron)


def test_a_misspelt_time_zone_is_reported_with_a_suggestion() -> None:
    with pytest.raises(ValidationError, match=r'Did you mean "Europe/Paris"'):
        make_schedule(timezone="Europe/Pariss")


@given(st.text(max_size=30))
def test_any_text_as_schedule_is_accepted_or_rejected_with_an_error(text: str) -> None:
    with suppress(ValidationError):
        make_schedule(cron=text)
