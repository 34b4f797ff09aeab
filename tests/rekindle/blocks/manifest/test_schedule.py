"""The weekly run: its schedule, and that a wrong one is refused before it reaches a cluster."""

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


def schedule(**values: Any) -> ScheduleConfig:
    return ScheduleConfig.model_validate(values)


def test_the_weekly_run_is_the_template_at_its_time_and_nothing_else() -> None:
    config = load_config(GOLDEN / "config.yaml", environment={}).config
    template, cron = render_manifest(config, "template"), render_manifest(config, "cron")
    assert cron["spec"]["workflowMetadata"] == {"labels": cron["metadata"]["labels"]}  # so its runs are ours
    time = {"name": "scheduled-time", "value": "{{workflow.scheduledTime}}"}
    reference = {"workflowTemplateRef": {"name": template["metadata"]["name"]}}
    assert cron["spec"]["workflowSpec"] == reference | {"arguments": {"parameters": [time]}}
    assert template["metadata"]["namespace"] == cron["metadata"]["namespace"] == "models"


def test_two_runs_never_meet_and_a_missed_one_is_made_up() -> None:
    spec = render_manifest(load_config(GOLDEN / "config.yaml", environment={}).config, "cron")["spec"]
    assert spec["concurrencyPolicy"] == "Forbid"
    assert spec["startingDeadlineSeconds"] == 3600
    assert (spec["successfulJobsHistoryLimit"], spec["failedJobsHistoryLimit"]) == (3, 3)
    assert (spec["schedules"], spec["timezone"]) == (["30 2 * * 0"], "Europe/Paris")
    assert "schedule" not in spec  # Argo 4 knows only the list


@pytest.mark.parametrize("cron", ["0 3 * * 1", "*/15 0-6,22 1,15 * MON-FRI", "59 23 31 12 6", "0 0 * JAN *"])
def test_schedules_that_argo_understands_are_accepted(cron: str) -> None:
    assert schedule(cron=cron).cron == cron


@pytest.mark.parametrize(
    "cron, names",
    [("0 25 * * 1", "hour"), ("60 3 * * 1", "minute"), ("0 3 0 * *", "day of the month"), ("0 3 * 13 *", "month"),
     ("0 3 * * 7", "day of the week"), ("0 3 * *", "five fields"), ("weekly", "five"), ("0 3 * * 1 2026", "five")],
)  # fmt: skip
def test_a_wrong_schedule_names_the_field(cron: str, names: str) -> None:
    with pytest.raises(ValidationError, match=names):
        schedule(cron=cron)


def test_a_misspelt_time_zone_is_an_error_that_knows_the_right_one() -> None:
    with pytest.raises(ValidationError, match=r'Did you mean "Europe/Paris"'):
        schedule(timezone="Europe/Pariss")


@given(st.text(max_size=30))
def test_no_text_is_a_crash(text: str) -> None:
    with suppress(ValidationError):
        schedule(cron=text)
