"""The same pipeline every week by itself: a WorkflowTemplate, and a CronWorkflow that runs it.

rekindle render configs/demo.yaml --kind template | kubectl apply -f -
rekindle render configs/demo.yaml --kind cron | kubectl apply -f -
"""

import re
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from pydantic import Field, field_validator

from steps.errors import did_you_mean
from steps.workload import Section

if TYPE_CHECKING:
    from hera.workflows import CronWorkflow, WorkflowTemplate

    from pipelines.config import Config

FIELDS = (("minute", 0, 59), ("hour", 0, 23), ("day of the month", 1, 31), ("month", 1, 12), ("day of the week", 0, 6))
PART = re.compile(r"(\*|\d+|[A-Za-z]{3})(-(\d+|[A-Za-z]{3}))?(/\d+)?")


class ScheduleConfig(Section):
    """When the pipeline runs by itself."""

    cron: str = Field("0 3 * * 1", description="minute, hour, day of the month, month, day of the week (0 is Sunday)")
    timezone: str = Field("UTC", description="of `cron`; daylight saving may skip or double a run")
    deadline_minutes: int = Field(60, ge=1, description="a run that was missed is made up for this long")
    keep_succeeded: int = Field(3, ge=0, description="finished runs kept in the cluster")
    keep_failed: int = Field(3, ge=0, description="failed runs kept in the cluster")
    suspend: bool = Field(False, description="do not run")

    @field_validator("cron")
    @classmethod
    def _cron(cls, text: str) -> str:
        fields = text.split()
        if len(fields) != len(FIELDS):
            names = ", ".join(name for name, _, _ in FIELDS)
            raise ValueError(f"it must have five fields ({names}), not {len(fields)}")
        for value, (name, low, high) in zip(fields, FIELDS, strict=True):
            for part in value.split(","):
                found = PART.fullmatch(part)
                numbers = [int(n) for n in (found[1], found[3]) if n and n.isdigit()] if found else []
                if not found or not all(low <= n <= high for n in numbers):
                    rule = f"* or {low}-{high}, with lists, ranges and /steps"
                    raise ValueError(f'the {name} is "{value}": it must be {rule}')
        return text

    @field_validator("timezone")
    @classmethod
    def _timezone(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            known = available_timezones()
            if known:  # a machine without a time zone database cannot tell
                rule = f"it must be an IANA time zone, such as Europe/Paris.{did_you_mean(name, known)}"
                raise ValueError(rule) from error
        return name


def template(config: "Config") -> "WorkflowTemplate":
    """The pipeline under the name of the config, for the schedule and for runs by hand."""
    from hera.workflows import WorkflowTemplate

    from pipelines.training import build

    result = build(config, WorkflowTemplate)
    assert isinstance(result, WorkflowTemplate)
    return result


def cron(config: "Config") -> "CronWorkflow":
    """The schedule. Its runs are called NAME-UNIXTIME; while one runs, no other begins."""
    from hera.workflows import CronWorkflow
    from hera.workflows import models as m

    schedule = config.schedule
    return CronWorkflow(
        name=config.name,
        namespace=config.cluster.namespace or None,
        labels={"app.kubernetes.io/part-of": "rekindle", "app.kubernetes.io/name": config.name},
        schedules=[schedule.cron],
        timezone=schedule.timezone,
        concurrency_policy="Forbid",
        starting_deadline_seconds=60 * schedule.deadline_minutes,
        successful_jobs_history_limit=schedule.keep_succeeded,
        failed_jobs_history_limit=schedule.keep_failed,
        cron_suspend=schedule.suspend or None,
        workflow_template_ref=m.WorkflowTemplateRef(name=config.name),
    )
